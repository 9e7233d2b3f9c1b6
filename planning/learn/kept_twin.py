"""A twin that `tokentwin learn` wrote, read from its folder."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokentwin.calibration.steps.interval import Factors
from tokentwin.planning.deployments import stated_deployment
from tokentwin.planning.learn.document import FILE as LEARNT
from tokentwin.planning.learn.document import LearntServer
from tokentwin.planning.learn.step_times import load_times
from tokentwin.planning.learn.twin import Setting, Twin
from tokentwin.serving.data_file import parse_json
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.front_door import FrontDoor
from tokentwin.traces.recording_writer import DEPLOYMENT

_OWN = 0.04  # change of step times that is not called drift, beyond the twin's interval


@dataclass(frozen=True)
class KeptTwin:
    """A twin read from its folder, with the document of what was learnt."""

    twin: Twin
    learnt: LearntServer

    @property
    def unchanged(self) -> Factors:
        """Factors of step times between which they are not called changed: the 90 % interval, and a little more."""
        return self.learnt.low_factor / (1 + _OWN), self.learnt.high_factor * (1 + _OWN)

    @classmethod
    def load(cls, folder: Path) -> KeptTwin:
        """Read a folder of `tokentwin learn`. Raises UserError if it holds no whole twin."""
        try:
            learnt = LearntServer.read(parse_json((folder / LEARNT).read_bytes()))
        except OSError as error:
            raise UserError("twin", str(folder), f"holds no {LEARNT} ({reason(error)}); make one with learn") from None
        except ValueError:
            raise UserError("twin", str(folder / LEARNT), "is damaged; learn again") from None
        times = load_times(folder)
        deployment = stated_deployment(folder / DEPLOYMENT)
        return cls(Twin(deployment, Setting.of(deployment), times, FrontDoor.load(folder)), learnt)
