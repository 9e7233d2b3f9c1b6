"""From a workload and a deployment to a recording on disk, on the virtual clock."""

from __future__ import annotations

from pathlib import Path

from serving.config import Deployment
from serving.cost_model import CostModel
from serving.workload import Workload
from sim.cluster import Cluster, Simulated
from sim.router import Router
from traces.recording import RecordingWriter


def simulate_to(
    out: str | Path,
    workload: Workload,
    deployment: Deployment,
    cost: CostModel,
    *,
    replicas: int = 1,
    router: Router | None = None,
    calibration: str = "",
    seed: int = 0,
    steps: bool = True,
    tokens: bool = False,
    overwrite: bool = False,
) -> Simulated:
    """Simulate `workload` and write the recording `out`, streaming.

    Raises UserError if `out` exists and `overwrite` is not set.
    """
    scheduler = deployment.scheduler
    run = {
        "run_id": Path(out).name,
        "clock": "virtual",
        "workload": workload.name,
        "deployment": deployment.model_dump_json(),
        "replicas": replicas,
        "seed": seed,
        "hardware": "",
        "calibration": calibration,
        "num_blocks": scheduler.num_blocks - 1,
        "block_size": scheduler.block_size,
        "notes": "{}",
    }
    with RecordingWriter(out, run, workload=workload, overwrite=overwrite) as writer:
        cluster = Cluster(
            deployment,
            cost,
            writer,
            replicas=replicas,
            router=router,
            shares_prefixes=workload.shares_prefixes,
            steps=steps,
            tokens=tokens,
        )
        done = cluster.run(workload)
        writer.close(duration_ns=done.duration_ns)
    return done
