"""Why a run is as slow as it is: its symptoms, what lifting one constraint at a time would buy, and what to change.

A recording alone gives symptoms. With a cost model the run is simulated again, as it was and without each constraint;
the p99 that a lift takes away is what its constraint is to blame for. Where more than one request in a hundred comes to
nothing no p99 says anything: it is then the requests that a lift lets finish. More of a resource also helps where a
setting is wrong, and one more replica helps nearly always. So a setting, failures or the shape of the load are blamed
before a resource, what one thing wastes before what the work takes, and a resource before the number of replicas, where
it buys nearly as much. Near saturation every little relief empties the queues: resources that buy nearly the same are
told apart by how much sooner all requests are served if they are there at once.
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
from planning.diagnose.changes import both_sides, changed, changes, one_more
from planning.diagnose.command import named
from planning.diagnose.constraint_lifts import (
    ADMISSION,
    BUBBLES,
    CHUNKS,
    FREE_PREFILL,
    KV_MEMORY,
    LIFTS,
    PREFIXES,
    QUESTIONS,
    REPLICA,
    RESOURCES,
    TIER_READS,
    TIERS,
    Lift,
    offered,
)
from planning.diagnose.device_symptoms import LOW_UTILISATION
from planning.diagnose.document import (
    FINISHED,
    OVERLOAD,
    Counterfactual,
    DiagnosisDocument,
    Question,
    Symptom,
    Trust,
    shown_ms,
)
from planning.diagnose.simulated_symptoms import (
    GOOD_BENCHMARK,
    good_benchmark,
    more_gpus_do_not_help,
    scaling_efficiency,
)
from planning.priced_scenario import PricedScenario
from planning.repricing import Source
from planning.version import __version__
from serving.errors import UserError
from serving.metrics import metric
from traces.run_metrics import RunMetrics
from traces.saturation import FEWEST

_LEAST = 0.1  # of the p99, or of what comes to nothing: what buys less is no cause
_NEARLY = 0.8  # of what the best lift buys
_OF_MORE = 0.65  # the same of what less work or more GPUs would buy, which make healthy runs faster, too
_LASTING = 0.25  # of the run: more arrives than can be served, and not all at once
_NO_TROUBLE = (LOW_UTILISATION, GOOD_BENCHMARK)  # of this run: symptoms that nobody waits for


@dataclass(frozen=True)
class Diagnosis:
    """What a `DiagnosisDocument` says, which has fields of the same names, and what that follows from.

    requests    how many were recorded
    gpus        of the run
    standing    how far to trust the cost model's step times, and why; None without one
    again       the dataset `requests` of the run simulated as it was; None without a cost model
    """

    symptoms: list[Symptom]
    metric: str
    requests: int
    recorded_p99: dict[str, float]
    recorded_finished: float
    simulated_p99: dict[str, float] = field(default_factory=dict)
    simulated_finished: float = math.nan
    counterfactuals: list[Counterfactual] = field(default_factory=list)
    changes: list[Counterfactual] = field(default_factory=list)
    both: dict[str, Any] = field(default_factory=dict)
    gpus: int = 0
    scaling: float | None = None
    standing: tuple[Coverage, str] | None = None
    again: pa.Table | None = field(default=None, repr=False, compare=False)
    warning: str | None = None

    def document(self, **about: Any) -> DiagnosisDocument:
        """`about` are facts of it that nothing here says, or says otherwise."""
        own = {name: getattr(self, name) for name in DiagnosisDocument.model_fields if hasattr(self, name)}
        trust = self.standing and Trust(mark=self.standing[0].name.lower(), reason=self.standing[1])
        own |= {"cause": self.cause.name if self.cause else None, "standing": trust}
        return DiagnosisDocument.model_validate({**own, "version": __version__, **about})

    @property
    def cause(self) -> Counterfactual | None:
        """What is most to blame; None when nothing is, or nobody can tell."""
        first = next((c for c in self.counterfactuals if not c.skipped), None)
        return first if first and first.gain(self.metric) >= _LEAST else None

    @property
    def troubled(self) -> bool:
        """Whether something is wrong: enough requests to tell, and a symptom that somebody waits for."""
        return self.requests >= FEWEST and any(symptom.name not in _NO_TROUBLE for symptom in self.symptoms)

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
        if not self.simulated_p99 and self.metric != FINISHED:
            return None
        if self.metric == FINISHED:
            real, simulated = 1 - self.recorded_finished, 1 - self.simulated_finished
        else:
            real, simulated = self.recorded_p99[self.metric], self.simulated_p99[self.metric]
        return simulated / real - 1 if real > 0 else None

    @property
    def questions(self) -> list[Question]:
        """In order, each with what buys most of all that it is about; none without a cost model."""
        if not self.counterfactuals:
            return []
        found: list[Question] = []
        for about, question in QUESTIONS.items():
            tried = [c for c in self.counterfactuals if not c.skipped and LIFTS[c.name].question == about]
            most = max(tried, key=lambda c: c.gain(self.metric), default=None)
            if most is None:
                found.append(Question(question=question, yes=None))
                continue
            gain = most.gain(self.metric)
            wrong = gain >= _LEAST
            yes = wrong if about not in _ASK_FOR_GOOD else not wrong
            found.append(Question(question=question, yes=yes, lift=most.name, gain=gain))
        return found

    @property
    def verdict(self) -> str:
        if not self.counterfactuals:
            if not self.symptoms:
                return "no symptom found"
            return f"evidence only, no cost model: {self.symptoms[0].name} ({self.symptoms[0].evidence})"
        if self.cause is None:
            return self._no_cause()
        return f"{self._judged(self.cause)}: {self.cause.cause}; with {self.cause.name} {self._left(self.cause)}"

    @property
    def summary(self) -> str:
        """For who decides what to buy: what is wrong, and the one change that buys most."""
        if self.cause is None or not self.counterfactuals:
            return self.verdict
        wrong = f"{self.cause.cause} ({self.cause.lifecycle})"
        best = self.changes[0] if self.changes else None
        if best is None or best.gain(self.metric) < _LEAST:
            return f"{wrong}; no change that was tried buys a tenth"
        more = (best.gpus or 0) - self.gpus
        cost = f", on {abs(more)} {'more' if more > 0 else 'fewer'} GPU{'s' * (abs(more) > 1)}" if more else ""
        return f"{wrong}; with {best.name} {self._left(best)}{cost}"

    def _judged(self, cause: Counterfactual) -> str:
        if self.troubled:
            return f"a {cause.kind} problem"
        would = f"what would still {'let more finish' if self.metric == FINISHED else 'lower the p99'}"
        if self.requests < FEWEST:
            return f"too few requests for a verdict ({self.requests} of at least {FEWEST}); {would}"
        only = " and ".join(symptom.name for symptom in self.symptoms)
        return f"no symptom {f'but {only}' if only else 'found'}; {would}"

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
            before, after = shown_share(self.simulated_finished), shown_share(cause.finished)
            return f"{after} of the requests would finish instead of {before}"
        was, left = self.simulated_p99[self.metric], cause.p99[self.metric]
        share = -100 * cause.gain(self.metric)
        lost = {name: cause.gain(name) for name in cause.bought if cause.gain(name) < -_LEAST}
        assert left is not None  # what buys something leaves a number
        return (
            f"the p99 of {metric(self.metric).label} would be {shown_ms(left)} ms instead of {shown_ms(was)} "
            f"({share:+.0f} %)" + "".join(f", that of {metric(m).label} {-100 * s:+.0f} %" for m, s in lost.items())
        )


_ASK_FOR_GOOD = ("kernels", "scheduler", "capacity")  # a yes is what one hopes for


def diagnose(
    found: Sequence[Symptom],
    recorded: RunMetrics,
    scenario: PricedScenario | None = None,
    judged: str | None = None,
    tell: Callable[[str, float], None] = lambda stage, share: None,
    source: Source | None = None,
) -> Diagnosis:
    """From the symptoms of a recorded run and, if there is a cost model for it, the scenario that was recorded.

    `judged` is the latency to explain; by default the one in which the worst symptom shows. Where more than one request
    in a hundred comes to nothing, that is explained. `tell` hears what is simulated next, and the share of all
    simulations that are done. `source` times deployments other than the recorded one. Raises UserError if nothing
    simulated has the chosen latency.
    """
    name = judged or (found[0].metric if found else "e2e_ms")
    names = LATENCIES if name in LATENCIES else (*LATENCIES, name)
    by_metric = {m: recorded.distribution(m).p99 for m in names}
    finished = float(recorded.finished.mean())
    known = Diagnosis(list(found), name, len(recorded.finished), by_metric, finished)
    if scenario is None:
        return known
    scenario = replace(scenario, workload=offered(scenario.workload))
    tell("simulating the run as it was", 0.0)
    base = Baseline(scenario, names)
    found = [*found, *good_benchmark(scenario, base.requests)]
    if base.sheds:
        name = FINISHED
    elif name not in base.p99:
        if judged:
            raise UserError("metric", judged, "has no value in this run; choose another latency")
        name = "e2e_ms"  # an output of one token has no TPOT
    arrivals = [request.arrival_ns for request in scenario.workload.requests]
    lasting = arrivals[-1] - arrivals[0] > _LASTING * 1e9 * (recorded.window_s or 0.0)
    overloaded = lasting and any(symptom.name == OVERLOAD for symptom in found)
    tried = _by_blame(list(_counterfactuals(scenario, base, tell)), name, scenario, overloaded)
    known = replace(
        known,
        symptoms=found,
        metric=name,
        recorded_p99={m: by_metric[m] for m in base.p99},
        simulated_p99=base.p99,
        simulated_finished=base.finished,
        counterfactuals=tried,
        again=base.requests,
        both=both_sides(scenario),
        gpus=scenario.gpus,
    )
    if known.troubled:
        tell("simulating changes", 0.95)
        scaling = scaling_efficiency(scenario)
        known = replace(known, symptoms=[*found, *more_gpus_do_not_help(tried, name, scaling)], scaling=scaling)
    if known.cause is not None:
        known = replace(known, changes=_changes(scenario, base, known, source))
    return known


def _counterfactuals(
    scenario: PricedScenario, base: Baseline, tell: Callable[[str, float], None]
) -> Iterator[Counterfactual]:
    for done, lift in enumerate(LIFTS.values(), start=1):
        tell(f"simulating it with {lift.name}", done / (len(LIFTS) + 2))
        lifted = lift.apply(scenario)
        yield _tried(lift, lift.name, lift.kind(scenario), base, lifted)


def _tried(
    lift: Lift, name: str, kind: str, base: Baseline, made: PricedScenario | str, **more: object
) -> Counterfactual:
    what = {"p99": {}, "bought": {}, "skipped": made} if isinstance(made, str) else base.against(made)._asdict()
    gpus = None if isinstance(made, str) else made.gpus
    return Counterfactual.model_validate(
        {"name": name, "cause": lift.cause, "lifecycle": lift.layer, "kind": kind, "gpus": gpus, "ideal": lift.ideal}
        | what
        | more
    )


def _changes(scenario: PricedScenario, base: Baseline, known: Diagnosis, source: Source | None) -> list[Counterfactual]:
    """What can be set or bought against the cause: of what buys nearly most, the fewest GPUs first."""
    assert known.cause is not None
    lift, found = LIFTS[known.cause.name], []
    replica = next(c for c in known.counterfactuals if c.name == REPLICA)
    if not replica.skipped:
        found.append(replica.model_copy(update={"settings": one_more(scenario)}))
    for settings in changes(scenario, lift.name):
        try:
            made = changed(scenario, source, settings)
        except UserError:
            continue  # such a deployment does not fit
        kind = "policy" if made.gpus <= scenario.gpus else "capacity"
        found.append(_tried(lift, named(settings), kind, base, made, ideal=False, settings=settings))
    most = max((c.gain(known.metric) for c in found), default=0.0)
    return sorted(found, key=lambda c: (c.gain(known.metric) < _NEARLY * most, c.gpus or 0, -c.gain(known.metric)))


def _by_blame(
    tried: Sequence[Counterfactual], judged: str, scenario: PricedScenario, overloaded: bool
) -> list[Counterfactual]:
    """The most likely cause first, what was skipped last.

    Where more arrives than can be served, it is no longer the work itself that is blamed before more replicas.
    """
    blame = {c.name: _blame(c, judged) for c in tried if not c.skipped}
    if PREFIXES in blame:  # it keeps all KV, too; what it does for prefixes it does by sparing prefill
        blame[PREFIXES] = min(blame[PREFIXES], blame[FREE_PREFILL])
    of_answer = {c.name: c.gain("e2e_ms") for c in tried}
    if BUBBLES in blame and of_answer[CHUNKS] < _NEARLY * of_answer[BUBBLES]:  # they fill bubbles, for some tokens only
        blame[CHUNKS] = min(blame[CHUNKS], _NEARLY * blame[BUBBLES] - 1e-9)
    most = max((blame[name] for name in RESOURCES if name in blame), default=0.0)
    alike = [name for name in RESOURCES if blame.get(name, 0.0) >= max(_NEARLY * most, _LEAST)]
    if len(alike) > 1:
        blame |= {name: most * sooner for name, sooner in _sooner(scenario, alike).items()}
    gains = {c.name: c.gain(judged) for c in tried}
    if TIER_READS in blame and gains[TIER_READS] >= _NEARLY * gains[KV_MEMORY]:  # which spares loads from tiers, too
        blame[TIER_READS] = max(blame[TIER_READS], blame[KV_MEMORY])
        blame[KV_MEMORY] = blame[TIER_READS] - 1e-9
    work = {lift.name for tier in TIERS[2:] for lift in tier} & blame.keys() - {REPLICA}
    if overloaded and blame.get(REPLICA, 0.0) >= _OF_MORE * max(blame[name] for name in work):
        blame |= {name: min(blame[name], _OF_MORE * blame[REPLICA] - 1e-9) for name in work}
    best = 0.0  # of the tiers before
    for tier in TIERS:
        names = [lift.name for lift in tier if lift.name in blame]
        nearly = _OF_MORE if tier in TIERS[2:] else _NEARLY
        for name in names:
            if best >= max(nearly * blame[name], _LEAST):
                blame[name] = min(blame[name], best - 1e-9)
        best = max([best, *(blame[name] for name in names)])
    return sorted(tried, key=lambda c: -blame.get(c.name, -math.inf))


def _sooner(scenario: PricedScenario, names: Sequence[str]) -> dict[str, float]:
    """By how much sooner each lift has all requests served, relative to the best; nothing where nobody can tell."""
    whole = Baseline.drained_ns(scenario)
    if not whole:
        return {}
    spared = {}
    for name in names:
        lifted = LIFTS[name].apply(scenario)
        assert isinstance(lifted, PricedScenario)  # it was tried
        spared[name] = max(1 - (Baseline.drained_ns(lifted) or whole) / whole, 0.0)
    most = max(spared.values())
    return {name: share / most for name, share in spared.items()} if most > 0 else {}


def _blame(c: Counterfactual, name: str) -> float:
    """What it buys, less what it costs elsewhere; more that finish take longer, which is no cost.

    Whoever lets everybody in is to blame as far as those that were let in wait no longer for it.
    """
    lost = c.gain("e2e_ms")
    if c.name == ADMISSION and lost < -1:
        return c.gain(name) / (1 - lost)
    return c.gain(name) + (lost if lost < -_LEAST and name != FINISHED else 0.0)
