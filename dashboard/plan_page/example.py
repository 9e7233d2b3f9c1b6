"""The answer that the Plan and Frontier pages open on, so that neither is ever empty.

`python -m dashboard.plan_page.example` makes it anew from the inputs that the Plan page begins with.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dashboard.plan_page.inputs import GPUS, MODEL, RATE, SIZES, SLOS
from dashboard.plan_page.tasks import plan
from dashboard.shapes import shapes
from planning.jobs.files import write_json
from planning.plan.document import PlanDocument
from planning.plan.request import PlanRequest
from planning.traffic import WHOLE_S

_FILE = Path(__file__).with_name("example_plan.json")


def example_request() -> PlanRequest:
    """What the Plan page asks before anything is changed."""
    return PlanRequest(
        model=MODEL,
        gpus=GPUS,
        tensor_parallel_sizes=tuple(map(int, SIZES)),
        traffic=next(iter(shapes().values())).traffic(RATE),
        slos=SLOS,
        window_s=WHOLE_S,
    )


def example_plan(settings: Mapping[str, Any]) -> PlanDocument | None:
    """The bundled answer, if it is one to `settings`."""
    return PlanDocument.read(example()["answer"]) if settings == example()["settings"] else None


@cache
def example() -> dict[str, Any]:
    """What was asked, and what came of it."""
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


if __name__ == "__main__":
    settings = example_request().as_json()
    with tempfile.TemporaryDirectory() as folder:
        found = plan(settings, Path(folder), lambda stage, share: print(f"{100 * share:3.0f} % {stage}"))
    write_json(_FILE, {"settings": settings, "answer": found})
