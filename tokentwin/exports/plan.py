"""The saved answer of a plan: every fleet that it simulated, and which of them it recommends."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from tokentwin.exports.html_report import html_report
from tokentwin.exports.saved_answer import Asked, Part, checked, rows_of
from tokentwin.exports.tables import flag_field, metric_field, number_field, text_field
from tokentwin.planning.frontier import per_dollar, per_gpu, unbeaten

if TYPE_CHECKING:
    import pyarrow as pa


_STEADY = "in steady operation; a run's own divide by all of its time, its last answers included"


class _Fleet(Part):
    engine: str
    replicas: int
    gpus: int
    usd_per_hour: float
    tok_s_user: float | None
    tok_s_gpu: float | None
    usd_per_mtok_out: float | None
    usd_per_mtok_total: float | None
    attainment: float
    met: bool
    mark: str = ""
    reason: str = ""


class _Standing(Part):
    mark: str
    reason: str


class _Draws(Part):
    drawn: int = 0
    met: int = 0


class _Recommendation(_Fleet):
    vllm_serve: str | None
    headroom_percent: float
    breaks_first: str | None
    plausible_gpus: tuple[int, int | None]
    standing: _Standing
    other_draws: _Draws = _Draws()
    deployment: dict[str, Any]


class _Dearer(Part):
    engine: str
    usd_per_hour_at_least: float


class _Infeasible(Part):
    engine: str
    reason: str


class _ByReplicas(Part):
    replicas: int
    attainment: float
    if_slow: float
    if_fast: float


class _ByRate(Part):
    requests_per_s: float
    ttft_p99_ms: float | None
    tpot_p99_ms: float | None


class _Histogram(Part):
    edges: list[float] = Field(min_length=2)
    percent: list[float] = Field(min_length=1)


class _Lengths(Part):
    prompt: _Histogram
    output: _Histogram


class _Plan(Asked):
    """What `tokentwin.planning.document.plan_document` makes."""

    answer: str
    objectives: list[str]
    requests: int
    span_s: float
    too_short: str | None = None
    requests_per_s: float | None
    spares: int
    recommendation: _Recommendation | None
    why_not_fewer: str | None
    runners_up: list[_Fleet]
    dearer: list[_Dearer]
    infeasible: list[_Infeasible]
    frontier: list[_Fleet]
    frontier_by_price: list[_Fleet]
    points: list[_Fleet]
    candidates: dict[str, dict[str, Any]] = Field(default_factory=dict)
    by_replicas: list[_ByReplicas]
    by_rate: list[_ByRate]
    lengths: _Lengths


class PlanAnswer:
    """A plan; `document` as `plan_document` makes it."""

    what: ClassVar[str] = "a plan"
    writers: ClassVar[Mapping[str, str]] = {
        "html": html_report("plan"),
        "json": "tokentwin.exports.saved_answer:write_json",
    }
    tables = ("fleets",)

    def __init__(self, document: Mapping[str, Any]) -> None:
        """Raises UserError for a document that is none of a plan, or of an older one."""
        self.document = checked(_Plan, document, "plan")

    def table(self, name: str) -> pa.Table:
        """A row for every fleet that was simulated to its end."""
        import pyarrow as pa

        fleets = self.document["points"]
        rows = rows_of(fleets, [*_Fleet.model_fields])
        best = self.document["recommendation"]
        for_gpus, for_money = (set(unbeaten(fleets, gain)) for gain in (per_gpu, per_dollar))
        for at, row in enumerate(rows):
            row["recommended"] = best is not None and _same(row, best)
            row["on_frontier"], row["on_frontier_by_price"] = at in for_gpus, at in for_money
            row["kv_tokens"] = self.document.get("candidates", {}).get(row["engine"], {}).get("kv_tokens")
        return pa.Table.from_pylist(rows, schema=_schema())


def _same(row: Mapping[str, Any], fleet: Mapping[str, Any]) -> bool:
    return (row["engine"], row["replicas"]) == (fleet["engine"], fleet["replicas"])


def _schema() -> pa.Schema:
    import pyarrow as pa

    return pa.schema(
        [
            text_field("engine", "one replica: its split, parallelism, GPU and whatever else tells it from others"),
            number_field("replicas", "", "those that carry the traffic", whole=True),
            number_field("gpus", "", "of all replicas, spares included", whole=True),
            number_field("usd_per_hour", "$/h", "of all GPUs, spares included"),
            *map(metric_field, ("tok_s_user", "tok_s_gpu")),
            number_field("usd_per_mtok_out", "$/Mtok", f"all dollars over output tokens {_STEADY}"),
            number_field("usd_per_mtok_total", "$/Mtok", f"all dollars over prompt and output tokens {_STEADY}"),
            number_field("attainment", "fraction", "share of the requests within every bound"),
            flag_field("met", "whether every SLO is met"),
            text_field("mark", "how far its step times can be trusted: validated, interpolated, extrapolated"),
            text_field("reason", "why"),
            flag_field("recommended", "whether this is the answer"),
            flag_field("on_frontier", "meets every SLO, and no other such fleet beats it per user and per GPU"),
            flag_field("on_frontier_by_price", "likewise, in tokens/s of a user and tokens for a dollar"),
            number_field("kv_tokens", "tokens", "for which one engine has KV blocks", whole=True),
        ]
    )
