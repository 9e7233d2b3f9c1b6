"""The settings of `tokentwin serve`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, field_validator, model_validator

from tokentwin.apiserver.failures import ServedFailures
from tokentwin.apiserver.kv_cache_events.block_hash import DEFAULT_SEED, Algorithm
from tokentwin.planning.request import Request, TimedBy
from tokentwin.serving.deployments.fleet import LinksConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.host_name import check_host_name
from tokentwin.traces.distributions import Lengths

_OF_A_TWIN = (
    "gpu",
    "calibration",
    "tokenizer",
    "answers",
    "output_tokens",
    "failures",
    "ports_per_replica",
    "kv_links",
)
_ENDPOINT = r"^tcp://.+:[0-9]{1,5}$"


class KvEventSettings(Request):
    """The settings of KV events, with the names of vLLM's `--kv-events-config` if vLLM has the setting."""

    endpoint: str = Field(
        pattern=_ENDPOINT, description="endpoint to publish at; the replica's index is added to the port"
    )
    connect: bool = Field(
        False, description="connect all replicas to one endpoint, instead of binding one endpoint for each"
    )
    replay_endpoint: str | None = Field(
        None, pattern=_ENDPOINT, description="endpoint at which a subscriber requests event batches that it missed"
    )
    buffer_steps: int = Field(
        10_000, ge=1, le=1_000_000, description="number of past event batches that are kept for replay"
    )
    topic: str = Field(
        "", description="topic of the messages; {replica}, {port} and {model} are replaced by their values"
    )
    form: Literal["map", "positional"] = Field("map", description="encode events with named fields, or as arrays")
    integer_hashes: bool = Field(
        True, description="send the last 64 bits of a hash as an integer, instead of all bytes"
    )
    hash: Algorithm = Field("sha256", description="hash function of blocks, like vLLM's prefix_caching_hash_algo")
    hash_seed: str = Field(DEFAULT_SEED, description="seed of the hash; the value of PYTHONHASHSEED, if it is set")

    @field_validator("topic")
    @classmethod
    def _can_be_filled_in(cls, topic: str) -> str:
        try:
            topic.format(replica=0, port=0, model="")
        except (KeyError, IndexError, ValueError):
            raise ValueError("may contain {replica}, {port} and {model}, but no other braces") from None
        return topic


def _endpoint_alone(given: Any) -> Any:
    return {"endpoint": given} if isinstance(given, str) else given


