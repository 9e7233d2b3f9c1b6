"""The comparisons that the Policy lab opens on, so that it is never empty: one simulated, one of bundled recordings.

`python -m dashboard.policy_lab_page.example` makes both anew from the inputs that the page begins with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dashboard.bundled import DEMO, SAMPLES, bundled_pair
from dashboard.policy_lab_page.inputs import BOUNDS, GPU, MODEL, POLICY, RATE, SECONDS, SEEDS
from dashboard.policy_lab_page.mixes import mixes
from dashboard.policy_lab_page.tasks import recorded, simulated
from planning.compare.request import CompareRecordingsRequest, CompareRequest, Side
from planning.jobs.files import write_json
from planning.timing import Timing

_FILE = Path(__file__).with_name("example.json")


def example_request() -> CompareRequest:
    """What the page asks before anything is changed."""
    a, b = (Side(settings={"policy": POLICY[side]}) for side in "ab")
    return CompareRequest(
        a=a,
        b=b,
        traffic=next(iter(mixes().values())).traffic(RATE, SECONDS),
        seeds=SEEDS,
        timing=Timing(gpu=GPU, model=MODEL),
        bounds=BOUNDS,
    )


def recorded_request() -> CompareRecordingsRequest:
    """What the page asks of the bundled recordings before anything is changed."""
    a, b = bundled_pair().values()
    timing = Timing(calibration=str((DEMO / "calibration").resolve()))
    return CompareRecordingsRequest(a=a.resolve(), b=b.resolve(), stamps=(0, 0), timing=timing, bounds=BOUNDS)


def example_answer(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The bundled answer, if there is one to `settings`."""
    portable = _portable(settings)
    return next((known["answer"] for known in _examples() if known["settings"] == portable), None)


def _portable(document: Mapping[str, Any]) -> Any:
    """The document with what is bundled named alike wherever tokentwin is installed."""
    return json.loads(json.dumps(document).replace(json.dumps(str(SAMPLES.resolve()))[:-1], '"samples'))


@cache
def _examples() -> list[dict[str, Any]]:
    content: list[dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def _make() -> None:
    made = []
    for task, request in ((simulated, example_request()), (recorded, recorded_request())):
        settings = request.as_json()
        with tempfile.TemporaryDirectory() as folder:
            answer = task(settings, Path(folder), lambda stage, share: print(f"{100 * share:3.0f} % {stage}"))
        made.append({"settings": _portable(settings), "answer": _portable(answer)})
    write_json(_FILE, made)


if __name__ == "__main__":
    _make()
