"""Why a run is as slow as it is: its symptoms, and what lifting one constraint at a time would buy.

A recording alone gives symptoms. With a cost model the run is simulated again, as it was and without each constraint;
the p99 that a lift takes away is what its constraint is to blame for. More of a resource also helps where a setting is
wrong, and one more replica helps nearly always. So a setting or the shape of the load is blamed before a resource, and
a resource before the number of replicas, where it buys nearly as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from calibration.constraint_lifts import FREE_PREFILL, PREFIXES, REPLICA, TIERS, Kind, Lifecycle, offered
from calibration.kernel_times import Mark
from calibration.scenario import Scenario
from calibration.symptoms import LOW_UTILISATION, Symptom, shown_ms
from serving.metrics import metric
from traces.run_metrics import RunMetrics, percentiles

LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")
_GAPS = "itl_ms"
_LEAST = 0.1  # of the p99: what buys less is no cause
_NEARLY = 0.8  # of what the best lift buys


@dataclass(frozen=True, slots=True)
class Counterfactual:
    """One constraint lifted. `p99` are what is left, `bought` the shares of the run's that are gone, by metric.

    skipped     why it was not simulated, or empty; then there are no numbers
    """

    name: str
    cause: str
    lifecycle: Lifecycle
    kind: Kind
    p99: dict[str, float]
    bought: dict[str, float]
    skipped: str = ""

    @property
    def trades(self) -> bool:
        """Whether it only moves latency: what it buys of one is lost on the whole."""
        return self.bought.get("e2e_ms", 0.0) < -_LEAST


@dataclass(frozen=True)
class Diagnosis:
    """Symptoms, the worst first; counterfactuals, the most likely cause first.

    metric      the latency whose p99 is explained
    recorded    its p99 and that of TTFT, TPOT and E2E, in the recording, and
    simulated   in the simulation of the run as it was; empty without a cost model
    standing    how far to trust the cost model's step times, and why; None without one
    again       the dataset `requests` of that simulation; None without one
    warning     why the counterfactuals may be about another run than the recorded one; None where nothing says so
    """

    symptoms: list[Symptom]
    metric: str
    recorded: dict[str, float]
    simulated: dict[str, float]
    counterfactuals: list[Counterfactual]
    standing: tuple[Mark, str] | None = None
    again: pa.Table | None = field(default=None, repr=False, compare=False)
    warning: str | None = None

    @property
    def cause(self) -> Counterfactual | None:
        """What is most to blame; None when nothing is, or nobody can tell."""
        first = next((c for c in self.counterfactuals if not c.skipped), None)
        return first if first and first.bought[self.metric] >= _LEAST else None

    @property
    def kind(self) -> Kind | None:
        """`capacity` or `policy`: whether a setting cures it (nearly) as well as any capacity would."""
        return self.cause.kind if self.cause else None

    @property
    def twin_error(self) -> float | None:
        """How far the simulated p99 is from the recorded one, relative to it; None without a simulation."""
        real = self.recorded[self.metric]
        return self.simulated[self.metric] / real - 1 if self.simulated and real > 0 else None

    def verdict(self) -> str:
        """One sentence."""
        label = metric(self.metric).label
        if not self.counterfactuals:
            if not self.symptoms:
                return "no symptom found"
            return f"evidence only, no cost model: {self.symptoms[0].name} ({self.symptoms[0].evidence})"
        if self.cause is None:
            return f"neither a capacity nor a policy problem: no constraint buys a tenth of the p99 of {label}"
        cause, before = self.cause, self.simulated[self.metric]
        after, share = cause.p99[self.metric], -100 * cause.bought[self.metric]
        judged = f"a {self.kind} problem" if self.symptoms else "no symptom found; what would still lower the p99"
        return (
            f"{judged}: {cause.cause}; with {cause.name} the p99 of {label} would be "
            f"{shown_ms(after)} ms instead of {shown_ms(before)} ({share:+.0f} %)"
            + "".join(f", that of {metric(m).label} {-100 * s:+.0f} %" for m, s in cause.bought.items() if s < -_LEAST)
        )

    def as_dict(self) -> dict[str, Any]:
        """For `--format json`; a p99 beyond all numbers is null."""
        return {
            "verdict": self.verdict(),
            "kind": self.kind,
            "cause": self.cause.name if self.cause else None,
            "metric": self.metric,
            "recorded_p99": _finite(self.recorded),
            "simulated_p99": _finite(self.simulated),
            "twin_error": self.twin_error,
            "warning": self.warning,
            "standing": self.standing and {"mark": self.standing[0].name.lower(), "reason": self.standing[1]},
            "symptoms": [asdict(symptom) for symptom in self.symptoms],
            "counterfactuals": [
                {**asdict(c), "p99": _finite(c.p99), "bought": _finite(c.bought)} for c in self.counterfactuals
            ],
        }


def diagnose(
    found: Sequence[Symptom],
    recorded: RunMetrics,
    scenario: Scenario | None = None,
    judged: str | None = None,
    tell: Callable[[str, float], None] = lambda stage, share: None,
) -> Diagnosis:
    """From the symptoms of a recorded run and, if there is a cost model for it, the scenario that was recorded.

    `judged` is the latency to explain; by default the one in which the worst symptom shows. `tell` hears what is
    simulated next, and the share of all simulations that are done.
    """
    name = judged or (found[0].metric if found else "e2e_ms")
    names = LATENCIES if name in LATENCIES else (*LATENCIES, name)
    by_metric = {m: recorded.distribution(m).p99 for m in names}
    if scenario is None:
        return Diagnosis(list(found), name, by_metric, {}, [])
    scenario = replace(scenario, workload=offered(scenario.workload))
    tell("simulating the run as it was", 0.0)
    base = scenario.requests(tokens=name == _GAPS)
    simulated = _p99s(base, base, names)
    tried = _by_blame(list(_counterfactuals(scenario, base, simulated, tell)), name)
    symptoms = [*found, *_no_help(tried, name, found)]
    return Diagnosis(symptoms, name, by_metric, simulated, tried, again=base)


def _counterfactuals(
    scenario: Scenario, base: pa.Table, before: dict[str, float], tell: Callable[[str, float], None]
) -> Iterator[Counterfactual]:
    lifts = [lift for tier in TIERS for lift in tier]
    for done, lift in enumerate(lifts, start=1):
        tell(f"simulating it with {lift.name}", done / (len(lifts) + 1))
        lifted = lift.apply(scenario)
        told = lift.name, lift.cause, lift.lifecycle, lift.kind(scenario)
        if isinstance(lifted, str):
            yield Counterfactual(*told, {}, {}, lifted)
            continue
        after = _p99s(lifted.requests(tokens=_GAPS in before), base, tuple(before))
        bought = {m: 1 - after[m] / p99 if p99 > 0 else 0.0 for m, p99 in before.items()}
        yield Counterfactual(*told, after, bought)


def _p99s(requests: pa.Table, base: pa.Table, names: Sequence[str]) -> dict[str, float]:
    """The p99 over the requests that finished in `base`; one that does not finish here takes for ever."""
    kept = base.filter(pc.equal(base["status"], "finished"))["request_id"].combine_chunks()
    metrics = RunMetrics(requests.filter(pc.is_in(requests["request_id"], kept)))
    found = {}
    for name in names:
        values = metrics.values(name)
        if name != _GAPS:
            values = np.where(metrics.finished, values, np.inf)
        values = values[~np.isnan(values)]  # NaN: one output token has no TPOT
        found[name] = percentiles(values, (99,))[0] if len(values) else math.nan
    return found


def _by_blame(tried: Sequence[Counterfactual], judged: str) -> list[Counterfactual]:
    """The most likely cause first, what was skipped last."""
    blame = {c.name: _blame(c, judged) for c in tried if not c.skipped}
    if PREFIXES in blame:  # it keeps all KV, too; what it does for prefixes it does by sparing prefill
        blame[PREFIXES] = min(blame[PREFIXES], blame[FREE_PREFILL])
    best = 0.0  # of the tiers before
    for tier in TIERS:
        names = [lift.name for lift in tier if lift.name in blame]
        for name in names:
            if best >= max(_NEARLY * blame[name], _LEAST):
                blame[name] = min(blame[name], best - 1e-9)
        best = max([best, *(blame[name] for name in names)])
    return sorted(tried, key=lambda c: -blame.get(c.name, -math.inf))


def _blame(c: Counterfactual, name: str) -> float:
    """What it buys, less what it costs elsewhere."""
    return c.bought[name] + (c.bought["e2e_ms"] if c.trades else 0.0)


def _no_help(tried: Sequence[Counterfactual], name: str, found: Sequence[Symptom]) -> Iterator[Symptom]:
    """What only a counterfactual can show, of a run that something other than idleness is wrong with."""
    replica = next(c for c in tried if c.name == REPLICA)
    idles = all(symptom.name == LOW_UTILISATION for symptom in found)
    if idles or replica.skipped or replica.bought[name] >= _LEAST:
        return
    yield Symptom(
        "more GPUs do not help",
        "request",
        0.5,
        name,
        f"one more replica takes {100 * replica.bought[name]:.0f} % off the p99 of {metric(name).label}",
        "the same run on two replicas",
    )


def _finite(numbers: dict[str, float]) -> dict[str, float | None]:
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}
