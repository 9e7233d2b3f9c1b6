"""A CSV table of measured runs: a row has the load, the latencies, and settings of the deployment."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field

from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.formats.rows import Row, csv_rows
from tokentwin.traces.measured.run import MeasuredRun

_LOAD = ("prompt_tokens", "output_tokens", "concurrency", "request_rate", "requests")
_FIGURES = {"ttft_ms": "ttft_ms.mean", "tpot_ms": "tpot_ms.mean", "e2e_ms": "e2e_ms.mean"}
_ABOUT = ("name", "gpu", "engine", "client")
# default number of requests of a run: 10 per client of a closed loop, and at least 100 for a request rate
_WAVES, _FEWEST = 10, 100
_MOST = 100_000


class CsvRows(Settings):
    """The rows of one file.

    A row states `prompt_tokens`, `output_tokens`, either `concurrency` (a closed loop) or `request_rate` (requests per
    second, a Poisson process), and at least one of the mean latencies `ttft_ms`, `tpot_ms` and `e2e_ms`. It may state
    `requests`, `name`, `gpu`, `engine` and `client`. Any other column is a field of the deployment or of its scheduler.
    """

    format: Literal["csv"] = "csv"
    file: str
    seed: int = Field(0, description="seed of the arrivals of a rate")

    def read(self, data: Path) -> list[MeasuredRun]:
        """See `MeasuredFormat`. The latencies are assumed to be measured by a client."""
        path = data / self.file
        rows = list(csv_rows(path))
        if not rows:
            raise UserError("measured", str(path), "holds no rows")
        return [self._run(row) for row in rows]

    def _run(self, row: Row) -> MeasuredRun:
        figures = {figure: row.time_ns(name, 10**6) / 1e6 for name, figure in _FIGURES.items() if row.text(name)}
        if not any(figures.values()):
            raise row.error("ttft_ms", None, f"is missing; give at least one of {', '.join(_FIGURES)}")
        prompt, output = row.tokens("prompt_tokens"), row.tokens("output_tokens")
        rate = row.time_ns("request_rate", 10**9) / 1e9 if row.text("request_rate") else None
        if bool(rate) == bool(row.text("concurrency")):
            raise row.error("concurrency", row.text("concurrency"), "give either a concurrency or a request_rate")
        slots = None if rate else row.integer("concurrency", 1, most=_MOST)
        count = row.integer("requests", 1, _WAVES * slots if slots else _FEWEST, _MOST)
        name = row.text("name") or f"{row.path.stem} line {row.line}"
        arrivals = self._arrivals(count, rate)
        requests = [WorkloadRequest(i, at, ((PRIVATE, prompt),), output) for i, at in enumerate(arrivals)]
        return MeasuredRun(
            name,
            Workload(requests, name=name, concurrency=slots, shares_prefixes=False),
            figures,
            settings=_settings(row),
            gpu=row.text("gpu"),
            engine=row.text("engine"),
            client=row.text("client"),
            by_client=True,
            offered_per_s=rate,
            lengths=(prompt, output),
        )

    def _arrivals(self, count: int, rate: float | None) -> list[int]:
        """Return arrival times in nanoseconds; all are 0 in a closed loop."""
        if rate is None:
            return [0] * count
        draw, now, times = random.Random(self.seed), 0.0, []
        for _ in range(count):
            times.append(round(now))
            now += 1e9 * draw.expovariate(rate)
        return times


def _settings(row: Row) -> dict[str, Any]:
    """Return the fields of the deployment that a row states; an empty cell states nothing."""
    settings: dict[str, Any] = {}
    scheduler: dict[str, Any] = {}
    for column in row.fields:
        text = row.text(column)
        if column in (*_LOAD, *_FIGURES, *_ABOUT) or not text:
            continue
        if column in SchedulerConfig.model_fields:
            scheduler[column] = _value(row, column)
        elif column in Deployment.model_fields:
            settings[column] = _value(row, column)
        else:
            known = ", ".join((*_LOAD, *_FIGURES, *_ABOUT))
            raise row.error(column, text, f"is not a known column; choose from {known}, or a field of a deployment")
    return {**settings, **({"scheduler": scheduler} if scheduler else {})}


def _value(row: Row, column: str) -> Any:
    """Return a cell as a deployment file would have it."""
    try:
        return yaml.safe_load(row.text(column))
    except yaml.YAMLError:
        raise row.error(column, row.text(column), "is not a value of a deployment file") from None
