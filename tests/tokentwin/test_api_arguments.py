"""Whatever is wrong with an argument of the Python API is a UserError of one line, parameter by parameter."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tokentwin
from tokentwin.planning.compare.request import CompareRequest
from tokentwin.planning.diagnose.request import DiagnoseRequest
from tokentwin.planning.measure.request import CalibrateRequest, ValidateRequest
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.request import Timing
from tokentwin.planning.scenario import Scenario
from tokentwin.planning.sweep.settings import SweepSettings
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest

TRAFFIC: dict[str, Any] = {
    "requests": 2,
    "arrivals": {"kind": "poisson", "rate": 5},
    "prompt": {"kind": "fixed", "tokens": 20},
    "output": {"kind": "fixed", "tokens": 3},
}
SWEEP = {
    "base": {"deployment": {"model": "Llama-3.1-8B", "device": "cuda"}, "gpu": "H100", "workload": TRAFFIC},
    "grid": {"replicas": [1]},
}
# Wrong for every parameter, whatever it takes: of no type that is asked for, or text that names nothing.
NEVER: tuple[Any, ...] = (object(), b"x", math.nan, "\udcff", "\0", {1: 2}, [object()], lambda: 3)
# What else is wrong, by parameter; a file must not be a folder, a folder must hold what is read.
NUMBERS = (-1, 0, 2.5, math.inf, True, "many", [], {}, [1])
FLAGS = (3, -1, None, "yes", [], {}, 2.5)
NAMES = (3, -1, "", "nothing", [], {}, True, 2.5, "x" * 5000)
PATHS = (3, -1, True, 2.5, "", [], {}, [1], {"a": 1}, (), "x" * 5000)
ALSO: dict[str, tuple[Any, ...]] = {
    "workload": (*PATHS, None, "nothing", "folder", Path("folder")),
    "traffic": (*PATHS, "nothing", "folder", Path("folder")),
    "run": (*PATHS, None, "nothing", "folder"),
    "path": (*PATHS, None, "nothing", "folder", Path("folder")),
    "settings": (*PATHS, None, "nothing", "folder"),
    "out": PATHS,
    "real": (3, True, 2.5, "", "nothing", [3], {}, ["nothing"]),
    "band": FLAGS, "details": FLAGS, "overwrite": FLAGS, "resume": FLAGS,
    "jobs": NUMBERS, "limit": NUMBERS[:-1], "replicas": NUMBERS, "seeds": NUMBERS, "max_replicas": NUMBERS,
    "rate_scale": (-1, 0, math.inf, "fast", 1e30, [], {}), "window_s": (-1, 0, math.inf, "long", [], {}),
    "spares": (-1, 2.5, "many", [], {}), "risk": (-1, 0, 1, math.inf, "low", []),
    "threshold": (-1, "low", [], math.inf),
    "gpu": NAMES, "calibration": NAMES, "router": NAMES[:4], "executor": (*NAMES, None), "model": NAMES,
    "gpus": (3, "", "H100", [], [3], ["nothing"], [""], {}, True),
    "policies": (3, "", "vllm", [], [3], ["nothing"], {}),
    "tensor_parallel_sizes": (3, "", [], [0], [-1], ["x"], {}, True), "splits": (3, "", [], ["x"], [3], {}),
    "slos": (3, "", "nothing", [], ["nothing"], ["ttft_ms p99<=nan"], {}, None), "vary": (3, "", [], {"nothing": [1]}),
    "prices": (3, "", [], {"nothing": 1.0}, {"H100": -1}, {"H100": math.nan}), "slo": (3, "", [], {"nothing": 1.0}),
    "bounds": (3, "", [], {"nothing": 1.0}), "metric": (3, "", "nothing", [], {}), "peak": (3, "", "nothing", [], {}),
    "deployment": (3, "", "nothing", [], {"nothing": 1}, {"scheduler": {"max_num_seqs": -1}}, True),
    "a": (3, True, [], {"nothing": 1}, {"gpu": ""}),
    "b": (3, True, [], {"policy": None}, {"replicas": 0}, {"router": ""}),
    "base": (None, 3, "", [], {}, {"gpu": "H100"}), "grid": (3, "", [], {"nothing": [1]}, {"replicas": []}, None),
    "minutes": (-1, 0, math.inf, "long", []), "recordings": ([], [3], "nothing", ["nothing"], {}),
    "nosuch": (1, None, "", [], {}),
}  # fmt: skip


def fields(*models: Any) -> list[str]:
    return [name for model in models for name in model.model_fields]


CALLS: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "simulate": (
        tokentwin.simulate,
        {"workload": "nothing.csv", "gpu": "H100"},
        ["workload", "out", "band", "details", "overwrite", *fields(Scenario)],
    ),
    "plan": (
        tokentwin.plan,
        {"traffic": "nothing.csv", "slos": ["ttft_ms p99<=500"], "gpus": ["H100"]},
        ["jobs", *fields(PlanRequest)],
    ),
    "compare": (
        tokentwin.compare,
        {"a": {}, "b": {"policy": "fair"}, "traffic": "nothing.csv", "gpu": "H100"},
        fields(CompareRequest, Timing),
    ),
    "sweep": (
        tokentwin.sweep,
        {"settings": SWEEP, "out": "file.txt", "jobs": 1},
        ["settings", "out", "executor", "jobs", "resume"],
    ),
    "sweep settings": (
        lambda **given: tokentwin.sweep({**SWEEP, **given}, "file.txt", jobs=1),
        {},
        fields(SweepSettings),
    ),
    "diagnose": (tokentwin.diagnose, {"run": "nothing"}, fields(DiagnoseRequest)),
    "validate": (
        tokentwin.validate,
        {"real": ["nothing"], "calibration": "nothing", "out": "file.txt"},
        ["overwrite", *fields(ValidateRequest)],
    ),
    "calibrate": (
        tokentwin.calibrate,
        {"recordings": ["nothing"], "out": "file.txt"},
        ["overwrite", *fields(CalibrateRequest)],
    ),
    "read_recording": (tokentwin.read_recording, {}, ["path"]),
}


def wrong() -> Iterator[tuple[str, str]]:
    for name, (_, _, parameters) in CALLS.items():
        yield from ((name, parameter) for parameter in dict.fromkeys([*parameters, "nosuch"]))


@pytest.mark.parametrize(("name", "parameter"), list(wrong()))
def test_a_wrong_argument_is_one_line(
    name: str, parameter: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if (name, parameter) == ("read_recording", "nosuch"):
        pytest.skip("Python refuses what a function without more fields does not have")
    if (name, parameter) == ("sweep", "nosuch"):
        pytest.skip("likewise")
    monkeypatch.chdir(tmp_path)
    Path("folder").mkdir()
    Path("file.txt").write_text("a file")
    call, usual, _ = CALLS[name]
    for value in (*NEVER, *ALSO.get(parameter, ())):
        with pytest.raises(UserError) as caught:
            call(**{**usual, parameter: value})
        assert "\n" not in str(caught.value), value
    assert {path.name for path in tmp_path.iterdir()} <= {"folder", "file.txt"}


@pytest.mark.parametrize(
    "nonsense",
    [
        {"requests": 5},
        {"requests": "abc"},
        {"requests": [5]},
        {"requests": [], "name": 3},
        {"requests": [], "concurrency": 0},
        {"requests": [], "until_ns": 1.5},
        {"requests": [WorkloadRequest(0, 0, (("", 5),), "x")]},  # type: ignore[arg-type]
        {"requests": [WorkloadRequest(0, 0, (("", 5),), 3, tenant=object())]},  # type: ignore[arg-type]
        {"requests": [WorkloadRequest(0, 2**70, (("", 5),), 3)]},
    ],
)
def test_a_workload_of_nonsense_is_refused(nonsense: dict[str, Any]) -> None:
    with pytest.raises(UserError) as refused:
        tokentwin.simulate(tokentwin.Workload(**nonsense), {"model": "Llama-3.1-8B"}, gpu="H100")
    assert len(str(refused.value).splitlines()) == 1
