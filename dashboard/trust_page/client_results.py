"""Rung 6 as `tokentwin validate front-door -o DIR` writes it: `clients.json`, read here and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from dashboard.library import find
from dashboard.trust_page.external_results import Result, read_results
from serving.metrics import axis_of

CLIENTS = "clients.json"


class Figure(Result):
    """One statistic: as clients saw it, and as simulated; errors in percent of what clients saw."""

    metric: str
    statistic: str
    real: float
    engine_alone: float
    simulated: float
    error_pct: float
    floor_pct: float | None = None
    in_weather: float | None = None
    in_weather_error_pct: float | None = None


class Clients(Result):
    """What clients saw of one workload, and what was simulated of it."""

    created: str = ""
    clients: list[str] = Field([])
    front_door: str = ""
    rows: list[Figure] = Field(min_length=1)

    @property
    def means(self) -> list[Figure]:
        return [row for row in self.rows if row.statistic == "mean"]


def newest_clients(runs: Path) -> Clients | None:
    """The newest results under `runs`, None without any. Raises UserError, one line, when they are damaged."""
    directory = next(iter(find(runs, CLIENTS).values()), None)
    return None if directory is None else read_results(Clients, directory, CLIENTS)


def client_rows(clients: Clients) -> list[dict[str, Any]]:
    return [
        {
            "metric": axis_of(row.metric),
            "statistic": row.statistic,
            "clients": row.real,
            "engine alone": row.engine_alone,
            "with the front door": row.simulated,
            "error (%)": row.error_pct,
            "floor (%)": row.floor_pct,
        }
        | (
            {"in the same weather": row.in_weather, "its error (%)": row.in_weather_error_pct}
            if row.in_weather is not None
            else {}
        )
        for row in clients.rows
    ]
