"""The SLOs of the Plan page by form and by text: one state, whatever is typed or clicked."""

import pytest

pytest.importorskip("streamlit")

from hypothesis import given
from hypothesis import strategies as st

from tests.dashboard.pages import opened
from tokentwin.dashboard.plan_page.slo_form import ATTAINMENT, LATENCIES, Slo
from tokentwin.planning.plan.objectives import parse_objectives

_classes = st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1, max_size=8)


@given(
    st.sampled_from(LATENCIES),
    st.sampled_from(["p50", "p99", "p99.9", "p100", "mean", "by attainment"]),
    st.floats(0.01, 1e6).map(lambda bound: float(f"{bound:.6g}")),
    st.one_of(st.just(""), _classes),
)
def test_a_row_of_the_form_is_a_line_of_the_text(metric, percentile, bound, slo_class):
    slo = Slo(metric, percentile, bound, slo_class if percentile != "by attainment" else "")
    assert Slo.of_line(slo.line) == slo


@pytest.mark.parametrize(
    ("line", "slo"),
    [
        ("TTFT p99 < 1s", Slo("ttft_ms", "p99", 1000.0)),
        ("attainment >= 0.995", Slo(ATTAINMENT, "", 99.5)),
        ("tpot<=50", Slo("tpot_ms", "by attainment", 50.0)),
        ("TPOT mean<=50 for chat", Slo("tpot_ms", "mean", 50.0, "chat")),
        ("ttft_ms p99<=500 for Web chat", Slo("ttft_ms", "p99", 500.0, "Web chat")),
        ("ttft_ms p99>500", None),
        ("", None),
    ],
)
def test_lines_are_read(line, slo):
    assert Slo.of_line(line) == slo


def test_form_and_text_are_one_state(tmp_path):
    def lines():
        return app.text_area(key=next(w.key for w in app.text_area if w.label == "SLOs")).value.splitlines()

    def field(label, at=0):
        kinds = ("selectbox", "number_input", "text_input")
        return [w for kind in kinds for w in app.get(kind) if w.label == label][at]

    app = opened("plan", tmp_path, slo=["TTFT p99 < 1s", "tpot_ms p99<=50"])
    field("at most (ms)").set_value(700.0).run()
    assert lines() == app.query_params["slo"] == ["ttft_ms p99<=700", "tpot_ms p99<=50"]
    field("Percentile", 1).set_value("by attainment").run()
    assert lines() == ["ttft_ms p99<=700", "tpot_ms<=50", "attainment>=0.99"]
    field("at most (ms)", 0).set_value(800.0)
    field("Percentile", 0).set_value("p95")
    field("at most (ms)", 1).set_value(60.0).run()  # in one click, as the browser sends quick ones
    assert lines() == ["ttft_ms p95<=800", "tpot_ms<=60", "attainment>=0.99"]
    app.text_area[0].set_value("ttft_ms p90<=300").run()
    assert field("Percentile").value == "p90" and field("at most (ms)").value == 300.0
    app.button(key="slo_add").click().run()
    assert lines() == ["ttft_ms p90<=300", "tpot_ms p99<=10000"]
    parse_objectives(lines())
    field("SLO class").set_value("chat").run()
    assert lines()[0] == "ttft_ms p90<=300 for chat"
    next(b for b in app.button if b.label == "Remove").click().run()
    assert lines() == ["tpot_ms p99<=10000"] and not app.exception
