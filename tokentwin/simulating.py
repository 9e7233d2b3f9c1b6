"""A simulated run, recorded with what is known of it: what timed it, how far to trust that, its bands, its prices.

For `tokentwin simulate`, and for a fleet of a plan as the dashboard's job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tokentwin.progress import Tell, untold

if TYPE_CHECKING:
    from serving.fleet import FleetConfig
    from serving.workload import Workload
    from tokentwin.costs import Priced
    from traces.recording import Recording
    from traces.run_metrics import RunMetrics


class SimulatedRun(NamedTuple):
    """`bands` are None where they were not asked for; `standing` has the `mark` and the `reason`."""

    recording: Recording
    metrics: RunMetrics
    bands: dict[str, dict[str, tuple[float, float]]] | None
    standing: dict[str, str]


def simulated_run(
    out: str | Path,
    workload: Workload,
    own: Priced,
    fleet: FleetConfig,
    priced: Sequence[Priced],
    prices: Mapping[str, float],
    *,
    band: bool = True,
    details: bool = True,
    overwrite: bool = False,
    tell: Tell = untold,
) -> SimulatedRun:
    """Simulate `workload` on `fleet`, whose pools are `priced` one by one, and record it in `out`.

    `own` is the deployment without what its pools change, `prices` are dollars per GPU-hour that differ from the
    catalogue's, by name; `band` simulates the ends of the 90 % interval of step times, too; `details` keeps steps and
    token times. Raises UserError if `out` exists and `overwrite` is not set.
    """
    from calibration.bands import bands, run_metrics
    from sim.simulate import simulate_to
    from tokentwin.fleets import ends, priced_pools, usd_per_gpu_hour
    from traces.recording import Recording
    from traces.recording_notes import add_notes
    from traces.run_metrics import RunMetrics

    pools = priced_pools(fleet, priced)
    tell("simulating", 0.0)
    simulate_to(
        out,
        workload,
        own.deployment,
        own.cost,
        fleet=fleet,
        pools=pools,
        calibration=own.calibration,
        usd_per_gpu_hour=usd_per_gpu_hour(fleet, priced, prices),
        steps=details,
        tokens=details,
        overwrite=overwrite,
    )
    recording = Recording.load(out)
    metrics, around = RunMetrics.of(recording), None
    if band:
        others = []
        for at, end in enumerate(ends(pools)):
            tell("simulating the ends of the 90 % interval", 0.4 + 0.3 * at)
            others.append(run_metrics(workload, own.deployment, own.cost, fleet=fleet, pools=end))
        around = bands(metrics, *others)
    notes: dict[str, Any] = {"standing": _standing(recording, [pool.cost for pool in pools])}
    if own.gpu:
        notes["gpu"] = own.gpu.name
    if around:
        notes["bands"] = around
    add_notes(out, notes)
    return SimulatedRun(Recording.load(out), metrics, around, notes["standing"])


def _standing(recording: Recording, costs: Sequence[Any]) -> dict[str, str]:
    """That of the least certain pool; of steps that lie beyond what was measured also how many, if they were kept."""
    from calibration.kernel_times import Mark
    from calibration.operation_cost import OperationCost
    from calibration.step_marks import recorded_beyond

    mark, reason = max(cost.standing() for cost in costs)
    if mark == Mark.EXTRAPOLATED and len(costs) == 1 and isinstance(costs[0], OperationCost):
        beyond = recorded_beyond(costs[0], recording)
        if beyond is not None:
            reason = f"{reason}, in {beyond}"
    return {"mark": mark.name.lower(), "reason": reason}
