"""Latencies of vLLM's API server as its clients see them, beside those of a simulation with a fitted front door.

`python -m lab.benchmarks.vllm_front_door OUT CALIBRATION [RATE]` needs `make vllm`, and a CALIBRATION of vLLM, such as
`tokentwin demo --engine vllm` makes. It starts vLLM's API server with our recorder in it. It sends 60 requests to fit
to, RATE (0.6) a second, and 60 others twice. `tokentwin calibrate` fits the front door (the times around the engine) to
the first run, and `tokentwin validate front-door` gives the errors of its predictions for the others.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import yaml
from click.testing import CliRunner

from tests.vllm.served_vllm import vllm_serving
from tokentwin.cli import cli
from tokentwin.planning.measure.vllm_process import vllm_words
from tokentwin.planning.resolution import base_deployment

REQUESTS = 60


def traffic(path: Path, seed: int, rate: float) -> Path:
    """Write a specification of chats to `path`."""
    spec = {
        "name": path.stem,
        "seed": seed,
        "requests": REQUESTS,
        "arrivals": {"kind": "poisson", "rate": rate},
        "prompt": {"kind": "lognormal", "mean": 120, "sigma": 0.6, "max": 400},
        "output": {"kind": "lognormal", "mean": 20, "sigma": 0.7, "max": 80},
    }
    path.write_text(yaml.safe_dump(spec), encoding="utf-8")
    return path


def run(*words: object) -> None:
    """Run one of our commands, and print its output; raise RuntimeError if it fails."""
    done = CliRunner().invoke(cli, [str(word) for word in words])
    print("$ tokentwin", *words)
    print(done.output, flush=True)
    if done.exit_code:
        raise RuntimeError(f"it ended with {done.exit_code}") from done.exception


def main(out: Path, calibration: str, rate: float) -> None:
    out.mkdir(parents=True, exist_ok=True)
    learning, other = (traffic(out / f"{name}.yaml", seed, rate) for name, seed in (("learning", 1), ("other", 2)))
    model, *options = vllm_words(base_deployment(calibration))[1:]
    recording = json.dumps({"tokentwin": {"record": str(out.resolve() / "served")}})
    recorder = (
        "--scheduler-cls",
        "tokentwin.vllmside.recording_scheduler.RecordingScheduler",
        "--additional-config",
        recording,
    )
    with vllm_serving(out, Path(model), *options, *recorder, "--shutdown-timeout", "10") as (host, port):
        url = ("--url", f"http://{host}:{port}", "--model", "m", "--force")
        for trace, name in ((learning, "learnt-from"), (other, "other-1"), (other, "other-2")):
            run("bench", trace, *url, "-o", out / name)
    served, door = out / "served", out / "front-door"
    run("calibrate", "--from-served", served, "--client", out / "learnt-from", "--engine", calibration, "-o", door)
    run("validate", "front-door", out / "other-1", out / "other-2", "-c", calibration, "--front-door", door)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]) if sys.argv[3:] else 0.6)
