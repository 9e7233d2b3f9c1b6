"""A recorded run as one HTML file: the figures of the Run page, the metrics and where they come from.

It needs no network: plotly.js is inside, once. Whatever a recording says is escaped; light or dark follows the browser.
"""

from __future__ import annotations

import json
import math
from html import escape
from typing import IO, Any

import numpy as np
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from dashboard import run_charts
from dashboard.palette import CLOCK, CLOCK_NAME, NEUTRAL
from dashboard.series import STEP_SERIES, column
from serving.metrics import STATISTICS, metric
from traces.recording import Recording
from traces.run_metrics import RunMetrics

_STEP_COLUMNS = ["replica", "start_ns", "end_ns", *STEP_SERIES, "prefill_tokens", "decode_rows"]
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
_PROVENANCE = ("run_id", "version", "seed", "calibration", "replicas", "num_blocks", "block_size")

_STYLE = """
:root { color-scheme: light dark; --text: #1b2330; --back: #ffffff; --line: #dde2ea; --soft: #5c6778 }
@media (prefers-color-scheme: dark) { :root { --text: #e6eaf1; --back: #11151c; --line: #2c3544; --soft: #9aa5b5 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back); max-width: 1180px;
       margin: 0 auto; padding: 1.5rem }
h1 { font-size: 1.7rem; margin: 0 } h2 { font-size: 1.2rem; margin: 2rem 0 .5rem }
p, figcaption { color: var(--soft); margin: .2rem 0 } figure { margin: 0; min-width: 0 }
.grid { display: grid; grid-template-columns: repeat(auto-fit, minmax(260px, 1fr)); gap: 1rem }
.wide { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: var(--soft); font-weight: 600 }
pre { white-space: pre-wrap; overflow-wrap: anywhere }
"""
_DRAW = """
const dark = matchMedia('(prefers-color-scheme: dark)');
function draw() {
  const ink = dark.matches ? '#c3ccd9' : '#3b4657', grid = dark.matches ? '#2c3544' : '#e4e8ee';
  for (const node of document.querySelectorAll('script.figure')) {
    const figure = JSON.parse(node.textContent), layout = figure.layout;
    const clear = 'rgba(0,0,0,0)';
    Object.assign(layout, {paper_bgcolor: clear, plot_bgcolor: clear, font: {color: ink, size: 12}});
    for (const name of Object.keys(layout)) if (/^[xy]axis/.test(name)) Object.assign(layout[name], {
      gridcolor: grid, linecolor: grid, zerolinecolor: grid});
    Plotly.react(node.previousElementSibling, figure.data, layout, {displaylogo: false, responsive: true});
  }
}
draw();
dark.addEventListener('change', draw);
"""


def write_html(recording: Recording, out: IO[bytes]) -> None:
    """The report. Raises UserError when the recording is damaged."""
    metrics = RunMetrics.of(recording)
    run = recording.run
    clock = CLOCK_NAME.get(run["clock"], "unknown clock")
    statuses = ", ".join(f"{count:,} {status}" for status, count in metrics.statuses().items())
    title = escape(run["workload"] or "A run")
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}: tokentwin</title>',
        f'<meta name="viewport" content="width=device-width"><style>{_STYLE}</style>',
        f"<script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{title}</h1>",
        f"<p>{clock} · {escape(statuses)} · {(run['duration_ns'] or 0) / 1e9:,.1f} s</p>",
        *(f"<p>{line}</p>" for line in _verdict(metrics)),
        "<h2>Over time</h2>",
        _figure(_timeline(recording)),
        "<h2>Four lifecycles</h2>",
        f'<div class="grid">{"".join(map(_card, *zip(*_cards(recording, metrics).items(), strict=True)))}</div>',
        "<h2>Distributions</h2>",
        _distributions(metrics),
        "<h2>The run</h2>",
        _scalars(metrics),
        "<h2>Where it comes from</h2>",
        _provenance(run),
        f"<script>{_DRAW}</script></body></html>\n",
    ]
    out.write("\n".join(parts).encode())


