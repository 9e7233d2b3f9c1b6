"""A calibration of an engine other than ours: kernels of its GPU, a correction fitted to its logs, and host times.

It comes from evidence, or from another configuration's calibration. The width of a prediction's band is the standard
deviation that the levels of the evidence give, times a number of standard deviations that contained the errors of
left-out sources. The file states what it was fitted to, so that results can state it, too. A calibration is called
blind if the engine was never measured: it has kernel tables and the correction of other engines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import blake2b
from math import log, sqrt
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict

from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.kernels.collectives import COLLECTIVES
from tokentwin.calibration.kernels.power_limit import limited
from tokentwin.calibration.kernels.sixteen_bits import SixteenBitKernels
from tokentwin.calibration.kernels.surfaces import bundled, bundled_names
from tokentwin.calibration.operations import KernelTimes, StepSizes
from tokentwin.calibration.steps.calibration_file import Price, checked, read, save
from tokentwin.calibration.steps.correction import ADDED, FACTORS, Correction, step_parts, wider_types
from tokentwin.calibration.steps.doubts import (
    Doubt,
    doubts,
    host_of_release,
    measured_types,
    priced_wider,
    untaught_types,
)
from tokentwin.calibration.steps.evidence import (
    NUMBERS,
    PARTS,
    PLACE,
    PRIORS,
    Belief,
    Evidence,
    Origin,
    bundled_bytes,
    bundled_evidence,
    own_missed_bytes,
    own_origin,
)
from tokentwin.calibration.steps.interval import REACH, Factors, StepInterval, factors_of, widened
from tokentwin.calibration.steps.launches import UNKNOWN, LaunchCost, outside_graphs
from tokentwin.calibration.steps.measured_runs import FILE as MEASURED_FILE
from tokentwin.calibration.steps.measured_runs import MeasuredRuns
from tokentwin.calibration.steps.operation_cost import HostTimes, OperationCost
from tokentwin.calibration.steps.pipeline_cost import PipelineCost
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.engines import captured_tokens
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu, gpus
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.deployments.weight_types import check_heads, narrowest_dtype
from tokentwin.serving.errors import UserError

FILE = "engine.json"
_FORMAT = 2
_APPROXIMATED = 0.25  # assumed reach, as a log factor, of the error of a step if the architecture is only approximated


@dataclass(frozen=True)
class ExternalCalibration:
    """The calibration of one engine on one GPU.

    Attributes:
        gpu, deployment: name of the catalogued GPU, and the measured deployment as JSON, including the engine if it is
            known
        correction, host: correction fitted to whole steps, and CPU time between steps
        interval: factors of the predicted time between which 90 % of runs lie
        prompt_interval: such factors for the time that prompts add to a step; None if they are not known separately
        request_ms: time that a server and a client add to TTFT, which the simulation of the engine does not have;
            `request_interval` is its 90 % interval as factors
        untaught: sentence about an important part of the configuration that was not measured; empty if there is none
        residuals: by regime, the number of held-out steps, and the median and p95 of their errors in percent
        source, created: the measurements that were fitted, and the date of the fit
    """

    gpu: str
    deployment: str
    correction: Correction
    host: HostTimes
    interval: Factors
    source: str
    created: str
    residuals: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    prompt_interval: Factors | None = None
    request_ms: Price = 0.0
    request_interval: Factors = (1.0, 1.0)
    untaught: str = ""
    format: int = _FORMAT

    __pydantic_config__ = ConfigDict(extra="forbid")

    @property
    def id(self) -> str:
        """A hash of everything that a prediction depends on, as twelve hexadecimal digits."""
        known = (self.gpu, self.correction, self.host, self.step_interval)
        contents = repr((*known, dict(self.correction.wider)) if self.correction.wider else known)
        return blake2b(contents.encode(), digest_size=6).hexdigest()

    @property
    def step_interval(self) -> StepInterval:
        """The intervals of the time of decode rows and of the time of prompts."""
        return StepInterval(self.interval, self.prompt_interval or self.interval)

    def save(self, directory: Path) -> None:
        """Write `engine.json` into `directory`; a failed write leaves no partial file."""
        save(self, directory / FILE)

    @classmethod
    def load(cls, path: Path) -> ExternalCalibration:
        """Read the file `path`; raise UserError if it is damaged or has another format."""
        loaded = checked(cls, read(path, _FORMAT), str(path))
        numbers = {**loaded.correction.factors, **loaded.correction.added_ns}
        if missing := [name for name in (*FACTORS, *ADDED) if name not in numbers]:
            raise UserError("calibration", str(path), f"has no value for {missing[0]}; calibrate again")
        try:
            _ = loaded.learnt_as
        except ValueError as error:
            raise UserError("calibration", str(path), f"is damaged ({error}); calibrate again") from None
        return loaded

    @property
    def learnt_as(self) -> Deployment:
        """The parsed `deployment`."""
        return parse(Deployment, json.loads(self.deployment), where="calibration.deployment")

    def differs(self, deployment: Deployment) -> str:
        """Return the first setting that affects times and is different in `deployment`; empty if there is none.

        A deployment without a release of the engine is assumed to have the release of the calibration.
        """
        then, now = self.learnt_as, deployment.engine_name
        if now.name != then.engine_name.name or now.version not in ("", then.engine_name.version):
            return f"engine {then.engine_name}"
        longest = deployment.scheduler.max_model_len  # max_model_len changes no time
        before, after = (
            one.rescheduled(max_model_len=longest).timing().model_dump(exclude={"engine"}) for one in (then, deployment)
        )
        name = next((name for name in before if before[name] != after.get(name)), "")
        return "an engine of another loop" if name == "scheduler" else name and f"{name} {before[name]}"

    def cost(self, model: ModelSpec, deployment: Deployment, kernels: KernelTimes) -> OperationCost:
        """Return the cost model of `deployment`.

        If it differs from the calibrated one, or if something important was not measured, no step counts as validated.
        """
        same = self.gpu == kernels.gpu.name and not self.differs(deployment) and not self.untaught
        correction = self.correction if same else replace(self.correction, domain={})
        kind = PipelineCost if deployment.pipeline_parallel_size > 1 else OperationCost
        return kind(model, deployment, kernels, correction, self.host, self.step_interval, self.untaught)


Floats = NDArray[np.float64]

_ROWS, _CONTEXT, _CHUNK = 32, 2048, 2048  # rows, context and chunk in tokens of the two steps in `step_shares`


def step_shares(model: ModelSpec, deployment: Deployment, kernels: KernelTimes) -> Floats:
    """Return the nanoseconds to which each number at its prior leads in a decode and a prompt step, `[2, numbers]`."""
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
        of_loop["launch"] = float(outside_graphs(model, deployment, sizes, captured_tokens(deployment, kernels.gpu)))
        for name, count in of_loop.items():
            shares[at, PLACE[name]] = count
    return shares * PRIORS


def correction_of(
    evidence: Evidence, origin: Origin, belief: Belief, deployment: Deployment, gpu: GpuSpec
) -> Correction:
    """Return the correction of `belief`, with the evidence's multipliers for weight types that have more bits."""
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
    times, at = shares * np.exp(belief.logs), PLACE["launch"]
    launching = times[:, at].copy()
    times[:, at] = 0.0
    waits = launching > times.sum(axis=1)
    times[waits] = 0.0
    times[waits, at] = launching[waits]
    return np.asarray(times / times.sum(axis=1, keepdims=True))


