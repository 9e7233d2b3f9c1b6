"""The short traces that a calibration measures.

They are real traffic through the engine's loop and not a grid of step sizes, because steps within a run take tens of
percent more or less than equal steps timed alone. Closed loops with several concurrencies reach every batch size, even
though the engine's speed is not known. Lengths cover the range that the deployment admits. The seed differs from seeds
that a user is likely to validate with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, cycle, repeat

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.workload import Workload
from tokentwin.traces.synth import parse_spec, synthesise

_SEED = 7_919_000
_NEW_TOKENS = 16  # mean output length, too short for much repetition


@dataclass(frozen=True)
class Pace:
    """The rough speed of the engine: one decode step and one prompt token, in ns."""

    decode_step_ns: int
    prompt_token_ns: int


def designed_workloads(
    config: SchedulerConfig, pace: Pace, seconds: float, adapters: Sequence[str] = (), pools: bool = False
) -> list[Workload]:
    """Return traces that together take about `seconds` at `pace`.

    The second half of each trace has the LoRA `adapters` in turn, so that their time is not mistaken for the model's.
    If `pools`, all are pooling requests.
    """
    most = config.max_num_seqs
    longest = config.max_model_len
    shapes = [
        # name, concurrency, mean prompt, mean output
        ("light", 1, longest / 16, longest / 32),
        ("few", max(most // 4, 1), longest / 12, longest / 32),
        ("busy", max(most // 2, 1), longest / 12, longest / 32),
        ("full", most, longest / 16, longest / 40),
        ("long", max(most // 4, 1), longest / 3, longest / 64),
    ]
    if config.speculative:  # long answers repeat themselves, so every step has drafts, which hide the cost of a row
        shapes += [
            ("new-few", max(most // 4, 1), longest / 64, _NEW_TOKENS),
            ("new-full", most, longest / 64, _NEW_TOKENS),
        ]
    made = []
    for number, (name, concurrency, mean_prompt, mean_output) in enumerate(shapes):
        prompt, output = max(mean_prompt, 4.0), 0.0 if pools else max(mean_output, 4.0)
        request_ns = prompt * pace.prompt_token_ns + output * pace.decode_step_ns / concurrency
        longest_output = max(min(int(4 * output), (longest - 1) // 2), 1)
        spec = {
            "name": f"calibrate-{name}",
            "seed": _SEED + number,
            "requests": max(round(seconds / len(shapes) * 1e9 / request_ns), concurrency + 1),
            "arrivals": {"kind": "closed", "concurrency": concurrency},
            "prompt": {
                "kind": "lognormal",
                "mean": prompt,
                "sigma": 0.8,
                "max": max(longest - 1 - longest_output, 1),
            },
            "output": {"kind": "lognormal", "mean": output, "sigma": 0.6, "max": longest_output} if output else 0,
        }
        workload = synthesise(parse_spec(spec, where=f"calibrate-{name}"))
        made.append(_adapted(workload, adapters, run=1 + number) if adapters else workload)
    return made


def _adapted(workload: Workload, adapters: Sequence[str], run: int) -> Workload:
    """Return `workload`, where `run` successive requests of its second half share an adapter."""
    requests = list(workload.requests)
    plain = len(requests) // 2
    names = chain.from_iterable(repeat(name, run) for name in cycle(adapters))
    more = (replace(request, adapter=name) for request, name in zip(requests[plain:], names, strict=False))
    return replace(workload, requests=[*requests[:plain], *more])
