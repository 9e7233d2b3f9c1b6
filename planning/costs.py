"""Deployments with the cost model that prices their steps.

A calibration of our own engine holds only for that engine. A calibration of another engine, or the bundled kernel
tables, hold for every deployment that can be derived from them. A user's cost model decides itself what it holds for.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from tokentwin.calibration.steps.external_calibration import Learnt
from tokentwin.calibration.steps.observed import JudgedCost, observed, pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.planning.resolution import calibration_in, resolved
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec, catalogue_name, find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.own_cost import identity, names_own_cost, own_cost

_PRICES = re.compile(r"[^,=]*=[^,\s]*|[^,\s][^,]*")  # GPU=DOLLARS, or what is none


class Priced(NamedTuple):
    """A deployment, its cost model, and the id of the calibration behind the cost model.

    The cost model counts the steps that it times. `defaults` says which settings the deployment left to its engine, and
    their values.
    """

    deployment: Deployment
    cost: JudgedCost
    calibration: str
    defaults: str = ""

    @property
    def gpu(self) -> GpuSpec | None:
        """The GPU of the kernel tables; None for our own engine, whose calibration needs no tables."""
        behind = pure(self.cost)
        return behind.kernels.gpu if isinstance(behind, OperationCost) else None

    @property
    def device(self) -> str:
        """The name under which prices list the device: the GPU's name, or `cpu` or `cuda` for our own engine."""
        return self.gpu.name if self.gpu else self.deployment.device

    def usd_per_gpu_hour(self, prices: Mapping[str, float]) -> float | None:
        """Return the price of `device` in `prices`, or else in the catalogue; None if it is in neither."""
        return prices.get(self.device, self.gpu.usd_per_hour if self.gpu else None)


def named_prices(texts: tuple[str, ...], option: str = "price") -> dict[str, float]:
    """Parse prices in dollars per GPU-hour, such as `H100=2.9`, separated by commas or blanks; names may have blanks.

    The result has the catalogue's names. Raises UserError that names the `option` for a text that is not a price.
    """
    prices: dict[str, float] = {}
    for pair in (pair.strip() for text in texts for pair in _PRICES.findall(text)):
        name, _, text = pair.rpartition("=")
        name = catalogue_name(name)
        if name in prices:
            raise UserError(option, pair, f"is the second price of {name}; give one")
        try:
            prices[name] = float(text)
        except ValueError:
            prices[name] = math.nan
        if not name or not 0 <= prices[name] < 1e9:
            raise UserError(option, pair, "must be GPU=DOLLARS, the price of an hour, e.g. H100=2.9")
    return prices


def priced(
    calibration: str | None, gpu: str | None, deployment: Deployment, shared_prefix: int = 0, encodes: bool = False
) -> Priced:
    """Return `deployment` with its cost model, from a calibration, a GPU, or both.

    `calibration` is a directory, or the `module:Class` of a user's cost model. All prompts start with the same
    `shared_prefix` tokens, which old releases of vLLM read once in a step. An engine that only `encodes` images needs
    no memory for the language model and its KV.

    Raises UserError when the arguments do not go together.
    """
    check_timed(calibration, gpu)
    if calibration is not None and names_own_cost(calibration):
        return _by_own_model(calibration, gpu, deployment)
    learnt = None if calibration is None else calibration_in(calibration)
    if isinstance(learnt, Calibration):
        if gpu is not None:
            raise UserError("gpu", gpu, "cannot be combined with a calibration of our own engine; leave --gpu out")
        return _of_our_engine(learnt, resolved(deployment, None)[0])
    return _on_gpu(gpu or (learnt.gpu if learnt else ""), learnt, deployment, shared_prefix, encodes)


def check_timed(calibration: str | None, gpu: str | None) -> None:
    """Raise UserError if neither a calibration nor a GPU is given to time steps."""
    if calibration is None and gpu is None:
        remedy = "is missing; give --calibration, or --gpu for a GPU without a calibration"
        raise UserError("calibration", None, remedy)


def _by_own_model(name: str, gpu: str | None, deployment: Deployment) -> Priced:
    if gpu is not None:
        raise UserError("gpu", gpu, "cannot be combined with your own cost model; leave --gpu out")
    made, _ = resolved(deployment, None)
    return Priced(made, observed(own_cost(name, made)), identity(name))


def _on_gpu(gpu: str, learnt: Learnt | None, deployment: Deployment, shared_prefix: int, encodes: bool) -> Priced:
    from tokentwin.calibration.steps.external_calibration import (  # imports slowly: it needs scipy
        identity,
        predicted_cost,
    )

    made, defaults = resolved(deployment, find_gpu(gpu), learnt, encodes)
    cost = predicted_cost(gpu, made, learnt).with_shared_prefix(0 if encodes else shared_prefix)
    return Priced(made, observed(cost), identity(gpu, learnt), defaults)


def _of_our_engine(measured: Calibration, deployment: Deployment) -> Priced:
    base = measured.learnt_as
    deployment = _as_measured(deployment, base)
    for name in Deployment.model_fields:
        if name in ("policy", "scheduler", "fleet", "kv_tiers"):
            continue
        stated, known = getattr(deployment, name), getattr(base, name)
        if name == "lora" and stated is not None and known is not None and stated.timing() == known.timing():
            continue  # the numbers of adapters change no step time
        launching = name == "enforce_eager" and stated and measured.launches.ns is not None
        if name == "engine" and stated == base.engine_name.name:
            continue  # a calibration holds for the release that was measured
        if stated != known and not launching:
            remedy = f"must be {known}, as the calibration was measured; calibrate again to change it"
            raise UserError(name, stated, remedy)
    return Priced(deployment, observed(StepCost(measured, deployment)), measured.id)


def _as_measured(deployment: Deployment, base: Deployment) -> Deployment:
    """Return `deployment` with the draft acceptance that `base` was measured with, unless `deployment` states one.

    Raises UserError for drafts of another kind, because they take a different time.
    """
    speculative, known = deployment.scheduler.speculative, base.scheduler.speculative
    if (speculative and speculative.timing()) != (known and known.timing()):
        stated = speculative and speculative.model_dump(exclude_defaults=True)
        shown = known.timing().model_dump(exclude_defaults=True) if known else "left out"
        remedy = f"must be {shown}, as the calibration was measured; calibrate again to change it"
        raise UserError("scheduler.speculative", stated, remedy)
    if speculative is None or speculative.states_acceptance:
        return deployment
    return deployment.rescheduled(speculative=known)
