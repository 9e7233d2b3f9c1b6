"""A check of the measured engine against the engine in its simplest form, on the answers of the measured engine.

The checked engine has the overlapped loop, CUDA graphs, our kernels and few blocks. The reference has the plain loop,
eager steps, torch's attention, room for all and no prefix cache. Both have the same weights. The checked engine answers
greedily. The reference is made to take the same tokens, so that both continue the same text even if two tokens were
almost equally likely. The logits behind every token are compared. Three faults would show as logits of another text: a
token read from another request's place, a graph replayed with old input, and a KV block freed too early.

The logits of two independent texts differ by ||a - b|| / ||b|| = 1.4. `limit` is the possible effect of rounding on the
same text, in the worst row: 1e-3 in float32, where only the order of sums differs; 0.05 in bfloat16, whose single
rounding is 0.002; 0.1 and 0.15 in FP8, where a small difference can change a rounding, which is 0.06. A token must have
exactly the largest of the logits that it was sampled from. In the reference's logits it may lie below the largest by 10
x limit x their root mean square: this is how far two of some thousand logits can move apart.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.layer_ops import LayerOps
from tokentwin.realengine.models.weights import ModelFiles, random_spec
from tokentwin.realengine.step_input import Batch
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.workload import WorkloadRequest

_TIE = 10  # factor on limit and root mean square
_MUST_HAPPEN = ("preemptions", "prefix_hits", "chunks", "whole_prompts", "graphs", "mixed_graphs", "in_flight")


class Checked(NamedTuple):
    """An engine that is checked: `limit` is the maximum relative error of a row of logits."""

    name: str
    deployment: Deployment
    spec: ModelSpec
    limit: float


class Answer(NamedTuple):
    """A request: its prompt, its number of output tokens, and the number of steps after which it arrives."""

    prompt: list[int]
    output: int
    arrives: int


class Noting:
    """Operations of a layer that also keep the logits from which tokens were sampled, step by step."""

    def __init__(self, ops: LayerOps) -> None:
        self._ops = ops
        self.logits: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Tensor, batch: Batch, greedy: bool) -> Tensor:
        self.logits.append(logits.clone())
        return self._ops.sample(logits, batch, greedy)


def checked(device: str, dry_run: bool) -> list[Checked]:
    """Return the engines to be checked: real heads and few layers on a GPU, tiny ones on the CPU."""
    scheduler = SchedulerConfig(
        max_num_seqs=8,
        max_num_batched_tokens=1024,
        max_model_len=2048,
        num_blocks=150,
        scheduler_reserve_full_isl=False,
        async_scheduling=True,
    )
    if dry_run:
        few, names = {"num_layers": 2}, ("llama", "qwen3")
    else:
        few, names = {"num_layers": 3, "vocab_size": 8192}, ("llama-3.1-8b", "qwen3-0.6b")
    llama, qwen = (random_spec(f"random:{name}").model_copy(update=few) for name in names)
    here = {"device": device, "scheduler": scheduler, "model": qwen.name}
    triton = {**here, "attention": "triton"} if device == "cuda" else here
    hybrid = {**here, "attention": "hybrid"} if device == "cuda" else here
    return [
        Checked("float32", Deployment(dtype="float32", **triton), qwen, 1e-3),
        Checked("bfloat16", Deployment(dtype="bfloat16", **{**triton, "model": llama.name}), llama, 0.05),
        Checked("hybrid attention", Deployment(dtype="bfloat16", **hybrid), qwen, 0.05),
        Checked("FP8 KV", Deployment(dtype="bfloat16", kv_cache_dtype="fp8", **triton), qwen, 0.1),
        Checked("int4 weights", Deployment(dtype="bfloat16", quantization="int4", **triton), qwen, 0.05),
        Checked("int8 weights", Deployment(dtype="bfloat16", quantization="int8", **triton), qwen, 0.05),
        Checked("FP8 projections", Deployment(dtype="bfloat16", quantization="fp8", **triton), qwen, 0.15),
    ]


def engine_checks(device: str, dry_run: bool) -> list[Callable[[], Iterator[dict[str, Any]]]]:
    """Return the check of each engine: it yields three rows in the form of `correctness.checks`, or its error."""
    engines = checked(device, dry_run)
    return [partial(_rows, engine) for engine in ([engines[0], engines[-1]] if dry_run else engines)]


def _rows(engine: Checked) -> Iterator[dict[str, Any]]:
    try:
        yield from check_engine(engine)
    except Exception as error:
        message = f"{type(error).__name__}: {str(error)[:300]}"
        yield _row(engine, "runs", message, engine.limit, False)


def check_engine(engine: Checked) -> Iterator[dict[str, Any]]:
    """Yield three rows for an engine: logits, tokens and covered.

    Logits: the worst row's relative error. Tokens: number of tokens that are not the likeliest. Covered: the events
    (such as preemptions) that must occur for the check to mean anything, and did not.
    """
    requests = _requests(engine.spec)
    outputs, ours, seen = _answers(engine.deployment, engine.spec, requests)
    _, theirs, _ = _answers(_simplest(engine.deployment), engine.spec, requests, forced=outputs)
    reference = dict(theirs)
    keys = [key for key, _ in ours]
    mine = torch.stack([logits for _, logits in ours]).float()
    wanted = torch.stack([reference[key] for key in keys]).float()
    tokens = torch.tensor([outputs[id][index] for id, index in keys], device=mine.device)[:, None]

    error = float(((mine - wanted).norm(dim=1) / wanted.norm(dim=1)).max())
    yield _row(engine, "logits", error, engine.limit, error <= engine.limit)
    slack = _TIE * engine.limit * wanted.square().mean(1).sqrt()
    likeliest = mine.gather(1, tokens)[:, 0] == mine.max(1).values
    near = wanted.gather(1, tokens)[:, 0] >= wanted.max(1).values - slack
    wrong = int((~(likeliest & near)).sum()) + sum(len(outputs[n]) != r.output for n, r in enumerate(requests))
    yield _row(engine, f"{len(set(keys))} tokens", wrong, 0, wrong == 0)
    must = [name for name in _MUST_HAPPEN if name != "mixed_graphs" or engine.deployment.attention != "hybrid"]
    missing = [name for name in must if not seen[name]]
    yield _row(engine, "covered", f"no {', '.join(missing)}" if missing else 0, 0, not missing) | {"seen": dict(seen)}


def _row(engine: Checked, check: str, error: float | str, limit: float, ok: bool) -> dict[str, Any]:
    return {"kernel": "engine", "case": f"{engine.name}: {check}", "error": error, "limit": limit, "ok": ok}


def _simplest(deployment: Deployment) -> Deployment:
    roomy = deployment.rescheduled(async_scheduling=False, enable_prefix_caching=False, num_blocks=1200)
    return roomy.model_copy(update={"attention": "torch", "enforce_eager": True})


def _requests(spec: ModelSpec) -> list[Answer]:
    """Return requests that arrive while others decode; prompts are short, shared, or long enough to be chunked."""
    draw = Random(0)

    def text(tokens: int) -> list[int]:
        return [draw.randrange(spec.vocab_size) for _ in range(tokens)]

    shared = text(320)
    prompts = [text(40), shared + text(9), text(600), text(1500), shared + text(70), text(5), shared + text(33),
               text(250), text(1), shared + text(1), text(520), text(130)]  # fmt: skip
    return [Answer(prompt, 19 + 5 * (n % 4), 3 * n) for n, prompt in enumerate(prompts)]


Logits = list[tuple[tuple[int, int], Tensor]]  # logits by request and index of its output token


def _answers(
    deployment: Deployment, spec: ModelSpec, requests: list[Answer], forced: dict[int, list[int]] | None = None
) -> tuple[dict[int, list[int]], Logits, Counter[str]]:
    """Return the output tokens of each request, the logits behind each, and counts of events."""
    engine = Engine(deployment, ModelFiles(spec, None, deployment.model))
    try:
        engine.runner.graph_mixed_steps(True)
        noting = engine.runner.model.ops = Noting(engine.runner.model.ops)
        outputs: dict[int, list[int]] = {number: [] for number in range(len(requests))}
        waiting = deque(enumerate(requests))
        flights, seen, steps = [], Counter[str](), 0
        while waiting or engine.scheduler.requests:
            while waiting and (waiting[0][1].arrives <= steps or forced is not None):
                number, (prompt, output, _) = waiting.popleft()
                arrived = WorkloadRequest(number, 0, (("", len(prompt)),), output)

                def take(token: int, _: float | None, taken: list[int] = outputs[number]) -> bool:
                    taken.append(token)
                    return False

                engine.add(arrived, prompt, forced=forced and forced[number], on_token=take)
            while engine.has_room and (flight := engine.launch()) is not None:
                flights.append(flight)
            step = engine.finish()
            steps += 1
            if step is None:
                continue
            seen["graphs"] += step.graph
            seen["mixed_graphs"] += step.graph and step.plan.prefill_rows > 0
            seen["in_flight"] += step.plan.lag > 0
            seen["preemptions"] += len(step.plan.preempted)
            seen["prefix_hits"] += sum((request.first_hit or 0) > 0 for request in step.finished)
            seen["chunks"] += sum(row.tokens > 1 and row.start > 0 for row in step.rows)
            seen["whole_prompts"] += sum(row.tokens >= 512 and row.start == 0 for row in step.rows)
        logits: Logits = []
        sampling = [flight for flight in flights if flight.sampled_rows]
        for flight, sampled in zip(sampling, noting.logits, strict=True):
            for index, values in zip(flight.sampled_rows, sampled, strict=True):
                if index is None:
                    continue
                row = flight.rows[index]
                place = row.start + row.tokens - row.request.prompt_len
                if place < len(outputs[row.request.id]):
                    logits.append(((row.request.id, place), values))
        return outputs, logits, seen
    finally:
        engine.close()
