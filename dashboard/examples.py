"""The questions that pages open on, so that none is ever empty; their answers are bundled (`samples/answers.json`).

`python -m dashboard.examples` makes the bundled run and all the answers anew.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from dashboard.bundled import ANSWERS, DEMO, RUN_GPU, RUN_SAMPLE, bundled_pair, portable, sample_diagnosis
from dashboard.plan_page.inputs import plan_request
from dashboard.policy_lab_page import inputs as lab_inputs
from dashboard.shapes import mixes
from planning.compare.request import CompareRecordingsRequest, CompareRequest, Side
from planning.jobs.files import write_json
from planning.request import Timing


def comparison_request() -> CompareRequest:
    """What the Policy lab asks before anything is changed."""
    a, b = (Side(settings={"policy": lab_inputs.POLICY[side]}) for side in "ab")
    return CompareRequest(
        a=a,
        b=b,
        traffic=next(iter(mixes().values())).traffic(lab_inputs.RATE, lab_inputs.SECONDS),
        seeds=lab_inputs.SEEDS,
        timing=Timing(gpu=lab_inputs.GPU, model=lab_inputs.MODEL),
        bounds=lab_inputs.BOUNDS,
    )


def recordings_request() -> CompareRecordingsRequest:
    """What the Policy lab asks of the bundled recordings before anything is changed."""
    a, b = bundled_pair().values()
    timing = Timing(calibration=str((DEMO / "calibration").resolve()))
    return CompareRecordingsRequest(
        a=a.resolve(), b=b.resolve(), stamps=(0, 0), timing=timing, bounds=lab_inputs.BOUNDS
    )


def _simulate_sample() -> None:
    """Bursty chat traffic on an H100."""
    from planning.priced_scenario import price_scenario
    from planning.simulation import recorded
    from serving.deployments.config import Deployment
    from traces.synth import parse_spec, synthesise

    traffic = {
        "requests": 400,
        "seed": 7,
        "arrivals": {"kind": "gamma", "rate": 25, "cv": 2.5},
        "prompt": {"kind": "lognormal", "mean": 900, "sigma": 0.9, "max": 6000},
        "output": {"kind": "lognormal", "mean": 180, "sigma": 0.7, "max": 1000},
    }
    deployment = Deployment(model="Llama-3.1-8B", device="cuda", gpu_memory_utilization=0.9)
    workload = replace(synthesise(parse_spec(traffic)), name="chat")
    recorded(price_scenario(workload, None, RUN_GPU, deployment), RUN_SAMPLE, overwrite=True)


def _answers() -> Iterator[dict[str, Any]]:
    from dashboard.plan_page.tasks import plan
    from dashboard.policy_lab_page.tasks import recorded, simulated
    from planning.diagnose.recorded_run import diagnosis

    for task, request in (
        (plan, plan_request()),
        (simulated, comparison_request()),
        (recorded, recordings_request()),
        (diagnosis, sample_diagnosis()),
    ):
        settings = request.as_json()
        with tempfile.TemporaryDirectory() as folder:
            answer = task(settings, Path(folder), lambda stage, share: print(f"{100 * share:3.0f} % {stage}"))
        yield {"settings": portable(settings), "answer": portable(answer)}


if __name__ == "__main__":
    _simulate_sample()
    write_json(ANSWERS, list(_answers()))
