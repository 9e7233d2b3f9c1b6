"""Traffic over time adds up to the requests, and clients who wait send what a simulation of them sends."""

from dataclasses import replace

import numpy as np
import pytest

from tests.planning.plan_samples import Steps, traffic
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.planning.made_up import MadeUp
from tokentwin.planning.plan.offered_load import clients_load, over_time
from tokentwin.planning.traffic import looped
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import PRIVATE, WorkloadRequest
from tokentwin.traces.synth import parse_spec


def test_periods_add_up_to_the_requests_and_their_tokens():
    requests = list(traffic().requests)
    seen = over_time(requests)
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    assert seen is not None and seen.period_s * len(seen.requests_per_s) == pytest.approx(span_s)
    for rates, whole in (
        (seen.requests_per_s, len(requests)),
        (seen.prompt_tokens_per_s, sum(request.prompt_len for request in requests)),
        (seen.output_tokens_per_s, sum(request.output_len for request in requests)),
    ):
        assert sum(rates) * seen.period_s == pytest.approx(whole, rel=1e-4)
    assert seen.sessions == seen.prompt_tokens_of_turn == ()
    assert over_time([replace(request, arrival_ns=7) for request in requests]) is None
    years = over_time([replace(request, arrival_ns=request.arrival_ns * 10**8) for request in requests])
    assert years is not None and years.period_s > 4.9 * 365 * 86400 / 60
    assert np.argmax(years.requests_per_s) == np.argmax(seen.requests_per_s)


def test_sessions_are_under_way_from_their_first_turn_to_the_last():
    turns = [("a", 0, 0, 10), ("b", 0, 10, 30), ("a", 1, 20, 50), ("b", 1, 40, 70), ("b", 2, 79, 90)]
    requests = [
        WorkloadRequest(at, round(second * 1e9), ((PRIVATE, tokens),), 1, session=session, turn=turn)
        for at, (session, turn, second, tokens) in enumerate(turns)
    ]
    seen = over_time([*requests, *(replace(requests[-1], id=9 + at, session="") for at in range(27))])
    assert seen is not None and seen.period_s == 79 / 8
    assert seen.sessions == (1, 2, 2, 1, 1, 1, 1, 1) and seen.prompt_tokens_of_turn == (20, 60, 90)


@pytest.mark.parametrize("sessions", [None, {"turns": 4, "think_ms": 1000}])
def test_clients_send_what_the_law_of_response_times_says(sessions):
    spec = MadeUp(prompt=200, output=20, users=30, think_s=3).spec().model_dump(mode="json", exclude_none=True)
    loop = parse_spec({**spec, "duration_s": 500, **({"sessions": sessions} if sessions else {})})
    scheduler = SchedulerConfig(max_num_seqs=64, max_num_batched_tokens=2048, max_model_len=8192, num_blocks=9000)
    workload = looped(loop)
    metrics = run_metrics(workload, Deployment(scheduler=scheduler), Steps(4.0), 1)
    answer_s = float(np.nanmean(metrics.values("e2e_ms"))) / 1e3
    load = clients_load(loop)
    counted_s = ((workload.until_ns or 0) - workload.warm_up_ns) / 1e9
    sent = len(metrics.values("e2e_ms")) / counted_s
    assert load.requests_per_s(answer_s) == pytest.approx(sent, rel=0.1)
    assert load.in_flight(answer_s) == pytest.approx(load.requests_per_s(answer_s) * answer_s)
    assert load.think_s == (3.0 if sessions is None else 1.5)