def transferred(
    learnt: ExternalCalibration,
    gpu: GpuSpec,
    deployment: Deployment,
    here: ExternalCalibration,
    there: ExternalCalibration,
) -> ExternalCalibration:
    """Return the calibration `learnt` adapted to `deployment` on `gpu`; unchanged if this deployment was calibrated.

    For another parallel layout, precision, loop, engine or release, each factor and time of `learnt` is multiplied by a
    ratio of two blind predictions of this factor or time: in the calibration `here`, which is of `deployment`, to that
    in `there`, which is of the deployment that `learnt` measured. The interval is then at least as wide as that of
    `here`. Raises UserError for another GPU or model, because their kernels differ.
    """
    for name, was, now in (("gpu", learnt.gpu, gpu.name), ("model", learnt.learnt_as.model, deployment.model)):
        if was != now:
            remedy = f"is not what the calibration was learnt on ({was}); calibrate on it, or leave the calibration out"
            raise UserError(name, now, remedy)
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


Learnt = ExternalCalibration | MeasuredRuns
"""A calibration of engines other than ours, which corrects the kernel times of a GPU."""

LEARNT_FILES = (FILE, MEASURED_FILE)


def load_learnt(directory: Path) -> Learnt | None:
    """Return the calibration of engines other than ours in `directory`; None if there is none."""
    if (directory / FILE).exists():
        return ExternalCalibration.load(directory / FILE)
    return MeasuredRuns.load(directory / MEASURED_FILE) if (directory / MEASURED_FILE).exists() else None


