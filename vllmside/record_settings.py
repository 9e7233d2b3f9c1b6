"""The settings of a recording, which a vLLM server gets in one of two ways.

These are `--additional-config '{"tokentwin": {"record": "DIR"}}'` and TOKENTWIN_RECORD=DIR in the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings

VARIABLE = "TOKENTWIN_RECORD"
_KEY = "tokentwin"
_OTHERS = ("policy", "scheduler")  # settings of one of our policies, which has its own scheduler class


class RecordSettings(Settings):
    """The directory and names of a vLLM server's recording, and a limit on its memory."""

    record: str = Field(min_length=1, description="directory of the recording")
    model: str = Field(
        "",
        description="name of the model in the recording; by default its folder's name, or its name on Hugging Face",
    )
    adapters: str | None = Field(None, description="folder of the LoRA adapters, to run them again")
    workload: str = Field("served", description="name of the workload in the recording")
    numbered: bool = Field(False, description="whether the id of a request begins with its number in the traffic")
    most_waiting_rows: int = Field(
        1_000_000,
        ge=1,
        description="maximum number of step rows that wait to be written; beyond it recording ends, and serving goes "
        "on",
    )


def record_settings(additional_config: object, environment: Mapping[str, str]) -> RecordSettings:
    """Read the settings of a recording; raise UserError if they are missing or invalid."""
    stated: Any = additional_config.get(_KEY) if isinstance(additional_config, Mapping) else None
    settings = dict(stated) if isinstance(stated, Mapping) else {}
    for name in _OTHERS:
        settings.pop(name, None)
    if VARIABLE in environment:
        settings.setdefault("record", environment[VARIABLE])
    if "record" not in settings:
        remedy = f"""is missing; add --additional-config '{{"{_KEY}": {{"record": "DIR"}}}}', or set {VARIABLE}=DIR"""
        raise UserError(f"additional_config.{_KEY}.record", None, remedy)
    return parse(RecordSettings, settings, where=f"additional_config.{_KEY}", typed=True)
