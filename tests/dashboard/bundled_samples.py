"""Makes what pages open on, so that none is ever empty (`dashboard/samples`).

`python -m tests.dashboard.bundled_samples` makes the bundled run, and the answers to what pages ask before anything is
changed. With DEMO_DIR [COMPARED_DIR] it condenses what `tokentwin demo` wrote into the first: the report, the
calibration, and the recordings without which requests were in which step; and what `tokentwin compare --engine` wrote
into the second. With `--on-vllm DEMO_DIR COMPARED_DIR` it condenses the same on vLLM.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tokentwin.calibration.validation.report import REPORT, RESIDUALS, load_report
from tokentwin.dashboard.bundled import (
    ANSWERS,
    DEMO,
    DEMO_ON_VLLM,
    PAIR,
    PAIR_ON_VLLM,
    RUN_GPU,
    RUN_SAMPLE,
    bundled_pair,
    bundled_pair_on_vllm,
    portable,
    sample_diagnosis,
)  # fmt: skip
from tokentwin.dashboard.plan_page.inputs import plan_request
from tokentwin.dashboard.policy_lab_page import inputs as lab_inputs
from tokentwin.dashboard.shapes import mixes
from tokentwin.planning.compare.request import CompareRecordingsRequest, CompareRequest, Side
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.request import Timing
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.schema import COLUMNS_FILE, RUNS, STEPS

_OF_CALIBRATION = ("calibration.json", "steps.parquet")


def comparison_request() -> CompareRequest:
    """Return what the Policy lab asks before any setting is changed."""
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
    """Return what the Policy lab asks about the bundled recordings before any setting is changed."""
    a, b = bundled_pair().values()
    timing = Timing(calibration=str((DEMO / "calibration").resolve()))
    return CompareRecordingsRequest(
        a=a.resolve(), b=b.resolve(), stamps=(0, 0), timing=timing, bounds=lab_inputs.BOUNDS
    )


def recordings_on_vllm_request() -> CompareRecordingsRequest:
    """Return what the Policy lab asks about the same change on vLLM."""
    a, b = bundled_pair_on_vllm().values()
    return CompareRecordingsRequest(a=a.resolve(), b=b.resolve(), stamps=(0, 0), bounds=lab_inputs.BOUNDS)


def _simulate_sample() -> None:
    """Simulate bursty chat traffic on an H100."""
    from tokentwin.planning.priced_scenario import price_scenario
    from tokentwin.planning.simulation import recorded
    from tokentwin.serving.deployments.config import Deployment
    from tokentwin.traces.synth import parse_spec, synthesise

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
    (RUN_SAMPLE / COLUMNS_FILE).unlink()


def _answers() -> Iterator[dict[str, Any]]:
    from tokentwin.dashboard.plan_page.tasks import plan
    from tokentwin.dashboard.policy_lab_page.tasks import recorded, simulated
    from tokentwin.planning.diagnose.recorded_run import diagnosis

    for task, request in (
        (plan, plan_request()),
        (simulated, comparison_request()),
        (recorded, recordings_request()),
        (recorded, recordings_on_vllm_request()),
        (diagnosis, sample_diagnosis()),
    ):
        settings = request.as_json()
        with tempfile.TemporaryDirectory() as folder:
            answer = task(settings, Path(folder), lambda stage, share: print(f"{100 * share:3.0f} % {stage}"))
        yield {"settings": portable(settings), "answer": portable(answer)}


def condense(demo: Path, out: Path) -> None:
    """Write to `out`, which is replaced, what pages show of the demo in `demo`.

    Raises UserError when `demo` holds none, or a damaged one.
    """
    load_report(demo / "validation")
    shutil.rmtree(out, ignore_errors=True)
    (out / "validation").mkdir(parents=True)
    for name in (REPORT, RESIDUALS):
        shutil.copyfile(demo / "validation" / name, out / "validation" / name)
    (out / "calibration").mkdir()
    for name in _OF_CALIBRATION:
        shutil.copyfile(demo / "calibration" / name, out / "calibration" / name)
    for source in (*sorted(demo.glob("real-*")), demo / "validation" / "simulated"):
        _copy(Recording.load(source), out / source.relative_to(demo))


def condense_pair(compared: Path, out: Path) -> None:
    """Write to `out`, which is replaced, the recordings of `compared` that `tokentwin compare --engine --out` made.

    Raises UserError when a recording is damaged.
    """
    recordings = [Recording.load(path) for side in "ab" for path in sorted((compared / side).glob("run-*"))]
    shutil.rmtree(out, ignore_errors=True)
    for recording in recordings:
        _copy(recording, out / recording.path.relative_to(compared), recording.workload())


def _copy(recording: Recording, out: Path, workload: Workload | None = None) -> None:
    run = {c.name: recording.run[c.name] for c in RUNS if c.name not in ("status", "duration_ns")}
    with RecordingWriter(out, run, keep=("token_times_ns",), workload=workload) as writer:
        writer.add_requests(recording.requests.to_pydict())
        writer.add_steps(recording.table("steps", [column.name for column in STEPS]).to_pydict())
        writer.close(recording.run["status"], recording.run["duration_ns"])
    (out / COLUMNS_FILE).unlink()  # which is the same for every recording


if __name__ == "__main__":
    if not sys.argv[1:]:
        _simulate_sample()
        write_json(ANSWERS, list(_answers()))
    elif sys.argv[1] == "--on-vllm":
        condense(Path(sys.argv[2]), DEMO_ON_VLLM)
        condense_pair(Path(sys.argv[3]), PAIR_ON_VLLM)
    else:
        condense(Path(sys.argv[1]), DEMO)
        if sys.argv[2:]:
            condense_pair(Path(sys.argv[2]), PAIR)
        print(json.dumps({at.name: sum(path.stat().st_size for path in at.rglob("*.*")) for at in (DEMO, PAIR)}))