def predicted_cost(
    gpu: str,
    deployment: Deployment,
    calibration: Learnt | None = None,
    launches: LaunchCost = UNKNOWN,
) -> OperationCost:
    """Return the cost model of `deployment` on `gpu`, from `calibration` or else from the bundled evidence (blind).

    A calibration of measured runs adds them to the bundled evidence, and applies to any GPU and model. If `launches`
    was measured, it replaces the launch cost. Raises UserError for an unknown GPU or model, for heads that cannot be
    split over the devices, and for a calibration of another GPU or model.
    """
    model = find_model(deployment.model)
    check_heads(model, deployment.tensor_parallel_size)
    known = expected(gpu, deployment, calibration if isinstance(calibration, MeasuredRuns) else None)
    if isinstance(calibration, ExternalCalibration):
        then = calibration.learnt_as
        same = find_gpu(gpu).name == calibration.gpu and then.model == deployment.model
        there = expected(gpu, then) if same else known
        known = transferred(calibration, find_gpu(gpu), deployment, known, there)
    if launches.ns is not None:
        known = replace(known, host=replace(known.host, launches=launches))
    limit_w = deployment.power_limit_w
    if isinstance(calibration, ExternalCalibration) and (then_w := calibration.learnt_as.power_limit_w) is not None:
        if limit_w != then_w:
            raise UserError("power_limit_w", limit_w, f"must be {then_w:g}, as the calibration was measured")
        limit_w = None  # the measured times contain it
    times = limited(kernels(gpu), limit_w)
    if times is not kernels(gpu):
        about = f"no measured run that taught it had a power limit ({limit_w:g} W)"
        known = replace(known, untaught="; ".join(filter(None, (about, known.untaught))))
    if not isinstance(calibration, ExternalCalibration) and _priced_wider(gpu, deployment, calibration):
        times = SixteenBitKernels(times.gpu, times)
    return known.cost(model, deployment, times)


def _priced_wider(gpu: str, deployment: Deployment, measured: MeasuredRuns | None) -> bool:
    evidence = measured.evidence if measured else bundled_evidence()
    origin = Origin.from_deployment(find_model(deployment.model), find_gpu(gpu), deployment)
    return bool(priced_wider(evidence, origin, deployment.engine_name))


def blind_doubts(gpu: str, deployment: Deployment, measured: MeasuredRuns | None = None) -> list[Doubt]:
    """Return what neither published runs nor a user's `measured` runs cover of `deployment` on `gpu`."""
    model, spec = find_model(deployment.model), find_gpu(gpu)
    evidence = measured.evidence if measured else bundled_evidence()
    origin, own = Origin.from_deployment(model, spec, deployment), measured.learnt_as if measured else None
    return list(doubts(evidence, origin, model, deployment, lambda: step_shares(model, deployment, kernels(gpu)), own))


