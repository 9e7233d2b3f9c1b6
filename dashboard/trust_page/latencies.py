"""What a validation report compares, and how far to trust a figure of it: latencies of recordings, times of steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import plotly.graph_objects as go
from numpy.typing import NDArray

from calibration.provenance import UNKNOWN, VALIDATED, Provenance
from calibration.validation.report import ValidationReport, load_residuals, resolve
from dashboard.trust_page.charts import residuals
from dashboard.trust_page.words import of_report, of_steps
from serving.errors import UserError
from traces.run_metrics import RunMetrics

COMPARED = ("ttft_ms", "tpot_ms", "e2e_ms")
Latencies = Mapping[str, NDArray[Any]]  # one value a request


class ComparedLatencies(NamedTuple):
    """Those that could be read of the real runs and of the simulated one, and why the others could not."""

    real: list[Latencies]
    simulated: Latencies | None
    problems: list[str]
    provenance: Provenance


def step_errors(directory: Path, report: ValidationReport) -> tuple[go.Figure, Provenance] | None:
    """Of the held-out steps of the report in `directory`, None if it has none. Raises UserError for damaged ones."""
    table = load_residuals(directory)
    if table is None:
        return None
    columns = (table[name].to_numpy(zero_copy_only=False) for name in ("regime", "measured_ns", "predicted_ns"))
    regimes = report.rungs.step.regimes.values() if report.rungs.step else ()
    medians = (regime.median_error_pct for regime in regimes)
    return residuals(*columns), of_steps(table.num_rows, medians, "and the calibration saw none of them")


def compared_latencies(
    directory: Path, report: ValidationReport, read: Callable[[Path], RunMetrics]
) -> ComparedLatencies:
    """Of the report in `directory`; `read` opens a recording."""
    found: dict[str, Latencies] = {}
    problems = []
    names = report.recordings
    for name in filter(None, (*names.real, names.simulated)):
        try:
            metrics = read(resolve(directory, name))
            found[name] = {latency: metrics.values(latency) for latency in COMPARED}
        except UserError as error:
            problems.append(str(error))
    real, simulated = [found[name] for name in names.real if name in found], found.get(names.simulated or "")
    provenance = of_report(report)
    if simulated is None:
        provenance = Provenance(VALIDATED, "measured on the real engine; there is no simulated run beside it")
    elif not real:
        provenance = Provenance(UNKNOWN, "there is no real run beside the simulated one")
    return ComparedLatencies(real, simulated, problems, provenance)
