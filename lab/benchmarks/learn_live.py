"""How well `tokentwin learn` finds out what a real server on this machine is, and predicts its traffic.

`python -m lab.benchmarks.learn_live OUT {engine,vllm} [--recorder]` starts our engine, or vLLM (`make vllm`), with
SmolLM2 and settings that the learner is not told, and without a GPU. The learner may not read `/metrics`, unless
`--recorder` gives it the recording of the server (of vLLM only). It prints which settings are right, and each error
beside the noise, which is the difference between two runs of the same traffic.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import yaml

from tests.apiserver.served import serving
from tests.vllm.served_vllm import vllm_serving
from tokentwin.planning.home import home
from tokentwin.planning.learn.document import LearntServer
from tokentwin.planning.learn.request import LearnRequest
from tokentwin.planning.learn.session import learn
from tokentwin.serving.deployments.config import Deployment

_HIDDEN = {"max_num_batched_tokens": 512, "max_num_seqs": 12, "enable_prefix_caching": True, "async_scheduling": False}
_LENGTH = 2048
_BLOCKS = {"engine": (1024, 16), "vllm": (512, 32)}  # KV blocks, and tokens of a block
_CLIENTS = 24
_WARM_UP_REQUESTS = 40


def _warm_up(url: str, model: str) -> None:
    """Send requests one after another, because a fresh server on a CPU becomes faster during its first steps."""
    for number in range(_WARM_UP_REQUESTS):
        body = {"model": model, "prompt": [number + 1] * 128, "max_tokens": 8, "temperature": 0}
        asked = Request(f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urlopen(asked, timeout=120) as answer:
            answer.read()


@contextmanager
def hidden(kind: str, folder: Path, recorded: bool) -> Iterator[str]:
    """Run the server, and yield its URL."""
    blocks, size = _BLOCKS[kind]
    if kind == "engine":
        scheduler = {**_HIDDEN, "num_blocks": blocks, "block_size": size, "max_model_len": _LENGTH}
        path = folder / "hidden.yaml"
        path.write_text(yaml.safe_dump({"model": "smollm2", "dtype": "float32", "scheduler": scheduler}))
        with serving(folder, "-d", str(path)) as server:
            yield server.url
        return
    options = ["--dtype", "float32", "--max-model-len", str(_LENGTH), "--enforce-eager", "--no-async-scheduling"]
    options += ["--max-num-seqs", str(_HIDDEN["max_num_seqs"]), "--block-size", str(size)]
    options += ["--max-num-batched-tokens", str(_HIDDEN["max_num_batched_tokens"])]
    options += ["--num-gpu-blocks-override", str(blocks)]
    if recorded:
        about = json.dumps({"tokentwin": {"record": str((folder / "served").resolve())}})
        options += [
            "--scheduler-cls",
            "tokentwin.vllmside.recording_scheduler.RecordingScheduler",
            "--additional-config",
            about,
        ]
    with vllm_serving(folder, home() / "models" / "smollm2", *options) as (host, port):
        url = f"http://{host}:{port}"
        _warm_up(url, "m")
        yield url


def shown(learnt: LearntServer, kind: str) -> Iterator[str]:
    """Yield the settings and the errors as tables."""
    blocks, size = _BLOCKS[kind]
    true = {**_HIDDEN, "policy": "vllm", "replicas": 1, "num_blocks": blocks, "block_size": size}
    yield "| setting | server | learnt | known |"
    yield "|-|-|-|-|"
    for one in learnt.settings:
        yield f"| {one.name} | {true.get(one.name)} | {one.value} | {one.known_from} |"
    yield ""
    yield "| traffic | latency | statistic | measured, ms | twin, ms | error | noise | in interval |"
    yield "|-|-|-|-|-|-|-|-|"
    for figure in learnt.proof:
        noise = "" if figure.floor_pct is None else f"{figure.floor_pct:.1f} %"
        yield (
            f"| {figure.traffic} | {figure.metric} | {figure.statistic} | {figure.measured:,.1f} | "
            f"{figure.predicted:,.1f} | {figure.error_pct:+.1f} % | {noise} | {'yes' if figure.inside else 'no'} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("kind", choices=sorted(_BLOCKS))
    parser.add_argument("--recorder", action="store_true")
    parser.add_argument("--minutes", type=float, default=15.0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    with hidden(given.kind, given.out, given.recorder) as url:
        request = LearnRequest(
            url=url,
            deployment=Deployment.model_validate({"model": "smollm2", "device": "cpu", "dtype": "float32"}),
            out=given.out / "twin",
            minutes=given.minutes,
            max_concurrency=_CLIENTS,
            ignore_metrics=not given.recorder,
            recorder=given.out / "served" if given.recorder else None,
        )
        learnt = learn(request, overwrite=True, say=lambda line: print(line, flush=True))
    for line in shown(learnt, given.kind):
        print(line)
    print(f"{sum(one.seconds for one in learnt.asked):.0f} s of the server for questions")


if __name__ == "__main__":
    main()
