"""The diagnosis of a recorded run, for `tokentwin diagnose` and as the dashboard's job.

First the run is simulated as it was. If the result differs from the recording, the counterfactuals are about another
run. A simulated run must be repeated to the nanosecond, since the simulator is deterministic. A real run is repeated
only as exactly as the simulator predicts it, and a run behind a real API server only as exactly as the server is known.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.calibration.front_door_fit import front_door_of
from tokentwin.planning.deployments import stated_deployment
from tokentwin.planning.diagnose import diagnosis as search
from tokentwin.planning.diagnose.document import DiagnosisDocument, TrustSection
from tokentwin.planning.diagnose.evidence import Evidence
from tokentwin.planning.diagnose.request import DiagnoseRequest
from tokentwin.planning.diagnose.symptoms import symptoms
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.planning.progress import Tell, quiet
from tokentwin.planning.repricing import Source
from tokentwin.serving.answers.figures import shown_change
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import check_slo
from tokentwin.serving.version import __version__
from tokentwin.traces.recording import Recording, notes_of

_FAR = 0.25  # share of a real run's p99; if the error is larger, counterfactuals are about another run
_SAME = ("status", "replica", "scheduled_ns", "first_token_ns", "finish_ns")


def another_run(recording: Recording, calibration: str, again: pa.Table, diagnosis: DiagnosisDocument) -> str | None:
    """Return a warning if the counterfactuals are not about the recorded run; None if they are.

    `calibration` is the id of the calibration that timed the steps in `diagnosis`. `again` is the dataset `requests` of
    the run simulated as it was.
    """
    fitted = recording.filled("requests", ["received_ns"]) and notes_of(recording.run).get("front_door") is None
    if recording.run["clock"] == "virtual" and not fitted:
        return _simulated(recording, again, calibration)
    error = diagnosis.twin_error
    if error is None or abs(error) <= _FAR:
        return None
    what = "share of requests that do not finish" if diagnosis.sheds else "p99"
    off = shown_change(100 * error, 0)
    return f"the simulated {what} differs from the recorded one by {off}, so these causes are those of the twin"


def _simulated(recording: Recording, again: pa.Table, calibration: str) -> str | None:
    before = recording.table("requests", ["request_id", *_SAME]).sort_by("request_id")
    after = again.select(["request_id", *_SAME]).sort_by("request_id")
    if before["request_id"].combine_chunks() != after["request_id"].combine_chunks():
        differing = before.num_rows
    else:
        differing = int(np.logical_or.reduce([_differs(before[name], after[name]) for name in _SAME]).sum())
    if not differing:
        return None
    return (
        f"simulated again, {differing:,} of {before.num_rows:,} requests have other times than in the recording, "
        f"because {_why(recording, calibration)}; these are causes in another run"
    )


def _differs(before: pa.ChunkedArray, after: pa.ChunkedArray) -> np.ndarray:
    same = pc.fill_null(pc.equal(before, after), False)
    neither = pc.and_(pc.is_null(before), pc.is_null(after))
    return ~pc.or_(same, neither).to_numpy()


def _why(recording: Recording, calibration: str) -> str:
    run = recording.run
    if run["calibration"] != calibration:
        recorded = run["calibration"] or "an unknown cost model"
        return f"the recorded steps were timed by {recorded}, and here by {calibration}"
    if run["version"] != __version__:
        return f"tokentwin {run['version']} made the recording, and this is version {__version__}"
    return "its router, policy or cost model has changed"


DIAGNOSIS = "tokentwin.planning.diagnose.recorded_run:diagnosis"
DIAGNOSIS_FILE = "diagnosis.json"  # beside a recording, where the recording's report looks for it


def diagnose(request: DiagnoseRequest, tell: Tell = quiet) -> DiagnosisDocument:
    """Diagnose a recorded run: its symptoms and, with a calibration or a GPU to time its steps, the gain of each lift.

    Raises UserError for a run that cannot be read or simulated.
    """
    tell("reading the recording", 0.0)
    recording = Recording.load(request.run)
    if not recording.run["deployment"]:
        remedy = "was recorded by clients and has no deployment; simulate it with -c and -d, and diagnose that run"
        raise UserError("run", request.run, remedy)
    peak = find_gpu(request.peak) if request.peak else None
    evidence = Evidence(recording, check_slo(request.bounds), peak)
    if request.calibration is None and request.gpu is None:
        document = search.diagnose(symptoms(evidence), evidence.seen, judged=request.metric)
        return document.model_copy(update={"steps": evidence.has_steps, "inputs": request.as_json()})
    if recording.run["status"] != "complete":
        remedy = f"is {recording.run['status']}, so it cannot be simulated; leave -c and --gpu out"
        raise UserError("run", request.run, remedy)
    deployment = stated_deployment(request.run)
    replicas = None if deployment.fleet is not None else recording.run["replicas"] or 1
    scenario = price_scenario(
        recording.workload(), request.calibration, request.gpu, deployment, replicas, request.router
    )
    scenario = _behind_its_front_door(scenario, recording)
    evidence.explain_by(scenario)
    source = Source(request.calibration, request.gpu)
    another = partial(another_run, recording, scenario.calibration)
    document = search.diagnose(symptoms(evidence), evidence.seen, scenario, request.metric, tell, source, another)
    trust = TrustSection(**scenario.trust()._asdict())
    about = {"steps": evidence.has_steps, "inputs": request.as_json(), "run": request.run, **source._asdict()}
    about["bounds"] = request.bounds
    return document.model_copy(update={**about, "trust": trust})


def _behind_its_front_door(scenario: PricedScenario, recording: Recording) -> PricedScenario:
    """Return the scenario behind the recorded front door; requests arrive when the HTTP server received them.

    In a server's recording, the arrival of a request is the time when the engine got it.
    """
    scenario = replace(scenario, front_door=front_door_of(recording))
    if scenario.front_door is None or notes_of(recording.run).get("front_door") is not None:
        return scenario
    ids, received = (recording.requests[name].to_pylist() for name in ("request_id", "received_ns"))
    came = {id: received_ns for id, received_ns in zip(ids, received, strict=True) if received_ns is not None}
    moved = [
        replace(request, arrival_ns=came.get(request.id, request.arrival_ns)) for request in scenario.workload.requests
    ]
    moved.sort(key=lambda request: (request.arrival_ns, request.id))
    return replace(scenario, workload=replace(scenario.workload, requests=moved))


def diagnosis(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Run the task of a `DiagnoseRequest`; see `DiagnosisDocument`."""
    return diagnose(parse(DiagnoseRequest, settings, where="diagnosis"), tell).as_json()