def _verdict(metrics: RunMetrics) -> list[str]:
    found = metrics.saturation
    if found is None:
        return []
    return [
        f"{found.verdict.lower()}: the backlog changes by {found.slope:+.3g} requests/s "
        f"(95 %: {found.low:+.3g} to {found.high:+.3g}) while {found.arrival_rate:.3g} requests/s arrive"
    ]


def _timeline(recording: Recording) -> go.Figure:
    blocks = float(recording.run["num_blocks"] or 0) * (recording.run["replicas"] or 1)
    return run_charts.timeline(recording.table("steps", _STEP_COLUMNS), blocks or math.nan, _colour(recording))


def _cards(recording: Recording, metrics: RunMetrics) -> dict[str, go.Figure]:
    of, colour = metrics.values, _colour(recording)
    gaps = "itl_ms" if metrics.distribution("itl_ms").count else "tpot_ms"
    prefill = np.nan_to_num(column(recording.table("steps", ["prefill_tokens"]), "prefill_tokens"))
    return {
        "Token": run_charts.histogram(of(gaps), gaps, colour),
        "Compute": run_charts.step_times(of("batch_tokens"), of("step_ms"), prefill, colour),
        "Memory": run_charts.memory_shares(of("kv_usage"), of("kv_pressure"), of("step_ms"), colour),
        "Request": run_charts.phases(of("queue_ms"), of("prefill_ms"), of("decode_ms"), colour),
    }


def _colour(recording: Recording) -> str:
    return CLOCK.get(recording.run["clock"], NEUTRAL)


def _figure(figure: go.Figure) -> str:
    """A place for a figure, and the figure as JSON in which nothing can end the script."""
    figure.update_layout(template="none", autosize=True)
    content = figure.to_json().replace("<", "\\u003c")
    height = figure.layout.height
    return f'<div style="height:{height}px"></div><script type="application/json" class="figure">{content}</script>'


def _card(title: str, figure: go.Figure) -> str:
    return f"<figure><figcaption>{title}</figcaption>{_figure(figure)}</figure>"


def _distributions(metrics: RunMetrics) -> str:
    rows = []
    for name, found in metrics.distributions().items():
        if found.count:
            numbers = found.as_dict()
            cells = "".join(f"<td>{_number(numbers[statistic])}</td>" for statistic in _STATISTICS)
            rows.append(f"<tr><td{_help(name)}>{escape(metric(name).axis)}</td>{cells}</tr>")
    heads = "".join(f'<th title="{escape(STATISTICS[statistic])}">{statistic}</th>' for statistic in _STATISTICS)
    return f'<div class="wide"><table><tr><th>metric</th>{heads}</tr>{"".join(rows)}</table></div>'


def _scalars(metrics: RunMetrics) -> str:
    rows = []
    for name, value in metrics.scalars().items():
        if value is not None:
            base = name.removesuffix("_peak")
            label = metric(base).axis + (" at its peak" if base != name else "")
            rows.append(f"<tr><td{_help(base)}>{escape(label)}</td><td>{escape(_number(value))}</td></tr>")
    return f'<div class="wide"><table>{"".join(rows)}</table></div>'


def _help(name: str) -> str:
    return f' title="{escape(metric(name).help)}"'


def _provenance(run: dict[str, Any]) -> str:
    facts = " · ".join(f"{name} {run[name]}" for name in _PROVENANCE if run[name] not in (None, ""))
    blocks = [f"<p>{escape(facts)}</p>"]
    for name in ("deployment", "hardware"):
        if run[name]:
            blocks.append(f"<details><summary>{name}</summary><pre>{escape(_indented(run[name]))}</pre></details>")
    return "".join(blocks)


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2)
    except ValueError:
        return text


def _number(value: Any) -> str:
    if not isinstance(value, int | float):
        return str(value)
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
