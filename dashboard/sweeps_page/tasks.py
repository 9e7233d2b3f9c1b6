"""The job of a sweep that a user starts on the page, and the check of what it may contain.

A sweep's file may name traces, calibrations and users' own code, which are paths. A sweep of the page may name only
bundled things; the page adds the path of an uploaded trace itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from tokentwin.dashboard.deployment_text import check_bundled
from tokentwin.planning.deployments import overridden
from tokentwin.planning.jobs.files import write_json
from tokentwin.planning.progress import Tell
from tokentwin.planning.sweep.executors import find_executor
from tokentwin.planning.sweep.settings import read_sweep
from tokentwin.planning.sweep.sweep import Sweep
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.errors import UserError
from tokentwin.sim.router import ROUTERS

SWEEP = "tokentwin.dashboard.sweeps_page.tasks:sweep"
DATASET = "sweep"  # folder of the dataset in the job's directory
UNDER_WAY = f".{DATASET}"  # the same folder until the sweep is complete
PARTIAL = "partial.json"
MOST_RUNS = 2000
MOST_REQUESTS = 5_000_000  # requests of all runs
RUN_LIMIT_S = 600.0
_PATHS = ("trace", "path")  # fields of a workload that name a file


def sweep(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Simulate the sweep `settings["sweep"]` into the folder `DATASET` of `out`, and return the numbers of its runs.

    A cancelled sweep is continued where it ended. Its dataset has a hidden name until it is complete; `PARTIAL` says
    how much of it there is, twenty times in all.
    """
    begun = read_sweep(settings["sweep"])
    limit_s = min(begun.run_limit_s or RUN_LIMIT_S, RUN_LIMIT_S)
    hidden = out / UNDER_WAY
    seen = 0

    def tell_part(stage: str, share: float) -> None:
        nonlocal seen
        if int(20 * share) > seen:
            seen = int(20 * share)
            write_json(out / PARTIAL, stage)
        tell(stage, share)

    done = Sweep.from_settings(begun).run(hidden, find_executor("process", None, limit_s), resume=True, tell=tell_part)
    hidden.rename(out / DATASET)
    return {"made": done.made + done.kept, "failed": done.failed}


def check_sweep(data: Mapping[str, Any], trace: Path | None = None, policy: str = "") -> int:
    """Return the number of runs of a sweep. Raises UserError if it is invalid, too large, or names what is not bundled.

    `trace` and `policy`, as `path.py:Class`, are the only files that it may name.
    """
    base = data.get("base")
    if isinstance(base, Mapping) and not isinstance(base.get("deployment"), Mapping):
        raise UserError("sweep.base.deployment", base.get("deployment"), "must be a mapping of settings on this page")
    settings = read_sweep(data)
    runs, requests = 0, 0.0
    for overrides, _ in islice(settings.variations(), MOST_RUNS + 1):
        config = overridden(settings.base, overrides)
        _check_run(config, trace, policy)
        runs += 1
        requests += _requests(config["workload"])
    if runs > MOST_RUNS:
        raise UserError("sweep", "its runs", f"are more than {MOST_RUNS:,}; vary less, or use `tokentwin sweep`")
    if requests > MOST_REQUESTS:
        remedy = f"are too many in all; {MOST_REQUESTS:,} are allowed here, and `tokentwin sweep` has no limit"
        raise UserError("sweep", f"{requests:,.0f} requests", remedy)
    return runs


def _check_run(config: Mapping[str, Any], trace: Path | None, policy: str) -> None:
    workload = config.get("workload")
    if not isinstance(workload, Mapping):
        raise UserError("sweep.base.workload", workload, "must be a mapping, as for `tokentwin trace synth`")
    if config.get("calibration") is not None:
        raise UserError("sweep.base.calibration", config["calibration"], "is a path; name a gpu on this page")
    if trace is None or workload.get("trace") != str(trace):
        _check_no_path("sweep.base.workload", workload)
    router = config.get("router")
    name = router.get("name") if isinstance(router, Mapping) else router
    if name is not None and name not in ROUTERS:
        raise UserError("sweep.base.router", name, f"must be one of {', '.join(ROUTERS)} on this page")
    deployment: Deployment | None = None
    with suppress(UserError):  # the row of this run then states the error
        deployment = parse(Deployment, config["deployment"], where="sweep.base.deployment")
    if deployment is not None:
        own = policy and deployment.policy == policy
        check_bundled(deployment.model_copy(update={"policy": "vllm"}) if own else deployment)


def _check_no_path(where: str, node: Any) -> None:
    for name, value in node.items() if isinstance(node, Mapping) else ():
        if name in _PATHS:
            raise UserError(f"{where}.{name}", value, "is a path, which this page does not allow; upload the trace")
        _check_no_path(f"{where}.{name}", value)


def _requests(workload: Mapping[str, Any]) -> float:
    """Return about how many requests a run has; 0 if the workload is invalid, or a trace without a limit."""
    with suppress(TypeError, ValueError, AttributeError):
        if (requests := workload.get("requests") or workload.get("limit")) is not None:
            return float(requests)
        arrivals = workload.get("arrivals") or {}
        return float(workload.get("duration_s") or 0) * float(arrivals.get("rate") or arrivals.get("end_rate") or 1)
    return 0.0
