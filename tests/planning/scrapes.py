"""The metrics of a simulated server as vLLM writes them, at two times, without a server."""

from __future__ import annotations

import numpy as np

from tokentwin.planning.learn.answers import Simulated, simulated
from tokentwin.planning.learn.passive_look import Scrape
from tokentwin.planning.learn.twin import Twin
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest

URL = "http://server:8000/metrics"
_BOUNDS = (0.3, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


def traffic(rate: float, seconds: float, prompt: int, output: int, seed: int, burstiness: float = 1.0) -> Workload:
    """Return requests whose lengths have these medians; `burstiness` 1 is Poisson."""
    draw = np.random.default_rng(seed)
    count = int(rate * seconds)
    arrivals = np.cumsum(draw.gamma(1 / burstiness, burstiness / rate, count))
    prompts, outputs = (np.clip(draw.lognormal(np.log(n), 0.6, count), 2, 5 * n).astype(int) for n in (prompt, output))
    rows = zip(arrivals, prompts.tolist(), outputs.tolist(), strict=True)
    requests = [WorkloadRequest(id_, int(1e9 * at), ((PRIVATE, p),), o) for id_, (at, p, o) in enumerate(rows)]
    return Workload(requests, "traffic", shares_prefixes=False)


def scrapes(server: Twin, workload: Workload, times_s: tuple[float, float], without: str = "-") -> list[Scrape]:
    """Return two scrapes of `server`, without the metrics whose names contain `without`."""
    deployment = server.deployment
    said = simulated(workload, deployment, server.times.cost(deployment), server.front_door)
    cache = {name: getattr(deployment.scheduler, name) for name in ("block_size", "enable_prefix_caching")}
    labels = ",".join(f'{name}="{value}"' for name, value in (cache | {"engine": 0}).items())
    info = f'vllm:cache_config_info{{{labels},num_gpu_blocks="{deployment.scheduler.num_blocks}"}} 1'
    texts = ["\n".join(line for line in [*_lines(said, 1e9 * at), info] if without not in line) for at in times_s]
    return [Scrape(URL, text, at) for text, at in zip(texts, times_s, strict=True)]


def _lines(said: Simulated, until_ns: float) -> list[str]:
    engine, clients = (table.sort_by("request_id") for table in (said.engine, said.clients))
    ended = engine["finish_ns"].to_numpy() <= until_ns
    arrival, scheduled, first, finish, prompts, outputs = (
        engine[name].to_numpy()[ended]
        for name in ("arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "prompt_tokens", "output_tokens")
    )
    outside = (clients["finish_ns"].to_numpy() - clients["arrival_ns"].to_numpy() + said.delay_ns)[ended]
    outside = (outside - (finish - arrival)) / 2  # the other half is the client's
    seconds = {
        "request_queue_time_seconds": scheduled - arrival,
        "request_prefill_time_seconds": first - scheduled,
        "request_decode_time_seconds": finish - first,
        "e2e_request_latency_seconds": finish - arrival + outside,
        "time_to_first_token_seconds": first - arrival + outside,
    }
    values = {name: ns / 1e9 for name, ns in seconds.items()}
    values |= {"request_prompt_tokens": prompts, "request_generation_tokens": outputs}
    lines = []
    for name, each in values.items():
        counts = {str(bound): int((each <= bound).sum()) for bound in _BOUNDS} | {"+Inf": len(each)}
        lines += [f'vllm:{name}_bucket{{le="{bound}",engine="0"}} {count}' for bound, count in counts.items()]
        lines.append(f'vllm:{name}_sum{{engine="0"}} {each.sum()}')
    return lines
