"""Functions that create a backend (real engines or a twin), its ledger and its metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from tokentwin.apiserver.backend import Backend
from tokentwin.apiserver.exchange import Exchange
from tokentwin.apiserver.failures import Accidents, ServedFailures
from tokentwin.apiserver.filler import PlainTexts, filler_tokens
from tokentwin.apiserver.kv_cache_events.events import KvEvents
from tokentwin.apiserver.kv_cache_events.feeds import KvFeeds
from tokentwin.apiserver.kv_cache_events.publisher import KvPublisher
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import LiveMetrics
from tokentwin.apiserver.messages import About
from tokentwin.apiserver.settings import KvEventSettings, ServeSettings
from tokentwin.apiserver.twin import AnswerLengths, Twin
from tokentwin.planning.home import home
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import LinksConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.hub_cache import cached_config
from tokentwin.serving.deployments.kv_capacity import stage_weight_bytes
from tokentwin.serving.deployments.kv_layout import kv_bytes_per_token, kv_dtype
from tokentwin.serving.deployments.model_catalogue import find_model, hub_id
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.sim.fleet import Life
from tokentwin.sim.remote_prefills import RemotePrefills
from tokentwin.traces.distributions import Lengths, Lognormal
from tokentwin.traces.live_recording import Place

if TYPE_CHECKING:
    from tokentwin.apiserver.real_fleet import RealFleet
    from tokentwin.apiserver.request_spans import RequestSpans

# Answers to chats without max_tokens: median 129 and mean 211 tokens, as in Azure's trace of conversations (2023).
_USUAL_LENGTHS = Lognormal(kind="lognormal", mean=211, sigma=1.0)
_VOCABULARY = 32_000  # size of the vocabulary of a model that is not known
_END = 0  # the end-of-sequence token of a twin; no filler token is 0


def make_twin(
    settings: ServeSettings,
    deployment: Deployment,
    place: Place,
    exchange: Exchange,
    poller: zmq.Poller,
) -> tuple[Twin, Ledger, LiveMetrics]:
    """Return the twin of a fleet, with its ledger and metrics. Raises UserError if the fleet cannot be simulated."""
    from tokentwin.planning.priced_scenario import price_scenario
    from tokentwin.realengine.tokenizer import Tokenizer
    from tokentwin.sim.live_cluster import LiveCluster

    scenario = price_scenario(Workload(()), settings.calibration, settings.gpu, deployment)
    scenario = replace(scenario, front_door=None)  # this API server is there itself
    first = scenario.all_pools[0].deployment
    if settings.adapters and any(pool.deployment.lora is None for pool in scenario.all_pools):
        raise UserError("lora_modules", settings.lora_modules, "needs slots; add the section lora to the deployment")
    model = _known_model(first.model)
    vocab_size, folder = model.vocab_size if model else _VOCABULARY, tokenizer_folder(settings.tokenizer, first.model)
    texts = Tokenizer(Path(folder)) if folder else PlainTexts(vocab_size)
    if settings.answers and not folder:
        raise UserError("answers", settings.answers, "needs the model's tokenizer; name one with --tokenizer")
    about = About(
        _model_name(settings, first),
        min(pool.deployment.scheduler.max_model_len for pool in scenario.all_pools),
        [_END],
        folder,
        vocab_size,
        True,
        first.scheduler.block_size,
        places=[-1] * scenario.ranks if settings.ports_per_replica else [],
        role=settings.role,
        adapters=settings.adapters,
        embedding_size=model.hidden_size if model else 0,
    )
    run = {
        **_identity(settings),
        "clock": "virtual",
        "deployment": scenario.deployment.model_dump_json(),
        "replicas": scenario.engines,
        "hardware": "",
        "calibration": scenario.calibration,
        "num_blocks": scenario.num_blocks,
        "block_size": first.scheduler.block_size,
        "notes": json.dumps({"served": {"speed": settings.speed}}),
        "usd_per_gpu_hour": dict(scenario.usd_per_gpu_hour),
    }
    twin = Twin(
        about,
        lambda sink, on_tokens: scenario.cluster(
            LiveCluster, sink, steps=True, tokens=True, block=1, on_tokens=on_tokens
        ),
        exchange,
        AnswerLengths(_drawn(settings.output_tokens, settings.seed), _drawn(_USUAL_LENGTHS, settings.seed)),
        filler_tokens(texts, vocab_size),
        first.scheduler.block_size,
        settings.speed,
        accidents=Accidents(settings.failures or ServedFailures()),
    )
    deployments = [pool.deployment for pool in scenario.all_pools]
    if model is not None and scenario.gpu is not None:
        weights = max(max(stage_weight_bytes(find_model(one.model), one)) for one in deployments)
        twin.weights_s = weights / find_gpu(scenario.gpu).pcie_bytes_per_s
    if settings.role == "decode":
        twin.prefills = _prefills(twin, settings.kv_links or LinksConfig(), deployments)
    if settings.kv_events is not None:
        follow_kv(twin, settings, settings.kv_events, deployments, poller)
    metrics = _metrics(about, deployments)
    twin.on_stall = metrics.stalled
    twin.ledger = ledger = _ledger(twin, metrics, settings, place, run)
    return twin, ledger, metrics


def _known_model(name: str) -> ModelSpec | None:
    """Return the model, or None if it is not known, as with a user's own cost model."""
    try:
        return find_model(name)
    except UserError:
        return None


