"""The pinned run beside the run of the page, by its main figures."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokentwin.dashboard.beside import Shown, Side, pinned, show_beside
from tokentwin.dashboard.loading import open_run
from tokentwin.dashboard.palette import CLOCK_NAME
from tokentwin.dashboard.run_page.header import served, title_of
from tokentwin.dashboard.run_page.words import LATENCIES, RATES, uncertain
from tokentwin.serving.answers.figures import NOTHING, shown_number, shown_share, shown_time
from tokentwin.serving.metrics import metric
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording, notes_of


def pinned_run(recording: Recording, metrics: RunMetrics, name: str, recordings: Mapping[str, Path]) -> None:
    """Draw the pinned run of `recordings` beside this one, or a button that pins this one; the link keeps the pin."""
    other = pinned("run", name, lambda said: said if said in recordings else None)
    if other is not None:
        show_beside("run", _side(other, *open_run(recordings[other])), _side(name, recording, metrics))


def _side(name: str, recording: Recording, metrics: RunMetrics) -> Side:
    run = recording.run
    clock = CLOCK_NAME.get(run["clock"], "unknown clock")
    called = (title_of(name, recording), clock, served(recording), run["workload"], f"seed {run['seed']}")
    return Side(" · ".join(filter(None, called)), _settings(run), dict(_figures(run, metrics)))


def _settings(run: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the run was made with: its deployment, its GPU, its requests."""
    try:
        deployment = json.loads(run["deployment"] or "{}")
    except ValueError:
        deployment = {}
    made = {name: run[name] for name in ("clock", "workload", "seed", "replicas")}
    return {**deployment, **made, "GPU": notes_of(run).get("gpu")}


def _figures(run: Mapping[str, Any], metrics: RunMetrics) -> Iterator[tuple[str, Shown]]:
    statuses = metrics.statuses()
    finished = statuses.get("finished", 0) / max(sum(statuses.values()), 1)
    yield "requests", Shown(sum(statuses.values()), f"{sum(statuses.values()):,}")
    yield "finished", Shown(finished, shown_share(finished, 1), share=True)
    unknown = uncertain(run)
    for name, stat in LATENCIES:
        value = getattr(metrics.distribution(name), stat)
        figure = Shown(None, NOTHING) if name in unknown or value != value else Shown(value, shown_time(value))
        yield f"{metric(name).label} {stat}", figure
    scalars = metrics.scalars()
    for name, label in RATES:
        yield label, Shown(scalars[name], shown_number(scalars[name]))