def expected(gpu: str, deployment: Deployment, measured: MeasuredRuns | None = None) -> ExternalCalibration:
    """Return the blind calibration of `deployment` on `gpu`, with what no measured run covers (`blind_doubts`).

    A user's `measured` runs join the bundled evidence. Weights of few bits may be slower than wider ones if runs of
    this engine on this generation of GPUs had them: what they taught replaces the assumption that they are not.
    """
    evidence = measured.evidence if measured else bundled_evidence()
    origin = Origin.from_deployment(find_model(deployment.model), find_gpu(gpu), deployment)
    calibration = blind(gpu, deployment, evidence=evidence, wide=_priced_wider(gpu, deployment, measured))
    if calibration.correction.wider and measured_types(evidence, origin):
        calibration = replace(calibration, correction=replace(calibration.correction, wider={}))
    decode, prompts = calibration.step_interval
    reasons = []
    for doubt in blind_doubts(gpu, deployment, measured):
        decode, prompts = widened(decode, *doubt.of_decode), widened(prompts, *doubt.of_prompts)
        reasons.append(doubt.why)
    types = untaught_types(evidence, origin).values()
    if calibration.untaught and not calibration.untaught.endswith(tuple(types)):
        reasons.insert(0, calibration.untaught)
    return replace(
        calibration,
        interval=decode,
        prompt_interval=prompts,
        host=host_of_release(calibration.host, deployment, evidence),
        untaught="; ".join(reasons),
    )


def identity(gpu: str, calibration: Learnt | None = None) -> str:
    """Return a hash of everything that a prediction depends on, as twelve hexadecimal digits.

    It covers the calibration, the evidence, the kernel tables, and the datasheet of a user's own GPU.
    """
    digest = blake2b((calibration.id if calibration else "").encode() + bundled_bytes(), digest_size=6)
    if isinstance(calibration, MeasuredRuns):
        digest.update(own_missed_bytes())
    spec = find_gpu(gpu)
    if spec != gpus().get(spec.name):
        digest.update(spec.model_dump_json(exclude={"linked_gpus"}).encode())  # it changes no time
    own = bundled(spec.name)
    for path in [COLLECTIVES, *([own] if own.exists() else map(bundled, bundled_names()))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def kernels(gpu: str) -> KernelTimes:
    """Return the kernel times of a GPU, given by its name or its file; they are read only once."""
    return load_kernels(find_gpu(gpu))


def blind(
    gpu: str,
    deployment: Deployment,
    without: Callable[[Origin], bool] | None = None,
    client: str = "",
    evidence: Evidence | None = None,
    wide: bool = False,
) -> ExternalCalibration:
    """Return the calibration of `deployment` on `gpu` from measured runs of other engines.

    Evidence from origins for which `without` returns True is left out. `evidence` is the bundled evidence by default.
    If `wide` is True, the calibration is that of weights in 16 bits.
    """
    model, spec = find_model(deployment.model), find_gpu(gpu)
    known = evidence or bundled_evidence()
    origin = own_origin(Origin.from_deployment(model, spec, deployment), client)
    origin = origin.stored_as("bfloat16") if wide else origin
    left = known if without is None else known.without(without)
    calibration = of_belief(left, origin, deployment, spec, step_shares(model, deployment, kernels(gpu)))
    if model.approximated and all(part.origin.model != model.name for part in left.taught):
        decode, prompts = (widened(known, _APPROXIMATED) for known in calibration.step_interval)
        untaught = "; ".join(filter(None, (model.approximated, calibration.untaught)))
        calibration = replace(calibration, interval=decode, prompt_interval=prompts, untaught=untaught)
    if spec.name in gpus():
        return calibration
    return replace(calibration, untaught=f"the catalogue lacks {spec.name}, so no measured run taught it")
