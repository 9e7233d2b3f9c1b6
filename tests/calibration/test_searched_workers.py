"""Prefill and decode workers of unknown number: the smallest number that holds all requests and keeps pace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.calibration.validation.external.predictor import Prediction
from tokentwin.calibration.validation.external.scoring import matched_workers
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload
from tokentwin.traces.measured.run import MeasuredRun

ROLES: Any = [{"name": role, "role": role, "replicas": 1} for role in ("prefill", "decode")]


class Linear:
    """A cost model in which a step takes a fixed time, plus a time for each of its tokens."""

    def __init__(self, step_ns: int, token_ns: int) -> None:
        self.step, self.token = step_ns, token_ns

    def step_ns(self, plan: StepPlan) -> int:
        return self.step + self.token * plan.tokens


@given(
    st.integers(1, 3000), st.integers(16, 4000), st.integers(16, 2000), st.integers(0, 10**8), st.integers(1, 10**6),
    st.sampled_from([1, 8]), st.integers(200, 20_000),
)  # fmt: skip
def test_workers_keep_pace_and_one_less_would_not(
    requests: int, prompt: int, output: int, step_ns: int, token_ns: int, ranks: int, blocks: int
) -> None:
    scheduler: Any = {"max_num_seqs": 64, "max_num_batched_tokens": 4096, "max_model_len": 8192}
    deployment = Deployment.model_validate(
        {"model": "Qwen3-30B-A3B", "data_parallel_size": ranks, "scheduler": scheduler, "fleet": {"pools": ROLES}}
    )
    run = MeasuredRun("run", Workload([], concurrency=requests), {}, lengths=(prompt, output), most_workers=10**6)
    prediction = Prediction(Linear(step_ns, token_ns), blocks + 1)  # type: ignore[arg-type]
    if blocks < -(-(prompt + output) // 16):
        with pytest.raises(UserError, match="need"):
            matched_workers(run, deployment, prediction)
        return
    prefill, decode = matched_workers(run, deployment, prediction)
    places = ranks * min(64, blocks // -(-(prompt + output) // 16))
    assert (decode - 1) * places < requests <= decode * places
    rows, prompts = -(-requests // decode // ranks), max(4096 // prompt, 1)
    wanted = requests / (output * (step_ns + token_ns * rows))  # requests a nanosecond
    rate = ranks * prompts / (step_ns + token_ns * prompts * prompt)
    assert prefill * rate >= wanted * (1 - 1e-9)
    assert prefill == 1 or (prefill - 1) * rate < wanted * (1 + 1e-9)


def test_more_than_the_limit_is_refused() -> None:
    run = MeasuredRun("run", Workload([], concurrency=1000), {}, lengths=(100, 100), most_workers=2)
    prediction: Any = SimpleNamespace(cost=Linear(10**7, 10), num_blocks=10_000)
    with pytest.raises(UserError, match=r"for decode; raise measured\.search"):
        matched_workers(run, Deployment.model_validate({"fleet": {"pools": ROLES}}), prediction)
