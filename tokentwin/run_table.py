"""The metrics of a run, printed for people or for scripts."""

from __future__ import annotations

import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import click

from tokentwin.planning.run_report import Bands, run_report, status_word
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.errors import one_line

if TYPE_CHECKING:
    from tokentwin.planning.capacity import Capacity
    from tokentwin.traces.metrics.run_metrics import RunMetrics
    from tokentwin.traces.recording import Recording


def print_metrics(
    metrics: RunMetrics, style: str, bands: Bands | None = None, capacity: Capacity | None = None, **more: Any
) -> None:
    """Print the metrics in the `style` `table` or `json`; `more` goes into the JSON."""
    from tokentwin.serving.answers.terminal import print_report

    if style == "json":
        distributions = {name: d.as_dict() for name, d in metrics.distributions().items() if d.count}
        if bands is not None:
            more["bands"] = bands
        if capacity is not None:
            more["capacity"] = capacity.model_dump()
        click.echo(
            json.dumps({"distributions": distributions, **metrics.scalars(), "requests": metrics.statuses(), **more})
        )
        return
    print_report(run_report(metrics, bands, capacity))


def print_reasons(recording: Recording) -> None:
    """Print the number of unfinished requests by status, and the reason of the first request of each status."""
    import pyarrow.compute as pc

    requests = recording.table("requests", ["status", "reason"])
    explained = requests.filter(pc.greater(pc.utf8_length(requests["reason"]), 0))
    statuses, reasons = (column.to_pylist() for column in explained.columns)
    firsts = dict(zip(reversed(statuses), reversed(reasons), strict=True))
    for status, count in Counter(statuses).items():
        click.echo(f"{count:,} {status_word(status)}; reason of the first: {one_line(firsts[status])}")


def print_tiers(metrics: RunMetrics) -> None:
    """Print the share of prompt tokens that each KV tier loaded, if there are tiers."""
    if metrics.scalars()["tier_hit_rate"] is not None:
        shares = [f"{shown_share(rate, 1)} {tier}" for tier, rate in metrics.tier_hit_rates().items()]
        click.echo(f"prompt tokens loaded from KV tiers: {', '.join(shares) or 'none'}")
