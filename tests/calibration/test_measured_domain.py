"""Measured domains: recordings are judged as the cost models judged their steps while pricing them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import SCHEDULER, deployment
from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.correction import Correction
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.steps.features import CPU_FEATURES, REGIMES, STEP_FEATURES, MeasuredSteps
from tokentwin.calibration.steps.observed import ObservedPrices, observed
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.steps.step_trust import beyond, factor_beyond, first_reason, step_trust, trust_within
from tokentwin.calibration.trust import TrustLevel
from tokentwin.serving.cost_model import CostModel
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.synth import parse_spec, synthesise

DEPLOYMENT = Deployment(
    scheduler=SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512, num_blocks=200)
)


def calibration(**domain: dict[str, tuple[float, float]]) -> Calibration:
    """Return a calibration of an invented engine, whose domain holds everything that it does not name."""
    everything = dict.fromkeys(STEP_FEATURES, (0.0, 1e12))
    return Calibration(
        id="made up",
        deployment=DEPLOYMENT.model_dump_json(),
        hardware={},
        version="0",
        created="",
        step_prices_ps=dict.fromkeys(STEP_FEATURES, 10**9),
        cpu_prices_ps=dict.fromkeys(CPU_FEATURES, 10**8),
        domain={regime: {**everything, **ranges} for regime, ranges in domain.items()},
        residuals={},
        noise={},
        fitted_steps=0,
    )


def simulated(cost: CostModel, seed: int) -> MeasuredSteps:
    """Return the steps of a run that `cost` timed."""
    spec = {
        "seed": seed,
        "requests": 60,
        "arrivals": {"kind": "poisson", "rate": 30},
        "prompt": {"kind": "lognormal", "mean": 60, "sigma": 0.9, "max": 300},
        "output": {"kind": "lognormal", "mean": 30, "sigma": 0.7, "max": 150},
    }
    workload = synthesise(parse_spec(spec))
    sink = TableSink()
    Cluster(DEPLOYMENT, cost, sink, shares_prefixes=workload.shares_prefixes).run(workload)
    return MeasuredSteps([sink.steps])


@examples(0.08)
@given(
    seed=st.integers(0, 10**6),
    rows=st.integers(1, 16),
    context=st.integers(10, 4000),
    tokens=st.integers(8, 128),
    left_out=st.sampled_from([None, *REGIMES]),
)
def test_a_recording_is_outside_where_its_cost_model_said_so(seed, rows, context, tokens, left_out):
    ranges = {
        "decode": {"decode_rows_padded": (1.0, float(rows)), "decode_context": (20.0, float(context))},
        "mixed": {"prefill_tokens": (4.0, float(tokens)), "decode_context": (0.0, 4.0 * context)},
        "prefill": {"prefill_tokens": (4.0, float(tokens))},
    }
    known = calibration(**{regime: limits for regime, limits in ranges.items() if regime != left_out})
    cost = ObservedPrices(StepCost(known))
    steps = simulated(cost, seed)
    out = beyond(known, steps.step, steps.regime)
    assert out.any(axis=1).sum() / len(steps) == cost.extrapolated_share
    assert (first_reason(known, out, steps.regime) == "") == (cost.extrapolated_share == 0)


def test_the_reason_is_what_puts_most_steps_outside() -> None:
    known = calibration()
    out = np.zeros((5, len(STEP_FEATURES)), dtype=bool)
    out[[0, 1], list(STEP_FEATURES).index("prefill_pairs")] = True
    out[2, list(STEP_FEATURES).index("decode_context")] = True
    assert first_reason(known, out, np.array([2, 2, 1, 0, 1])) == "query-key pairs of prompts, in mixed steps"


def test_how_far_beyond_is_the_farthest_of_all_amounts() -> None:
    factor = factor_beyond(
        {"rows": (2, 8), "context": (100, 1000)},
        {"rows": np.array([1.0, 4.0, 16.0]), "context": np.array([[100.0], [4000.0]])},
    )
    np.testing.assert_allclose(factor, [[2, 1, 2], [4, 4, 4]])
    assert factor_beyond({"rows": (1, 8)}, {"rows": np.array([0.0])}) == [np.inf]


SIZES = st.tuples(
    st.integers(0, 300), st.integers(1, 30_000), st.integers(0, 4), st.integers(1, 4000), st.integers(0, 20_000)
).filter(lambda size: size[0] + size[2] > 0)


PLAIN = {"model": "Llama-3.1-8B"}
DRAFTED = SCHEDULER.model_copy(
    update={"speculative": SpeculativeConfig(num_speculative_tokens=3, acceptance_rate=0.7, model="Llama-3.2-1B")}
)


@pytest.fixture(scope="module", params=[PLAIN, {**PLAIN, "pipeline_parallel_size": 2}, {**PLAIN, "scheduler": DRAFTED}])
def predicted(request: pytest.FixtureRequest) -> OperationCost:
    return predicted_cost("L40S", deployment(**request.param))


def sizes_of(rows: int, context: int, prompts: int, chunk: int, past: int) -> dict[str, float]:
    n = prompts * chunk
    return {
        "decode_rows": rows,
        "decode_context": rows * context,
        "prefill_rows": prompts,
        "prefill_tokens": n,
        "prefill_context": prompts * past,
        "prefill_pairs": n * past + n * (chunk + 1) / 2,
        "sampled_rows": rows + prompts,
    }


@examples(0.06)
@given(many=st.lists(SIZES, min_size=1, max_size=8))
def test_many_steps_are_trusted_as_each_alone(predicted, many):
    steps = [sizes_of(*size) for size in many]
    trust = step_trust(predicted, StepSizes(**{name: np.array([float(s[name]) for s in steps]) for name in steps[0]}))
    for at, sizes in enumerate(steps):
        alone = explain(predicted, StepSizes(**sizes))
        level = trust_within(predicted, [StepSizes(**sizes)]).level
        assert trust.level[at] == max(alone.level, TrustLevel.INTERPOLATED) == TrustLevel[level.upper()]
        errors, times = sum(o.sigma * o.ns for o in alone.operations), sum(o.ns for o in alone.operations)
        assert trust.sigma[at] == pytest.approx(errors / times, rel=1e-9)


def test_a_run_is_as_sure_as_its_steps_and_not_as_one_that_never_was() -> None:
    """Many rows of short contexts, and few of long ones: not as many rows of long ones."""
    cost = observed(predicted_cost("H100", deployment(**PLAIN)))
    for rows, context in ((256, 300), (1, 16_000)):
        cost.decode_run_ns(rows, rows * context, rows * context**2, 1)
    assert trust_within(cost.pure, [StepSizes(**sizes_of(256, 16_000, 0, 0, 0))]).level == "extrapolated"
    assert cost.trust().level == "interpolated"
    cost.decode_run_ns(256, 256 * 16_000, 256 * 16_000**2, 1)
    assert cost.trust().level == "extrapolated"


def test_what_measured_steps_cover_is_validated(predicted: OperationCost) -> None:
    covered = Correction(domain={"tokens": (1, 64), "decode rows": (1, 64), "decode context": (1, 64_000)}, source="us")
    cost = OperationCost(predicted.model, predicted.deployment, predicted.kernels, covered)
    rows = np.array([1.0, 64.0, 65.0])
    trust = step_trust(cost, StepSizes(decode_rows=rows, decode_context=1000 * rows, sampled_rows=rows))
    assert trust.level[:2].tolist() == [TrustLevel.VALIDATED] * 2 and trust.level[2] > TrustLevel.VALIDATED
