"""The twin as a gateway sees it: a port and KV events for each replica, and replicas that fail as real ones do."""

import http.client
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from time import sleep
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
import zmq

from tests.apiserver.served_command import free_ports, kv_batches, served
from tokentwin.apiserver.failures import Accidents, ServedFailures
from tokentwin.apiserver.kv_cache_events.block_hash import BlockHash
from tokentwin.planning.priced_scenario import price_scenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.recording import Recording

REFUSED, CUT, DEAD, SOUND = range(4)
FAILURES = {
    "seed": 3,
    "refusals": [{"replica": REFUSED, "status": 429, "share": 0.5}],
    "cuts": [{"replica": CUT, "after_tokens": 3}],
    "crashes": [{"at_s": 10, "replica": DEAD, "recovery_s": 3}],
    "slowdowns": [{"at_s": 0, "for_s": 1e6, "factor": 2, "replica": SOUND}],
}
TWIN = ("--twin", "--gpu", "H100", "--model", "Llama-3.1-8B")


class Gateway:
    """Four replicas: one refuses, one cuts answers, one crashes and comes back, one is slow but sound."""

    def __init__(self, urls: list[str], events: int) -> None:
        self.ports = [urlsplit(url).port or 0 for url in urls]
        self.events = events
        self.asked = 0  # number of requests that have come to the twin

    def ask(self, replica: int, prompt: list[int], tokens: int, **more: Any) -> tuple[int, bytes]:
        """Return status and body of a completion."""
        self.asked += 1
        body = {"prompt": prompt, "max_tokens": tokens, **more}
        return self.call(replica, "POST", "/v1/completions", json.dumps(body))

    def call(self, replica: int, method: str, path: str, body: str | None = None) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[replica], timeout=60)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def replayed(self, replica: int, number: int = 0) -> list[tuple[int, list[dict[str, Any]]]]:
        """Return sequence numbers and events that a replica has published since that number."""
        batches = kv_batches(self.events + 10 + replica, number)
        assert {topic for topic, _, _ in batches} <= {f"kv@{replica}:{self.ports[replica]}@Llama-3.1-8B"}
        return [(sequence, events) for _, sequence, events in batches]


@pytest.fixture(scope="module")
def gateway() -> Iterator[Gateway]:
    events = free_ports(14)
    published = {
        "endpoint": f"tcp://127.0.0.1:{events}",
        "replay_endpoint": f"tcp://127.0.0.1:{events + 10}",
        "topic": "kv@{replica}:{port}@{model}",
        "hash_seed": "5",
    }
    ports = ("--replicas", "4", "--ports-per-replica")
    with served(*TWIN, *ports, "--kv-events", json.dumps(published), "--failures", json.dumps(FAILURES)) as urls:
        made = Gateway(urls, events)
        assert len(made.ports) == 4
        until(lambda: all(made.call(replica, "GET", "/ready")[0] == 200 for replica in range(4)))
        yield made


def test_a_crash_cuts_answers_and_the_port_is_dead_until_a_successor_is_ready(gateway: Gateway) -> None:
    gateway.ask(DEAD, [7] * 40, 1)
    assert gateway.replayed(DEAD)[0][1][0]["type"] == "BlockStored"
    with pytest.raises((http.client.IncompleteRead, ConnectionError)):
        gateway.ask(DEAD, [7] * 40, 8000, stream=True)
    status, body = gateway.call(DEAD, "GET", "/health")
    assert status == 503 and "has crashed" in json.loads(body)["error"]["message"]
    assert gateway.call(DEAD, "POST", "/v1/completions", '{"prompt": [1], "max_tokens": 1}')[0] == 503
    assert gateway.call(SOUND, "GET", "/health")[0] == 200
    until(lambda: gateway.call(DEAD, "GET", "/health")[0] == 200)
    assert gateway.replayed(DEAD) == [(0, [{"type": "AllBlocksCleared"}])]
    assert gateway.ask(DEAD, [7] * 40, 1)[0] == 200
    assert gateway.call(DEAD, "GET", "/metrics")[0] == 200


def test_requests_are_refused_by_the_seed_and_the_order_in_which_they_come(gateway: Gateway) -> None:
    accidents = Accidents(ServedFailures(**FAILURES))
    ids = range(gateway.asked, gateway.asked + 20)
    refusals = [gateway.ask(REFUSED, [id], 1) for id in ids]
    wanted = [429 if accidents.refusal(id, REFUSED, 0.0) else 200 for id in ids]
    assert [status for status, _ in refusals] == wanted and len(set(wanted)) == 2
    assert {json.loads(body)["error"]["type"] for status, body in refusals if status == 429} == {"Too Many Requests"}


