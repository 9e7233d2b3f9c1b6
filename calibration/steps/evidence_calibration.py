"""The calibration of a configuration from evidence, and from another configuration's calibration.

The band of a configuration has the width of the numbers behind its steps, as the levels know them, times as many
standard deviations as sources left out in turn needed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import log, sqrt

import numpy as np
from numpy.typing import NDArray

from calibration.kernels.times import KernelTimes
from calibration.operations import StepSizes
from calibration.steps.correction import Correction
from calibration.steps.evidence import NUMBERS, PARTS, PLACE, PRIORS, Belief, Evidence, Origin
from calibration.steps.external_calibration import ExternalCalibration
from calibration.steps.interval import REACH, factors_of, widened
from calibration.steps.parts import step_parts, wider_types
from serving.deployments.config import Deployment
from serving.deployments.gpu_spec import GpuSpec
from serving.deployments.model_catalogue import find_model
from serving.deployments.model_spec import ModelSpec
from serving.deployments.weight_types import narrowest_dtype
from serving.errors import UserError

Floats = NDArray[np.float64]

_ROWS, _CONTEXT, _CHUNK = 32, 2048, 2048  # amounts of the steps that judge a configuration


def step_shares(model: ModelSpec, deployment: Deployment, kernels: KernelTimes) -> Floats:
    """Return nanoseconds of each number's part at its prior, for a decode step and for a prompt `[2, numbers]`."""
    rows = float(min(_ROWS, deployment.scheduler.max_num_seqs))
    decode = StepSizes(decode_rows=rows, decode_context=rows * _CONTEXT, sampled_rows=rows)
    pairs = _CHUNK * (_CHUNK + 1) / 2
    prompt = StepSizes(prefill_rows=1.0, prefill_tokens=float(_CHUNK), prefill_pairs=pairs, sampled_rows=1.0)
    shares = np.zeros((2, len(NUMBERS)))
    for at, sizes in enumerate((decode, prompt)):
        for part, ns in step_parts(model, deployment, kernels, sizes).items():
            if part in PARTS:
                shares[at, PLACE[PARTS[part]]] += float(ns)
        of_loop = {"step": 1.0, "host step": 0.0 if deployment.scheduler.async_scheduling else 1.0}
        of_loop |= {"decode row": rows * (at == 0), "host row": of_loop["host step"] * rows * (at == 0)}
        for name, count in of_loop.items():
            shares[at, PLACE[name]] = count
    return shares * PRIORS


def correction_of(
    evidence: Evidence, origin: Origin, belief: Belief, deployment: Deployment, gpu: GpuSpec
) -> Correction:
    """Return the correction of `belief`, with the evidence's multipliers for weight types of more bits."""
    wider = wider_types(narrowest_dtype(find_model(deployment.model), deployment), gpu)
    others = {dtype: evidence.belief(origin.stored_as(dtype)) for dtype in wider}
    return belief.correction("measured runs of other engines", others)


def of_belief(
    evidence: Evidence, origin: Origin, deployment: Deployment, gpu: GpuSpec, shares: Floats
) -> ExternalCalibration:
    """Return the calibration of one configuration on `gpu` from the evidence; `shares` are its `step_shares`."""
    belief = evidence.belief(origin)
    decode, prompts = (
        factors_of(evidence.reach(figure, origin) * sqrt(float(belief.variance(slopes)) + evidence.noise[figure] ** 2))
        for figure, slopes in zip(("tpot_ms.mean", "ttft_ms.mean"), _slopes(belief, shares), strict=True)
    )
    at = PLACE["request"]
    return ExternalCalibration(
        gpu="",
        deployment=deployment.model_dump_json(),
        correction=correction_of(evidence, origin, belief, deployment, gpu),
        host=belief.host,
        interval=decode,
        prompt_interval=prompts,
        request_ms=belief.values["request"] / 1e6,
        request_interval=factors_of(REACH * sqrt(float(belief.covariance[at, at]))),
        untaught=evidence.untaught(origin),
        source=f"{len(evidence.taught)} groups of measured runs",
        created="",
    )


def _slopes(belief: Belief, shares: Floats) -> Floats:
    times = shares * np.exp(belief.logs)
    return np.asarray(times / times.sum(axis=1, keepdims=True))


def transferred(
    learnt: ExternalCalibration,
    gpu: GpuSpec,
    deployment: Deployment,
    here: ExternalCalibration,
    there: ExternalCalibration,
) -> ExternalCalibration:
    """Return a calibration for use with `deployment` on `gpu`, unchanged for the configuration it was learnt on.

    At another parallel split, precision, loop, engine or release, each number is the blind one `here` times the ratio
    of the learnt number to the blind one `there`, at the configuration it was learnt on. Its interval is then no
    narrower than the blind one. Raises UserError for another GPU or model, because its kernels differ.
    """
    for field, was, now in (("gpu", learnt.gpu, gpu.name), ("model", learnt.learnt_as.model, deployment.model)):
        if was != now:
            remedy = f"is not what the calibration was learnt on ({was}); calibrate on it, or leave the calibration out"
            raise UserError(field, now, remedy)
    differs = learnt.differs(deployment)
    if not differs:
        return learnt

    def moved(which: Callable[[ExternalCalibration], Mapping[str, float]]) -> dict[str, float]:
        blind, own = which(here), which(learnt)
        return {
            name: value * blind[name] / base if (base := which(there)[name]) > 0 else value
            for name, value in own.items()
        }

    correction = replace(
        learnt.correction,
        factors=moved(lambda c: c.correction.factors),
        added_ns=moved(lambda c: c.correction.added_ns),
        wider=here.correction.wider,
        domain={},
    )
    host_ns = moved(lambda c: c.host.times_ns)
    host = replace(learnt.host, step_ns=host_ns["step_ns"], row_ns=host_ns["row_ns"])
    intervals = (
        widened(mine, max(abs(log(end)) for end in blind))
        for mine, blind in zip(learnt.step_interval, here.step_interval, strict=True)
    )
    decode, prompts = intervals
    request_ms = moved(lambda c: {"": c.request_ms})[""]
    return replace(
        learnt,
        correction=correction,
        host=host,
        interval=decode,
        prompt_interval=prompts,
        request_ms=request_ms,
        request_interval=here.request_interval,
        untaught=f"it was learnt as {differs}",
    )
