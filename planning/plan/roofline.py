"""The roofline estimate for a candidate, from the datasheet of its GPU, before anything is simulated or priced.

A step takes at least as long as its FLOPs at the GPU's peak rate, and at least as long as its bytes at the memory's
bandwidth (the roofline of Williams, Waterman and Patterson, CACM 2009). The estimate assumes that every engine always
runs as many requests as its KV memory allows.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from planning.plan.candidates import Engine
from serving.deployments.gpu_spec import GpuSpec
from serving.deployments.model_catalogue import find_model
from serving.workload import PRIVATE, WorkloadRequest
from traces.metrics.step_metrics import StepWork


class MeanRequest(NamedTuple):
    """Mean numbers of tokens of a request.

    Attributes:
        prompt: tokens of the prompt
        computed: tokens of the part of the prompt that no other request has
        output: tokens of the answer
    """

    prompt: float
    computed: float
    output: float

    @classmethod
    def from_requests(cls, requests: Sequence[WorkloadRequest]) -> MeanRequest:
        """Return the means over `requests`."""
        return cls(
            fmean(request.prompt_len for request in requests),
            fmean(sum(tokens for key, tokens in request.prompt if key == PRIVATE) for request in requests),
            fmean(request.output_len for request in requests),
        )


class Roofline(NamedTuple):
    """Lower bounds of times in seconds.

    Attributes:
        token_s: time of an output token for a single user
        request_s: time that a request adds to a replica that runs many requests
    """

    token_s: float
    request_s: float

    @classmethod
    def from_engine(cls, engine: Engine, gpu: GpuSpec, mean: MeanRequest) -> Roofline:
        """Return the bounds of an engine whose GPUs are `gpu`."""
        context = mean.prompt + mean.output / 2
        batch = max(min(engine.kv_tokens / context, engine.deployment.scheduler.most_running), 1.0)
        work = StepWork(find_model(engine.deployment.model), engine.deployment, gpu)
        # Three steps: with one row, with all rows, and with a prompt. The prompt shares its step with decodes, so it
        # adds no time to read weights.
        compute, memory = _steps_s(work, [(0, 1, context), (0, batch, batch * context), (mean.computed, 0, 0)])
        request_s = max(mean.output * compute[1] / batch + compute[2], mean.output * memory[1] / batch)
        return cls(max(compute[0], memory[0]), request_s / sum(engine.split or (1,)))


def _steps_s(work: StepWork, steps: Sequence[tuple[float, float, float]]) -> tuple[list[float], list[float]]:
    """Return the times for FLOPs and the times for memory traffic of each step, in seconds.

    A step is given by its numbers of prompt tokens, of decode rows, and of tokens in the context of the decode rows.
    """
    prompts, rows, contexts = (np.array(column, dtype=float) for column in zip(*steps, strict=True))
    given = pa.table(
        {
            "prefill_tokens": prompts,
            "prefill_rows": np.minimum(prompts, 1.0),
            "prefill_pairs": prompts * (prompts + 1) / 2,
            "prefill_context": np.zeros(len(steps)),
            "decode_rows": rows,
            "decode_context": contexts,
            "draft_tokens": np.zeros(len(steps)),
            "sampled_rows": rows + np.minimum(prompts, 1.0),
        }
    )
    return (work.flops(given) / work.flop_per_s).tolist(), (work.moved_bytes(given) / work.bytes_per_s).tolist()