@pytest.mark.parametrize("stream", [True, False])
def test_a_cut_answer_ends_in_the_middle(gateway: Gateway, stream: bool) -> None:
    assert gateway.ask(CUT, [1, 2], 2)[0] == 200
    with pytest.raises((http.client.IncompleteRead, http.client.RemoteDisconnected, ConnectionError)) as broken:
        gateway.ask(CUT, [1, 2], 9, stream=stream)
    if isinstance(broken.value, http.client.IncompleteRead):
        partial = broken.value.partial.decode()
        words = "".join(json.loads(event)["choices"][0]["text"] for event in re.findall(r"data: (.*)", partial))
        assert len(words.split()) == 3  # in as many pieces as the client's machine lets come


def test_what_one_port_has_served_is_in_no_other_ports_metrics(gateway: Gateway) -> None:
    def served_tokens(replica: int) -> float:
        text = gateway.call(replica, "GET", "/metrics")[1].decode()
        (line,) = re.findall(r'^vllm:generation_tokens_total\{.*engine="0".*\} (\S+)$', text, re.MULTILINE)
        return float(line)

    before = [served_tokens(replica) for replica in (CUT, SOUND)]
    gateway.ask(SOUND, [3, 4, 5], 7)
    assert [served_tokens(replica) for replica in (CUT, SOUND)] == [before[0], before[1] + 7]


def test_events_name_blocks_as_vllm_does_and_a_known_prefix_is_not_stored_again(gateway: Gateway) -> None:
    prompt = list(range(1000, 1040))
    before = len(gateway.replayed(SOUND))
    text = json.loads(gateway.ask(SOUND, prompt, 20)[1])["choices"][0]["text"]
    stored = [event for _, events in gateway.replayed(SOUND, before) for event in events]
    hash = BlockHash("sha256", "5").hash_block
    first = hash(None, prompt[:16])
    second = hash(first, prompt[16:32])
    assert stored[0] == {
        "type": "BlockStored",
        "block_hashes": [int.from_bytes(name[-8:], "big") for name in (first, second)],
        "parent_block_hash": None,
        "token_ids": prompt[:32],
        "block_size": 16,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, None],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }
    answer = json.loads(gateway.call(SOUND, "POST", "/tokenize", json.dumps({"prompt": text}))[1])["tokens"]
    assert [event["token_ids"] for event in stored[1:]] == [(prompt + answer)[32:48]]
    again = len(gateway.replayed(SOUND))
    gateway.ask(SOUND, prompt, 1)
    assert gateway.replayed(SOUND, again) == []


def test_who_subscribes_gets_what_is_published(gateway: Gateway) -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as subscribed:
        subscribed.connect(f"tcp://127.0.0.1:{gateway.events + SOUND}")
        subscribed.subscribe("kv@")
        prompts = iter(range(2000, 3000))
        until(lambda: gateway.ask(SOUND, [next(prompts)] * 16, 1)[0] == 200 and subscribed.poll(100))
        topic, number, batch = subscribed.recv_multipart()
        assert topic.startswith(b"kv@3:") and len(number) == 8
        seconds, events, rank = msgspec.msgpack.decode(batch)
        assert seconds > 1.7e9 and events[0]["type"] == "BlockStored" and rank == 0


def until(holds: Callable[[], Any]) -> None:
    """Ask until the condition holds, at most three thousand times."""
    for _ in range(3000):
        if holds():
            return
        sleep(0.02)
    raise AssertionError("never")


def test_a_recording_by_ports_with_cuts_and_a_crash_simulates_to_the_same_decisions(tmp_path: Path) -> None:
    failures = {"cuts": [{"replica": 0, "after_tokens": 5, "share": 0.5}], "crashes": [{"at_s": 8, "replica": 1}]}
    options = (
        "--replicas",
        "2",
        "--ports-per-replica",
        "--failures",
        json.dumps(failures),
        "-o",
        str(tmp_path / "run"),
    )
    with served(*TWIN, *options) as urls:
        gateway = Gateway(urls, 0)
        until(lambda: all(gateway.call(replica, "GET", "/ready")[0] == 200 for replica in range(2)))
        with ThreadPoolExecutor() as clients:
            crashed = clients.submit(gateway.ask, 1, [4] * 50, 8000)
            for _ in range(6):
                with suppress(http.client.HTTPException, ConnectionError):
                    gateway.ask(0, [1, 2, 3] * 20, 9)
            assert isinstance(crashed.exception(), http.client.HTTPException | ConnectionError)
    recording = Recording.load(tmp_path / "run")
    deployment = Deployment.model_validate_json(recording.run["deployment"])
    sink = TableSink()
    price_scenario(recording.workload(), None, "H100", deployment).cluster(Cluster, sink).run(recording.workload())
    decided = ["request_id", "replica", "status", "arrival_ns", "scheduled_ns", "first_token_ns", "end_ns"]
    rows = [table.select(decided).sort_by("request_id").to_pylist() for table in (recording.requests, sink.requests)]
    assert rows[0] == rows[1]
    ends = {(row["replica"], row["status"]) for row in rows[0]}
    assert ends == {(None, "cancelled"), (0, "cancelled"), (0, "finished")}
