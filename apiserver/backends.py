"""Functions that make a backend (the real engine, a fleet of real engines, or a twin) with its ledger and metrics."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from time import monotonic_ns
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq

from apiserver.backend import Backend
from apiserver.exchange import Exchange
from apiserver.failures import Accidents, ServedFailures
from apiserver.filler import PlainTexts, filler_tokens
from apiserver.kv_cache_events.events import KvEvents
from apiserver.kv_cache_events.feeds import EngineKvEvents, KvFeeds
from apiserver.ledger import ForwardingLedger, Ledger
from apiserver.live_metrics import LiveMetrics
from apiserver.messages import About, From
from apiserver.settings import KvEventSettings, ServeSettings
from apiserver.twin import AnswerLengths, Twin
from planning.home import home
from serving.deployments.config import Deployment, parse
from serving.deployments.fleet import LinksConfig
from serving.deployments.kv_layout import kv_bytes_per_token, kv_dtype
from serving.errors import UserError
from serving.workload import Workload
from sim.fleet import Life
from sim.remote_prefills import RemotePrefills
from traces.live_recording import Place

if TYPE_CHECKING:
    from apiserver.real import RealEngine
    from apiserver.real_fleet import RealFleet
    from apiserver.request_spans import RequestSpans

_LOG = logging.getLogger("tokentwin")
_END = 0  # the token that would end a twin's answers; no filler token is 0


def make_twin(
    settings: ServeSettings,
    deployment: Deployment,
    place: Place,
    exchange: Exchange,
    poller: zmq.Poller,
) -> tuple[Twin, Ledger, LiveMetrics]:
    """Return the twin of a fleet, with its ledger and metrics. Raises UserError if the fleet cannot be simulated."""
    from planning.priced_scenario import price_scenario
    from realengine.tokenizer import Tokenizer
    from sim.live_cluster import LiveCluster

    scenario = price_scenario(Workload(()), settings.calibration, settings.gpu, deployment)
    first = scenario.all_pools[0].deployment
    vocab_size, folder = 32_000, _tokenizer_folder(first.model)
    texts = Tokenizer(Path(folder)) if folder else PlainTexts(vocab_size)
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
        AnswerLengths(_drawn(settings)),
        filler_tokens(texts, vocab_size),
        first.scheduler.block_size,
        settings.speed,
        accidents=Accidents(settings.failures or ServedFailures()),
    )
    deployments = [pool.deployment for pool in scenario.all_pools]
    if settings.role == "decode":
        twin.prefills = _prefills(twin, settings.kv_links or LinksConfig(), deployments)
    if settings.kv_events is not None:
        follow_kv(twin, settings, settings.kv_events, deployments, poller)
    metrics = _metrics(about, deployments)
    twin.ledger = ledger = _ledger(twin, metrics, settings, place, run)
    return twin, ledger, metrics


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
        return KvEvents(kv, deployments[life.pool].scheduler.block_size, twin.tokens)

    def topic(place: int) -> str:
        return _topic(settings, kv, place, twin.about.model)

    twin.kv_feeds = feeds = KvFeeds(kv, events, topic, zmq.Context.instance(), poller)
    twin.cluster.follow(feeds.ready, feeds.gone)


def _topic(settings: ServeSettings, kv: KvEventSettings, place: int, model: str) -> str:
    port = settings.port + place if settings.ports_per_replica else settings.port
    return kv.topic.format(replica=place, port=port, model=model)


def engine_kv_events(
    settings: ServeSettings, deployment: Deployment, place: int, begun_again: bool, poller: zmq.Poller
) -> EngineKvEvents | None:
    """Return the publisher of KV events for the real engine at `place`; None if KV events are not wanted.

    Raises UserError if its endpoints cannot be bound.
    """
    kv = settings.kv_events
    if kv is None:
        return None
    topic = _topic(settings, kv, place, _model_name(settings, deployment))
    return EngineKvEvents(kv, place, topic, poller, begun_again)


def make_real(
    settings: ServeSettings,
    deployment: Deployment,
    place: Place,
    exchange: Exchange,
    kv_events: EngineKvEvents | None,
    wake: Callable[[], None],
    shared_ns: int | None,
) -> tuple[RealEngine, Ledger | ForwardingLedger, LiveMetrics]:
    """Load the real engine, and return it with its ledger and metrics. Raises UserError if it cannot be loaded.

    If it is one of several engines, whose run began at `shared_ns`, its rows go to the process that routes to it.
    """
    from apiserver.real import RealEngine
    from planning.measure.real_engine import load_engine
    from realengine.devices.machine import describe
    from realengine.engine import Engine

    def about(engine: Engine) -> About:
        spec, folder, deployment = engine.spec, engine.folder, engine.deployment
        return About(
            _model_name(settings, deployment),
            deployment.scheduler.max_model_len,
            list(spec.eos_ids),
            str(folder) if folder is not None and (folder / "tokenizer.json").is_file() else "",
            spec.vocab_size,
            False,
            deployment.scheduler.block_size,
            {
                "clock": "wall",
                "deployment": deployment.model_dump_json(),
                "replicas": 1,
                "hardware": json.dumps(describe(deployment.device)),
                "calibration": "",
                "num_blocks": engine.scheduler.pool.total,
                "block_size": deployment.scheduler.block_size,
                "notes": json.dumps({"served": {}, **engine.notes}),
            },
        )

    def send(message: From) -> None:
        for peer in exchange.peers:
            exchange.send(peer, message)

    origin_ns = monotonic_ns() if shared_ns is None else shared_ns
    real = RealEngine(lambda: load_engine(deployment, _LOG.info), about, exchange, wake, origin_ns, kv_events)
    metrics = _metrics(real.about, [deployment])
    ledger: Ledger | ForwardingLedger = ForwardingLedger(send)
    if shared_ns is None:
        ledger = _ledger(real, metrics, settings, place, {**real.about.run, **_identity(settings)})
    real.ledger = ledger
    return real, ledger, metrics


def make_fleet(
    settings: ServeSettings,
    addresses: Sequence[str],
    place: Place,
    exchange: Exchange,
    context: zmq.Context[zmq.Socket[bytes]],
    poller: zmq.Poller,
    origin_ns: int,
) -> tuple[RealFleet, Ledger, LiveMetrics]:
    """Return the engines at `addresses` behind one router, with ledger and metrics.

    Raises UserError for an unknown router.
    """
    from apiserver.real_fleet import RealFleet
    from sim.router import find_router

    fleet = RealFleet(context, addresses, exchange, find_router(settings.router or "round-robin"), origin_ns)
    fleet.register(poller)
    fleet.await_all(poller)
    deployment = parse(Deployment, json.loads(fleet.about.run["deployment"]), where="deployment")
    metrics = _metrics(fleet.about, [deployment])
    run = {**fleet.about.run, **_identity(settings), "replicas": len(addresses)}
    fleet.ledger = ledger = _ledger(fleet, metrics, settings, place, run)
    return fleet, ledger, metrics


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
    """Return the sender of spans, if they are wanted. Raises UserError if OpenTelemetry is not installed."""
    if settings.otlp_endpoint is None:
        return None
    try:
        from apiserver.request_spans import RequestSpans
    except ImportError:
        remedy = "needs opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http; pip install 'tokentwin[server]'"
        raise UserError("otlp_endpoint", settings.otlp_endpoint, remedy) from None
    return RequestSpans(settings.otlp_endpoint, backend.about.model, backend)


def _tokenizer_folder(model: str) -> str:
    """Return the folder of the model's tokenizer; empty if there is none on this machine."""
    for folder in (Path(model), home() / "models" / model):
        if (folder / "tokenizer.json").is_file():
            return str(folder)
    return ""


def _drawn(settings: ServeSettings) -> Callable[[int], int] | None:
    """Return a function from a request's number to the length of its answer; None if lengths are not drawn."""
    lengths = settings.output_tokens
    if lengths is None:
        return None
    return lambda number: int(lengths.draw(np.random.default_rng((settings.seed, abs(number))), 1)[0])
