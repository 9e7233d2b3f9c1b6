"""Plausible questions to commands that answer, over all models and GPUs of the catalogue; a seed is one question."""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import yaml

from tests.command import tokentwin
from tokentwin.serving.deployments.gpu_spec import gpus
from tokentwin.serving.deployments.model_catalogue import find_model, models

Words = list[str]

_SLOS = (
    "ttft_ms p95<=1000", "tpot_ms p95<=50", "e2e_ms p99<=60000", "ttft_ms p99<=3000", "tpot_ms mean<=40",
    "ttft_ms mean<=600",
)  # fmt: skip
_SETTINGS = (
    "max_num_seqs=2", "max_num_batched_tokens=2048", "policy=sjf", "policy=sglang", "enforce_eager=true",
    "enable_prefix_caching=false", "kv_cache_dtype=fp8", "quantization=fp8", "async_scheduling=false", "replicas=2",
)  # fmt: skip
_STATUSES = {"plan": (0, 4), "compare": (0, 3), "sweep": (0, 1)}  # of an answer; 2: refused before it has begun


@cache
def _kinds() -> list[list[str]]:
    """Return the models of the catalogue by what their layers keep, so that rare kinds are asked about as often."""
    kinds: dict[int, list[str]] = {}
    for name, model in sorted(models().items()):
        kept = (model.pooling, model.linear, model.sliding_window > 1, model.latent, True)
        kinds.setdefault([*map(bool, kept)].index(True), []).append(name)
    return [kinds[kind] for kind in sorted(kinds)]