def _metrics(about: About, deployments: Sequence[Deployment]) -> LiveMetrics:
    drafting = [deployment.scheduler.speculative for deployment in deployments]
    longest = max(drafts.num_speculative_tokens if drafts else 0 for drafts in drafting)
    return LiveMetrics(about.model, about.max_model_len, longest)


def _prefills(twin: Twin, links: LinksConfig, deployments: Sequence[Deployment]) -> RemotePrefills:
    """Let decode replicas of `twin` pull the KV of prompts from prefill servers.

    Raises UserError if the size of the KV is not known, or if KV cannot be pulled into such a deployment.
    """
    first = deployments[0]
    for deployment in deployments:
        if deployment.kv_tiers is not None:
            raise UserError("role", "decode", "cannot be combined with kv_tiers; leave one out")
        if deployment.scheduler.kv_groups:
            raise UserError("role", "decode", f"cannot be combined with the sliding windows of {deployment.model}")
        if (deployment.model, kv_dtype(deployment)) != (first.model, kv_dtype(first)):
            raise UserError("role", "decode", "needs the same model and KV dtype in all pools")
    per_token = kv_bytes_per_token(first, links.kv_bytes_per_token, "kv_links.kv_bytes_per_token")
    return twin.cluster.pull_prompts(links, per_token)


def follow_kv(
    twin: Twin, settings: ServeSettings, kv: KvEventSettings, deployments: Sequence[Deployment], poller: zmq.Poller
) -> None:
    """Publish the KV events of every replica of `twin`, whose pools have `deployments`.

    Raises UserError if a replica has no prefix cache, or if an endpoint cannot be bound.
    """

    def events(life: Life) -> KvEvents:
        return KvEvents(kv, deployments[life.pool].scheduler.block_size, twin.tokens, twin.salt)

    def topic(place: int) -> str:
        return _topic(settings, kv, place, twin.about.model)

    twin.kv_feeds = feeds = KvFeeds(kv, events, topic, zmq.Context.instance(), poller)
    twin.cluster.follow(feeds.ready, feeds.gone)


def _topic(settings: ServeSettings, kv: KvEventSettings, place: int, model: str) -> str:
    port = settings.port + place if settings.ports_per_replica else settings.port
    return kv.topic.format(replica=place, port=port, model=model)


