"""An engine with drafts: its prices are recovered, its acceptance is measured, and both are simulated."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
import yaml
from click.testing import CliRunner

from tokentwin.calibration.acceptance import with_acceptance, with_drafts
from tokentwin.calibration.steps.features import (
    DRAFTING,
    FEATURES,
    MeasuredSteps,
    draft_features,
    feature_names,
    step_features,
)
from tokentwin.calibration.steps.fit import fit, predict
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.cli import cli
from tokentwin.planning.costs import priced
from tokentwin.planning.resolution import base_deployment
from tokentwin.serving.cost_model import padded
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import find_policy
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.formats.trace_file import write_workload
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise

PRICES_NS = np.array([30e6, 2e6, 5e3, 1e6, 1e6, 100, 50, 0, 2e5, 3e6, 4e5, 5e6, 1e5, 2e4, 200])
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2}


class KnownCost:
    """A cost model with chosen prices."""

    def __init__(self) -> None:
        self.drafting: list[float] = []

    def cpu_ns(self, plan: StepPlan) -> int:
        return 1000

    def step_ns(self, plan: StepPlan) -> int:
        amounts = np.array(step_features(plan, padded(plan.decode_rows)) + draft_features(plan), dtype=float)
        self.drafting.append(float(PRICES_NS[DRAFTING] @ amounts[DRAFTING]))
        return int(PRICES_NS @ amounts)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> list[int]:
        raise AssertionError("every step is kept")


def traffic(requests: int, rate: float, seed: int = 1) -> Workload:
    spec = {
        "name": "chat",
        "seed": seed,
        "requests": requests,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt": {"kind": "lognormal", "mean": 30, "sigma": 0.6, "max": 90},
        "output": {"kind": "lognormal", "mean": 30, "sigma": 0.6, "max": 90},
    }
    return synthesise(parse_spec(spec, where="x"))


def test_prices_of_verifying_and_drafting_are_found_again() -> None:
    drafts = SpeculativeConfig(**NGRAM, acceptance_rate=0.6, proposal_rates=(0.7, 0.5, 0.2))
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, num_blocks=400, speculative=drafts)
    cost, sink = KnownCost(), TableSink()
    Cluster(Deployment(scheduler=config), cost, sink).run(traffic(150, 0.5))
    place = sink.steps.schema.get_field_index("draft_ns")
    table = sink.steps.set_column(place, "draft_ns", pa.array(np.array(cost.drafting).astype(int), pa.int64()))
    steps = MeasuredSteps([table])
    calibration = fit(steps, deployment="{}", hardware={}, version="0", created="", noise={})
    assert set(calibration.step_prices_ps) == set(feature_names(drafts=True, knees=False))
    np.testing.assert_allclose(predict(calibration, steps), steps.step_ns, rtol=1e-3)
    verifying = calibration.step_prices_ps["draft_tokens"] / 1000
    assert verifying == pytest.approx(PRICES_NS[list(FEATURES).index("draft_tokens")], rel=0.05)
    again = TableSink()
    Cluster(Deployment(scheduler=config), StepCost(calibration), again).run(traffic(150, 0.5))
    ends = [max(one.requests["finish_ns"].to_pylist()) for one in (sink, again)]
    assert ends[1] == pytest.approx(ends[0], rel=0.01)


# Before any is accepted, and after steps that accepted none, some and all of two: how often two are drafted, and how
# often each of them is accepted.
PLANTED = ((0.2, 0.4), (0.1, 0.5), (0.6, 0.7), (0.95, 0.9))
TWO = SpeculativeConfig(method="ngram", num_speculative_tokens=2)


def recorded(planted: Sequence[tuple[float, float]], requests: int = 250, steps: int = 40) -> SimpleNamespace:
    """Return a recording of requests that each decode for some steps; -1 accepted drafts stands before the first."""
    rng = np.random.default_rng(0)
    proposed, sort, outputs = np.zeros((3, requests), int)
    rows = []
    for _ in range(steps):
        verified = proposed
        accepted = np.array(
            [
                (rng.random(drafts) < planted[before][1]).cumprod().sum()
                for before, drafts in zip(sort, verified, strict=True)
            ],
            int,
        )
        sort = np.where((sort > 0) | (accepted > 0), 1 + accepted, 0)
        proposed = 2 * (rng.random(requests) < np.array(planted)[sort, 0])
        row = {"row_ids": range(requests), "row_tokens": 1 + verified, "row_proposed": proposed}
        row = {name: [int(one) for one in values] for name, values in row.items()}
        accepted_drafts = [int(kept) if drafts else None for kept, drafts in zip(accepted, verified, strict=True)]
        rows.append(row | {"row_accepted": accepted_drafts})
        outputs += 1 + accepted
    return made(rows, outputs.tolist())


def made(rows: list[dict[str, Any]], outputs: list[int]) -> SimpleNamespace:
    """Return a recording of these steps, and of requests with these numbers of output tokens."""
    requests = {"request_id": range(len(outputs)), "output_tokens": outputs}
    tables = {"steps": pa.Table.from_pylist(rows), "requests": pa.table({k: pa.array(v) for k, v in requests.items()})}
    return SimpleNamespace(table=lambda name, _: tables[name], run={"run_id": "made"})


def test_a_text_that_repeats_itself_goes_on_doing_so() -> None:
    learnt = with_acceptance(TWO, [recorded(PLANTED)])
    assert learnt.rates_after is not None
    for rates, (drafts, accepts) in zip(learnt.rates_after, PLANTED, strict=True):
        assert rates.proposal_rates == pytest.approx((drafts, drafts), abs=0.06)
        assert rates.synthetic_acceptance_rates == pytest.approx((accepts, accepts**2), abs=0.08)
    again = with_acceptance(TWO, [_simulated(learnt)]).rates_after
    for rates, once in zip(again or (), learnt.rates_after, strict=True):
        assert rates.proposal_rates == pytest.approx(once.proposal_rates, abs=0.05)
        assert rates.synthetic_acceptance_rates == pytest.approx(once.synthetic_acceptance_rates, abs=0.06)


def _simulated(config: SpeculativeConfig, requests: int = 600, outputs: int = 60) -> SimpleNamespace:
    """Return the recording that `recorded` makes, but by the scheduler, with each request alone."""
    scheduler = find_policy("vllm")(SchedulerConfig(speculative=config), shares_prefixes=False)
    rows = []
    for id in range(requests):
        request = scheduler.add(WorkloadRequest(id, 0, (("", 4),), outputs))
        while not request.ended:
            plan = scheduler.schedule()
            (row,) = plan.rows()
            scheduler.commit(plan)
            accepted = plan.verified[0][1] if plan.verified else None
            taken = {"row_ids": [id], "row_tokens": [row.tokens], "row_accepted": [accepted]}
            rows.append(taken | {"row_proposed": [None if request.ended else request.proposed]})
    return made(rows, [outputs] * requests)


def test_what_lies_beyond_the_end_of_an_output_was_not_rejected() -> None:
    """The overlapped loop verifies two drafts of each row; the last rows' are not the output's."""
    rows = [
        {"row_ids": [0], "row_tokens": [1 + two], "row_proposed": [2], "row_accepted": [accepted]}
        for two, accepted in ((0, 0), (2, 2), (2, 0), (2, 0))
    ]
    assert with_acceptance(TWO, [made(rows, [5])]).synthetic_acceptance_rates == (1.0, 1.0)
    assert with_acceptance(TWO, [made(rows, [7])]).synthetic_acceptance_rates == (0.333333, 0.333333)


def test_rates_that_nothing_was_recorded_for_are_those_of_all() -> None:
    learnt = with_acceptance(TWO, [recorded([(0.5, 1.0)] * 4)])  # none accepts one of two
    assert learnt.rates_after is not None
    assert learnt.rates_after[2].proposal_rates == learnt.proposal_rates
    assert "rates_after" not in TWO.model_dump() and "rates_after" in learnt.model_dump()
    assert SpeculativeConfig(**learnt.model_dump()).timing() == TWO


@pytest.mark.engine
def test_an_engine_that_drafts_is_recorded_calibrated_simulated_and_validated(tmp_path: Path) -> None:
    """In the overlapped loop; the plain one goes all the way in `tests/tokentwin/test_engine_features.py`."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    for name, seed in (("a", 1), ("b", 2)):
        write_workload(traffic(20, 200.0, seed), tmp_path / f"{name}.parquet")
    scheduler = {"max_num_seqs": 6, "max_model_len": 256, "block_size": 4, "num_blocks": 200, "speculative": NGRAM}
    scheduler["async_scheduling"] = True
    file = tmp_path / "d.yaml"
    file.write_text(yaml.safe_dump({"model": "random:llama", "dtype": "float32", "scheduler": scheduler}))

    def run(*words: object, status: int = 0) -> str:
        done = CliRunner().invoke(cli, [str(word) for word in words])
        assert done.exit_code == status, done.output
        return done.output

    for name in ("a", "b"):
        run("bench", tmp_path / f"{name}.parquet", "-d", file, "-o", tmp_path / name)
    run("calibrate", "--from-recordings", tmp_path / "a", "-o", tmp_path / "c")
    assert Calibration.load(tmp_path / "c").drafts
    learnt = base_deployment(str(tmp_path / "c")).scheduler.speculative
    assert learnt is not None and learnt.states_acceptance and learnt.proposal_rates
    run("simulate", tmp_path / "b.parquet", "-c", tmp_path / "c", "-o", tmp_path / "blind", "--no-band")
    as_told = ("--acceptance", tmp_path / "b", "-d", file, "-o", tmp_path / "told", "--no-band")
    run("simulate", tmp_path / "b.parquet", "-c", tmp_path / "c", *as_told)
    names = ("drafts", "draft_tokens", "accepted_tokens")

    def drafted(name: str) -> list[int]:
        table = Recording.load(tmp_path / name).table("requests", names)
        return [pc.sum(column).as_py() for column in table.columns]

    simulated, real = drafted("told"), drafted("b")
    assert simulated[:2] == pytest.approx(real[:2], rel=0.2)
    assert abs(simulated[2] - real[2]) <= 4 * np.sqrt(real[2])
    lengths = [
        RunMetrics.from_recording(Recording.load(tmp_path / n)).scalars()["acceptance_length"] for n in ("told", "b")
    ]
    assert lengths[0] == pytest.approx(lengths[1], rel=0.1)
    real_run = Recording.load(tmp_path / "b")
    again = TableSink()
    cost = StepCost(Calibration.load(tmp_path / "c"))
    Cluster(base_deployment(str(tmp_path / "c")), cost, again).run(with_drafts(real_run.workload(), real_run))
    columns = ["request_id", *names]
    both = [table.select(columns).sort_by("request_id").to_pylist() for table in (again.requests, real_run.requests)]
    assert both[0] == [{name: count or 0 for name, count in row.items()} for row in both[1]]
    run("validate", tmp_path / "b", "-c", tmp_path / "c", "-o", tmp_path / "v")
    report = json.loads((tmp_path / "v" / "report.json").read_text())
    assert report["rungs"]["replay"]["first_difference"] is None
    assert report["rungs"]["replay"]["identical"] == report["rungs"]["replay"]["steps"] > 0
    other = SpeculativeConfig(**{**NGRAM, "num_speculative_tokens": 5})
    with pytest.raises(UserError, match=r"scheduler\.speculative.*'num_speculative_tokens': 3.*as the calibration was"):
        priced(str(tmp_path / "c"), None, base_deployment(str(tmp_path / "c")).rescheduled(speculative=other))
