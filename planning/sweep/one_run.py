"""One run of a sweep, from its point to its row. The result depends only on the point, on any machine."""

from __future__ import annotations

from dataclasses import dataclass
from io import BytesIO
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokentwin.planning.scenario import Scenario
from tokentwin.planning.sweep.columns import band_values, metric_values
from tokentwin.planning.sweep.points import Point
from tokentwin.serving.errors import UserError

DIED = "the process that ran it died, perhaps for want of memory"
OVERDUE = "took longer than run_limit_s; raise the limit, or leave the run out"


@dataclass(frozen=True)
class RunResult:
    """The result of a run.

    Attributes:
        values: values by column, including `status`
        requests: the requests as a Parquet file; None if they were not kept
        refused: the error of a run that cannot be made
    """

    point: Point
    values: dict[str, Any]
    requests: bytes | None = None
    refused: UserError | None = None


def failed(point: Point, error: str, refused: UserError | None = None) -> RunResult:
    """Return the result of a run that failed."""
    return RunResult(point, {"status": "failed", "error": " ".join(error.split())}, refused=refused)


@dataclass(frozen=True)
class Measure:
    """A callable that simulates a point.

    Attributes:
        full: True to keep steps and tokens for their metrics
        requests: True to keep the requests in the result
        bands: True to simulate both ends of the 90 % interval of step times, too
    """

    full: bool = False
    requests: bool = False
    bands: bool = False

    def __call__(self, point: Point) -> RunResult:
        if point.error:
            return failed(point, point.error)
        try:
            return self._simulated(point)
        except UserError as error:
            return failed(point, str(error))
        except Exception as error:  # a user's policy may fail in any way, and the sweep must continue
            return failed(point, f"{type(error).__name__}: {error}")

    def _simulated(self, point: Point) -> RunResult:
        scenario = Scenario.model_validate(point.scenario)
        try:
            priced = scenario.priced(whole=scenario.deployment)
            priced.check_site(steps=self.full)
        except UserError as error:
            return failed(point, str(error), refused=error)
        requests, metrics = priced.measured(scenario.slo, self.full)
        trust = priced.trust()
        values = {
            "status": "complete",
            **metric_values(metrics),
            "calibration_id": priced.calibration,
            "trust": trust.level,
            "trust_reason": trust.reason,
            "gpus": priced.gpus,
            "kv_blocks": priced.num_blocks,
        }
        if self.bands and priced.has_bands:
            (_, fast), (_, slow) = (end.measured(scenario.slo) for end in priced.ends())
            values |= band_values(metrics, fast, slow)
        return RunResult(point, values, _parquet(requests) if self.requests else None)


def _parquet(requests: pa.Table) -> bytes:
    content = BytesIO()
    pq.write_table(requests, content, compression="zstd")
    return content.getvalue()
