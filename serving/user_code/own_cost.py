"""A user's own cost model: a function of a step's plan, or a class with `step_ns`.

It is found by its name. The other methods of a cost model have defaults here. It gets the amounts of a step, which it
cannot write to. Its times are checked: a value that cannot be a time, and another time for an equal step, end the run
with a one-line error that names the model and the step. One in sixteen steps is priced again, and an earlier step with
it, so a run makes at most an eighth more calls, besides the first few steps, which are all priced again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from copy import copy
from hashlib import blake2b
from importlib.util import find_spec
from numbers import Integral
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokentwin.serving.cost_model import decode_plans
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError, shown
from tokentwin.serving.step_plan import AGGREGATES, StepAmounts, StepPlan, amounts_of
from tokentwin.serving.user_code.call_limit import Fault, limited
from tokentwin.serving.user_code.plugins import find_object, make

_FIELD = "cost model"
_MOST_NS = 10**18  # 31 years
_ONE_IN = 16  # steps of which one is priced again
_FIRST = 16  # number of steps at the start of a run that are all priced again
_MOST_PRICED = 64  # number of steps that are kept to be priced again


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

    Raises UserError if the model returns a time that is not an int or is negative, raises an exception, or has another
    time for an equal step.
    """

    def __init__(self, name: str, model: Any) -> None:
        self.name, self._factor = name, 1.0
        self._priced: deque[tuple[str, StepAmounts, int]] = deque()  # steps to price again
        self._step: Callable[..., Any] = model.step_ns
        self._cpu: Callable[..., Any] | None = getattr(model, "cpu_ns", None)
        self._run = getattr(model, "decode_run_ns", None)
        self.interval = self._checked_interval(getattr(model, "interval", None))

    def scaled(self, factor: float) -> OwnCost:
        """Return this cost model with all its times multiplied by `factor`."""
        scaled = copy(self)
        scaled._factor *= factor
        return scaled

    def cpu_ns(self, plan: StepPlan) -> int:
        return 0 if self._cpu is None else self._scaled(self._price("cpu_ns", StepAmounts(*amounts_of(plan))))

    def step_ns(self, plan: StepPlan) -> int:
        return self._scaled(self._price("step_ns", StepAmounts(*amounts_of(plan))))

    def decode_run_ns(self, rows: int, context: int, squares: int, steps: int) -> Iterable[int]:
        run = self._run
        if run is None:
            plans = decode_plans(rows, context, squares, steps)
            return [self.cpu_ns(plan) + self.step_ns(plan) for plan in plans]
        first = StepAmounts(decode_rows=rows, decode_context=context, decode_squares=squares, sampled_rows=rows)
        times = self._answer("decode_run_ns", first, lambda: list(run(rows, context, squares, steps)))
        if len(times) != steps:
            raise self._wrong("decode_run_ns", first, f"returned {len(times)} times instead of {steps}")
        times = [self._time("decode_run_ns", ns, first) for ns in times]
        if self._is_due(first):
            grown = steps - 1
            end, squared = context + grown * rows, squares + grown * (2 * context + grown * rows)
            last = first._replace(decode_context=end, decode_squares=squared)
            ns = self._price("step_ns", last) + (self._price("cpu_ns", last) if self._cpu else 0)
            self._must_equal("decode_run_ns", last, times[-1], ns, "while cpu_ns and step_ns have")
        return [self._scaled(ns) for ns in times]

    def _price(self, method: str, amounts: StepAmounts) -> int:
        """Return the unscaled time of a step. If it is due, price this step and an earlier one again."""
        ns = self._priced_once(method, amounts)
        if self._is_due(amounts):
            priced = self._priced
            if len(priced) < _MOST_PRICED:
                priced.append((method, amounts, ns))
            for named, equal, before in ((method, amounts, ns), priced[0]):
                self._must_equal(named, equal, before, self._priced_once(named, equal), "and later")
            priced.rotate(-1)
        return ns

    def _priced_once(self, method: str, amounts: StepAmounts) -> int:
        call = self._cpu if self._cpu is not None and method == "cpu_ns" else self._step
        return self._time(method, self._answer(method, amounts, call, amounts), amounts)

    def _is_due(self, amounts: StepAmounts) -> bool:
        return len(self._priced) < _FIRST or not hash(amounts) % _ONE_IN

    def _must_equal(self, method: str, amounts: StepAmounts, ns: int, other: int, then: str) -> None:
        if ns != other:
            raise self._wrong(method, amounts, f"returned {ns:,} ns, {then} {other:,} ns,")

    def _answer(self, method: str, amounts: StepAmounts, call: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `call`. Raises UserError about the step if the call fails or takes too long."""
        try:
            return limited(call, *arguments)
        except Fault as fault:
            raise self._wrong(method, amounts, fault.what) from fault.__cause__

    def _time(self, method: str, ns: Any, amounts: StepAmounts) -> int:
        if type(ns) is not int:
            if not isinstance(ns, Integral) or isinstance(ns, bool):
                raise self._wrong(method, amounts, f"returned {shown(ns)} instead of whole nanoseconds")
            ns = int(ns)
        if not 0 <= ns < _MOST_NS:
            raise self._wrong(method, amounts, f"returned {ns:,} ns instead of a time of 0 or more")
        return ns

    def _scaled(self, ns: int) -> int:
        return ns if self._factor == 1.0 else round(ns * self._factor)

    def _wrong(self, method: str, amounts: StepAmounts, what: str) -> UserError:
        step = ", ".join(f"{name}={amount}" for name in AGGREGATES if (amount := getattr(amounts, name)))
        return UserError(_FIELD, self.name, " ".join(f"{method} {what} in a step of {step}".split()))

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
