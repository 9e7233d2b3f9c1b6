"""The diagnosis of a recorded run, for `tokentwin diagnose` and as the dashboard's job."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokentwin.progress import Tell, untold
from tokentwin.scenarios import priced_scenario

if TYPE_CHECKING:
    from calibration.diagnosis import Diagnosis
    from calibration.symptoms import Evidence

DIAGNOSIS = "tokentwin.diagnosing:diagnosis"


def diagnosed(
    run: str | Path,
    calibration: str | None = None,
    gpu: str | None = None,
    router: str = "",
    judged: str | None = None,
    slo: str = "",
    tell: Tell = untold,
) -> tuple[Evidence, Diagnosis]:
    """What the recording `run` shows and, with a calibration or a GPU, what lifting each constraint would buy.

    `slo` is as `parse_slo` takes it, `judged` the latency to explain. Raises UserError for what cannot be simulated.
    """
    from calibration.diagnosis import diagnose
    from calibration.simulated_again import another_run
    from calibration.symptoms import Evidence, symptoms
    from serving.errors import UserError
    from traces.recording import Recording
    from traces.run_metrics import parse_slo

    recording = Recording.load(run)
    evidence = Evidence(recording, parse_slo(slo) if slo else {})
    if calibration is None and gpu is None:
        return evidence, diagnose(symptoms(evidence), evidence.metrics, judged=judged)
    if recording.run["status"] != "complete":
        raise UserError(
            "run", str(run), f"is {recording.run['status']} and cannot be simulated; leave -c and --gpu out"
        )
    deployment = evidence.as_run()
    replicas = None if deployment.fleet is not None else recording.run["replicas"] or 1
    scenario, price = priced_scenario(recording.workload(), calibration, gpu, lambda _: deployment, replicas, router)
    found = diagnose(symptoms(evidence), evidence.metrics, scenario, judged, tell)
    warning = another_run(recording, found, price.calibration)
    return evidence, replace(found, standing=scenario.standing(), warning=warning)


def diagnosis(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """The task: `run`, `calibration` (directories), `gpu`, `router`, `judged`, `slo`; see `Diagnosis.as_dict`."""
    asked = {name: settings[name] for name in ("run", "calibration", "gpu", "router", "judged", "slo")}
    evidence, found = diagnosed(**asked, tell=tell)
    return diagnosis_document(evidence, found)


def diagnosis_document(evidence: Evidence, found: Diagnosis) -> dict[str, Any]:
    """`Diagnosis.as_dict`, and whether there were `steps` to look at."""
    return {"steps": evidence.has_steps, **found.as_dict()}
