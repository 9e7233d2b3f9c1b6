"""The function that simulates a workload on a deployment and writes a recording on disk."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from serving.cost_model import CostModel
from serving.deployments.config import Deployment
from serving.deployments.fleet import FleetConfig
from serving.front_door import FrontDoor
from serving.workload import Workload
from sim.cluster import Cluster, Simulated
from sim.priced_pool import PricedPool, alike_pools, plain_fleet
from traces.recording import Recording
from traces.recording_writer import RecordingWriter


def simulate_to(
    out: str | Path,
    workload: Workload,
    deployment: Deployment,
    cost: CostModel,
    *,
    replicas: int = 1,
    fleet: FleetConfig | None = None,
    pools: Sequence[PricedPool] | None = None,
    calibration: str = "",
    usd_per_gpu_hour: Mapping[str, float | None] | None = None,
    seed: int = 0,
    steps: bool = True,
    tokens: bool = False,
    leaps: bool = False,
    front_door: FrontDoor | None = None,
    note: Callable[[Simulated, Recording], Mapping[str, Any]] | None = None,
    overwrite: bool = False,
) -> Simulated:
    """Simulate `workload` and write the recording `out` while the simulation runs.

    See `Cluster` for `replicas`, `fleet`, `pools`, `leaps` and `front_door`. The recorded deployment includes the
    fleet, whichever argument gave it, so that the run can be repeated. `usd_per_gpu_hour` maps pools to prices, None if
    unknown. `note` returns the notes of the run. Raises UserError if `out` exists and `overwrite` is not set.
    """
    fleet = fleet or deployment.fleet or plain_fleet(replicas)
    deployment = deployment.model_copy(update={"fleet": fleet})
    pools = pools or alike_pools(fleet, deployment, cost)
    schedulers = [pool.deployment.scheduler for pool in pools]
    run = {
        "run_id": Path(out).name,
        "clock": "virtual",
        "workload": workload.name,
        "deployment": deployment.model_dump_json(),
        "replicas": sum(pool.replicas for pool in fleet.pools),
        "seed": seed,
        "hardware": "",
        "calibration": calibration,
        "num_blocks": _common([scheduler.num_blocks - 1 for scheduler in schedulers]),
        "block_size": _common([scheduler.block_size for scheduler in schedulers]),
        "notes": "{}",
        "usd_per_gpu_hour": dict(usd_per_gpu_hour or {}),
    }
    with RecordingWriter(out, run, workload=workload, overwrite=overwrite) as writer:
        cluster = Cluster(
            deployment,
            cost,
            writer,
            pools=pools,
            shares_prefixes=workload.shares_prefixes,
            steps=steps,
            tokens=tokens,
            leaps=leaps,
            front_door=front_door,
        )
        done, lives = cluster.run(workload), cluster.lives
        del cluster  # free its memory, because `note` may simulate more
        noted = None if note is None else partial(note, done)
        writer.close(duration_ns=done.duration_ns, note=noted, replica_lives=lives)
    return done


def _common(values: list[int]) -> int | None:
    """Return the value that all pools have; None if they differ."""
    return values[0] if len(set(values)) == 1 else None
