"""Every metric that a recording has, as rows: distributions with their percentiles, and what is one number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboard.shown import shown
from serving.metrics import metric
from traces.recording_notes import notes_of
from traces.run_metrics import RunMetrics

Bands = Mapping[str, Mapping[str, tuple[float, float]]]
_STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def bands_of(run: Mapping[str, Any]) -> Bands:
    """The 90 % bands by metric and statistic; none where the recording holds none."""
    bands = notes_of(run).get("bands")
    return bands if isinstance(bands, dict) else {}


def distribution_rows(metrics: RunMetrics) -> list[dict[str, Any]]:
    """One for each metric that requests or steps have a value of."""
    rows = []
    for name, found in metrics.distributions().items():
        if found.count:
            about, numbers = metric(name), found.as_dict()
            cells = {statistic: shown(about.read(numbers[statistic])) for statistic in _STATISTICS}
            rows.append({"metric": about.read_as, **cells, "values": found.count})
    return rows


def scalar_rows(run: Mapping[str, Any], metrics: RunMetrics) -> list[dict[str, str]]:
    """One for each metric of the whole run; what the recording cannot tell is left out."""
    bands, rows = bands_of(run), []
    for name, value in metrics.scalars().items():
        if value is None:
            continue
        about = metric(name.removesuffix("_peak"))
        band = bands.get(name, {}).get("value")
        rows.append(
            {
                "metric": about.read_as + (" at its peak" if name.endswith("_peak") else ""),
                "value": shown(about.read(value)),
                "90 % band": "–".join(shown(about.read(end)) for end in band) if band else "",
                "definition": about.definition,
            }
        )
    return rows
