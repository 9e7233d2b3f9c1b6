"""The saved answer of a comparison: what can be claimed of every number, and who gains and loses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from serving.metrics import METRICS
from tokentwin.exports.html_report import html_report
from tokentwin.exports.saved_answer import Asked, Part, checked, rows_of
from tokentwin.exports.tables import number_field, text_field

if TYPE_CHECKING:
    import pyarrow as pa


class _Units(Part):
    of: str
    count: int
    carry_over: bool


class _Row(Part):
    metric: str
    stat: str
    a: float | None
    b: float | None
    low: float | None
    high: float | None
    percent: float | None
    better: str


class _Tally(Part):
    metric: str
    by: str
    group: str
    gain: int
    lose: int
    same: int
    mean_a: float | None
    mean_b: float | None


class _Curve(Part):
    x: list[float]
    y: list[float]


class _Curves(Part):
    ttft_ms: _Curve
    tpot_ms: _Curve
    e2e_ms: _Curve


class _Cdfs(Part):
    a: _Curves
    b: _Curves


class _Tenant(Part):
    tenant: str
    requests: float
    a: float
    b: float


class _Deployment(Part):
    policy: str
    scheduler: dict[str, Any]


class _Side(Part):
    deployment: _Deployment
    mark: str = ""
    reason: str = ""
    clock: str = ""


class _Ranked(Part):
    metric: str
    stat: str
    simulated_percent: float | None
    real_percent: float | None
    outcome: str


class _Simulated(Part):
    verdict: str
    rows: list[_Row]
    a: _Side
    b: _Side


class _Comparison(Asked):
    """What `tokentwin.comparison_document` makes."""

    verdict: str
    difference: bool
    requests: int
    runs: int
    units: _Units
    threshold: float
    rows: list[_Row] = Field(min_length=1)
    tallies: list[_Tally]
    cdfs: _Cdfs
    tenants: list[_Tenant]
    a: _Side
    b: _Side
    simulated: _Simulated | None = None
    ranking: list[_Ranked] | None = None
    disturbed: bool = False
    disturbance: str = ""


class ComparisonAnswer:
    """A comparison; `document` as `comparison_document` makes it."""

    what: ClassVar[str] = "a comparison"
    writers: ClassVar[Mapping[str, str]] = {
        "html": html_report("comparison"),
        "json": "tokentwin.exports.saved_answer:write_json",
    }

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises UserError for a document that is none of a comparison, or of an older one."""
        self.document = checked(_Comparison, document, "comparison")

    @property
    def tables(self) -> tuple[str, ...]:
        """Those of the engine's runs where the same were simulated, too."""
        simulated = ("simulated", "errors", "outcomes") if self.document.get("simulated") else ()
        return ("rows", "tallies", *simulated)

    def table(self, name: str) -> pa.Table:
        """One of these.

        rows        every number of both sides with its difference
        tallies     winners and losers, by group
        simulated   as `rows`, of the simulated runs beside real ones
        errors      every simulated number beside the real one, by side
        outcomes    whether the engine confirms what the simulator claims
        """
        import pyarrow as pa

        from tokentwin.comparison_document import simulated_errors

        found = self.document
        match name:
            case "tallies":
                return pa.Table.from_pylist(rows_of(found[name], [*_Tally.model_fields]), schema=_tallies())
            case "errors":
                return pa.Table.from_pylist(_with_units(simulated_errors(found)), schema=_errors())
            case "outcomes":
                ranked = rows_of(found.get("ranking") or [], [*_Ranked.model_fields])
                return pa.Table.from_pylist(ranked, schema=_outcomes())
            case _:
                rows = (found["simulated"] if name == "simulated" else found)["rows"]
                return pa.Table.from_pylist(_with_units(rows_of(rows, [*_Row.model_fields])), schema=_rows())


def _with_units(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**row, "unit": METRICS[row["metric"]].unit if row["metric"] in METRICS else "fraction"} for row in rows]


def _rows() -> pa.Schema:
    import pyarrow as pa

    own = "the row's"
    return pa.schema(
        [
            text_field("metric", "a metric of the glossary, or `finished`: the share of the requests that finish"),
            text_field("stat", "its statistic; `value` where it has but one"),
            text_field("unit", "of a, b, low and high"),
            number_field("a", own, "on side A"),
            number_field("b", own, "on side B"),
            number_field("low", own, "lower end of the 95 % interval of B - A, which holds for all rows together"),
            number_field("high", own, "upper end"),
            number_field("percent", "%", "B - A in percent of A; of a share in percentage points"),
            text_field("better", "A or B where a difference can be claimed, else empty"),
        ]
    )


def _errors() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            text_field("metric", "a metric of the glossary, or `finished`: the share of the requests that finish"),
            text_field("stat", "its statistic; `value` where it has but one"),
            text_field("unit", "of simulated and real"),
            text_field("side", "A or B"),
            number_field("simulated", "the row's", "in the simulator"),
            number_field("real", "the row's", "on the real engine"),
            number_field("error", "%", "simulated against real, in percent of real; of a share in percentage points"),
        ]
    )


def _outcomes() -> pa.Schema:
    import pyarrow as pa

    change = "B - A on the {}, in percent of A; of a share in percentage points"
    return pa.schema(
        [
            text_field("metric", "a metric of the glossary, or `finished`: the share of the requests that finish"),
            text_field("stat", "its statistic; `value` where it has but one"),
            number_field("simulated_percent", "%", change.format("simulator")),
            number_field("real_percent", "%", change.format("real engine")),
            text_field("outcome", "holds, open (the engine claims nothing), reversed, missed (only the engine claims)"),
        ]
    )


def _tallies() -> pa.Schema:
    import pyarrow as pa

    changes = "requests that B serves {} by the threshold or more"
    return pa.schema(
        [
            text_field("metric", "by which a request gains or loses"),
            text_field("by", "what the group is: all, a tenant, an SLO class"),
            text_field("group", "its name"),
            number_field("gain", "requests", changes.format("better"), whole=True),
            number_field("lose", "requests", changes.format("worse"), whole=True),
            number_field("same", "requests", "the others", whole=True),
            number_field("mean_a", "ms", "mean on side A, of the requests that finished on both"),
            number_field("mean_b", "ms", "mean on side B, of the same"),
        ]
    )
