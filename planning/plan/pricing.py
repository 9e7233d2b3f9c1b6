"""The candidates that may serve the traffic of a request, and their cost models.

Steps are timed by kernel tables for any GPU and any number of GPUs, by a calibration of our own engine, which holds for
one model and one GPU, or by a user's cost model.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from tokentwin.calibration.steps.external_calibration import Learnt
from tokentwin.calibration.steps.observed import JudgedCost, observed
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.planning.costs import priced
from tokentwin.planning.deployments import described, long_enough, with_settings
from tokentwin.planning.plan.candidates import Engine, RuledOut, Split, candidate_engines, shown_settings
from tokentwin.planning.plan.request import PlanRequest
from tokentwin.planning.plan.trial import Pricing
from tokentwin.planning.resolution import base_deployment, calibration_in, timed_by
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.scheduler import find_policy
from tokentwin.serving.user_code.own_cost import names_own_cost, own_cost
from tokentwin.serving.workload import Workload, common_prefix


@dataclass(frozen=True)
class KernelPricing:
    """Pricing by the kernel tables of each GPU, corrected by a calibration of engines or the bundled corrections.

    `shared_prefix` is the number of tokens with which all prompts of the traffic start.
    """

    learnt: Learnt | None = None
    shared_prefix: int = 0
    _known: dict[tuple[str, str], OperationCost] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __call__(self, engine: Engine) -> JudgedCost:
        from tokentwin.calibration.steps.external_calibration import predicted_cost

        key = engine.gpu, engine.deployment.model_dump_json()
        if key not in self._known:
            cost = predicted_cost(engine.gpu, engine.deployment, self.learnt)
            self._known[key] = cost.with_shared_prefix(self.shared_prefix)
        return observed(self._known[key])


def _measured(calibration: Calibration, engine: Engine) -> JudgedCost:
    """Return the cost model of our calibrated engine; candidates differ only in policies, limits and CUDA graphs."""
    return observed(StepCost(calibration, engine.deployment))


def _own(name: str, engine: Engine) -> JudgedCost:
    """Return a user's cost model, given by its `module:Class`."""
    return observed(own_cost(name, engine.deployment))


class Candidates(NamedTuple):
    """The engines that may serve the traffic, the combinations that cannot, and the pricing of steps."""

    engines: list[Engine]
    ruled_out: list[RuledOut]
    pricing: Pricing


def priced_candidates(request: PlanRequest, workload: Workload) -> Candidates:
    """Return every candidate of `request`, with room for the longest request of `workload`.

    Raises UserError if there is none.
    """
    names: dict[str, str] = {}
    for policy in request.policies or ():
        find_policy(policy)
        if names.setdefault(name := policy.rpartition("/")[2], policy) != policy:
            raise UserError("policy", name, "is in two files; give the files or the classes other names")
    calibration = request.calibration
    learnt = None if calibration is None else timed_by(calibration, None)[1]
    if calibration is not None and learnt is None:
        if request.gpus or request.tensor_parallel_sizes or request.model or request.splits:
            remedy = (
                "is a calibration of one engine, which fixes model, GPU, tensor-parallel size and split; "
                "leave these options out"
            )
            raise UserError("calibration", calibration, remedy)
        return _of_our_engine(calibration, request)
    named = request.gpus or ((learnt.gpu,) if learnt is not None else ())
    if not named:
        raise UserError("gpu", None, "is missing; give at least one candidate, e.g. --gpu H100,H200")
    base = described(request.deployment, base_deployment(calibration).model_copy(update={"fleet": None}))
    if request.model:
        base = base.model_copy(update={"model": request.model})
    if request.deployment is None or not request.deployment.scheduler.states("max_model_len"):
        base = long_enough(base, workload)
    engines, ruled_out = candidate_engines(
        base,
        {name: find_gpu(name) for name in named},
        request.tensor_parallel_sizes or (base.tensor_parallel_size,),
        request.policies or (base.policy,),
        request.prices,
        request.variations,
        Split.listed(request.splits or ("none",), encoders=base.multimodal is not None),
        learnt,
    )
    return Candidates(engines, ruled_out, KernelPricing(learnt, common_prefix(workload.requests)))


def _of_our_engine(calibration: str, request: PlanRequest) -> Candidates:
    """Return the calibrated engine with each policy and setting; its price is listed under `cpu` or `cuda`."""
    prices, engines = request.prices, []
    base = described(request.deployment, base_deployment(calibration))
    for settings in request.variations:
        deployment = priced(calibration, None, with_settings(base, settings)).deployment
        device = deployment.device
        if prices.keys() != {device}:
            raise UserError("price", ", ".join(prices) or None, f"give exactly one price, --price {device}=DOLLARS")
        for policy in request.policies or (deployment.policy,):
            ours = deployment.model_copy(update={"policy": policy})
            engines.append(Engine(device, prices[device], ours, shown_settings(settings)))
    learnt = None if names_own_cost(calibration) else calibration_in(calibration)
    timed = partial(_measured, learnt) if isinstance(learnt, Calibration) else partial(_own, calibration)
    return Candidates(engines, [], timed)
