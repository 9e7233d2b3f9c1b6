"""The engine against its limits: decode and prefill against the roofline, and the usual workload for comparisons."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from functools import partial
from random import Random
from statistics import mean, median
from time import perf_counter, perf_counter_ns
from typing import Any

from tokentwin.realengine.engine import Engine
from tokentwin.realengine.sampling import SamplingParams
from tokentwin.realengine.step import Step
from tokentwin.realengine.undisturbed import no_cycle_search
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import weight_width
from tokentwin.serving.workload import WorkloadRequest

Prompt = list[int]

_TURNS = 5
_PEERS_TEMPERATURE = 0.6  # at which nano-vllm's benchmark samples


def usual_workload(requests: int = 256, longest: int = 1024) -> list[tuple[Prompt, int]]:
    """Return prompt and output length of each request in the workload of nano-vllm's benchmark.

    The seed is 0, and lengths are uniform in 100..1024; the default 256 requests have 133,966 output tokens in total.
    """
    draw = Random(0)
    least = min(100, longest // 4)
    prompts = [[draw.randint(0, 10_000) for _ in range(draw.randint(least, longest))] for _ in range(requests)]
    return [(prompt, draw.randint(least, longest)) for prompt in prompts]


def offer(engine: Engine, requests: Iterable[tuple[Prompt, int]], temperature: float = 0.0) -> None:
    """Reset the engine, and offer requests of these prompts and output lengths, all at once."""
    engine.reset()
    for number, (prompt, output) in enumerate(requests):
        sampling = SamplingParams(temperature)
        engine.add(WorkloadRequest(number, 0, (("", len(prompt)),), output), prompt, sampling=sampling)


def random_prompts(engine: Engine, count: int, tokens: int, seed: int = 0) -> list[Prompt]:
    """Return `count` prompts of `tokens` tokens each."""
    draw = Random(seed)
    return [[draw.randrange(engine.spec.vocab_size) for _ in range(tokens)] for _ in range(count)]


def throughput(engine: Engine, workload: list[tuple[Prompt, int]], temperature: float) -> dict[str, Any]:
    """Measure output tokens/s with all requests at once, end-of-sequence ignored, and the device's idle share."""
    known = (([token % engine.spec.vocab_size for token in prompt], output) for prompt, output in workload)
    offer(engine, known, temperature)
    with no_cycle_search():  # without garbage collection, as in recorded runs and in the server
        began = perf_counter()
        steps = drain(engine)
        seconds = perf_counter() - began
    tokens = sum(output for _, output in workload)
    return {
        "temperature": temperature,
        "requests": len(workload),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "steps": len(steps),
        "idle_share": idle_share(steps),
    }


