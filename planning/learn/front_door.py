"""The front door of a learnt twin, which every command applies that takes the twin as its calibration."""

from __future__ import annotations

from pathlib import Path

from tokentwin.planning.learn.document import FILE as LEARNT
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FILE, FrontDoor


def learnt_front_door(calibration: str | None) -> FrontDoor | None:
    """Return the front door in the folder `calibration` if `tokentwin learn` wrote it; None for another calibration.

    Raises UserError if the folder of a twin has no whole front door.
    """
    if calibration is None or not (Path(calibration) / LEARNT).is_file():
        return None
    path = Path(calibration) / FILE
    try:
        return FrontDoor.load(path).model_copy(update={"learnt": True})
    except UserError:
        raise UserError("calibration", str(path), "is missing or damaged; learn the server again") from None
