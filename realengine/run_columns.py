"""The columns of a real run's recording that are known before it begins.

Nothing here needs torch, so that vLLM can be recorded where torch is not installed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from serving.deployments.config import Deployment
from serving.workload import Workload


def run_columns(
    run_id: str,
    workload: Workload,
    deployment: Deployment,
    hardware: Mapping[str, str | int],
    num_blocks: int,
    seed: int,
) -> dict[str, Any]:
    """Return the columns of `runs` that are known before a replay: of one engine, with `num_blocks` KV blocks."""
    return {
        "run_id": run_id,
        "clock": "wall",
        "workload": workload.name,
        "deployment": deployment.model_dump_json(),
        "replicas": 1,
        "seed": seed,
        "hardware": json.dumps(hardware),
        "calibration": "",
        "num_blocks": num_blocks,
        "block_size": deployment.scheduler.block_size,
    }
