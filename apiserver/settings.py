"""The settings of `tokentwin serve`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from apiserver.failures import ServedFailures
from apiserver.kv_cache_events.block_hash import DEFAULT_SEED, Algorithm
from planning.request import Request, TimedBy
from serving.deployments.fleet import LinksConfig
from serving.errors import UserError
from traces.lengths import Lengths

_OF_A_TWIN = ("gpu", "calibration", "output_tokens", "failures", "ports_per_replica", "kv_links")
_ENDPOINT = r"^tcp://.+:[0-9]{1,5}$"


class KvEventSettings(Request):
    """The settings of KV events, named as in vLLM's `--kv-events-config` if they exist there."""

    endpoint: str = Field(pattern=_ENDPOINT, description="where to publish; a replica's port is this and its number")
    connect: bool = Field(False, description="connect to the endpoint, one for all replicas, instead of binding it")
    replay_endpoint: str | None = Field(None, pattern=_ENDPOINT, description="where missed batches are asked for")
    buffer_steps: int = Field(10_000, ge=1, le=1_000_000, description="batches that are kept to be asked for")
    topic: str = Field("", description="topic; {replica}, {port} and {model} in it are replaced")
    form: Literal["map", "positional"] = Field("map", description="events with named fields, or as arrays")
    integer_hashes: bool = Field(True, description="the last 64 bits of hashes as integers instead of all their bytes")
    hash: Algorithm = Field("sha256", description="hash of blocks, as vLLM's prefix_caching_hash_algo")
    hash_seed: str = Field(DEFAULT_SEED, description="seed of the hash; that of PYTHONHASHSEED, if it is set")

    @field_validator("topic")
    @classmethod
    def _can_be_filled_in(cls, topic: str) -> str:
        try:
            topic.format(replica=0, port=0, model="")
        except (KeyError, IndexError, ValueError):
            raise ValueError("may hold {replica}, {port} and {model}, and no other braces") from None
        return topic


def _endpoint_alone(given: Any) -> Any:
    return {"endpoint": given} if isinstance(given, str) else given


class ServeSettings(Request):
    """The address to listen on, the limits of a server and, for a twin, the fleet to simulate."""

    host: str = Field("127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 is every one")
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    served_model_name: str = Field("", description="name that clients use for the model; by default its own")
    api_workers: int = Field(1, ge=1, le=64, description="number of processes that handle HTTP")
    max_requests: int = Field(4096, ge=1, description="requests under way at once; more are refused with 429")
    request_timeout: float = Field(600, gt=0, le=86400, description="seconds that a request may take")
    client_timeout: float = Field(
        60,
        gt=0,
        le=86400,
        description="seconds that a client may take to send a request, or pause in reading its answer",
    )
    body_limit: int = Field(4 << 20, ge=1024, description="largest body of a request, in bytes")
    api_key_file: str | None = Field(None, description="file of API keys, one per line; clients must send one of them")
    tls_cert: str | None = Field(None, description="certificate in PEM format; with it the server speaks HTTPS")
    tls_key: str | None = Field(None, description="key of the certificate in PEM format")
    seed: int = Field(0, description="seed of the random numbers of a twin")

    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+(/\S*)?$",
        description="URL of an OpenTelemetry collector that gets the spans of each request, by OTLP over HTTP",
    )

    twin: bool = Field(False, description="serve a simulated fleet in real time instead of the real engine")
    gpu: str | None = Field(None, description="GPU that the twin simulates, by name")
    calibration: TimedBy = None
    replicas: int | None = Field(None, ge=1, le=100_000, description="number of replicas behind the router")
    router: str | None = Field(None, description="router, by name; by default round-robin")
    speed: Annotated[float, Field(gt=0, le=1000)] = Field(1.0, description="simulated seconds that pass in one second")
    output_tokens: Lengths | None = Field(
        None,
        description="length of a twin's answers: a number, or a distribution of a trace's specification, in JSON",
    )
    kv_events: Annotated[KvEventSettings | None, BeforeValidator(_endpoint_alone)] = Field(
        None, description="publish KV events as vLLM does: an endpoint, as tcp://127.0.0.1:5557, or settings in JSON"
    )
    ports_per_replica: bool = Field(
        False, description="give each replica its own port, from --port upwards, so that a gateway can route"
    )
    role: Literal["serve", "prefill", "decode"] = Field(
        "serve", description="what a gateway may ask of the twin by kv_transfer_params, besides whole requests"
    )
    kv_links: LinksConfig | None = Field(
        None, description="role decode: what brings KV from servers that prefill, in JSON, as a fleet's links"
    )
    failures: ServedFailures | None = Field(
        None, description="failures of the twin: a YAML file, or JSON; they replace those of the deployment"
    )

    @model_validator(mode="after")
    def _goes_together(self) -> ServeSettings:
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise UserError(missing, None, "is missing; give tls_cert and tls_key together")
        if self.twin and self.gpu is None and self.calibration is None:
            raise UserError("gpu", None, "is missing; name the GPU to simulate, or give a calibration")
        if not self.twin:
            for name in _OF_A_TWIN:
                if getattr(self, name):
                    raise UserError(name, None, "works only on a twin; add --twin, or leave it out")
            if self.role != "serve":
                raise UserError("role", self.role, "works only on a twin; add --twin, or leave it out")
        if self.kv_links is not None and self.role != "decode":
            raise UserError("kv_links", None, "works only with role decode; add it, or leave kv_links out")
        if self.ports_per_replica and self.router:
            remedy = "cannot be combined with ports_per_replica, where a gateway chooses the replica; give one"
            raise UserError("router", self.router, remedy)
        requests = () if self.failures is None else (*self.failures.refusals, *self.failures.cuts)
        if not self.ports_per_replica and any(accident.replica is not None for accident in requests):
            raise UserError("failures", None, "replica needs ports_per_replica; add it, or leave replica out")
        return self
