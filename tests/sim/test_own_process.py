"""A user's own process on the virtual clock."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.sim.fleet_samples import COST
from tokentwin.api import simulate, sweep
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.fleet import FleetConfig, PoolConfig
from tokentwin.serving.errors import UserError
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.synth import parse_spec, synthesise

GUIDE = Path(__file__).parents[2] / "docs" / "simulator.md"
TRAFFIC = {
    "name": "day",
    "seed": 1,
    "requests": 400,
    "arrivals": {"kind": "poisson", "rate": 20},
    "prompt": {"kind": "fixed", "tokens": 50},
    "output": {"kind": "fixed", "tokens": 5},
}


def run(process: str, replicas: int = 2) -> Cluster:
    fleet = FleetConfig(pools=(PoolConfig(replicas=replicas),), processes=(process,))
    cluster = Cluster(Deployment(fleet=fleet), COST, TableSink())
    cluster.run(synthesise(parse_spec(TRAFFIC, where="day")))
    return cluster


def test_the_guides_operator_drains_a_replica_at_its_time(tmp_path) -> None:
    (code,) = re.findall(r"```python\n(def operator.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    imports = "from tokentwin.sim.clock import from_seconds\n\n"
    (tmp_path / "operator.py").write_text(imports + code.replace("12 * 3600", "5").replace("3600", "4"))
    ended, stayed, started = run(f"{tmp_path}/operator.py:operator").replica_lives
    assert ended["ended_by"] == "scale-in" and 5e9 <= ended["ended_ns"] < 6e9
    assert stayed["ended_by"] == "" and started["started_ns"] == ended["ended_ns"] + 4e9


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("    yield clock.until(5)\n    1 / 0", "ZeroDivisionError"),
        ("    return 3", "must be a function with yield"),
        ("    yield 17", "yielded 17, which is no event"),
        ("    yield clock.until(5)\n    fleet.serving('east')", "is no pool of the fleet; choose one of"),
        ("    raise OSError('no')\n    yield", "OSError"),
    ],
)
def test_what_goes_wrong_in_it_is_one_line(tmp_path, body, says) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(clock, fleet):\n{body}\n")
    with pytest.raises(UserError, match=re.escape(says)) as error:
        run(f"{tmp_path}/mine.py:mine")
    assert "fleet.processes" in str(error.value)


def test_a_process_that_is_nowhere_is_one_line() -> None:
    with pytest.raises(UserError, match="does not exist"):
        run("nowhere.py:mine")


def test_it_runs_once_and_not_again_for_the_bands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text("def mine(clock, fleet):\n    print('begun')\n    yield clock.until(5)\n")
    fleet = {"processes": [f"{tmp_path}/mine.py:mine"]}
    deployment = {"model": "Llama-3.1-8B", "device": "cuda", "fleet": fleet}
    run = simulate(TRAFFIC, deployment, gpu="H100", out=tmp_path / "run")
    assert capsys.readouterr().out.count("begun") == 1 and run.bands is None
    assert "without bands, because fleet.processes run once" in run.trust.reason
    base = {"deployment": deployment, "gpu": "H100", "workload": TRAFFIC}
    swept = sweep({"base": base, "grid": {"replicas": [None]}, "bands": True}, tmp_path / "swept", jobs=1)
    assert swept.runs["status"].to_pylist() == ["complete"]
