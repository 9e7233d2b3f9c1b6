"""A user's own cost model: a function of a step's plan, or a class with `step_ns`.

It is found by its name. The other methods of a cost model have defaults here. Its times are checked at every step: a
value that cannot be a time ends the run with a one-line error that names the model and the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from hashlib import blake2b
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokentwin.serving.cost_model import decode_plans
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError, shown
from tokentwin.serving.step_plan import AGGREGATES, StepPlan
from tokentwin.serving.user_code.call_limit import Fault, limited
from tokentwin.serving.user_code.plugins import find_object, make

_FIELD = "cost model"
_MOST_NS = 10**18  # 31 years


def names_own_cost(text: str) -> bool:
    """Return whether `text` names a function or a class, as `module:name` or `path/to/file.py:name`."""
    return ":" in text and text.rpartition(":")[2].isidentifier()


def own_cost(name: str, deployment: Deployment) -> OwnCost:
    """Return the cost model called `name` for `deployment`. Raises UserError if it does not exist or cannot be made.

    A class that defines `__init__` is called with the deployment, any other class without arguments.
    """
    model = find_object(_FIELD, name, {})
    if deployment.pipeline_parallel_size > 1:
        remedy = f"needs the time of each stage, which the cost model {name} does not give; leave it out, or use --gpu"
        raise UserError("pipeline_parallel_size", deployment.pipeline_parallel_size, remedy)
    of_class = isinstance(model, type)
    if not callable(getattr(model, "step_ns", None) if of_class else model):
        raise UserError(_FIELD, name, "is neither a function of a step's plan nor a class with step_ns")
    if not of_class:
        return OwnCost(name, SimpleNamespace(step_ns=model))
    arguments = () if model.__init__ is object.__init__ else (deployment,)
    return OwnCost(name, make(_FIELD, name, model, *arguments))


def source_file(name: str) -> str | None:
    """Return the file that holds `module:name` or `path/to/file.py:name`; None if there is none."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return place
    try:
        spec = find_spec(place)
    except (ImportError, ValueError):
        return None
    return spec.origin if spec and spec.has_location else None


def identity(name: str) -> str:
    """Return the name with twelve hexadecimal digits: a hash of the file that holds it."""
    file = source_file(name)
    return f"{name}@{blake2b(Path(file).read_bytes(), digest_size=6).hexdigest()}" if file else name


class OwnCost:
    """A `CostModel` made from a user's `model`, which has `step_ns(plan)` and any of the following.

    cpu_ns(plan)    CPU time of planning in ns; 0 if missing
    decode_run_ns   as in `CostModel`; if missing, the steps are priced one by one
    interval        two factors of the predicted time between which 9 of 10 runs lie; unknown if missing

    Raises UserError if the model returns a time that is not an int or is negative, or raises an exception.
    """

    def __init__(self, name: str, model: Any, factor: float = 1.0) -> None:
        self.name, self._model, self._factor = name, model, factor
        self._step = model.step_ns
        self._cpu = getattr(model, "cpu_ns", None)
        self._run = getattr(model, "decode_run_ns", None)
        self.interval = self._checked_interval(getattr(model, "interval", None))

    def scaled(self, factor: float) -> OwnCost:
        """Return this cost model with all its times multiplied by `factor`."""
        return OwnCost(self.name, self._model, self._factor * factor)

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0 if self._cpu is None else self._time("cpu_ns", self._answer("cpu_ns", plan, self._cpu, plan), plan)

    def step_ns(self, plan: StepPlan) -> int:
        return self._time("step_ns", self._answer("step_ns", plan, self._step, plan), plan)

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        run = self._run
        if run is None:
            plans = decode_plans(rows, context, squares, steps)
            return [self.cpu_ns(plan) + self.step_ns(plan) for plan in plans]
        first = next(decode_plans(rows, context, squares, 1))
        times = self._answer("decode_run_ns", first, lambda: list(run(rows, context, squares, steps)))
        if len(times) != steps:
            raise self._wrong("decode_run_ns", first, f"returned {len(times)} times instead of {steps}")
        return [self._time("decode_run_ns", ns, first) for ns in times]

    def _answer(self, method: str, plan: StepPlan, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `call`. Raises UserError about `plan` if the call fails or takes too long."""
        try:
            return limited(call, *arguments)
        except Fault as fault:
            what = fault.what.partition("() ")[2] if fault.rule == "time" else fault.what
            raise self._wrong(method, plan, what) from fault.__cause__

    def _time(self, method: str, ns: Any, plan: StepPlan) -> int:
        if type(ns) is not int:
            if not isinstance(ns, Integral) or isinstance(ns, bool):
                raise self._wrong(method, plan, f"returned {shown(ns)} instead of whole nanoseconds")
            ns = int(ns)
        if not 0 <= ns < _MOST_NS:
            raise self._wrong(method, plan, f"returned {ns:,} ns instead of a time of 0 or more")
        return ns if self._factor == 1.0 else round(ns * self._factor)

    def _wrong(self, method: str, plan: StepPlan, what: str) -> UserError:
        amounts = ", ".join(f"{name}={amount}" for name in AGGREGATES if (amount := getattr(plan, name)))
        return UserError(_FIELD, self.name, " ".join(f"{method} {what} in a step of {amounts}".split()))

    def _checked_interval(self, stated: Any) -> tuple[float, float] | None:
        if stated is None:
            return None
        try:
            low, high = map(float, stated)
        except (TypeError, ValueError):
            low = high = -1.0
        if not 0 < low <= 1 <= high < 1e3:
            remedy = f"states the interval {shown(stated)}; give two factors around 1, e.g. (0.9, 1.2)"
            raise UserError(_FIELD, self.name, remedy)
        return low, high
