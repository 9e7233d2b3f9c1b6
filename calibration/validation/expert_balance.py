"""The balance of an MoE model's experts in real runs, compared with the assumption of the cost model of operations.

The cost model assumes that each token chooses its experts evenly and independently. The number of experts that a step
reads (`Experts.touched`) follows from this. With `expert_imbalance: random`, the ratio of the busiest device's load to
the mean load follows, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.expert_routing import experts_touched, random_imbalance
from tokentwin.calibration.validation.report import DeviceLoad, ExpertBalance
from tokentwin.serving.step_plan import AGGREGATES
from tokentwin.traces.recording import Recording, notes_of

_TOKENS = ("prefill_tokens", "decode_rows", "draft_tokens")
assert set(_TOKENS) <= set(AGGREGATES)


def expert_balance(runs: Sequence[Recording]) -> ExpertBalance | None:
    """Return the balance over all `runs` of one MoE model; None for a dense model, or if loads were not recorded.

    Steps are weighted by their number of tokens in the mean imbalance, because compute time is proportional to it.
    """
    mixture = notes_of(runs[0].run).get("experts")
    columns = [run.table("steps", [*_TOKENS, "experts_hit", "expert_imbalance"]) for run in runs]
    if mixture is None or any(steps["experts_hit"].null_count for steps in columns):
        return None
    experts, topk = mixture["experts"], mixture["topk"]

    def all_of(name: str) -> NDArray[np.float64]:
        return np.concatenate([steps[name].fill_null(0).to_numpy().astype(np.float64) for steps in columns])

    tokens = sum((all_of(name) for name in _TOKENS), start=np.zeros(1))
    counts = [
        np.array(run.steps["expert_tokens"].to_pylist()) for run in runs if run.filled("steps", ["expert_tokens"])
    ]
    load = np.concatenate(counts).sum(axis=0) if counts else None
    ratios: dict[int, list[float]] = {}
    for steps in columns:
        for step in steps["expert_imbalance"].to_pylist():
            for devices, ratio in step:
                ratios.setdefault(devices, []).append(ratio)
    return ExpertBalance(
        steps=len(tokens),
        experts=experts,
        topk=topk,
        hit=_mean(all_of("experts_hit")),
        hit_even=_mean(experts_touched(experts, topk, tokens)),
        devices=tuple(
            DeviceLoad(
                devices=devices,
                imbalance=_mean(np.array(measured), tokens),
                imbalance_random=_mean(random_imbalance(experts, topk, devices, tokens), tokens),
            )
            for devices, measured in sorted(ratios.items())
        ),
        busiest=None if load is None else float(load.max() / load.mean()),
    )


def _mean(values: Any, weights: NDArray[np.float64] | None = None) -> float:
    return float(np.average(values, weights=weights))
