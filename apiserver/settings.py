"""How to serve: what `tokentwin serve` takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from planning.request import Request, TimedBy
from traces.lengths import Lengths


class ServeSettings(Request):
    """Where to listen, what to hold back, and, for a twin, what to stand in for."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 is every one")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    served_model_name: str = Field("", description="name that clients use for the model; by default its own")
    api_workers: int = Field(1, ge=1, le=64, description="processes that speak HTTP")
    max_requests: int = Field(4096, ge=1, description="requests under way at once; more are refused with 429")
    request_timeout: float = Field(600, gt=0, le=86400, description="seconds that a request may take")
    client_timeout: float = Field(
        60, gt=0, le=86400, description="seconds that a client may take to send a request, or not read its answer"
    )
    body_limit: int = Field(4 << 20, ge=1024, description="most bytes of a request")
    api_key_file: str | None = Field(None, description="file of keys, one a line, of which clients must send one")
    tls_cert: str | None = Field(None, description="certificate in PEM format; the server then speaks HTTPS")
    tls_key: str | None = Field(None, description="key of the certificate in PEM format")
    seed: int = Field(0, description="seed of what a twin draws")

    twin: bool = Field(False, description="serve the fleet's twin on real time instead of the engine")
    gpu: str | None = Field(None, description="GPU whose kernel tables time the twin's steps")
    calibration: TimedBy = None
    replicas: int | None = Field(None, ge=1, le=100_000, description="engines behind the router")
    router: str | None = Field(None, description="router, by name; by default round-robin")
    speed: Annotated[float, Field(gt=0, le=1000)] = Field(1.0, description="seconds of the twin's time in a second")
    output_tokens: Lengths | None = Field(
        None,
        description="length of a twin's answers: a number, or a distribution of a trace's specification, in JSON",
    )

    @model_validator(mode="after")
    def _goes_together(self) -> ServeSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ValueError("give tls_cert and tls_key together")
        if self.twin and self.gpu is None and self.calibration is None:
            raise ValueError("give gpu or calibration, which time the twin's steps")
        if not self.twin:
            for name in ("gpu", "calibration", "output_tokens"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} is of a twin; add --twin, or leave it out")
        return self
