"""Runs that users measured on their own servers, which join the evidence from published runs.

The runs are kept as normal equations (`evidence.Taught`). They change the prediction for a deployment that shares the
engine, the GPU, the precision or the model with a measured server, and most of all the prediction for such a server
itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from tokentwin.calibration.steps.calibration_file import checked, read, save
from tokentwin.calibration.steps.evidence import Evidence, Taught, bundled_evidence
from tokentwin.serving.answers.report import BAND, CHANGE, METRIC, NUMBER, Column, Line, Table
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError

FILE = "measured.json"
_FORMAT = 1


@dataclass(frozen=True)
class OwnFigure:
    """A measured mean latency in milliseconds, beside its predictions.

    Attributes:
        blind: prediction from published runs only
        others: prediction that also uses the other runs of this calibration; None if there are no others
        low, high: 90 % interval of `others`, or of `blind`
    """

    run: str
    figure: str
    measured: float
    blind: float
    low: float
    high: float
    others: float | None = None


@dataclass(frozen=True)
class MeasuredRuns:
    """Measured runs, ready to join the evidence.

    Attributes:
        gpu, deployment: name of the GPU, and the deployment as JSON, of the first run; a simulation uses them where the
            user states none
        taught: normal equations of the runs, by origin, as `Taught.as_dict` returns them
        figures: each measured figure with its predictions
        source, created: the measured files, and the date of the calibration
    """

    gpu: str
    deployment: str
    taught: tuple[Mapping[str, Any], ...]
    figures: tuple[OwnFigure, ...]
    source: str
    created: str
    format: int = _FORMAT

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def id(self) -> str:
        """A hash of everything that a prediction depends on, as twelve hexadecimal digits."""
        return blake2b(json.dumps(list(map(dict, self.taught))).encode(), digest_size=6).hexdigest()

    @property
    def learnt_as(self) -> Deployment:
        """The parsed `deployment`."""
        return parse(Deployment, json.loads(self.deployment), where="calibration.deployment")

    @property
    def equations(self) -> Sequence[Taught]:
        """The normal equations of each origin; raise KeyError, TypeError or ValueError if they are damaged."""
        return [Taught.read(entry) for entry in self.taught]

    @cached_property
    def evidence(self) -> Evidence:
        """The bundled evidence with these runs."""
        return bundled_evidence().joined(self.equations)

    def report(self) -> Iterator[Line | Table]:
        """Return the errors of predictions without these runs, and of each run's prediction from the others."""
        yield Line(f"calibration {self.id}: {self.source} join the published runs")
        yield Table(
            [
                Column("run"),
                Column("figure", METRIC),
                Column("measured, ms", NUMBER),
                Column("without your runs", CHANGE),
                Column("from your other runs", CHANGE),
                Column("90 % interval, ms", BAND),
            ],
            [
                (
                    figure.run,
                    figure.figure.removesuffix(".mean"),
                    figure.measured,
                    _error_pct(figure.blind, figure.measured),
                    _error_pct(figure.others, figure.measured),
                    (figure.low, figure.high),
                )
                for figure in self.figures
            ],
            "errors of predicted means",
        )

    def save(self, directory: Path) -> None:
        """Write `measured.json` into `directory`; a failed write leaves no partial file."""
        save(self, directory / FILE)

    @classmethod
    def load(cls, path: Path) -> MeasuredRuns:
        """Read the file `path`; raise UserError if it is damaged or has another format."""
        loaded = checked(cls, read(path, _FORMAT), str(path))
        try:
            _ = loaded.learnt_as, loaded.equations
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("calibration", str(path), f"is damaged ({error}); calibrate again") from None
        return loaded


def _error_pct(predicted: float | None, measured: float) -> float | None:
    return None if predicted is None else 100 * (predicted / measured - 1)
