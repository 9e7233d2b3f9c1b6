"""Why a run is as slow as it is: its symptoms, and what lifting one constraint at a time would buy.

A recording alone gives symptoms. With a cost model the run is simulated again, as it was and without each constraint;
the p99 that a lift takes away is what its constraint is to blame for. Where more than one request in a hundred comes to
nothing no p99 says anything: it is then the requests that a lift lets finish. More of a resource also helps where a
setting is wrong, and one more replica helps nearly always. So a setting, failures or the shape of the load are blamed
before a resource, and a resource before the number of replicas, where it buys nearly as much.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from calibration.kernels.times import Coverage
from calibration.steps.coverage import shown_share
from planning.diagnose.baseline import LATENCIES, Baseline
from planning.diagnose.constraint_lifts import FREE_PREFILL, PREFIXES, REPLICA, TIERS, offered
from planning.diagnose.document import FINISHED, Counterfactual, shown_ms
from planning.diagnose.symptoms import LOW_UTILISATION, Symptom
from planning.priced_scenario import PricedScenario
from serving.errors import UserError
from serving.metrics import metric
from traces.run_metrics import RunMetrics
from traces.saturation import FEWEST

_LEAST = 0.1  # of the p99, or of what comes to nothing: what buys less is no cause
_NEARLY = 0.8  # of what the best lift buys


@dataclass(frozen=True)
class Diagnosis:
    """Symptoms, the worst first; counterfactuals, the most likely cause first.

    metric      the latency whose p99 is explained; `finished` where that requests come to nothing is
    requests    how many were recorded
    recorded    the p99 of TTFT, TPOT, E2E and the chosen latency, of those there are, in the recording, and
    simulated   in the simulation of the run as it was; empty without a cost model
    finished    the share of the requests that finish, in both; NaN without a cost model
    standing    how far to trust the cost model's step times, and why; None without one
    again       the dataset `requests` of that simulation; None without one
    warning     why the counterfactuals may be about another run than the recorded one; None where nothing says so
    """

    symptoms: list[Symptom]
    metric: str
    requests: int
    recorded: dict[str, float]
    simulated: dict[str, float]
    finished: tuple[float, float]
    counterfactuals: list[Counterfactual]
    standing: tuple[Coverage, str] | None = None
    again: pa.Table | None = field(default=None, repr=False, compare=False)
    warning: str | None = None

    @property
    def cause(self) -> Counterfactual | None:
        """What is most to blame; None when nothing is, or nobody can tell."""
        first = next((c for c in self.counterfactuals if not c.skipped), None)
        return first if first and first.gain(self.metric) >= _LEAST else None

    @property
    def troubled(self) -> bool:
        """Whether something is wrong: enough requests to tell, and a symptom other than idleness."""
        return self.requests >= FEWEST and any(symptom.name != LOW_UTILISATION for symptom in self.symptoms)

    @property
    def kind(self) -> str | None:
        """`capacity` or `policy`: whether a setting cures it (nearly) as well as any capacity would.

        None when nothing is to blame, or there is no trouble.
        """
        return self.cause.kind if self.cause and self.troubled else None

    @property
    def twin_error(self) -> float | None:
        """How far what is judged is off in the simulation, relative to the recording; None without a simulation.

        It is the p99 or, where that is judged, the share of the requests that comes to nothing.
        """
        if not self.simulated and self.metric != FINISHED:
            return None
        if self.metric == FINISHED:
            real, simulated = (1 - share for share in self.finished)
        else:
            real, simulated = self.recorded[self.metric], self.simulated[self.metric]
        return simulated / real - 1 if real > 0 else None

    def verdict(self) -> str:
        if not self.counterfactuals:
            if not self.symptoms:
                return "no symptom found"
            return f"evidence only, no cost model: {self.symptoms[0].name} ({self.symptoms[0].evidence})"
        if self.cause is None:
            return self._no_cause()
        return f"{self._judged(self.cause)}: {self.cause.cause}; with {self.cause.name} {self._left(self.cause)}"

    def _judged(self, cause: Counterfactual) -> str:
        if self.troubled:
            return f"a {cause.kind} problem"
        would = f"what would still {'let more finish' if self.metric == FINISHED else 'lower the p99'}"
        if self.requests < FEWEST:
            return f"too few requests for a verdict ({self.requests} of at least {FEWEST}); {would}"
        return f"no symptom {f'but {LOW_UTILISATION}' if self.symptoms else 'found'}; {would}"

    def _no_cause(self) -> str:
        if self.metric == FINISHED:
            return (
                "unexplained: lifting one constraint lets less than a tenth of the unfinished requests finish; "
                "their column `reason` says what ended them"
            )
        return (
            "neither a capacity nor a policy problem: no lifted constraint takes a tenth off the p99 of "
            f"{metric(self.metric).label}"
        )

    def _left(self, cause: Counterfactual) -> str:
        if self.metric == FINISHED and cause.finished is not None:
            return (
                f"{shown_share(cause.finished)} of the requests would finish instead of {shown_share(self.finished[1])}"
            )
        before, after = self.simulated[self.metric], cause.p99[self.metric]
        share = -100 * cause.gain(self.metric)
        lost = {name: cause.gain(name) for name in cause.bought if cause.gain(name) < -_LEAST}
        assert after is not None  # what buys something leaves a number
        return (
            f"the p99 of {metric(self.metric).label} would be {shown_ms(after)} ms instead of {shown_ms(before)} "
            f"({share:+.0f} %)" + "".join(f", that of {metric(m).label} {-100 * s:+.0f} %" for m, s in lost.items())
        )


def diagnose(
    found: Sequence[Symptom],
    recorded: RunMetrics,
    scenario: PricedScenario | None = None,
    judged: str | None = None,
    tell: Callable[[str, float], None] = lambda stage, share: None,
) -> Diagnosis:
    """From the symptoms of a recorded run and, if there is a cost model for it, the scenario that was recorded.

    `judged` is the latency to explain; by default the one in which the worst symptom shows. Where more than one request
    in a hundred comes to nothing, that is explained. `tell` hears what is simulated next, and the share of all
    simulations that are done. Raises UserError if nothing simulated has the chosen latency.
    """
    name = judged or (found[0].metric if found else "e2e_ms")
    names = LATENCIES if name in LATENCIES else (*LATENCIES, name)
    by_metric = {m: recorded.distribution(m).p99 for m in names}
    finished = float(recorded.finished.mean())
    known = Diagnosis(list(found), name, len(recorded.finished), by_metric, {}, (finished, math.nan), [])
    if scenario is None:
        return known
    scenario = replace(scenario, workload=offered(scenario.workload))
    tell("simulating the run as it was", 0.0)
    base = Baseline(scenario, names)
    if base.sheds:
        name = FINISHED
    elif name not in base.p99:
        if judged:
            raise UserError("metric", judged, "has no value in this run; choose another latency")
        name = "e2e_ms"  # an output of one token has no TPOT
    tried = _by_blame(list(_counterfactuals(scenario, base, tell)), name)
    return replace(
        known,
        symptoms=[*found, *(_no_help(tried, name) if known.troubled else ())],
        metric=name,
        recorded={m: by_metric[m] for m in base.p99},
        simulated=base.p99,
        finished=(finished, base.finished),
        counterfactuals=tried,
        again=base.requests,
    )


def _counterfactuals(
    scenario: PricedScenario, base: Baseline, tell: Callable[[str, float], None]
) -> Iterator[Counterfactual]:
    lifts = [lift for tier in TIERS for lift in tier]
    for done, lift in enumerate(lifts, start=1):
        tell(f"simulating it with {lift.name}", done / (len(lifts) + 1))
        lifted = lift.apply(scenario)
        skipped: dict[str, Any] = {"p99": {}, "bought": {}, "skipped": lifted}
        yield Counterfactual(
            name=lift.name,
            cause=lift.cause,
            lifecycle=lift.lifecycle,
            kind=lift.kind(scenario),
            **(skipped if isinstance(lifted, str) else base.against(lifted)._asdict()),
        )


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
    """What it buys, less what it costs elsewhere; more that finish take longer, which is no cost."""
    lost = c.gain("e2e_ms")
    return c.gain(name) + (lost if lost < -_LEAST and name != FINISHED else 0.0)


def _no_help(tried: Sequence[Counterfactual], name: str) -> Iterator[Symptom]:
    """What only a counterfactual can show of a troubled run."""
    replica = next(c for c in tried if c.name == REPLICA)
    if replica.skipped or not -math.inf < replica.gain(name) < _LEAST:
        return
    percent = round(100 * replica.gain(name))
    if name == FINISHED:
        lets = f"{percent} %" if percent > 0 else "none"
        evidence = f"one more replica lets {lets} of the unfinished requests finish"
    else:
        takes = f"takes {f'{percent} %' if percent else 'nothing'} off"
        does = takes if percent >= 0 else f"adds {-percent} % to"
        evidence = f"one more replica {does} the p99 of {metric(name).label}"
    judged = "e2e_ms" if name == FINISHED else name
    yield Symptom("more GPUs do not help", "request", 0.5, judged, evidence, "simulate the run with one more replica")
