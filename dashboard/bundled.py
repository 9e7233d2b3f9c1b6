"""The results that pages open on where there are none of one's own: `samples/demo`, `/compared`, `/external`, `/run`.

`samples/answers.json` has the answers to what they ask before anything is changed.

`python -m dashboard.bundled DEMO_DIR [COMPARED_DIR]` condenses what `tokentwin demo` wrote into the first: the report,
the calibration, and the recordings without which requests were in which step; and what `tokentwin compare --engine`
wrote into the second. The others are written by `tokentwin validate external` and `dashboard.examples`.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from calibration.validation.report import REPORT, RESIDUALS, load_report
from dashboard.library import RECORDING, find
from planning.diagnose.request import DiagnoseRequest
from serving.workload import Workload
from traces.recording import Recording, RecordingWriter
from traces.schema import RUNS, STEPS

SAMPLES = Path(__file__).with_name("samples")
DEMO = SAMPLES / "demo"
PAIR = SAMPLES / "compared"
EXTERNAL_SAMPLE = SAMPLES / "external"
RUN_SAMPLE = SAMPLES / "run"
RUN_GPU = "H100"
ANSWERS = SAMPLES / "answers.json"
_OF_CALIBRATION = ("calibration.json", "steps.parquet")


def bundled_recordings() -> dict[str, Path]:
    """The bundled recordings by name: one that kernel tables timed, then those of the demo."""
    return {"bundled: chat on an H100": RUN_SAMPLE} | {
        f"bundled: {n}": path for n, path in find(DEMO, RECORDING).items()
    }


def bundled_pair() -> dict[str, Path]:
    """The real engine's recordings of two policies on the same arrivals, by name: a directory of several runs each."""
    return {f"bundled pair/{side}": PAIR / side for side in "ab"}


def sample_diagnosis(run: Path = RUN_SAMPLE) -> DiagnoseRequest:
    """What the Run page asks of the bundled run before anything is changed, asked of `run`."""
    return DiagnoseRequest(run=str(run.resolve()), gpu=RUN_GPU)


def bundled_answer(settings: Mapping[str, Any]) -> Any:
    """The bundled answer to the settings of a job; None if there is none."""
    asked = portable(settings)
    return next((known["answer"] for known in _answers() if known["settings"] == asked), None)


def portable(document: Mapping[str, Any]) -> Any:
    """The document with what is bundled named alike, wherever and whenever tokentwin was installed."""
    named = json.loads(json.dumps(document).replace(json.dumps(str(SAMPLES.resolve()))[:-1], '"samples'))
    return {name: value for name, value in named.items() if name != "stamp"}


@cache
def _answers() -> Any:
    return json.loads(ANSWERS.read_text(encoding="utf-8"))


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
    found = [Recording.load(path) for side in "ab" for path in sorted((compared / side).glob("run-*"))]
    shutil.rmtree(out, ignore_errors=True)
    for recording in found:
        _copy(recording, out / recording.path.relative_to(compared), recording.workload())


def _copy(recording: Recording, out: Path, workload: Workload | None = None) -> None:
    run = {c.name: recording.run[c.name] for c in RUNS if c.name not in ("status", "duration_ns")}
    with RecordingWriter(out, run, keep=("token_times_ns",), workload=workload) as writer:
        writer.add_requests(recording.requests.to_pydict())
        writer.add_steps(recording.table("steps", [column.name for column in STEPS]).to_pydict())
        writer.close(recording.run["status"], recording.run["duration_ns"])


if __name__ == "__main__":
    condense(Path(sys.argv[1]), DEMO)
    if sys.argv[2:]:
        condense_pair(Path(sys.argv[2]), PAIR)
    print(json.dumps({at.name: sum(path.stat().st_size for path in at.rglob("*.*")) for at in (DEMO, PAIR)}))
