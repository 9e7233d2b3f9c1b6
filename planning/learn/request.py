"""What a user says about a server: to learn it, what may be asked; to watch it unasked, where its metrics are."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, SecretStr, field_validator

from tokentwin.planning.bench.request import BenchTarget, base_url
from tokentwin.planning.request import Request, StatedDeployment


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
    minutes: float = Field(10.0, gt=0, le=600, description="time for questions and the proof, in minutes")
    within_pct: float = Field(
        3.0,
        gt=0,
        le=100,
        description="half of the 90 % interval of the traffic's mean and median latencies, in percent, that is narrow "
        "enough to stop asking",
    )
    max_concurrency: int = Field(256, ge=16, le=4096, description="maximum number of unfinished requests at a time")
    ignore_metrics: bool = Field(False, description="do not read settings from the server's /metrics")


class MetricsPage(Request):
    """The metrics of a server, and the time between two scrapes."""

    metrics: str = Field(
        description="send nothing, and read /metrics of the server at this URL twice: vLLM, or tokentwin serve"
    )
    api_key: SecretStr | None = None
    window: float = Field(1.0, gt=0, le=1440, description="minimum time between two scrapes, in minutes")

    @field_validator("metrics")
    @classmethod
    def _page(cls, url: str) -> str:
        """Add `/metrics`, which may be given or not."""
        return f"{base_url(base_url(url).removesuffix('/metrics'))}/metrics"
