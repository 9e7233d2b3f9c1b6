"""The request to learn a server: where it is, what is known of it, and what may be asked."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from planning.bench.request import BenchTarget
from planning.request import StatedDeployment


class LearnRequest(BenchTarget):
    """A server to learn. What its deployment states is taken as known; all other settings are inferred."""

    deployment: StatedDeployment = Field(
        description="deployment of the server: its model, precision and parallelism; settings that it states are not "
        "inferred"
    )
    gpu: str | None = Field(
        None,
        description="GPU that the server runs on; without it step times are linear in the sizes of a step, and "
        "hold for this server only",
    )
    out: Path = Field(description="directory for the twin and the answers")
    traffic: str | None = Field(None, description="your own traffic for the proof: a trace, a recording or a YAML file")
    model_name: str | None = Field(None, description="name of the model on the server, if not the first that it lists")
    recorder: Path | None = Field(
        None,
        description="directory to which the server's recorder writes (docs/vllm.md); its settings and step times are "
        "used instead of inferred ones",
    )
    minutes: float = Field(10.0, gt=0, le=600, description="time for questions, in minutes")
    within_pct: float = Field(
        3.0,
        gt=0,
        le=100,
        description="half of the 90 % interval of the traffic's mean and median latencies, in percent, that is narrow "
        "enough to stop asking",
    )
    max_concurrency: int = Field(256, ge=16, le=4096, description="maximum number of unfinished requests at a time")
    ignore_metrics: bool = Field(False, description="do not read settings from the server's /metrics")
