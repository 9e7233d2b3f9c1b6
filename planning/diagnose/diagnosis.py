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
from dataclasses import replace

import pyarrow as pa

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
    REPLICA,
    RESOURCES,
    TIER_READS,
    TIERS,
    Lift,
    offered,
)
from planning.diagnose.document import (
    FINISHED,
    LEAST,
    OVERLOAD,
    Counterfactual,
    DiagnosisDocument,
    Symptom,
)
from planning.diagnose.simulated_symptoms import (
    good_benchmark,
    more_gpus_do_not_help,
    scaling_efficiency,
)
from planning.diagnose.verdict import Facts, concluded, troubled
from planning.priced_scenario import PricedScenario
from planning.repricing import Source
from serving.errors import UserError
from traces.run_metrics import RunMetrics

_NEARLY = 0.8  # of what the best lift buys
_OF_MORE = 0.65  # the same of what less work or more GPUs would buy, which make healthy runs faster, too
_ROUNDING = {"quantization", "kv_cache_dtype"}  # settings that answers may suffer from
_LASTING = 0.25  # of the run: more arrives than can be served, and not all at once


def diagnose(
    found: Sequence[Symptom],
    recorded: RunMetrics,
    scenario: PricedScenario | None = None,
    judged: str | None = None,
    tell: Callable[[str, float], None] = lambda stage, share: None,
    source: Source | None = None,
    another: Callable[[pa.Table, DiagnosisDocument], str | None] = lambda requests, known: None,
) -> DiagnosisDocument:
    """From the symptoms of a recorded run and, if there is a cost model for it, the scenario that was recorded.

    `judged` is the latency to explain; by default the one in which the worst symptom shows. Where more than one request
    in a hundred comes to nothing, that is explained. `tell` hears what is simulated next, and the share of all
    simulations that are done. `source` times deployments other than the recorded one. `another` is given the dataset
    `requests` of the run simulated as it was, and says why that is another run. Raises UserError if nothing simulated
    has the chosen latency.
    """
    name = judged or (found[0].metric if found else "e2e_ms")
    names = LATENCIES if name in LATENCIES else (*LATENCIES, name)
    by_metric = {m: recorded.distribution(m).p99 for m in names}
    facts: Facts = {
        "symptoms": found,
        "metric": name,
        "requests": len(recorded.finished),
        "recorded_p99": by_metric,
        "recorded_finished": float(recorded.finished.mean()),
        "simulated_p99": {},
        "counterfactuals": (),
    }
    if scenario is None:
        return concluded(facts)
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
    facts |= {
        "symptoms": found,
        "metric": name,
        "recorded_p99": {m: by_metric[m] for m in base.p99},
        "simulated_p99": base.p99,
        "simulated_finished": base.finished,
        "counterfactuals": tried,
        "both": both_sides(scenario),
        "gpus": scenario.gpus,
    }
    known = concluded(facts)
    if troubled(known):
        tell("simulating changes", 0.95)
        scaling = scaling_efficiency(scenario)
        facts |= {"symptoms": [*found, *more_gpus_do_not_help(tried, name, scaling)], "scaling": scaling}
    if known.blamed is not None:
        facts["changes"] = _changes(scenario, base, known, known.blamed, source)
    return concluded(facts | {"warning": another(base.requests, known)})


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


def _changes(
    scenario: PricedScenario, base: Baseline, known: DiagnosisDocument, cause: Counterfactual, source: Source | None
) -> list[Counterfactual]:
    """What can be set or bought against the cause: of what buys nearly most, the fewest GPUs first.

    Of those, what keeps every bit of weights and KV comes before what does not.
    """
    lift, found = LIFTS[cause.name], []
    replica = next(c for c in known.counterfactuals if c.name == REPLICA)
    if not replica.skipped:
        found.append(replica.model_copy(update={"settings": one_more(scenario)}))
    for settings in changes(scenario, lift.name):
        try:
            made = changed(scenario, source, settings)
        except UserError:
            continue  # such a deployment does not fit
        bought = made.gpus > scenario.gpus or settings.get("inter_node")
        kind = "capacity" if bought else "policy"
        found.append(_tried(lift, named(settings), kind, base, made, ideal=False, settings=settings))
    worth = {c.name: worth_of(c, known.metric) for c in found}
    most = max(worth.values(), default=0.0)
    return sorted(
        found,
        key=lambda c: (
            worth[c.name] < _NEARLY * most, c.gpus or 0, not _ROUNDING.isdisjoint(c.settings), -worth[c.name],
        ),
    )  # fmt: skip


def worth_of(change: Counterfactual, judged: str) -> float:
    """What it takes off the p99 that is judged; less than nothing where it adds more to another."""
    gain, net = change.gain(judged), change.gain(judged) + min((change.gain(m) for m in change.p99), default=0.0)
    return net if net < 0 and judged != FINISHED else gain


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
    alike = [name for name in RESOURCES if blame.get(name, 0.0) >= max(_NEARLY * most, LEAST)]
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
            if best >= max(nearly * blame[name], LEAST):
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
    return c.gain(name) + (lost if lost < -LEAST and name != FINISHED else 0.0)
