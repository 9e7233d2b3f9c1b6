"""Prompts that other servers prefill: what is pulled, how long that takes, and what goes wrong on the way."""

from typing import Any

import pytest

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import LinksConfig
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.sim.live_cluster import LiveCluster
from tokentwin.sim.run_log import TableSink

MS = 1_000_000
PER_TOKEN = 1_000_000  # bytes: a millisecond over a link of 1 GB/s
LINKS = LinksConfig(nic_gb_s=1, latency_us=500)
COST = TokenCost(base_ns=MS, per_token_ns=MS, per_pair_ps=0)


class Decoding:
    """One replica that decodes, on its own clock."""

    def __init__(self, **scheduler: Any) -> None:
        settings = {"max_num_batched_tokens": 1024, "num_blocks": 101, **scheduler}
        self.sink = TableSink()
        self.cluster = LiveCluster(Deployment(scheduler=SchedulerConfig(**settings)), COST, self.sink, block=1)
        self.prefills = self.cluster.pull_prompts(LINKS, PER_TOKEN)

    def arrives(self, id: int, at_ms: int, prompt: int, server: str, name: str = "") -> None:
        request = WorkloadRequest(id, at_ms * MS, ((name or f"p{id}", prompt),), 3)

        def arrive(at_ns: int) -> None:
            if server:
                self.prefills.expect(id, server)
            self.cluster.offer(request)

        self.cluster.advance(at_ms * MS, [arrive])

    def ended(self) -> list[dict[str, Any]]:
        self.cluster.finish(10_000 * MS)
        return sorted(self.sink.requests.to_pylist(), key=lambda row: row["request_id"])


def test_a_prompt_is_pulled_and_only_its_last_token_computed() -> None:
    decoding = Decoding()
    decoding.arrives(0, 0, 64, "a")
    (row,) = decoding.ended()
    assert row["status"] == "finished" and row["output_tokens"] == 3
    assert row["transfer_ns"] == 64 * MS + MS // 2  # all of it; the last token is computed again
    assert row["first_token_ns"] - row["arrival_ns"] == row["transfer_ns"] + 2 * MS
    assert [step["prefill_tokens"] + step["decode_rows"] for step in decoding.sink.steps.to_pylist()] == [1, 1, 1]


def test_what_is_in_the_cache_is_not_pulled_again() -> None:
    decoding = Decoding()
    decoding.arrives(0, 0, 64, "a", "shared")
    decoding.arrives(1, 200, 64, "a", "shared")
    assert [row["transfer_ns"] for row in decoding.ended()] == [64 * MS + MS // 2, 16 * MS + MS // 2]


@pytest.mark.parametrize("servers", ["aa", "ab"])
def test_the_link_into_a_replica_is_shared(servers: str) -> None:
    decoding = Decoding()
    for id, server in enumerate(servers):
        decoding.arrives(id, 0, 64, server)
    for row in decoding.ended():
        assert row["transfer_ns"] == pytest.approx(2 * 64 * MS + MS / 2, abs=10)


def test_a_prompt_of_which_nothing_is_elsewhere_is_computed() -> None:
    decoding = Decoding()
    decoding.arrives(0, 0, 64, "")
    (row,) = decoding.ended()
    assert row["transfer_ns"] is None and row["first_token_ns"] - row["arrival_ns"] == 65 * MS


def test_who_leaves_while_its_prompt_is_on_its_way_gives_its_blocks_back() -> None:
    decoding = Decoding(num_blocks=7)
    decoding.arrives(0, 0, 64, "a")
    decoding.cluster.advance(10 * MS, [lambda _: decoding.cluster.give_up(0, "cancelled", "gone")])
    decoding.arrives(1, 20, 64, "a")
    gone, served = decoding.ended()
    assert (gone["status"], served["status"]) == ("cancelled", "finished")
    pool = decoding.cluster.replicas[0].scheduler.pool
    assert pool.free == pool.total
