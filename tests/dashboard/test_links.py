"""Inputs live in the URL: every one that is changed is in the link, and no link, however odd, breaks a page."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.budget import examples

pytest.importorskip("streamlit")

from streamlit.testing.v1 import AppTest

from tests.dashboard.pages import opened

PAGES: dict[str, tuple[str, dict[str, str]]] = {
    "plan": ("plan", {}),
    "plan, a shape": ("plan", {"traffic": "shape"}),
    "policy lab": ("policy_lab", {}),
    "policy lab, settings": ("policy_lab", {"a": "edf", "b": "sjf", "a_replicas": "2", "b_replicas": "3"}),
    "policy lab, recordings": ("policy_lab", {"compare": "recordings"}),
    "run": ("run", {}),
    "run, steps": ("run", {"view": "steps"}),
    "run, diagnosis": ("run", {"view": "diagnosis"}),
    "step": ("step", {}),
    "trust, engines": ("trust", {"view": "engines"}),
    "claims": ("claims", {"claim": "kv-of-a-70b"}),
    "calibration": ("calibration", {}),
    "sweeps": ("sweeps", {}),
    "glossary": ("glossary", {}),
}
_KINDS = ("selectbox", "multiselect", "number_input", "slider", "toggle", "text_input", "button_group")
_ASK_FOR_MORE = {"a config.json of your own", "a deployment in YAML"}


def looked_at(page: str, runs: Path, link: dict[str, Any]) -> AppTest:
    app = opened(page, *([] if page in ("step", "glossary") else [runs]), **link)
    assert not app.exception, app.exception[0].stack_trace
    return app


def widgets(app: AppTest) -> dict[str, Any]:
    """Return every input that a user sees, by its label (SLO rows have a new key each time)."""
    widgets = {}
    for kind in _KINDS:
        for at, widget in enumerate(app.get(kind)):
            widgets[f"{kind} {at} {widget.proto.label}"] = widget
    return widgets


def values(app: AppTest) -> dict[str, Any]:
    return {name: widget.value for name, widget in widgets(app).items()}


def change(widget: Any) -> None:
    """Set an input to another valid value."""
    kind, value = widget.type, widget.value
    if kind == "selectbox":
        others = [at for at, option in enumerate(widget.options) if at != widget.index and option not in _ASK_FOR_MORE]
        if others:
            widget.select_index(others[0])
    elif kind == "button_group":
        last = getattr(widget.options[-1], "content", widget.options[-1])
        widget.set_value([last] if isinstance(value, list) else last)
    elif kind == "multiselect":
        widget.set_value(value[:-1] if len(value) > 1 else widget.options[:2])
    elif kind == "number_input":
        step = widget.step or 1
        widget.set_value(value + step)
    elif kind == "slider":
        low, high = widget.value
        widget.set_range(low + 0.25 * (high - low), low + 0.75 * (high - low))
    elif kind == "toggle":
        widget.set_value(not value)
    else:
        widget.set_value("chat=300, batch=20000" if "chat=" in value else "latency")


def beginning(widget: Any) -> Any:
    """Return what the browser shows in a widget that is new to it."""
    said = widget.proto.default
    if widget.type == "selectbox":
        return widget.options[said]
    if widget.type in ("multiselect", "button_group"):
        return sorted(getattr(widget.options[at], "content", widget.options[at]) for at in said)
    return tuple(said) if widget.type == "slider" else said


def value_of(widget: Any) -> Any:
    """Return the value that the page took from a widget, as the widget shows it."""
    if widget.type == "selectbox":
        return widget.options[widget.index]
    if widget.type == "multiselect":
        return sorted(widget.format_func(value) for value in widget.value)
    if widget.type == "button_group":
        return sorted(getattr(widget.options[at], "content", widget.options[at]) for at in widget.indices)
    return widget.value


# Inputs that decide which others there are.
CHOICES_OF_INPUTS = ("Traffic", "Compare", "View", "Measurements of", "Sweeps", "Describe it", "Show")


@pytest.mark.parametrize("name", PAGES)
def test_what_is_changed_is_in_the_link(name: str, samples: Path) -> None:
    page, link = PAGES[name]
    app = looked_at(page, samples, link)
    before = values(app)
    changed = set()
    for labels in (list(before)[::2], list(before)[1::2]):  # in two drawings: each of them costs as much as a page
        for label, widget in widgets(app).items():
            if label in labels and widget.proto.label not in CHOICES_OF_INPUTS:
                change(widget)
        app.run()
        assert not app.exception, labels
        changed |= {label for label in labels if values(app).get(label) != before[label]}
    assert changed, "nothing to change"
    assert name != "trust, engines" or app.query_params["prediction"] == "anchored"
    again = looked_at(page, samples, dict(app.query_params))
    assert values(again) == values(app)
    again.run()  # of a drawing that is cut short the browser sees nothing: the next one must be enough to begin with
    for label, widget in widgets(again).items():
        assert beginning(widget) == value_of(widget), label


# What a page may be asked, whatever is chosen on it; a name says nothing of the page.
PARAMETERS = re.findall(
    r"\w+",
    """
    a a_deadlines a_fair_input_weight a_max_num_seqs a_own a_replicas a_router a_yaml asked_engine asked_figure
    asked_gpu asked_load asked_model asked_tp asked_weights async b b_sjf_error b_yaml batch_tokens beside by
    calibration chunk columns compare config context cv do energy factors file fleet gpu gpus grid how judged kernel
    kv lab_trace limit log minutes mix model of of_gpu offered only_rate output over past pin plan policies
    prediction prefix preset price prompt prompt_sigma prompts pue q quantization rate rate_scale rates rec_a rec_b
    report req_s request requests rows run scenario seconds seeds seqs serving shape shards show size slo spares sql
    stretch sweep timing tp tpot_within trace trace_rate traffic trust_in_run view win window x y
    """,
)
ODD = (
    "", "9" * 5000, "1e400", "-1e400", "nan", "-", "--", "1.2.3-4", "nan-nan", "-5-3", "1e-07-2e-05", "\x00",
    "\U0001f600", "../../etc/passwd", "H100:1e9", "H100:99999999999", "ttft_ms p99<=0", '"', '"a,',
    "a,,b", "a\nb", "\u0663", "1_0", "$x$ <b>*", "chat=" + "9" * 400, "select 1 as a, 2 as a",
    "select timestamp '294000-01-01'",
)  # fmt: skip
KINDS = {
    "compare": ["recordings"],
    "traffic": ["shape", "trace"],
    "offered": ["trace"],
    "do": ["start"],
    "how": ["yaml"],
    "show": ["fleets"],
    "view": ["steps", "diagnosis", "metrics", "scatter", "heat map", "table"],
    "of": ["Engines"],
    "a": ["edf", "pasted", "own"],
    "b": ["sjf", "fair"],
    "model": ["a config.json of your own"],
}
_text = st.one_of(st.sampled_from(ODD), st.text(max_size=30))
_links = st.fixed_dictionaries(
    {name: st.one_of(_text, st.sampled_from(KINDS.get(name, [""]))) for name in PARAMETERS if name != "slo"}
    | {"slo": st.lists(_text, min_size=1, max_size=10)}
)


@pytest.mark.parametrize("page", sorted({page for page, _ in PAGES.values()}))
@settings(examples(0.02), phases=[Phase.generate])
@given(link=_links)
def test_no_link_breaks_a_page(page: str, samples: Path, link: dict[str, Any]) -> None:
    app = looked_at(page, samples, link)
    for kind in ("error", "warning", "info"):
        assert all("\n" not in element.value and "Traceback" not in element.value for element in app.get(kind))


@pytest.mark.parametrize(
    ("page", "link"),
    [
        ("step", {"rows": "9" * 5000, "tp": "2,4"}),
        ("plan", {"price": "H100:99999999999", "spares": "9" * 400}),
        ("plan", {"price": f"H100:{'9' * 400}", "slo": ["ttft_ms p99<=0", "tpot_ms p99<=99999999999999"]}),
        ("plan", {"slo": ["x" * 5000], "hold": "1e9", "tp": "0,-1,x"}),
        ("plan", {"splits": "1:" + "9" * 400, "vary": "a..b=1; policy.x=[2]"}),
        ("plan", {"splits": "search," * 500, "vary": "{=;"}),
        ("policy_lab", {"a": "edf", "a_deadlines": "x=" + "9" * 400}),
        ("policy_lab", {"a": "edf", "a_deadlines": "x" * 600}),
        ("glossary", {"q": "x" * 5000}),
        ("sweeps", {"sql": "select 1 as a, 2 as a"}),
        ("sweeps", {"sql": "select timestamp '294000-01-01' as a"}),
        ("sweeps", {"sql": "select map {'a': 1} as a, interval 1 day as b, {'c': [1]} as d, '1'::bit as e"}),
        ("sweeps", {"sql": "select 1e400::decimal(38, 0)"}),
        ("run", {"window": "-1e9-nan"}),
        ("run", {"window": "1.2.3-4"}),
    ],
)
def test_odd_values_of_a_link(page: str, samples: Path, link: dict[str, Any]) -> None:
    app = looked_at(page, samples, link)
    if "sql" in link:
        app.button[0].click().run()
        assert not app.exception
    assert all("\n" not in error.value for error in app.error)


def test_what_a_link_says_is_shown_letter_by_letter(samples: Path) -> None:
    """An image in it would have every reader's browser ask somebody else's server for it."""
    for page, parameter in (("run", "run"), ("trust", "report"), ("step", "model")):
        app = looked_at(page, samples, {parameter: "![x](https://example.org/x.png)"})
        said = [element.value for element in (*app.info, *app.error)]
        assert any("example.org" in text for text in said), page
        assert not any(re.search(r"(?<!\\)\]\(http", text) for text in said), said
