"""Every page has one badge, and every plot states its trust level on hover, by the data that it shows."""

import shutil
from itertools import pairwise

import numpy as np
import pytest

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from tests.dashboard.badges import badges, heading_levels, page_badges
from tests.dashboard.pages import opened
from tests.dashboard.samples import plan_example, report, toy_run
from tests.traces.notes import add_notes
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.steps.observed import observed
from tokentwin.calibration.trust import Trust, TrustLevel, noted_trust, trust_in_run, weakest
from tokentwin.calibration.validation.evidence import trust_in_report, trust_in_steps
from tokentwin.calibration.validation.report import ValidationReport
from tokentwin.dashboard.bundled import DEMO, RUN_SAMPLE
from tokentwin.dashboard.calibration_page import charts as calibration_charts
from tokentwin.dashboard.calibration_page.page import _of_dots
from tokentwin.dashboard.frontier_page import charts as frontier_charts
from tokentwin.dashboard.palette import policy_colour
from tokentwin.dashboard.plan_page import charts as plan_charts
from tokentwin.dashboard.policy_lab_page.charts import side_colours
from tokentwin.dashboard.policy_lab_page.tasks import recorded
from tokentwin.dashboard.policy_lab_page.words import trust
from tokentwin.dashboard.sweeps_page import charts as sweep_charts
from tokentwin.planning.compare.document import ComparisonDocument
from tokentwin.planning.plan.document import PlanDocument
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.traces.recording import Recording

PAGES = {
    "plan": ("plan", {}, 6),
    "frontier": ("plan", {"show": "fleets"}, 2),
    "policy lab": ("policy_lab", {}, 4),
    "recordings": ("policy_lab", {"compare": "recordings"}, 4),
    "requests": ("run", {}, 6),
    "steps": ("run", {"view": "steps"}, 7),
    "diagnosis": ("run", {"view": "diagnosis"}, 5),
    "metrics": ("run", {"view": "metrics"}, 5),
    "trust": ("trust", {}, 3),
    "what was measured": ("trust", {"view": "domain"}, 1),
    "engines of others": ("trust", {"view": "engines"}, 1),
    "kernel tables": ("calibration", {}, 3),
    "sweeps": ("sweeps", {}, 1),
}


@pytest.mark.parametrize("name", PAGES)
def test_every_plot_has_a_badge_and_headings_skip_no_level(tmp_path, name):
    page, url, least = PAGES[name]
    app = opened(page, tmp_path, **url)
    assert not app.exception and not app.error
    assert len(badges(app)) >= least
    assert len(page_badges(app)) == 1 and len(page_badges(app)[0].reason) > len(":gray[:small[]]")
    levels = heading_levels(app)
    assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels)), levels


def test_every_plot_of_a_calibration_and_of_a_step_has_a_badge(tmp_path):
    shutil.copytree(DEMO / "calibration", tmp_path / "calibration")
    assert [badge.level for badge in badges(opened("calibration", tmp_path, of="Engines"))] == ["validated"]
    assert len(badges(opened("step"))) == 2


def test_a_plot_without_a_badge_is_found():
    def script():
        import plotly.graph_objects as go
        import streamlit as st

        from tokentwin.calibration.trust import Trust
        from tokentwin.dashboard.blocks import figure

        figure(go.Figure(), "one", "With", Trust("validated", "measured"))
        st.plotly_chart(go.Figure(), key="two")

    app = AppTest.from_function(script).run()
    assert not app.exception
    with pytest.raises(AssertionError, match="1 badges and 2 plots"):
        badges(app)


# What a badge says


def test_several_stand_as_the_least_certain_and_say_how_many_do():
    good, beyond = Trust("interpolated", "between"), Trust("extrapolated", "beyond")
    assert weakest([good, good], "runs") == good
    level, reason = weakest([good, beyond, good], "runs")
    assert level == "extrapolated" and "1 extrapolated, 2 interpolated" in reason and "beyond" in reason
    assert weakest([beyond, noted_trust(None, None, "nobody knows")], "runs").level == "unknown"
    assert weakest([], "runs").level == "unknown"


def test_a_run_stands_as_what_it_is(tmp_path):
    toy_run(tmp_path / "simulated", "virtual", seed=0)
    toy_run(tmp_path / "real", "wall", seed=0)
    levels = {name: trust_in_run(Recording.load(tmp_path / name).run).level for name in ("simulated", "real")}
    assert levels == {"simulated": "unknown", "real": "measured"}
    assert trust_in_run(Recording.load(RUN_SAMPLE).run).level == "interpolated"
    assert trust_in_run({"clock": "sundial", "notes": ""}).level == "unknown"
    assert trust_in_run({"clock": "virtual", "notes": '{"trust": {"level": "splendid"}}'}).level == "unknown"
    former = '{"standing": {"mark": "validated", "reason": "as 0.2 wrote it"}}'
    assert trust_in_run({"clock": "virtual", "notes": former}) == Trust("validated", "as 0.2 wrote it")


def test_two_recordings_stand_as_the_less_certain_one(tmp_path):
    for name, clock in (("real", "wall"), ("again", "wall"), ("simulated", "virtual")):
        toy_run(tmp_path / name, clock, seed=0)
    asked = {"bounds": {}, "stamps": [0, 0]}

    def level(a, b):
        sides = {"a": str(tmp_path / a), "b": str(tmp_path / b)}
        answer = recorded({**asked, **sides}, tmp_path, lambda stage, share: None)
        return trust(ComparisonDocument.read(answer)).level

    assert level("real", "again") == "measured"
    assert level("real", "simulated") == level("simulated", "real") == "unknown"


