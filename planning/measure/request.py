"""The requests of `validate` and `calibrate`: earlier or new measurements, and an output directory."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, model_validator

from tokentwin.planning.request import Request, StatedDeployment
from tokentwin.planning.traffic import Offered
from tokentwin.serving.errors import UserError
from tokentwin.traces.synth import SynthSpec

# The sources of a calibration that each option belongs to; an empty name is the engine on this machine.
_GOES_WITH = {
    "deployment": ("", "iterations", "measured"),
    "minutes": ("",),
    "gpu": ("iterations", "measured"),
    "data": ("case",),
    "client": ("served",),
    "engine": ("served",),
    "kernels": ("", "recordings"),
}


class ValidateRequest(Offered):
    """Recordings of one workload on the real engine, or traffic to record now. Repeated runs give the noise floor."""

    real: tuple[Path, ...] = ()
    traffic: str | SynthSpec | tuple[SynthSpec, ...] = Field(
        (), description="trace or YAML specification to run on the real engine now, instead of REAL"
    )
    repeats: int = Field(2, ge=1, description="number of real runs of --trace; they give the noise floor")
    minutes: float | None = Field(
        None,
        gt=0,
        description="run only as many of the first requests of --trace as fit, with all repeats, into this time in "
        "minutes",
    )
    calibration: Path = Field(description="directory that `tokentwin calibrate` wrote")
    out: Path = Field(description="directory to write the report to")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if bool(self.real) == bool(self.traffic):
            raise UserError(
                "real", list(map(str, self.real)) or None, "give either recordings, or --trace to record them now"
            )
        of_traffic = sorted(self.model_fields_set & {"repeats", "minutes", "limit", "rate_scale", "window_s"})
        if self.real and of_traffic:
            raise UserError(of_traffic[0], getattr(self, of_traffic[0]), "needs --trace; leave it out")
        return self


class CalibrateRequest(Request):
    """A calibration of the engine on this machine, or from one kind of measurements."""

    out: Path = Field(description="directory to write the calibration to")
    deployment: StatedDeployment | None = None
    minutes: float = Field(1.0, ge=0.01, le=1e4, description="time to measure, in minutes (approximate)")
    recordings: tuple[Path, ...] = Field(
        (), description="recording of the real engine to fit, instead of measuring now; can be repeated"
    )
    iterations: Path | None = Field(
        None, description="CSV file with iterations (steps) of another engine, to correct its predicted step times"
    )
    measured: tuple[Path, ...] = Field(
        (),
        description="run measured on your server: a result of vllm bench serve, GuideLLM or AIPerf, a recording of "
        "`tokentwin bench --url`, a CSV table, or a case file; can be repeated",
    )
    gpu: str | None = Field(None, description="with --from-iterations or --from-measured: GPU on which the engine ran")
    case: Path | None = Field(
        None, description="case file of a measured run of another engine (the anchor), to correct its step times"
    )
    data: Path = Field(Path(), description="folder with the case's data files; by default the current folder")
    served: Path | None = Field(
        None, description="recording of `serve -o`, to fit the time that an API server adds to requests"
    )
    client: Path | None = Field(None, description="with --from-served: recording of `bench --url` of the same run")
    engine: Path | None = Field(None, description="with --from-served: calibration of the engine behind the server")
    kernels: Path | None = Field(
        None, description="kernels.parquet of the GPU suite: times of the engine's own kernels, which its steps correct"
    )

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if "recordings" in self.model_fields_set and not self.recordings:
            raise UserError("recordings", None, "is empty; give recordings, or leave it out to measure")
        sources = [name for name in ("recordings", "iterations", "measured", "case", "served") if getattr(self, name)]
        if len(sources) > 1:
            raise UserError(
                "from", ", ".join(sources), "give only one of recordings, iterations, measured, case and served"
            )
        source = sources[0] if sources else ""
        for name, about in _GOES_WITH.items():
            stated = getattr(self, name) if name in self.model_fields_set else None
            if stated is not None and source not in about:
                remedy = f"cannot be combined with --from-{source}" if source else f"needs --from-{about[0]}"
                raise UserError(name, str(stated), remedy)
        if source == "iterations" and self.gpu is None:
            raise UserError("gpu", None, "is missing; name the GPU that the iterations ran on")
        if source == "served" and self.client is None:
            raise UserError("client", None, "is missing; give the recording of `bench --url` of the same run")
        return self
