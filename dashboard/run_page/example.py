"""The run that the Run page opens on, with its diagnosis, so that it shows what helps before anything was recorded.

`python -m dashboard.run_page.example` makes both anew: bursty chat traffic on an H100.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dashboard.bundled import RUN_SAMPLE
from planning.diagnose.recorded_run import diagnosis
from planning.diagnose.request import DiagnoseRequest
from planning.jobs.files import write_json
from planning.priced_scenario import price_scenario
from planning.simulation import recorded
from serving.deployments.config import Deployment
from traces.synth import parse_spec, synthesise

_FILE = Path(__file__).with_name("example_diagnosis.json")
_GPU = "H100"
_DEPLOYMENT = {"model": "Llama-3.1-8B", "device": "cuda", "gpu_memory_utilization": 0.9}
_TRAFFIC = {
    "requests": 400,
    "seed": 7,
    "arrivals": {"kind": "gamma", "rate": 25, "cv": 2.5},
    "prompt": {"kind": "lognormal", "mean": 900, "sigma": 0.9, "max": 6000},
    "output": {"kind": "lognormal", "mean": 180, "sigma": 0.7, "max": 1000},
}
_OF_THE_PLACE = ("run", "stamp")  # of a diagnosis' settings: where the recording lies, and since when


def example_diagnosis(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The bundled answer, if the diagnosis that is asked for is the one of the bundled run."""
    known = _example()
    same = Path(settings["run"]) == RUN_SAMPLE.resolve() and _portable(settings) == known["settings"]
    return known["answer"] if same else None


def example_settings() -> dict[str, Any]:
    """What the Run page asks of the bundled run before anything is changed."""
    return DiagnoseRequest(run=str(RUN_SAMPLE.resolve()), gpu=_GPU).as_json()


def _portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _OF_THE_PLACE}


@cache
def _example() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def _make() -> None:
    workload = replace(synthesise(parse_spec(_TRAFFIC)), name="chat")
    recorded(price_scenario(workload, None, _GPU, Deployment(**_DEPLOYMENT)), RUN_SAMPLE, overwrite=True)
    settings = example_settings()
    answer = diagnosis(settings, RUN_SAMPLE, lambda stage, share: print(f"{100 * share:3.0f} % {stage}"))
    write_json(_FILE, {"settings": _portable(settings), "answer": answer})


if __name__ == "__main__":
    _make()
