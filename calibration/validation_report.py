"""A validation report, as `tokentwin validate` writes it: `report.json` and `step_residuals.parquet`.

Read here and checked, so that what shows or exports one never meets a report that it cannot show. Fields
that a later version adds are ignored.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, BeforeValidator, ConfigDict

from serving.config import parse
from serving.errors import UserError

REPORT = "report.json"
RESIDUALS = "step_residuals.parquet"
_RESIDUAL_COLUMNS = ["regime", "measured_ns", "predicted_ns"]
_MOST_NOISE_PCT = 50.0  # real runs that differ by more say nothing of a simulated one


def _number_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


Number = Annotated[float | None, BeforeValidator(_number_or_none)]


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)


class Replay(_Part):
    """Rung 1: how many recorded steps the simulator decided identically."""

    steps: int
    identical: int
    requests: int = 0
    first_difference: str | None = None


class Regime(_Part):
    """Rung 2: the cost model's error on held-out steps of one regime."""

    steps: int
    median_error_pct: Number = None
    p95_error_pct: Number = None
    bias_pct: Number = None


class StepRung(_Part):
    regimes: dict[str, Regime] = {}


class RunRow(_Part):
    """Rung 3: one statistic of one metric, simulated against real, beside the real-vs-real floor.

    `low` and `high` are the ends of the simulated 90 % band (rung 5); None in reports that have none.
    """

    metric: str
    stat: str
    real: Number = None
    simulated: Number = None
    error_pct: Number = None
    floor_pct: Number = None
    low: Number = None
    high: Number = None

    @property
    def noisy(self) -> bool:
        """Whether repeats of the real run differ by so much that nothing can be held against them."""
        return self.floor_pct is not None and abs(self.floor_pct) > _MOST_NOISE_PCT

    @property
    def covered(self) -> bool | None:
        """Whether the band holds the real number; None when unknown, or noisy."""
        if self.real is None or self.low is None or self.high is None or self.noisy:
            return None
        return self.low <= self.real <= self.high

    @property
    def within_floor(self) -> bool | None:
        """Whether the error is no larger than repeating the real run makes it; None when unknown, or noisy."""
        if self.error_pct is None or self.floor_pct is None or self.noisy:
            return None
        return abs(self.error_pct) <= abs(self.floor_pct)


class RunRung(_Part):
    rows: list[RunRow] = []


class Rungs(_Part):
    replay: Replay | None = None
    step: StepRung | None = None
    run: RunRung | None = None


class Recordings(_Part):
    real: list[str] = []
    simulated: str | None = None


class Report(_Part):
    """The whole report. A rung that was not climbed is None."""

    verdict: str
    created: str = ""
    disturbed: bool = False
    disturbance: str = ""
    set_aside: str = ""
    hardware: dict[str, Any] = {}
    workload: str = ""
    calibration: str = ""
    extrapolated_share: Number = None
    rungs: Rungs = Rungs()
    recordings: Recordings = Recordings()


def load_report(directory: Path) -> Report:
    """The report in `directory`. Raises UserError, one line, when it is missing or damaged."""
    name = f"{directory.name}/{REPORT}"
    try:
        data = json.loads((directory / REPORT).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("report", name, f"cannot be read ({error}); run tokentwin validate again") from None
    except ValueError as error:
        raise UserError("report", name, f"is not JSON ({error}); run tokentwin validate again") from None
    return parse(Report, data, where=name)


def load_residuals(directory: Path, whole: bool = False) -> pa.Table | None:
    """Regime, measured and predicted time of each held-out step, or the `whole` of what is known of it.

    None when the report has none.
    """
    path = directory / RESIDUALS
    if not path.is_file():
        return None
    try:
        return pq.read_table(path, columns=None if whole else _RESIDUAL_COLUMNS)
    except (pa.ArrowException, OSError) as error:
        name = f"{directory.name}/{RESIDUALS}"
        raise UserError("report", name, f"is damaged ({error}); run tokentwin validate again") from None


def resolve(directory: Path, recording: str) -> Path:
    """Where a recording that the report names lies: beside the report, or from where it was started."""
    beside = directory / recording
    return beside if beside.exists() else Path(recording)