class ServeSettings(Request):
    """The address to listen on, the limits of a server and, for a twin, the fleet to simulate."""

    host: str = Field(
        "127.0.0.1", min_length=1, description="address to listen on; 0.0.0.0 accepts connections from every network"
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 chooses a free port")
    served_model_name: str = Field("", description="name that clients use for the model; by default the model's name")
    api_workers: int = Field(1, ge=1, le=64, description="number of processes that handle HTTP")
    max_requests: int = Field(
        4096, ge=1, description="maximum number of unfinished requests; further requests get status 429"
    )
    request_timeout: float = Field(
        600, gt=0, le=86400, description="maximum time until a request is answered, in seconds"
    )
    client_timeout: float = Field(
        60,
        gt=0,
        le=86400,
        description="maximum seconds to receive a request, and for which a client may stop reading its answer",
    )
    body_limit: int = Field(4 << 20, ge=1024, description="maximum size of a request's body, in bytes")
    api_key_file: str | None = Field(
        None, description="file with API keys, one per line; clients must send one of the keys"
    )
    allowed_hosts: str = Field(
        "",
        description="names by which clients may call the server, apart by commas; by default any name. With names, a "
        "web page cannot send requests through a visitor's browser",
    )
    tls_cert: str | None = Field(None, description="file with a certificate in PEM format, for HTTPS")
    tls_key: str | None = Field(None, description="file with the certificate's key in PEM format")
    seed: int = Field(0, description="seed of the twin's random numbers")

    otlp_endpoint: str | None = Field(
        None,
        pattern=r"^https?://[^/\s]+(/\S*)?$",
        description="URL of an OpenTelemetry collector to send the spans of requests to, by OTLP over HTTP",
    )

    twin: bool = Field(False, description="serve a fleet that is simulated in real time, instead of the real engine")
    gpu: str | None = Field(None, description="name of the GPU that the twin simulates")
    calibration: TimedBy = None
    replicas: int | None = Field(None, ge=1, le=100_000, description="number of replicas behind the router")
    router: str | None = Field(None, description="name of the router; by default round-robin")
    speed: Annotated[float, Field(gt=0, le=1000)] = Field(1.0, description="simulated seconds per real second")
    tokenizer: str = Field(
        "",
        description="the twin's tokenizer: a folder with tokenizer.json, a name in the local hub cache, or an "
        "installed Python package that has one; by default the model's, or if that is not on this machine an "
        "approximation of four characters per token",
    )
    answers: str = Field(
        "",
        description="texts of the twin's answers: echo repeats the prompt; a JSON file has answers by prompt. By "
        "default words without meaning",
    )
    output_tokens: Lengths | None = Field(
        None,
        description="number of tokens of the twin's answers, or in JSON a distribution as in a trace's specification",
    )
    lora_modules: str = Field(
        "",
        description="names of LoRA adapters, apart by commas; clients give one as the model. By default those in the "
        "folder lora.adapters",
    )
    enable_prompt_tokens_details: bool = Field(
        False, description="return the number of cached tokens of the prompt in usage.prompt_tokens_details"
    )
    enable_sleep_mode: bool = Field(
        False, description="let clients send the server to sleep, and wake it up, at vLLM's paths /sleep and /wake_up"
    )
    tool_call_parser: Literal["auto", "none", "hermes", "llama3_json", "mistral", "qwen3_coder"] = Field(
        "auto",
        description="format in which the model writes tool calls, by vLLM's name; auto: as its chat template shows; "
        "none: answers are not read for calls",
    )
    kv_events: Annotated[KvEventSettings | None, BeforeValidator(_endpoint_alone)] = Field(
        None,
        description="publish KV events as vLLM does: an endpoint such as tcp://127.0.0.1:5557, or settings in JSON",
    )
    ports_per_replica: bool = Field(
        False, description="serve each replica at its own port, from --port upwards, so that a gateway can route"
    )
    role: Literal["serve", "prefill", "decode"] = Field(
        "serve",
        description="serve: run complete requests; prefill, decode: also this part of a request, with vLLM's "
        "kv_transfer_params",
    )
    kv_links: LinksConfig | None = Field(
        None,
        description="with role decode: links over which KV comes from prefill servers, in JSON; fields of a fleet's "
        "links",
    )
    failures: ServedFailures | None = Field(
        None, description="failures to simulate, as a YAML file or JSON; they replace the deployment's fleet.failures"
    )

    @property
    def adapters(self) -> list[str]:
        return _names(self.lora_modules)

    @property
    def hosts(self) -> list[str]:
        return [name.lower().strip("[]") for name in _names(self.allowed_hosts)]

    @model_validator(mode="after")
    def _goes_together(self) -> ServeSettings:
        for name in self.hosts:
            check_host_name("allowed_hosts", name)
        if (self.tls_cert is None) != (self.tls_key is None):
            missing = "tls_key" if self.tls_key is None else "tls_cert"
            raise UserError(missing, None, "is missing; give both tls_cert and tls_key")
        if self.twin and self.gpu is None and self.calibration is None:
            raise UserError("gpu", None, "is missing; name the GPU to simulate, or give a calibration")
        if self.twin and self.tool_call_parser not in ("auto", "none"):
            remedy = "works only on the real engine, because a twin chooses no calls; leave it out"
            raise UserError("tool_call_parser", self.tool_call_parser, remedy)
        if not self.twin:
            for name in _OF_A_TWIN:
                if getattr(self, name):
                    raise UserError(name, None, "works only on a twin; add --twin, or leave it out")
            if self.role != "serve":
                raise UserError("role", self.role, "works only on a twin; add --twin, or leave it out")
        if self.adapters and self.kv_events is not None:
            raise UserError("lora_modules", self.lora_modules, "cannot be combined with kv_events; leave one out")
        if self.enable_sleep_mode and self.kv_events is not None:
            raise UserError("enable_sleep_mode", None, "cannot be combined with kv_events; leave one out")
        if self.kv_links is not None and self.role != "decode":
            raise UserError("kv_links", None, "works only with role decode; set role to decode, or leave kv_links out")
        if self.ports_per_replica and self.router:
            remedy = "cannot be combined with ports_per_replica, where a gateway chooses the replica; leave one out"
            raise UserError("router", self.router, remedy)
        if not self.ports_per_replica and self.failures is not None and self.failures.of_one_replica:
            raise UserError(
                "failures", None, "replica needs ports_per_replica; set ports_per_replica, or leave replica out"
            )
        return self


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]