def make_real(
    settings: ServeSettings, deployment: Deployment, place: Place, exchange: Exchange, poller: zmq.Poller
) -> tuple[RealFleet, Ledger, LiveMetrics]:
    """Start the real engines and wait until all serve; return them with their ledger and metrics.

    Raises UserError if an engine cannot be loaded, and for settings that only the simulator supports.
    """
    from tokentwin.apiserver.real_fleet import RealFleet
    from tokentwin.planning.measure.engine_fleet import gpus_of, real_fleet
    from tokentwin.planning.priced_scenario import with_fleet
    from tokentwin.realengine.parallel.replica_process import ReplicaProcess
    from tokentwin.sim.router import find_router

    fleet = real_fleet(with_fleet(deployment, settings.replicas, settings.router))
    replicas, kv, origin_ns = fleet.pools[0].replicas, settings.kv_events, monotonic_ns()
    if settings.adapters and deployment.lora is None:
        raise UserError("lora_modules", settings.lora_modules, "needs slots; add the section lora to the deployment")
    if deployment.lora is not None and kv is not None:
        raise UserError("kv_events", kv.endpoint, "cannot be combined with lora; leave one of them out")
    alone, name = deployment.model_copy(update={"fleet": None}), _model_name(settings, deployment)
    gpus = gpus_of(deployment, replicas) if replicas > 1 else [None]
    publishers = [] if kv is None else _publishers(settings, kv, name, replicas, poller)

    def start(number: int, again: bool) -> ReplicaProcess:
        serve = partial(_serve_engine, alone, name, settings.adapters, kv, again or place.again, origin_ns)
        return ReplicaProcess(number, serve, gpus[number], alone.tensor_parallel_size > 1)

    router = find_router(fleet.router.name, **fleet.router.settings)
    real = RealFleet(start, replicas, exchange, router, poller, origin_ns, publishers)
    real.await_all()
    metrics = _metrics(real.about, [alone])
    run = {**real.about.run, **_identity(settings), "replicas": replicas}
    real.ledger = ledger = _ledger(real, metrics, settings, place, run)
    return real, ledger, metrics


def _publishers(
    settings: ServeSettings, kv: KvEventSettings, model: str, replicas: int, poller: zmq.Poller
) -> list[KvPublisher]:
    topics = [_topic(settings, kv, number, model) for number in range(replicas)]
    return [KvPublisher(kv, number, topic, zmq.Context.instance(), poller) for number, topic in enumerate(topics)]


def _serve_engine(*arguments: Any) -> None:
    from tokentwin.apiserver.real import serve_engine  # in the engine's process, which alone needs torch

    serve_engine(*arguments)


def _model_name(settings: ServeSettings, deployment: Deployment) -> str:
    return settings.served_model_name or deployment.model


def _identity(settings: ServeSettings) -> dict[str, Any]:
    return {"workload": "served", "seed": settings.seed}


def _ledger(
    backend: Backend,
    metrics: LiveMetrics,
    settings: ServeSettings,
    place: Place,
    run: dict[str, Any],
) -> Ledger:
    return Ledger(backend, metrics, place.open(run), _request_spans(settings, backend), backend.about.block_size)


def _request_spans(settings: ServeSettings, backend: Backend) -> RequestSpans | None:
    """Return the sender of spans; None without an endpoint. Raises UserError if OpenTelemetry is not installed."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from tokentwin.apiserver.request_spans import RequestSpans
    except ImportError:
        remedy = "needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http; pip install 'tokentwin[server]'"
        raise UserError("otlp_endpoint", settings.otlp_endpoint, remedy) from None
    return RequestSpans(settings.otlp_endpoint, backend.about.model, backend)


def tokenizer_folder(named: str, model: str) -> str:
    """Return the folder of the tokenizer that is `named`, or else of the model's; empty if the model's is not here.

    A tokenizer is named by its folder, by a name in the local hub cache, or by an installed Python package that has
    one. Raises UserError if it is not there.
    """
    for name in [named] if named else [model, hub_id(model)]:
        cached = cached_config(name)
        for folder in (Path(name).expanduser(), home() / "models" / name, *([cached.parent] if cached else [])):
            if (folder / "tokenizer.json").is_file():
                return str(folder)
    packaged = _packaged_tokenizers(named) if named else []
    if len(packaged) > 1:
        raise UserError("tokenizer", named, f"has several; give a folder: {', '.join(packaged[:5])}")
    if named and not packaged:
        remedy = "has no tokenizer.json; give its folder, a name in the local hub cache, or an installed package"
        raise UserError("tokenizer", named, remedy)
    return packaged[0] if packaged else ""


def _packaged_tokenizers(package: str) -> list[str]:
    """Return the folders of an installed Python package that have a tokenizer.json; the package is not imported."""
    try:
        files = metadata.files(package) or []
    except (metadata.PackageNotFoundError, ValueError):
        return []
    return [str(Path(str(file.locate())).parent) for file in files if file.name == "tokenizer.json"]


def _drawn(lengths: Lengths | None, seed: int) -> Callable[[int], int] | None:
    """Return a function that draws an answer's length by a seed or request id; None without `lengths`."""
    if lengths is None:
        return None
    return lambda number: int(lengths.draw(np.random.default_rng((seed, abs(number))), 1)[0])
