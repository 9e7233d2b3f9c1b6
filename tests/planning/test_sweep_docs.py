"""The figures of docs/sweeps.md are those that its file gives."""

import re
from pathlib import Path
from typing import Any

import yaml

import tokentwin
from tokentwin.planning.sweep.estimate import sweep_estimate
from tokentwin.planning.sweep.settings import read_sweep

PAGE = Path(__file__).parents[2] / "docs" / "sweeps.md"


def documented() -> tuple[dict[str, Any], str]:
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert found is not None
    data: dict[str, Any] = yaml.safe_load(found[1])
    return data, text


def test_the_table(tmp_path: Path) -> None:
    data, text = documented()
    data = {"base": data["base"], "grid": data["grid"]}
    data["base"]["workload"] |= {"requests": 500, "prompt": {"kind": "fixed", "tokens": 900}}
    runs = tokentwin.sweep(data, tmp_path / "out", jobs=1).runs.to_pylist()
    made = [
        f"│ {run['gpu']} │ {run['rate']:4} │ {run['slo_attainment']:14.3f} │ {run['ttft_ms_p99']:11.1f} │ "
        f"{run['tpot_ms_p95']:11.2f} │ {run['usd_per_mtok_out']:16.2f} │"
        for run in runs
    ]
    assert "\n".join(made[:4]) in text


def test_the_estimate() -> None:
    data, text = documented()
    assert f"--dry-run\n{sweep_estimate(read_sweep(data), jobs=2)}\n" in text
