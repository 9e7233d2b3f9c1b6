"""The metric registry: the definition of each metric, its names in other tools, and the checks of SLOs.

Column metadata, `--help`, tooltips and the glossary (`docs/metrics.md`) all come from the table in `metrics.toml`; no
other module may define a metric. Tools disagree on TPOT, ITL and "throughput"; this project uses the definitions of
this table. `python -m tokentwin.serving.metrics` prints the glossary.
"""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tokentwin.serving.answers.figures import shown_number
from tokentwin.serving.errors import UserError

Direction = Literal["lower", "higher"]
Tool = Literal["vllm", "aiperf", "guidellm", "prometheus"]

TOOLS: dict[Tool, str] = {"vllm": "vLLM", "aiperf": "AIPerf", "guidellm": "GuideLLM", "prometheus": "Prometheus"}

STATISTICS: dict[str, str] = {
    "mean": "sum / count",
    "std": "population standard deviation (divisor: count)",
    "min": "smallest value",
    "max": "largest value",
    "count": "number of values",
    "p50": "nearest-rank 50th percentile",
    "p90": "nearest-rank 90th percentile",
    "p95": "nearest-rank 95th percentile",
    "p99": "nearest-rank 99th percentile",
}
TERMS: dict[str, str] = {
    "SLO": "service-level objective: a bound on a latency, with the share of the requests that must keep it",
    "prefill": "the steps that compute a prompt; they end with the first output token",
    "decode": "the steps that compute one output token after another",
    "KV cache": "the keys and values of all tokens that running requests have computed, in blocks of GPU memory",
    "closed loop": "clients wait for an answer before they send again, so the number of requests in flight is fixed",
    "open loop": "requests come at given times, whether or not earlier ones have been answered",
    "headroom": "how much the traffic can grow until an SLO breaks",
}  # words of the field that are no metrics
SLO_METRICS = ("ttft_ms", "tpot_ms", "tpot_inclusive_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: its `name` (which ends in the unit, if there is one), its label, its definition and its unit.

    `scope` says what one value belongs to: a request, a token gap, a step, or the whole run. `better` says whether
    lower or higher values are better. `vllm`, `aiperf`, `guidellm` and `prometheus` are the metric's names in these
    tools, empty if the tool has no such metric.
    """

    name: str
    label: str
    definition: str
    scope: Literal["request", "token", "step", "run"]
    unit: str = ""
    better: Direction | None = None
    vllm: tuple[str, ...] = ()
    aiperf: tuple[str, ...] = ()
    guidellm: tuple[str, ...] = ()
    prometheus: tuple[str, ...] = ()

    @property
    def axis(self) -> str:
        """The title of an axis: the label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def read_unit(self) -> str:
        """The unit in which reports show the metric: percent for a fraction, otherwise its own unit."""
        return "%" if self.unit == "fraction" else self.unit

    def read(self, value: Any) -> Any:
        """Return a value in `read_unit`. Only a fraction changes: it becomes a percentage."""
        return 100 * value if self.unit == "fraction" and value is not None else value

    def shown(self, value: Any) -> str:
        """Return a value as text, in `read_unit`; a value that is text already stays as it is."""
        return value if isinstance(value, str) else shown_number(self.read(value))

    @property
    def read_as(self) -> str:
        """The label with `read_unit`."""
        return f"{self.label} ({self.read_unit})" if self.unit else self.label

    @property
    def help(self) -> str:
        """One paragraph about the metric, for `--help` and tooltips."""
        better = f" {self.better.capitalize()} is better." if self.better else ""
        return f"{self.axis}: {self.definition}.{better}"

    def names_in(self, tool: Tool) -> tuple[str, ...]:
        """Return the names of the metric in `tool`."""
        return getattr(self, tool)


def _read_table() -> dict[str, Metric]:
    metrics = {}
    for name, entry in tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")).items():
        fields: dict[str, Any] = {
            field: tuple(value) if isinstance(value, list) else value for field, value in entry.items()
        }
        metrics[name] = Metric(name, **fields)
    return metrics


METRICS = _read_table()


def metric(name: str) -> Metric:
    """Return the metric called `name` in the registry. Raises UserError that lists the known metrics."""
    if name not in METRICS:
        raise UserError("metric", name, f"is not a known metric; choose one of {', '.join(METRICS)}")
    return METRICS[name]


def label_of(name: str) -> str:
    """Return a metric's label, or `name` itself if the registry lacks it: documents may name unknown metrics."""
    return METRICS[name].label if name in METRICS else name


def axis_of(name: str) -> str:
    """Return a metric's label with its unit, or `name` itself if the registry does not have it."""
    return METRICS[name].axis if name in METRICS else name


def check_slo(slo: Mapping[str, float]) -> dict[str, float]:
    """Return the SLOs, which are bounds on request metrics, after checking them.

    Raises UserError for a metric that cannot have a bound, and for a bound that is not above 0.
    """
    for name, bound in slo.items():
        if name not in SLO_METRICS:
            raise UserError("slo", name, f"is not a known latency; choose one of {', '.join(SLO_METRICS)}")
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
            raise UserError(f"slo {name}", bound, "must be a number of milliseconds above 0")
    return {name: float(bound) for name, bound in slo.items()}


def defined_in(text: str) -> str | None:
    """Return the definitions of the metrics and terms that a text names, one paragraph each, as a tooltip.

    Labels that are everyday words, such as `running`, do not count. None if the text names none.
    """
    definitions = dict.fromkeys(_WORDS[word.lower()] for word in _NAMED.findall(text))
    return "\n\n".join(definitions) or None


def _is_term(label: str) -> bool:
    return label != label.lower() or " " in label or label in ("goodput", "preemptions")


_WORDS = {m.label.lower(): m.help for m in METRICS.values() if _is_term(m.label)}
_WORDS |= {"attainment": METRICS["slo_attainment"].help}
_WORDS |= {term.lower(): f"{term}: {meaning}." for term, meaning in TERMS.items()}
_NAMED = re.compile(rf"\b(?:{'|'.join(sorted(map(re.escape, _WORDS), key=len, reverse=True))})(?=s?\b)", re.IGNORECASE)


def parse_slo(text: str) -> dict[str, float]:
    """Parse SLOs in the form of vLLM's `--goodput`: `ttft:200 tpot:50`, in milliseconds; our own names work too."""
    slo: dict[str, float] = {}
    for pair in re.split(r"[\s,]+", text.strip()):
        name, colon, bound = pair.partition(":")
        if not colon:
            raise UserError("slo", pair or text, "must be METRIC:MILLISECONDS, e.g. ttft:200 tpot:50")
        name = {"e2el": "e2e_ms"}.get(name, f"{name.removesuffix('_ms')}_ms")
        if name in slo:
            raise UserError("slo", text, f"bounds {name} twice; give each latency one bound")
        try:
            slo[name] = float(bound)
        except ValueError:
            raise UserError(f"slo {name}", bound, "must be a number of milliseconds above 0") from None
    return check_slo(slo)


def glossary() -> str:
    """Return the glossary in Markdown: definitions, rules, and the names in other tools."""
    lines = [
        "# Metrics",
        "",
        "<!-- Generated by `python -m tokentwin.serving.metrics`; edit serving/metrics.toml instead. -->",
        "",
        "```",
        "tokentwin columns  # what every column of a recording means",
        "```",
        "Each metric has one definition, for real and for simulated runs.",
        "",
        "## Definitions",
        "",
        "In brackets: the unit, whether a request, token, step or run has such a value, and which direction is better.",
        "",
    ]
    for m in METRICS.values():
        about = ", ".join(part for part in (m.unit, m.scope, m.better) if part)
        lines.append(f"- `{m.name}` ({about}). {m.label}: {m.definition}")
    lines += [
        "",
        "## Rules",
        "",
        "- **Measurement window**: first intended arrival to last finish. Throughputs are totals divided by this",
        "  window (in a plan: in [steady operation](plan.md#steady-operation)).",
        "- **Latencies** are those of finished requests. All others count only in the denominator of SLO attainment.",
        "- **Percentiles** are by nearest rank: of n sorted values, p*q* is number ceil(q n / 100). The standard",
        "  deviation `std` is that of the population.",
        "- **SLO**: a request with fewer than two output tokens meets a TPOT bound.",
        "- **Saturation**: a line is fitted to the number of outstanding requests in sixteen equal bins of the last",
        "  three quarters of the arrival period. Its slope gets a Student's t interval, corrected for lag-1",
        "  autocorrelation. A verdict needs 20 requests.",
        "",
        "## Names elsewhere",
        "",
        "Prometheus has seconds, or counters for rates and ratios. Some words mean other metrics: AIPerf's and",
        "GuideLLM's *inter-token latency* is our TPOT, GuideLLM's *time per output token* our inclusive TPOT.",
        "",
    ]
    for m in METRICS.values():
        names = [f"{TOOLS[tool]} {', '.join(f'`{n}`' for n in m.names_in(tool))}" for tool in TOOLS if m.names_in(tool)]
        if names:
            lines.append(f"- `{m.name}`: {'; '.join(names)}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(glossary(), end="")