def decode(engine: Engine, rows: int, context: int, steps: int, copy_bytes_per_s: float) -> dict[str, Any]:
    """Measure steady decode steps of `rows` requests at about `context` tokens each, and the time to read their bytes.

    The bytes are the KV of every row and all weights, except those of experts that no token chose, and of an embedding
    that is no output head: it is only looked up.
    """
    engine.run_dummy([1] * rows)  # captures the CUDA graph before it is timed
    offer(engine, ((prompt, steps) for prompt in random_prompts(engine, rows, context - steps // 2, rows)))
    measured, touched = [], []
    while (step := engine.step()) is not None:
        if step.plan.decode_rows == rows and not step.plan.prefill_rows:
            measured.append(step)
            if step.expert_tokens is not None:
                touched.append(int((step.expert_tokens > 0).sum()))
    if len(measured) < 3:
        return {"rows": rows, "context": context, "failed": "not all rows were running at once"}
    times = [step.end_ns - step.start_ns for step in measured]
    periods = [after.end_ns - before.end_ns for before, after in itertools.pairwise(measured)]
    spec, size, rounded = engine.spec, engine.runner.model.dtype.itemsize, engine.deployment.quantization
    width = size if rounded == "none" else weight_width(rounded, spec, engine.deployment)
    read = decode_weight_bytes(spec, size, width, mean(touched) if touched else 0)
    kv = spec.kv_bytes_per_token(engine.runner.kv.dtype.itemsize)
    roofline_ns = 1e9 * (read + rows * context * kv) / copy_bytes_per_s
    return {
        "rows": rows,
        "context": context,
        "steps": len(measured),
        "median_step_ns": median(times),
        "median_period_ns": median(periods),
        "roofline_ns": roofline_ns,
        "roofline_share": roofline_ns / median(times),
        "idle_share": idle_share(measured),
        "graphs": all(step.graph for step in measured),
    }


def prefill(engine: Engine, tokens: int, gemm_flops_per_s: float) -> dict[str, Any]:
    """Measure one prompt alone: FLOPs (of GEMMs and causal attention) per second of device time."""
    times = []
    for prompt in random_prompts(engine, 3, tokens):
        offer(engine, [(prompt, 1)])
        times.append(sum(step.end_ns - step.start_ns for step in drain(engine)))
    flops = prefill_flops(engine.spec, tokens)
    rate = flops / (median(times) / 1e9)
    return {
        "tokens": tokens,
        "median_ns": median(times),
        "flops": flops,
        "flops_per_s": rate,
        "gemm_share": rate / gemm_flops_per_s,
    }


def mixed(engine: Engine, rows: int, tokens: int) -> dict[str, Any]:
    """Measure a step of `rows` decode rows and a prompt of `tokens`, as a graph and eagerly, in turns.

    Times are ns from the launch until the step's tokens are on the host.
    """
    sizes = [1] * rows + engine.runner.prompts(tokens)
    times: dict[bool, list[int]] = {True: [], False: []}
    for graph in (True, False) * _TURNS:
        engine.runner.graph_mixed_steps(graph)
        engine.run_dummy(sizes)  # captures the CUDA graph before it is timed
        times[graph] += [engine.run_dummy(sizes) for _ in range(2)]
    engine.runner.graph_mixed_steps(engine.runner.device.torch_device.type == "cuda")
    graph_ns, eager_ns = median(times[True]), median(times[False])
    return {
        "rows": rows,
        "tokens": tokens,
        "graph_ns": graph_ns,
        "eager_ns": eager_ns,
        "saved_share": 1 - graph_ns / eager_ns,
    }


def timing_cost(engine: Engine, rows: int, context: int, steps: int) -> dict[str, Any]:
    """Measure the cost of timing steps: wall time in ns of a steady decode step, timed and untimed, in turns."""
    periods: dict[bool, list[float]] = {True: [], False: []}
    for timed in (True, False) * _TURNS:
        engine.runner.time_steps(timed)
        offer(engine, (([number] * (context - steps), steps) for number in range(rows)))
        while any(request.outputs == 0 for request in engine.scheduler.requests.values()):
            engine.step()
        began, done = perf_counter_ns(), 0
        while engine.step() is not None:
            done += 1
        periods[timed].append((perf_counter_ns() - began) / max(done, 1))
    engine.runner.time_steps(True)
    timed_ns, untimed_ns = median(periods[True]), median(periods[False])
    return {
        "rows": rows,
        "context": context,
        "timed_ns": timed_ns,
        "untimed_ns": untimed_ns,
        "cost_share": timed_ns / untimed_ns - 1,
    }


def decode_weight_bytes(spec: ModelSpec, dtype_bytes: int, width: float | None = None, experts: float = 0) -> float:
    """Return the bytes of weights that a decode step reads: all but those of an embedding that is not also the head.

    Args:
        dtype_bytes: bytes of a weight of the head, which is never rounded
        width: bytes of every other weight; by default `dtype_bytes`
        experts: number of experts that the step reads, over all layers
    """
    routed = spec.moe_layers * spec.num_experts * spec.expert_parameters
    others = spec.parameters - spec.embedding_parameters - routed + experts * spec.expert_parameters
    return spec.vocab_size * spec.hidden_size * dtype_bytes + others * (dtype_bytes if width is None else width)


def prefill_flops(spec: ModelSpec, tokens: int) -> int:
    """Return the FLOPs of a prefill.

    They are 2 per weight and token in GEMMs (the head for one token, of the experts the chosen ones), and 4 per
    query-key pair, head and dimension.
    """
    layers = spec.active_parameters - spec.embedding_parameters
    head = spec.vocab_size * spec.hidden_size
    pairs = tokens * (tokens + 1) // 2
    return 2 * layers * tokens + 2 * head + 4 * pairs * spec.num_heads * spec.head_dim * spec.num_layers


def idle_share(steps: list[Step]) -> float | None:
    """Return the fraction of time in which the device may have been idle, from the first step's start to the last end.

    It is idle between steps, and may be idle while the host still launches the step that it runs. So the fraction is
    an upper bound, and exact if every launch ends before the device begins the step.
    """
    if len(steps) < 2:
        return None
    gaps = sum(max(after.start_ns - before.end_ns, 0) for before, after in itertools.pairwise(steps))
    return (gaps + sum(step.launching_ns for step in steps)) / (steps[-1].end_ns - steps[0].start_ns)


def drain(engine: Engine) -> list[Step]:
    """Run steps until the engine has nothing to do, and return them."""
    steps = []
    while (step := engine.step()) is not None:
        steps.append(step)
    return steps


def benchmark(
    engine: Callable[[], Engine], ceilings: dict[str, Any], sizes: dict[str, Any], kinds: Iterable[str]
) -> list[Callable[[], dict[str, Any]]]:
    """Return the measurements of `kinds`, targets first; each returns a row `{"kind": ..., ...}`.

    Kinds are decode, prefill, mixed, timing, throughput (temperature 0.6, as nano-vllm measures) and greedy (the same
    workload at temperature 0). `engine` returns the engine to measure.
    """
    copy, gemm = ceilings["copy_bytes_per_s"], ceilings["gemm_flops_per_s"]
    context, steps = sizes["context"], sizes["decode_steps"]
    workload = partial(usual_workload, sizes["requests"], sizes["longest"])
    measurements: dict[str, list[Callable[[Engine], dict[str, Any]]]] = {
        "decode": [
            partial(decode, rows=rows, context=context, steps=steps, copy_bytes_per_s=copy)
            for rows in sizes["decode_rows"]
        ],
        "prefill": [partial(prefill, tokens=tokens, gemm_flops_per_s=gemm) for tokens in sizes["prefill_tokens"]],
        "mixed": [partial(mixed, rows=rows, tokens=tokens) for rows, tokens in sizes["mixed"]],
        "throughput": [lambda engine: throughput(engine, workload(), _PEERS_TEMPERATURE)],
        "greedy": [lambda engine: throughput(engine, workload(), 0.0)],
        "timing": [partial(timing_cost, rows=sizes["timing_rows"], context=context, steps=steps)],
    }

    def row(kind: str, measure: Callable[[Engine], dict[str, Any]]) -> dict[str, Any]:
        return {"kind": "throughput" if kind == "greedy" else kind, **measure(engine())}

    return [partial(row, kind, measure) for kind in kinds for measure in measurements[kind]]
