"""Calibration: planted prices are recovered, damage is named, and domains are stated honestly."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tokentwin.calibration.operations import StepSizes
from tokentwin.calibration.steps.design import Pace, designed_workloads
from tokentwin.calibration.steps.features import (
    CPU_FEATURES,
    STEP_FEATURES,
    TOKEN_FEATURES,
    MeasuredSteps,
    feature_rows,
)
from tokentwin.calibration.steps.fit import fit, predict, residuals
from tokentwin.calibration.steps.observed import ObservedPrices
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.serving.cost_model import padded
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.schema import arrow_schema

CONFIG = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=128, max_model_len=512, num_blocks=400)
PACE = Pace(40_000_000, 1_000_000)
STEP_NS = (30e6, 2e6, 5_000.0, 1e6, 1e6, 100.0, 50.0, 0.0, 2e5)
CPU_NS = (150_000.0, 10_000.0, 1_000.0)


class KnownCost:
    """A cost model with chosen prices, and seeded noise of a given size."""

    def __init__(self, noise: float) -> None:
        self._random = np.random.default_rng(0)
        self._noise = noise

    def _priced(self, prices: tuple[float, ...], amounts: tuple[int, ...]) -> int:
        factor = 1 + self._noise * self._random.standard_normal()
        return int(factor * sum(p * a for p, a in zip(prices, amounts, strict=True)))

    def cpu_ns(self, plan: StepPlan) -> int:
        from tokentwin.calibration.steps.features import cpu_features

        return self._priced(CPU_NS, cpu_features(plan))

    def step_ns(self, plan: StepPlan) -> int:
        from tokentwin.calibration.steps.features import step_features

        return self._priced(STEP_NS, step_features(plan, padded(plan.decode_rows)))

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> list[int]:
        raise AssertionError("every step is kept")


def measured(noise: float, seconds: float = 200) -> MeasuredSteps:
    tables = []
    for workload in designed_workloads(CONFIG, Pace(40_000_000, 1_000_000), seconds):
        sink = TableSink()
        Cluster(Deployment(scheduler=CONFIG), KnownCost(noise), sink).run(workload)
        tables.append(sink.steps)
    return MeasuredSteps(tables)


def fitted(steps: MeasuredSteps, **changes: Any) -> Calibration:
    given: dict[str, Any] = {"deployment": "{}", "hardware": {}, "version": "0", "created": "", "noise": {}}
    return fit(steps, **{**given, **changes})


def test_known_prices_predict_exactly_without_noise() -> None:
    steps = measured(noise=0.0)
    calibration = fitted(steps)
    np.testing.assert_allclose(predict(calibration, steps), steps.step_ns, rtol=1e-4)
    assert {r: v.steps > 0 for r, v in calibration.residuals.items()} == {
        "prefill": True,
        "decode": True,
        "mixed": True,
    }
    cpu = [calibration.cpu_prices_ps[name] / 1000 for name in CPU_FEATURES]
    np.testing.assert_allclose(cpu, CPU_NS, rtol=1e-3)


def test_known_times_of_adapters_are_recovered_beside_those_of_the_model() -> None:
    sink = TableSink()
    Cluster(Deployment(scheduler=CONFIG), KnownCost(0.0), sink).run(designed_workloads(CONFIG, PACE, 200)[2])
    steps, draw = sink.steps, np.random.default_rng(1)
    count, tokens, loads, copies = (draw.integers(0, most, steps.num_rows) for most in (4, 40, 2, 3))
    tokens, loads, copies = (number * (count > 0) for number in (tokens, loads, copies))
    added, waits = (count > 0) * 5_000_000 + count * 1_000_000 + tokens * 20_000, loads * 3_000_000 + copies * 500_000
    later = {"start_ns": waits.cumsum() + added.cumsum() - added, "end_ns": (waits + added).cumsum()}
    for name, ns in {**later, "plan_ns": later["start_ns"] - waits}.items():
        at = steps.column_names.index(name)
        steps = steps.set_column(at, steps.field(at), pa.array(steps[name].to_numpy() + ns))
    columns = (count, tokens, loads, loads * 3_000_000, copies, copies * 500_000)
    fields = arrow_schema("steps").field("adapters")
    its = [dict(zip((one.name for one in fields.type), row, strict=True)) for row in zip(*columns, strict=True)]
    at = steps.column_names.index("adapters")
    steps = steps.set_column(at, fields, pa.array([row if row["adapters"] else None for row in its], fields.type))
    calibration = fitted(MeasuredSteps([steps]))
    assert calibration.adapters == pytest.approx((5e6, 0, 1e6, 2e4, 5e5, 3e6), rel=0.02)
    assert {"adapted", "adapter_loads"} <= {name for _, meanings, _ in calibration.priced for name in meanings}
    assert calibration.most_adapters == 3 and StepCost(calibration).scaled(2).adapters.load_ns == pytest.approx(6e6)
    np.testing.assert_allclose([calibration.cpu_prices_ps[name] / 1000 for name in CPU_FEATURES], CPU_NS, rtol=1e-2)
    more = Deployment(scheduler=CONFIG, lora={"max_loras": 4})
    assert "at most 3" in ObservedPrices(StepCost(calibration, more)).trust().reason
    prompt = StepPlan.from_amounts(prefill_rows=1, prefill_tokens=50, prefill_pairs=1275, sampled_rows=1)
    assert StepCost(calibration).step_ns(prompt) == pytest.approx(KnownCost(0.0).step_ns(prompt), rel=0.02)


def test_noise_is_reported_as_residual_and_outliers_do_not_pull() -> None:
    steps = measured(noise=0.03)
    steps.step_ns[::50] *= 6  # the machine was interrupted, and CPU time is not known
    steps.own_ns = steps.step_ns
    calibration = fitted(steps)
    truth = steps.step @ np.array(STEP_NS)
    assert np.median(np.abs(predict(calibration, steps) / truth - 1)) < 0.01
    assert 1 < calibration.residuals["decode"].median_error_pct < 4


def test_noise_moves_no_total() -> None:
    """Steps are as often slow as fast; weighed by their measured time, fast ones would count more (-8 % here)."""
    steps = measured(noise=0.2)
    total = predict(fitted(steps), steps).sum()
    assert total == pytest.approx((steps.step @ np.array(STEP_NS)).sum(), rel=0.02)


def test_what_the_device_waits_between_overlapped_steps_is_part_of_a_step() -> None:
    """The simulator begins a step that was planned behind another when that ends: a run takes as long as it did."""
    config = CONFIG.model_copy(update={"async_scheduling": True})
    sink = TableSink()
    workload = designed_workloads(config, Pace(40_000_000, 1_000_000), 50)[0]
    Cluster(Deployment(scheduler=config), KnownCost(0.1), sink).run(workload)

    def behind(wait_ns: int) -> MeasuredSteps:
        """Return the steps, each beginning some time after the end of the step behind which it was planned."""
        table = sink.steps.to_pandas()
        table["host_ns"] = 1000.0
        waits = table["plan_ns"] < table["end_ns"].shift(1)
        assert waits.any() and not waits.all()
        table.loc[waits, "start_ns"] += wait_ns
        return MeasuredSteps([pa.Table.from_pandas(table)])

    np.testing.assert_array_equal(behind(2_000_000).step_ns, behind(0).step_ns)
    assert MeasuredSteps([sink.steps]).step_ns.sum() == behind(0).step_ns.sum()


def test_too_few_steps_is_one_line() -> None:
    steps = measured(noise=0.0, seconds=200)
    for name in ("step", "cpu", "step_ns", "cpu_ns", "sample_ns", "regime"):
        setattr(steps, name, getattr(steps, name)[:50])
    with pytest.raises(UserError, match="at least 100"):
        fitted(steps)


def test_saved_and_loaded_is_the_same(tmp_path: Path) -> None:
    calibration = fitted(measured(noise=0.01))
    calibration.save(tmp_path)
    loaded = Calibration.load(tmp_path)
    assert json.dumps(loaded.__dict__, default=lambda o: o.__dict__) == json.dumps(
        calibration.__dict__, default=lambda o: o.__dict__
    )


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "tokentwin calibrate makes one"),
        ("{", "not JSON"),
        ("{}", "format"),
        ('{"format": 1}', "calibrate again"),
        ('{"format": 2}', "damaged"),
    ],
)
def test_a_damaged_calibration_is_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    if content is not None:
        (tmp_path / "calibration.json").write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        Calibration.load(tmp_path)
    assert "\n" not in str(caught.value)


def test_steps_outside_the_domain_are_counted() -> None:
    calibration = fitted(measured(noise=0.0))
    sink = TableSink()
    inside, outside = (ObservedPrices(StepCost(calibration)) for _ in range(2))
    workload = designed_workloads(CONFIG, Pace(40_000_000, 1_000_000), 50)[2]
    Cluster(Deployment(scheduler=CONFIG), inside, sink).run(workload)
    wide = CONFIG.model_copy(update={"max_num_seqs": 64, "max_num_batched_tokens": 4096})
    from dataclasses import replace

    Cluster(Deployment(scheduler=wide), outside, sink).run(replace(workload, concurrency=60))
    assert inside.extrapolated_share < 0.05
    assert outside.extrapolated_share > 0.25


def test_residuals_by_regime_are_signed_relative_errors() -> None:
    by_regime = residuals(np.array([0, 1, 1]), np.array([100.0, 200.0, 400.0]), np.array([110.0, 200.0, 300.0]))
    assert by_regime["prefill"].median_error_pct == pytest.approx(10)
    assert by_regime["decode"].p95_error_pct == pytest.approx(25)
    assert by_regime["decode"].bias_pct == pytest.approx(-100 / 6)
    assert "mixed" not in by_regime


def test_features_from_a_plan_equal_features_from_a_recording() -> None:
    """What is fitted and what is asked must be the same quantities."""
    from tokentwin.calibration.steps.features import cpu_features, step_features

    asked: list[tuple[int, ...]] = []

    class Spy(KnownCost):
        def step_ns(self, plan: StepPlan) -> int:
            asked.append((*step_features(plan, padded(plan.decode_rows)), *cpu_features(plan)))
            return super().step_ns(plan)

    sink = TableSink()
    workload = designed_workloads(CONFIG, Pace(40_000_000, 1_000_000), 60)[3]
    Cluster(Deployment(scheduler=CONFIG), Spy(0.0), sink).run(workload)
    steps = MeasuredSteps([sink.steps])
    assert np.array_equal(np.array(asked, dtype=float), np.hstack((steps.step, steps.cpu)))
    assert steps.step.shape[1] == len(STEP_FEATURES)


def test_an_empty_steps_table_adds_nothing() -> None:
    sink = TableSink()
    Cluster(Deployment(scheduler=CONFIG), KnownCost(0.0), sink).run(
        designed_workloads(CONFIG, Pace(40_000_000, 1_000_000), 30)[0]
    )
    empty = arrow_schema("steps").empty_table()
    assert len(MeasuredSteps([sink.steps, empty])) == sink.steps.num_rows


def test_mixed_steps_that_are_graphs_are_priced_at_the_tokens_of_their_graph() -> None:
    """On the GPU, as its log says; a decode step, an eager one and one on the CPU have no such padding."""
    sizes = StepSizes(*(np.zeros(4) for _ in fields(StepSizes)))
    sizes = replace(sizes, prefill_tokens=np.array([100.0, 0, 100, 5000]), decode_rows=np.array([5.0, 5, 5, 5]))
    at = list(STEP_FEATURES).index("prefill_tokens")
    graphs = np.array([True, True, False, True])
    assert feature_rows(sizes, graphs=graphs)[:, at].tolist() == [128 - 8, 0, 100, 5000]  # 5 rows are 8
    zero = dict.fromkeys((*STEP_FEATURES, *CPU_FEATURES), 0)
    for device, eager, tokens in (("cuda", False, 120), ("cuda", True, 100), ("cpu", False, 100)):
        deployment = Deployment(device=device, enforce_eager=eager).model_dump_json()
        prices = {**zero, "prefill_tokens": 1000}
        made = Calibration("x", deployment, {}, "", "", prices, prices, {}, {}, {}, 1)
        assert (
            StepCost(made).step_ns(StepPlan.from_amounts(prefill_rows=1, prefill_tokens=100, decode_rows=5)) == tokens
        )


def test_a_price_of_tokens_may_rise_with_their_number() -> None:
    """On a GPU, where few tokens wait for the weights and many for arithmetic."""
    sizes = StepSizes(*(np.zeros(3) for _ in fields(StepSizes)))
    sizes = replace(sizes, prefill_tokens=np.array([50.0, 300, 2000]), decode_rows=np.array([8.0, 8, 8]))
    above = feature_rows(sizes, knees=True)[:, len(STEP_FEATURES) :]
    assert above.tolist() == [[0, 0, 0, 0, 0], [244, 180, 52, 0, 0], [1944, 1880, 1752, 1496, 984]]
    zero = dict.fromkeys((*STEP_FEATURES, *TOKEN_FEATURES, *CPU_FEATURES), 0)
    prices = {**zero, "launch": 10**6, "tokens_above_256": 1000}
    deployment = Deployment(device="cuda", enforce_eager=True).model_dump_json()
    made = Calibration("x", deployment, {}, "", "", prices, prices, {}, {}, {}, 1)
    cost = StepCost(made)
    for tokens, extra in ((50, 0), (300, 52), (2000, 1752)):
        assert cost.step_ns(StepPlan.from_amounts(prefill_rows=1, prefill_tokens=tokens, decode_rows=8)) == 1000 + extra
    assert list(cost.decode_run_ns(300, 0, 0, 2)) == [1000 + 304 - 256] * 2  # padded to 304


def test_a_knee_that_few_steps_reach_has_no_price() -> None:
    steps = measured(0.0)
    at_knees = MeasuredSteps.__new__(MeasuredSteps)
    at_knees.__dict__.update(steps.__dict__)
    above = np.zeros((len(steps), len(TOKEN_FEATURES)))
    above[:20, 0] = 1.0
    at_knees.features = (*steps.features, *TOKEN_FEATURES)
    at_knees.step = np.hstack((steps.step, above))
    prices = fitted(at_knees).step_prices_ps
    assert all(prices[name] == 0 for name in TOKEN_FEATURES) and prices["launch"] > 0