@pytest.mark.parametrize(
    ("change", "level", "reason"),
    [
        ({"extrapolated_share": 0.0}, "validated", "; 0 %"),
        ({"extrapolated_share": 0.3}, "extrapolated", "30.0 %"),
        ({"extrapolated_share": None}, "validated", "does not say"),
        ({"extrapolated_share": 0.0, "disturbed": True}, "unknown", "disturbed"),
        ({"rungs": {}}, "unknown", "no real run"),
    ],
)
def test_a_report_stands_as_what_it_holds(tmp_path, change, level, reason):
    judged = trust_in_report(ValidationReport.model_validate({**report(tmp_path), **change}))
    assert judged.level == level and reason in judged.reason


@pytest.mark.parametrize("change", [{"floor_pct": 1e6}, {"error_pct": None}])
def test_a_report_without_a_comparable_median_validates_nothing(tmp_path, change):
    stated = report(tmp_path) | {"extrapolated_share": 0.0}
    for row in stated["rungs"]["run"]["rows"]:
        if row["stat"] == "p50":
            row.update(change)
    judged = trust_in_report(ValidationReport.model_validate(stated))
    assert judged.level == "unknown" and "no median could be compared" in judged.reason


def test_steps_stand_as_the_worst_regime():
    assert trust_in_steps(1200, [None], "for once").level == "unknown"
    assert trust_in_steps(0, [], "").level == "unknown"
    assert trust_in_steps(1200, [2.0, None, 9.0], "for once").reason == "1,200 steps were measured, for once"
    far = trust_in_steps(1200, [2.0, 80.0], "for once")
    assert far.level == "unknown" and "80 %" in far.reason


def test_a_curve_stands_as_its_dots():
    assert _of_dots(np.array([1.0, 2.0])).level == "validated"
    assert _of_dots(np.array([1.0, np.nan])) == Trust(
        "extrapolated", "this shape was measured at only 1 of 2 sizes (the dots)"
    )


def test_gpus_stand_as_their_shapes():
    kernels = load_kernels(find_gpu("H100"))
    fits = {"H100": (kernels.gpu, kernels.fits["gemm/bfloat16"])}
    measured = np.exp2(kernels.fits["gemm/bfloat16"].surface.shapes[0]).tolist()
    assert calibration_charts.worst_levels(fits, "gemm/bfloat16", measured, 0)["H100"] < TrustLevel.EXTRAPOLATED
    assert calibration_charts.worst_levels(fits, "gemm/bfloat16", [3.0, 3.0], 0)["H100"] is TrustLevel.EXTRAPOLATED


# What is hollow


def test_fleets_rates_and_replicas_are_hollow_where_they_are_extrapolated():
    def some_beyond(points):
        """Every third extrapolated, the others not."""
        return [
            p.model_copy(update={"level": "interpolated" if at % 3 else "extrapolated"}) for at, p in enumerate(points)
        ]

    def hollow(figure):
        return sum(symbol.endswith("-open") for trace in figure.data for symbol in trace.marker.symbol or ())

    def beyond(points):
        return sum(point.level == "extrapolated" for point in points)

    answer = PlanDocument.read(plan_example()["answer"])
    curve = answer.engine_curves[0]
    points, replicas, rates = map(some_beyond, (curve.points, answer.by_replicas, answer.by_rate))
    drawn = frontier_charts.frontier([curve.model_copy(update={"points": tuple(points)})], None)
    assert sum(symbol.endswith("-open") for symbol in drawn.data[0].marker.symbol) == beyond(points) > 0
    assert hollow(plan_charts.attainment(replicas, 3)) == beyond(replicas) > 0
    assert hollow(plan_charts.latency(rates, "ttft_ms", 20, 22, {})) == beyond(rates) > 0


# Colours


def test_a_policy_has_one_colour_on_every_page():
    import pandas as pd

    policies = ["fair", "vllm", "mine:Own"]
    runs = pd.DataFrame({"rate": [1, 1, 1], "policy": policies, "v": [1.0, 2.0, 3.0], "trust": ""})
    titles = {"rate": "rate", "v": "v"}
    drawn = sweep_charts.metric_over(runs, "rate", "v", "policy", titles, policies)
    colours = {trace.name: trace.marker.color for trace in drawn.data if trace.mode != "none"}
    assert colours == {name: policy_colour(name) for name in policies}
    assert tuple(side_colours("fair", "mine:Own")) == (colours["fair"], colours["mine:Own"])


def test_a_run_on_a_machine_that_was_not_calm_says_so_and_no_other_does(tmp_path):
    """Planted: a canary that takes 31 % longer after the run, and one that takes as long."""
    for name, after_ns in (("disturbed", 131), ("calm", 101)):
        toy_run(tmp_path / name, "wall", seed=0)
        add_notes(tmp_path / name, canary_before_ns=100 * 10**6, canary_after_ns=after_ns * 10**6)
        warnings = [warning.value for warning in opened("run", tmp_path, run=name).warning]
        assert ("31 % apart" in "".join(warnings)) == (name == "disturbed")


def test_few_extrapolated_steps_do_not_make_a_run_extrapolated():
    """Planted: decode steps of a size that was measured, and 1 in 300, or 1 in 3, far beyond any."""
    cost = predicted_cost("H100", Deployment(model="Llama-3.1-8B", device="cuda", gpu_memory_utilization=0.9))
    for usual, level in ((299, "interpolated"), (2, "extrapolated")):
        seen = observed(cost)
        for _ in range(usual):
            seen.decode_run_ns(8, 8000, 8_000_000, 1)
        seen.decode_run_ns(2, 2 * 10**8, 10**16, 1)
        trust = seen.trust()
        share = f"{100 / (usual + 1):.1f} % of the steps extrapolated: "
        assert trust.level == level and trust.reason.startswith(share)
