"""A small sweep of an invented calibration, and policies that fail in the ways that policies do."""

import json
import os
from pathlib import Path
from typing import Any

import yaml

from tokentwin.calibration.steps.features import CPU_FEATURES, STEP_FEATURES
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.scheduler import POLICIES
from tokentwin.serving.user_code.plugins import find

SCHEDULER = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512, num_blocks=400)
_Vllm = find("policy", "vllm", POLICIES, ())


class Raises(_Vllm):  # type: ignore[misc, valid-type]
    """Fails in its first step."""

    def schedule(self) -> Any:
        raise ZeroDivisionError("not today")


class Dies(_Vllm):  # type: ignore[misc, valid-type]
    """Takes its process with it."""

    def schedule(self) -> Any:
        os._exit(9)


def calibrated(folder: Path) -> Path:
    """A calibration of an engine that was never there: 5 ms a step and 0.1 ms a prompt token."""
    prices = dict.fromkeys(STEP_FEATURES, 0) | {"launch": 5 * 10**9, "prefill_tokens": 10**8}
    Calibration(
        id="invented",
        deployment=Deployment(scheduler=SCHEDULER).model_dump_json(),
        hardware={},
        version="",
        created="",
        step_prices_ps=prices,
        cpu_prices_ps=dict.fromkeys(CPU_FEATURES, 0),
        domain={},
        residuals={},
        noise={},
        fitted_steps=0,
    ).save(folder)
    return folder


def base(folder: Path, requests: int = 30) -> dict[str, Any]:
    """A run of `requests` by the calibration in `folder`."""
    return {
        "calibration": str(folder),
        "workload": {
            "requests": requests,
            "arrivals": {"kind": "poisson", "rate": 20},
            "prompt": {"kind": "uniform", "low": 10, "high": 100},
            "output": 20,
        },
    }


def sweep_file(file: Path, base: dict[str, Any], **settings: Any) -> Path:
    """`file` with a sweep of `base` in it."""
    file.write_text(yaml.safe_dump(json.loads(json.dumps({"base": base, **settings}))))
    return file


def content(out: Path) -> dict[str, bytes]:
    """Every file of a dataset."""
    return {str(file.relative_to(out)): file.read_bytes() for file in sorted(out.rglob("*")) if file.is_file()}
