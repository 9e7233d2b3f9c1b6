"""A router that does anything but choose a replica ends every verb in one line that names it and the request."""

import json
from pathlib import Path

import pytest
import yaml

from tests.command import tokentwin
from tokentwin.planning.sweep.results import SweepResults

ROUTERS = """
class Later:
    def choose(self, request, replicas):
        return replicas[0] if request.id < 3 else self.then(request, replicas)

class Raises(Later):
    def then(self, request, replicas): return replicas[99]

class Exits(Later):
    def then(self, request, replicas): raise SystemExit(0)

class Index(Later):
    def then(self, request, replicas): return 1

class Yes(Later):
    def then(self, request, replicas): return True

class Nothing(Later):
    def then(self, request, replicas): pass

class Elsewhere(Later):
    def then(self, request, replicas):
        kind = type(replicas[0])
        return kind.__new__(kind)

class Free(Later):
    def then(self, request, replicas):
        replicas[0]._cost = None

class Slows(Later):
    def then(self, request, replicas):
        replicas[0].slow_down(0.001)

class Empties(Later):
    def then(self, request, replicas):
        replicas.clear()

class Shortens(Later):
    def then(self, request, replicas):
        object.__setattr__(request, "output_len", 1)
        return replicas[0]

class Hurries(Later):
    def then(self, request, replicas):
        object.__setattr__(request, "arrival_ns", 0)
        return replicas[0]
"""
SAYS = {
    "Raises": "raised IndexError: list index out of range (routers.py, line 7)",
    "Exits": "raised SystemExit: 0",
    "Index": "choose() returned 1, which is none of the 2 replicas that it was given",
    "Yes": "choose() returned True, which is none of the 2 replicas",
    "Nothing": "choose() returned None, which is none of the 2 replicas",
    "Elsewhere": "choose() returned a replica, which is none of the 2 replicas",
    "Free": "raised AttributeError: a router may not write _cost of a replica (routers.py",
    "Slows": "raised AttributeError: a router may read index, outstanding_requests, outstanding_tokens, known_tokens, "
    "queued_requests, used_blocks, kv_tokens of a replica, not slow_down",
    "Empties": "raised AttributeError: 'SeenReplicas' object has no attribute 'clear'",
    "Shortens": "it came with output_len 9, which is 1 now",
    "Hurries": "it came with arrival_ns 60000000, which is 0 now",
}
SCENARIO = {
    "deployment": {"model": "Llama-3.1-8B", "device": "cuda"},
    "gpu": "H100",
    "replicas": 2,
    "workload": {"trace": "t.jsonl"},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "routers.py").write_text(ROUTERS)
    request = {"prompt_tokens": 40, "output_tokens": 9}
    (tmp_path / "t.jsonl").write_text("".join(json.dumps({"arrival_s": at / 50, **request}) + "\n" for at in range(8)))
    return tmp_path


@pytest.mark.parametrize("name", SAYS)
def test_a_verb_ends_in_one_line(name: str, folder: Path) -> None:
    router = f"routers.py:{name}"
    two = ("--gpu", "H100", "--a", "replicas=2", "--b", "replicas=2")
    verbs = {
        "simulate": ("t.jsonl", "--gpu", "H100", "--replicas", 2, "--out", "run", "--router", router),
        "compare": ("--trace", "t.jsonl", *two, "--b", f"router={router}"),
        "plan": ("t.jsonl", "--gpu", "H100", "--slo", "ttft_ms p99<=500", "--jobs", 1, "--router", router),
    }
    searched = {"plan": ["tokentwin: searching one candidate on 8 requests"]}  # said at once
    for verb, arguments in verbs.items():
        done = tokentwin(verb, *arguments, cwd=folder)
        *before, _ = done.stderr.splitlines()
        assert done.returncode == 2 and before == searched.get(verb, []), (verb, done)
        says = SAYS[name].partition(" of the 2 ")[0] if verb == "plan" else SAYS[name]
        assert f"{router}': request 3: {says}" in done.stderr
    assert not (folder / "run").exists()


def test_a_sweep_keeps_the_line_in_a_row(folder: Path) -> None:
    grid = {"router": ["round-robin", *(f"routers.py:{name}" for name in SAYS)]}
    (folder / "sweep.yaml").write_text(yaml.safe_dump({"base": SCENARIO, "grid": grid}))
    assert tokentwin("sweep", "sweep.yaml", "--out", "swept", "--jobs", 1, cwd=folder).returncode == 1
    rows = SweepResults.load(folder / "swept").runs.select(["router", "error"]).to_pylist()
    errors = {row["router"].rpartition(":")[2]: row["error"] for row in rows}
    assert errors.pop("round-robin") is None and sorted(errors) == sorted(SAYS)
    assert all(SAYS[name] in error for name, error in errors.items())
