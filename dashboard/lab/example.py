"""The comparison that the Policy lab opens on, so that it is never empty.

`python -m dashboard.lab.example` makes it anew from the inputs that the page begins with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dashboard.lab.inputs import BOUNDS, GPU, MODEL, POLICY, RATE, SECONDS, SEEDS, settings_of
from dashboard.lab.mixes import mixes
from dashboard.lab.request import LabRequest, Side, Timing
from dashboard.lab.tasks import simulated
from tokentwin.jobs.files import write_json

_FILE = Path(__file__).with_name("example.json")


def example_request() -> LabRequest:
    """What the page asks before anything is changed."""
    a, b = (Side(settings={"policy": POLICY[side]}) for side in "ab")
    return LabRequest(
        a=a,
        b=b,
        traffic=next(iter(mixes().values())).traffic(RATE, SECONDS),
        seeds=SEEDS,
        timing=Timing(gpu=GPU, model=MODEL),
        bounds=BOUNDS,
    )


def example_answer(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The bundled answer, if it is one to `settings`."""
    return _example()["answer"] if settings == _example()["settings"] else None


@cache
def _example() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    asked = settings_of(example_request())
    with tempfile.TemporaryDirectory() as folder:
        found = simulated(asked, Path(folder), lambda stage, share: print(f"{100 * share:3.0f} % {stage}"))
    write_json(_FILE, {"settings": asked, "answer": found})
