"""The real engine's metrics: they agree with its rows, in the plain loop and in the overlapped one."""

from functools import partial
from time import monotonic_ns

import pytest
import zmq

pytest.importorskip("torch")

from tests.apiserver.test_live_metrics import Rows, Scraped, Wire
from tokentwin.apiserver.ledger import Ledger
from tokentwin.apiserver.live_metrics import LiveMetrics
from tokentwin.apiserver.messages import Add
from tokentwin.apiserver.real import serve_engine
from tokentwin.apiserver.real_fleet import RealFleet
from tokentwin.realengine.parallel.replica_process import ReplicaProcess
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.sim.router import find_router

pytestmark = pytest.mark.engine
TIGHT = {"num_blocks": 24, "max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": 256}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize("scheduler", [{}, {"async_scheduling": True}, {"speculative": DRAFTS}])
def test_metrics_agree_with_the_rows(scheduler):
    scheduler = SchedulerConfig(**TIGHT, **scheduler)
    deployment = Deployment(model="random:llama", dtype="float32", scheduler=scheduler)
    poller, wire, rows = zmq.Poller(), Wire(), Rows()
    origin_ns = monotonic_ns()

    def start(number, again):
        serve = partial(serve_engine, deployment, "random:llama", (), None, again, origin_ns)
        return ReplicaProcess(number, serve)

    real = RealFleet(start, 1, wire, find_router("round-robin"), poller, origin_ns, [])
    real.await_all()
    metrics = LiveMetrics("random:llama", 256, 3 if scheduler.speculative else 0)
    real.ledger = ledger = Ledger(real, metrics, rows)
    ends, take = [], metrics.step
    metrics.step = lambda end: (ends.append(end), take(end))
    for id in range(10):
        asked = Add(id, [*range(40), *range(100 * id + 100, 100 * id + 110)], 30 + id, monotonic_ns())
        ledger.expects(id, asked)
        real.add(id, asked)
    told = 0
    while ledger.under_way:
        assert poller.poll(60_000)
        real.turn()
        if not told and any(len(tokens) > 5 for tokens in wire.given.values()):
            real.abort(3, "its client went away")
            told = Scraped(metrics.text(real.replicas(), ledger.records))["generation_tokens_total"]
    assert told  # long before the first request has ended
    for id in range(10):
        ledger.delivered(id, None)
    scraped = Scraped(metrics.text(real.replicas(), ledger.records))
    real.close()

    (aborted,) = [at for at, end in enumerate(ends) if not end.tokens]  # gauges move at once
    assert ends[aborted].running + ends[aborted].waiting < ends[aborted - 1].running + ends[aborted - 1].waiting
    done = [row for row in rows.requests if row["status"] == "finished"]
    assert len(done) == 9 and sum(row["preemptions"] for row in rows.requests) > 0
    tokens = sum(row["output_tokens"] for row in rows.requests)
    assert scraped["generation_tokens_total"] == tokens
    assert scraped["time_to_first_token_seconds_count"] == sum(row["output_tokens"] > 0 for row in rows.requests)
    assert scraped["inter_token_latency_seconds_count"] == sum(
        max(row["output_tokens"] - 1 - (row.get("accepted_tokens") or 0), 0) for row in rows.requests
    )
    assert scraped["prefix_cache_hits_total"] == sum(row["prefix_hit_tokens"] for row in rows.requests)
    assert scraped["num_preemptions_total"] == sum(row["preemptions"] for row in rows.requests)
    assert scraped["e2e_request_latency_seconds_sum"] == pytest.approx(
        sum(row["finish_ns"] - row["received_ns"] for row in done) / 1e9
    )
    if scheduler.speculative:
        for name in ("draft_tokens", "accepted_tokens"):
            assert scraped[f"spec_decode_num_{name}_total"] == sum(row.get(name) or 0 for row in rows.requests) > 0
    assert scraped["num_requests_running"] == scraped["kv_cache_usage_perc"] == 0
