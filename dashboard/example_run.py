"""The run that the Run page opens on, with its diagnosis, so that it shows what helps before anything was recorded.

`python -m dashboard.example_run` makes both anew: bursty chat traffic on an H100.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from dashboard.bundled import RUN_SAMPLE
from serving.config import Deployment
from tokentwin.costs import priced
from tokentwin.diagnosing import diagnosis
from tokentwin.fleets import asked_fleet
from tokentwin.jobs.files import write_json
from tokentwin.simulating import simulated_run
from traces.synth import parse_spec, synthesise

_FILE = RUN_SAMPLE / "diagnosis.json"
_GPU = "H100"
_DEPLOYMENT = {"model": "Llama-3.1-8B", "device": "cuda", "gpu_memory_utilization": 0.9}
_TRAFFIC = {
    "requests": 400,
    "seed": 7,
    "arrivals": {"kind": "gamma", "rate": 25, "cv": 2.5},
    "prompt": {"kind": "lognormal", "mean": 900, "sigma": 0.9, "max": 6000},
    "output": {"kind": "lognormal", "mean": 180, "sigma": 0.7, "max": 1000},
}
_OF_THE_PLACE = ("run", "stamp")  # of a diagnosis' settings: where the recording lies, and since when


def example_diagnosis(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The bundled answer, if the diagnosis that is asked for is the one of the bundled run."""
    known = _example()
    same = Path(settings["run"]) == RUN_SAMPLE.resolve() and _portable(settings) == known["settings"]
    return known["answer"] if same else None


def example_settings() -> dict[str, Any]:
    """What the Run page asks of the bundled run before anything is changed."""
    asked = {"calibration": None, "gpu": _GPU, "router": "", "judged": None, "slo": ""}
    return {"run": str(RUN_SAMPLE.resolve()), **asked}


def _portable(settings: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in settings.items() if name not in _OF_THE_PLACE}


@cache
def _example() -> dict[str, Any]:
    content: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return content


def _make() -> None:
    own = priced(None, _GPU, lambda _: Deployment(**_DEPLOYMENT))
    workload = replace(synthesise(parse_spec(_TRAFFIC)), name="chat")
    simulated_run(RUN_SAMPLE, workload, own, asked_fleet(None, None, None), [own], {}, overwrite=True)
    asked = example_settings()
    answer = diagnosis(asked, RUN_SAMPLE, lambda stage, share: print(f"{100 * share:3.0f} % {stage}"))
    write_json(_FILE, {"settings": _portable(asked), "answer": answer})


if __name__ == "__main__":
    _make()
