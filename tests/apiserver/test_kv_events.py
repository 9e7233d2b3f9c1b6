"""Rung 0 of KV events: vLLM's own scheduler and ours publish the same events, batch by batch."""

import gzip
import json
from base64 import b64decode
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.apiserver import vllm_kv_events as vllm
from tokentwin.apiserver.kv_cache_events.block_hash import BlockHash
from tokentwin.apiserver.kv_cache_events.events import KvEvents
from tokentwin.apiserver.settings import KvEventSettings
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.request import Request
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink

RECORDED = json.loads(gzip.decompress(Path("tests/data/vllm/kv_events.json.gz").read_bytes()))


def tokens_of(request: Request, begin: int, end: int) -> list[int]:
    """Return the tokens of a request, by the rule of the recording."""
    parts = [*request.arrived.prompt, (f"out:{request.id}", request.max_len)]
    return [token for part in parts for token in vllm.tokens(*part)][begin:end]


Tokens = Callable[[Request, int, int], Sequence[int]]


def events_of(way: dict[str, Any], tokens: Tokens, **changed: Any) -> KvEvents:
    told = {name: way[name] for name in ("hash", "hash_seed", "integer_hashes")}
    return KvEvents(KvEventSettings(endpoint="tcp://*:5557", **told | changed), vllm.BLOCK, tokens)


def batches(way: dict[str, Any], tokens: Tokens = tokens_of, **changed: Any) -> list[bytes]:
    """Return the batches of events that our scheduler publishes."""
    published = []

    def step_ended(*step: Any) -> None:
        if (batch := events.take(0.0)) is not None:
            published.append(batch)

    events = events_of(way, tokens, **changed)
    deployment = Deployment(scheduler=SchedulerConfig(**vllm.config(way)))
    sink = TableSink()
    cluster = Cluster(deployment, TokenCost(**vllm.COST), sink, on_tokens=step_ended)
    cluster.replicas[0].scheduler.pool.observe(events)
    cluster.run(Workload([WorkloadRequest(**request) for request in vllm.scenario()]))
    assert sum(sink.requests["preemptions"].to_pylist()) > 0 < sum(sink.requests["prefix_hit_tokens"].to_pylist())
    return published


@pytest.mark.parametrize("recorded", RECORDED, ids=["plain, sha256", "overlapped, sha256_cbor"])
def test_batches_are_those_of_vllm(recorded: dict[str, Any]) -> None:
    wanted = [msgspec.msgpack.decode(b64decode(batch)) for batch in recorded["batches"]]
    assert [msgspec.msgpack.decode(batch) for batch in batches(recorded["way"])] == wanted


@pytest.mark.engine
@pytest.mark.parametrize("way", vllm.WAYS, ids=["plain", "overlapped"])
def test_the_real_engine_publishes_what_its_twin_does(way: dict[str, Any]) -> None:
    """On the twin's clock; its answers are given, and its tokens are those that it computed with."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    from tokentwin.realengine.engine import Engine
    from tokentwin.realengine.models.weights import load_model_files

    config = SchedulerConfig(**vllm.config(way))
    engine = Engine(
        Deployment(model="random:llama", dtype="float32", scheduler=config), load_model_files("random:llama", Path())
    )
    vocab_size = engine.spec.vocab_size
    events = events_of(way, lambda request, begin, end: engine.sequences[request.id].tokens[begin:end])
    engine.scheduler.pool.observe(events)
    cost, published = TokenCost(**vllm.COST), []
    coming = deque(WorkloadRequest(**request) for request in vllm.scenario())
    ends: deque[int] = deque()  # of the steps under way
    now_ns = free_ns = 0
    while coming or engine.scheduler.requests:
        while coming and coming[0].arrival_ns <= now_ns:
            arrived = coming.popleft()
            prompt, answer = (
                [token % vocab_size for part in parts for token in vllm.tokens(*part)]
                for parts in (arrived.prompt, [(f"out:{arrived.id}", arrived.output_len)])
            )
            engine.add(arrived, prompt, forced=answer)
        if engine.has_room and (flight := engine.launch()):
            free_ns = max(now_ns, free_ns) + cost.step_ns(flight.plan)
            ends.append(free_ns)
            if engine.has_room:
                continue
        if not ends:
            now_ns = coming[0].arrival_ns
            continue
        now_ns = max(now_ns, ends.popleft())
        engine.finish()
        if (batch := events.take(0.0)) is not None:
            published.append(batch)
    engine.close()
    assert published == batches(way, lambda *asked: [token % vocab_size for token in tokens_of(*asked)])


def test_the_recording_is_what_vllm_says_today() -> None:
    pytest.importorskip("vllm", reason="vLLM is not installed: its recorded events are compared, not live ones")
    for recorded in RECORDED:
        assert vllm.record(recorded["way"]) == recorded["batches"]


def test_events_as_arrays_begin_with_their_names() -> None:
    named = [msgspec.msgpack.decode(batch) for batch in batches(vllm.WAYS[0])]
    arrays = [msgspec.msgpack.decode(batch) for batch in batches(vllm.WAYS[0], form="positional")]
    for (_, events, _), (_, positions, _) in zip(named, arrays, strict=True):
        for event, values in zip(events, positions, strict=True):
            kept = {name: value for name, value in event.items() if name not in ("group_idx", "kv_cache_spec_kind")}
            assert values == list(kept.values())


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_hash_names_the_seed_and_everything_before(algorithm: Any) -> None:
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 2**31 - 1]
    hash_block = BlockHash(algorithm, "1").hash_block
    one = hash_block(None, tokens)
    assert len({one, hash_block(None, tokens[:7]), hash_block(one, tokens), hash_block(b"\1" * 32, tokens)}) == 4
    assert BlockHash(algorithm, "2").hash_block(None, tokens) != one


def test_a_cleared_cache_is_an_event_without_fields() -> None:
    events = KvEvents(KvEventSettings(endpoint="tcp://*:5557"), 16, tokens_of)
    assert events.take(1.5) is None
    events.cleared()
    assert msgspec.msgpack.decode(events.take(1.5) or b"") == [1.5, [{"type": "AllBlocksCleared"}], 0]