class _Drawn:
    """The parts of a question: its traffic, its model and its GPUs."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.model = self.draw.choice(_kinds()[seed // len(_ASKED) % len(_kinds())])
        self.gpus = self.draw.sample(sorted(gpus()), self.draw.choice((1, 1, 1, 2)))
        self.tp = self.draw.choice(("1", "1,2", "2,4", "4,8", "8"))
        self.prompt = self.draw.choice((100, 500, 1500, 4000, 12000))
        pools = bool(find_model(self.model).pooling)
        self.output = 0 if pools else self.draw.choice((1, 20, 150, 400))

    def spec(self, folder: Path) -> str:
        """Write a specification of traffic, and return its path."""
        rate = self.draw.choice((0.2, 1.0, 5.0, 50.0))
        output = {"kind": "exponential", "mean": self.output, "max": 8 * self.output}
        users = {"kind": "users", "users": self.draw.choice((1, 5)), "think_ms": {"kind": "exponential", "mean": 3000}}
        arrivals = self.draw.choice(
            (
                {"kind": "poisson", "rate": rate},
                {"kind": "gamma", "rate": rate, "cv": 3.0},
                {"kind": "closed", "concurrency": self.draw.choice((1, 4))},
                users,
            )
        )
        lasts = {"duration_s": 30} if arrivals is users else {"requests": self.draw.choice((2, 12, 24))}
        traffic = {
            **lasts,
            "seed": self.draw.randrange(100),
            "arrivals": arrivals,
            "prompt": {"kind": "lognormal", "mean": self.prompt, "sigma": 1.0, "max": 8 * self.prompt},
            "output": output if self.output else {"kind": "none"},
        }
        path = folder / "traffic.yaml"
        path.write_text(yaml.safe_dump(traffic))
        return str(path)

    def served(self) -> Words:
        tp = self.tp.rpartition(",")[2]
        return ["--gpu", self.gpus[0], "--model", self.model, "--tensor-parallel-size", tp]


def _plan(drawn: _Drawn, folder: Path) -> list[Words]:
    one_of = drawn.draw.choice
    made_up = ["--prompt", str(drawn.prompt), "--output", str(drawn.output), "--limit", one_of(("12", "24"))]
    made_up += one_of((["--rate", "0.2"], ["--rate", "15"], ["--concurrency", "2"]))
    words = ["plan", *one_of((made_up, [drawn.spec(folder)]))]
    words += ["--model", drawn.model, "--gpu", ",".join(drawn.gpus).replace("-", one_of("- ")), "--tp", drawn.tp]
    for slo in drawn.draw.sample(_SLOS, one_of((1, 2))):
        words += ["--slo", slo]
    others: Sequence[Words] = (
        [], [], [], ["--energy"], ["--split", "none,1:1"], ["--spares", "1"], ["--vary", "max_num_seqs=32,256"],
        ["--policy", "vllm,sglang"], ["--mix", "search"], ["--vary", "enforce_eager=true"], ["--rank-by", "gpus"],
        ["--spot", f"{drawn.gpus[0]}=1.0", "--interruptions-per-hour", "0.1"], ["--save", str(folder / "plan.json")],
    )  # fmt: skip
    return [[*words, *one_of(others), "--jobs", "1", "--max-replicas", "4"]]


def _simulate(drawn: _Drawn, folder: Path) -> list[Words]:
    more = drawn.draw.choice(([], [], ["--replicas", "2"], ["--max-num-seqs", "4"], ["--rate-scale", "3"]))
    return [["simulate", drawn.spec(folder), *drawn.served(), *more, "-o", str(folder / "run")]]


def _compare(drawn: _Drawn, folder: Path) -> list[Words]:
    own = [word for setting in drawn.draw.sample(_SETTINGS, drawn.draw.choice((1, 2))) for word in ("--b", setting)]
    return [["compare", "--trace", drawn.spec(folder), *drawn.served(), *own]]


def _diagnose(drawn: _Drawn, folder: Path) -> list[Words]:
    (simulated,) = _simulate(drawn, folder)
    more = drawn.draw.choice(([], ["--gpu", drawn.gpus[0]], ["--gpu", drawn.gpus[0], "--slo", "ttft:200 tpot:50"]))
    return [simulated, ["diagnose", str(folder / "run"), *more]]


def _sweep(drawn: _Drawn, folder: Path) -> list[Words]:
    traffic = yaml.safe_load(Path(drawn.spec(folder)).read_text())
    deployment = {"model": drawn.model, "device": "cuda", "gpu_memory_utilization": 0.9}
    settings = {
        "base": {"deployment": deployment, "gpu": drawn.gpus[0], "workload": traffic, "slo": {"ttft_ms": 300}},
        "grid": {
            "gpu": drawn.gpus,
            "deployment.tensor_parallel_size": [int(size) for size in drawn.tp.split(",")],
            **drawn.draw.choice(({}, {"replicas": [1, 2]}, {"deployment.scheduler.max_num_seqs": [4, 64]})),
        },
    }
    path = folder / "sweep.yaml"
    path.write_text(yaml.safe_dump(settings))
    return [["sweep", str(path), "-o", str(folder / "sweep"), "--jobs", "1"]]


_ASKED: Sequence[Callable[[_Drawn, Path], list[Words]]] = (_plan, _simulate, _compare, _diagnose, _sweep)


def faults(seed: int, folder: Path) -> list[str]:
    """Ask a question whose files lie in `folder`, and return what is wrong with its end."""
    wrong = []
    for words in _ASKED[seed % len(_ASKED)](_Drawn(seed), folder):
        begun: list[str] = []  # the stages, of which the first one may be to read
        with patch("tokentwin.planning.progress._bar", _noting(begun)):
            status, stdout, stderr = tokentwin(*words)
        lines = stderr.splitlines()
        odd = re.findall(r"\bnan\b|\binf(?:inity)?\b|traceback|left out: .*|90 % band -.*", stdout + stderr, re.I)
        searched = begun[1:] and words[0] != "sweep"  # whose runs are all refused before a sweep is
        if status == 2 and (searched or len(lines) != 1):
            odd.append(f"refused after {begun[:1]}: {lines}")
        elif status not in (2, *_STATUSES.get(words[0], (0,))):
            odd.append(f"status {status}: {lines[-1:]}")
        wrong += [f"{' '.join(words)}: {what}" for what in odd]
        if status == 2:
            break
    return wrong


def _noting(begun: list[str]) -> Any:
    @contextmanager
    def bar(*_: object) -> Iterator[Callable[[str, float], None]]:
        yield lambda stage, share: begun.append(stage)

    return bar
