"""The bundled results that pages show if there are no others: `samples/demo`, `/compared`, `/external`, `/run`.

`samples/answers.json` has the answers to the questions with which the pages open. `docs/dashboard-internals.md` says
how they are made.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tokentwin.dashboard.library import RECORDING, find
from tokentwin.planning.diagnose.request import DiagnoseRequest

SAMPLES = Path(__file__).resolve().with_name("samples")
DEMO = SAMPLES / "demo"
DEMO_ON_VLLM = SAMPLES / "demo-vllm"
PAIR = SAMPLES / "compared"
PAIR_ON_VLLM = SAMPLES / "compared-vllm"
EXTERNAL_SAMPLE = SAMPLES / "external"
RUN_SAMPLE = SAMPLES / "run"
RUN_GPU = "H100"
ANSWERS = SAMPLES / "answers.json"


def bundled_recordings() -> dict[str, Path]:
    """Return the bundled recordings by name: first a run that kernel tables timed, then the runs of the demo."""
    return {"bundled: chat on an H100": RUN_SAMPLE} | {
        f"bundled: {n}": path for n, path in find(DEMO, RECORDING).items()
    }


def bundled_pair() -> dict[str, Path]:
    """Return the real engine's recordings of two policies on the same arrivals: directories of runs, by name."""
    return {f"bundled pair/{side}": PAIR / side for side in "ab"}


def bundled_pair_on_vllm() -> dict[str, Path]:
    """Return vLLM's recordings of the same two policies on the same arrivals, by name."""
    return {f"bundled pair on vLLM/{side}": PAIR_ON_VLLM / side for side in "ab"}


def sample_diagnosis(run: Path = RUN_SAMPLE) -> DiagnoseRequest:
    """Return the request for a diagnosis of `run`, by default of the bundled run as on the Run page."""
    return DiagnoseRequest(run=str(run.resolve()), gpu=RUN_GPU)


def bundled_answer(settings: Mapping[str, Any]) -> Any:
    """Return the bundled answer to the settings of a job; None if there is none."""
    asked = portable(settings)
    return next((known["answer"] for known in _answers() if known["settings"] == asked), None)


def portable(document: Mapping[str, Any]) -> Any:
    """Return the document in a form that is equal in every installation.

    Paths of bundled files begin at `samples`, and the stamp of file times is left out.
    """
    named = json.loads(json.dumps(document).replace(json.dumps(str(SAMPLES.resolve()))[:-1], '"samples'))
    return {name: value for name, value in named.items() if name != "stamp"}


@cache
def _answers() -> Any:
    return json.loads(ANSWERS.read_text(encoding="utf-8"))
