"""The diagnosis of a slow run: its symptoms, the gain from lifting one constraint at a time, and what to change.

A recording alone gives symptoms. With a cost model the run is simulated again, as it was and without each constraint.
A constraint is to blame for the part of the p99 that disappears when it is lifted. If more than one request in a
hundred is lost, p99s say nothing; the gain of a lift is then the share of the lost requests that finish. Less work or
more GPUs help even if the cause is a wrong setting or waste, so they come last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import pyarrow as pa

from tokentwin.planning.diagnose.baseline import LATENCIES, Baseline
from tokentwin.planning.diagnose.changes import both_sides, changed, changes, replicas_setting
from tokentwin.planning.diagnose.command import named
from tokentwin.planning.diagnose.constraint_lifts import (
    ADMISSION,
    LIFTS,
    MORE,
    REPLICA,
    WORK,
    Lift,
    lifts_for,
    offered,
)
from tokentwin.planning.diagnose.document import (
    FINISHED,
    LEAST,
    Counterfactual,
    DiagnosisDocument,
    Symptom,
)
from tokentwin.planning.diagnose.fleet_lifts import more_replicas
from tokentwin.planning.diagnose.simulated_symptoms import (
    good_benchmark,
    more_gpus_do_not_help,
    scaling_efficiency,
)
from tokentwin.planning.diagnose.verdict import Facts, concluded, troubled
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.repricing import Source
from tokentwin.serving.errors import UserError
from tokentwin.traces.metrics.run_metrics import RunMetrics

_NEARLY = 0.8  # share of the largest gain from which a change counts as one of the best
_ROUNDING = {"quantization", "kv_cache_dtype"}  # settings that may make answers worse


def diagnose(
    symptoms: Sequence[Symptom],
    recorded: RunMetrics,
    scenario: PricedScenario | None = None,
    judged: str | None = None,
    tell: Callable[[str, float], None] = lambda stage, share: None,
    source: Source | None = None,
    another: Callable[[pa.Table, DiagnosisDocument], str | None] = lambda requests, known: None,
) -> DiagnosisDocument:
    """Diagnose a recorded run from its symptoms and, if there is a cost model, the scenario that was recorded.

    `judged` is the latency to explain, by default the latency in which the first symptom shows. If more than one
    request in a hundred is lost, the loss is explained instead. `tell` is called with the name of the next simulation
    and the share of all simulations that are done. `source` times deployments other than the recorded one. `another`
    takes the dataset `requests` of the run simulated as it was, and returns a reason if it differs from the recorded
    run. Raises UserError if no simulated request has the chosen latency.
    """
    name = judged or (symptoms[0].metric if symptoms else "e2e_ms")
    names = LATENCIES if name in LATENCIES else (*LATENCIES, name)
    by_metric = {m: recorded.distribution(m).p99 for m in names}
    facts: Facts = {
        "symptoms": symptoms,
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
    symptoms = [*symptoms, *good_benchmark(scenario, base.requests)]
    if base.sheds:
        name = FINISHED
    elif name not in base.p99:
        if judged:
            raise UserError("metric", judged, "has no value in this run; choose another latency")
        name = "e2e_ms"  # an output of one token has no TPOT
    overload = base.overload
    tried = _by_blame(list(_counterfactuals(scenario, base, tell)), name, overload is not None)
    facts |= {
        "symptoms": symptoms,
        "metric": name,
        "recorded_p99": {m: by_metric[m] for m in base.p99},
        "simulated_p99": base.p99,
        "simulated_finished": base.finished,
        "arrival_rate": overload and overload.arrival_rate,
        "served_rate": overload and overload.served_rate,
        "counterfactuals": tried,
        "both": both_sides(scenario),
        "gpus": scenario.gpus,
    }
    known = concluded(facts)
    if troubled(known):
        tell("simulating changes", 0.95)
        scaling = scaling_efficiency(scenario)
        facts |= {"symptoms": [*symptoms, *more_gpus_do_not_help(tried, name, scaling)], "scaling": scaling}
    if known.blamed is not None:
        facts["changes"] = _changes(scenario, base, known, known.blamed, source)
    return concluded(facts | {"warning": another(base.requests, known)})


def _counterfactuals(
    scenario: PricedScenario, base: Baseline, tell: Callable[[str, float], None]
) -> Iterator[Counterfactual]:
    lifts = lifts_for(scenario)
    for done, lift in enumerate(lifts, start=1):
        tell(f"simulating it with {lift.name}", done / (len(lifts) + 2))
        lifted = lift.apply(scenario)
        yield _tried(lift, lift.name, lift.kind(scenario), base, lifted)
    replica = LIFTS[REPLICA]
    tell(f"simulating it with {replica.name} and more", len(lifts) / (len(lifts) + 1))
    count = base.replicas_to_add(scenario)
    if count is not None and count > 1:
        lifted, settings = more_replicas(scenario, count), replicas_setting(scenario, count)
        fleet = scenario.deployment.fleet
        name = f"{count:,} more replicas" + (" of each role" if fleet and fleet.prefills_apart else "")
        yield _tried(replica, name, replica.usually, base, lifted, settings=settings)


def _tried(
    lift: Lift, name: str, kind: str, base: Baseline, made: PricedScenario | str, **more: object
) -> Counterfactual:
    what = {"p99": {}, "bought": {}, "skipped": made} if isinstance(made, str) else base.against(made)._asdict()
    gpus = None if isinstance(made, str) else made.gpus
    return Counterfactual.model_validate(
        {"name": name, "cause": lift.cause, "lifecycle": lift.layer, "area": lift.area, "kind": kind, "gpus": gpus}
        | {"ideal": lift.ideal}
        | what
        | more
    )


def _changes(
    scenario: PricedScenario, base: Baseline, known: DiagnosisDocument, cause: Counterfactual, source: Source | None
) -> list[Counterfactual]:
    """Return settings and purchases that reduce the cause, the best first.

    Changes come first that mend an overload or a loss of requests, or gain nearly as much as the best without more
    GPUs; if neither is to be mended, those that gain nearly as much as the best. Of these, those with the fewest GPUs
    come first, and of these those that keep the precision of weights and KV.
    """
    tried = [c for c in known.tried if c.settings]
    replica = next(c for c in known.counterfactuals if c.name == REPLICA)
    if not replica.skipped:
        tried.append(replica.model_copy(update={"settings": replicas_setting(scenario)}))
    lift = LIFTS.get(cause.name, LIFTS[REPLICA])
    for settings in changes(scenario, lift.name):
        try:
            made = changed(scenario, source, settings)
        except UserError:
            continue  # the changed deployment does not fit
        bought = made.gpus > scenario.gpus or settings.get("inter_node")
        kind = "capacity" if bought else "policy"
        tried.append(_tried(lift, named(settings), kind, base, made, ideal=False, settings=settings))
    own = [c for c in tried if c.kind == "policy" and c.gain(known.metric) >= LEAST]
    if base.overload is not None and own and not any(c.mends for c in own):
        setting = max(own, key=lambda c: c.gain(known.metric)).settings
        made = changed(scenario, source, setting)
        if count := base.replicas_to_add(made):
            both = {**setting, **replicas_setting(made, count)}
            name = f"{named(setting)} and {count:,} more replica{'s' * (count > 1)}"
            wide = more_replicas(made, count)
            tried.append(_tried(lift, name, "capacity", base, wide, ideal=False, settings=both))
    worth = {c.name: worth_of(c, known.metric) for c in tried}
    most = max(worth.values(), default=0.0)

    def rank(c: Counterfactual) -> tuple[bool, int, bool, bool, float]:
        rounds, far = not _ROUNDING.isdisjoint(c.settings), worth[c.name] < _NEARLY * most
        fails = not c.mends and (far or (c.mends is False and (c.gpus or 0) > scenario.gpus))
        return fails, c.gpus or 0, not c.mends, rounds, -worth[c.name]

    return sorted(tried, key=rank)


def worth_of(change: Counterfactual, judged: str) -> float:
    """Return the share that a change takes off the judged p99; negative if it adds a larger share to another p99."""
    gain, net = change.gain(judged), change.gain(judged) + min((change.gain(m) for m in change.p99), default=0.0)
    return net if net < 0 and judged != FINISHED else gain


def _by_blame(tried: Sequence[Counterfactual], judged: str, overloaded: bool) -> list[Counterfactual]:
    """Return the counterfactuals, the most likely cause first and skipped ones last.

    Lifts that gain a tenth come in the order of what they cost the user: first constraints, which settings may remove,
    then less work, which needs other traffic, then more GPUs. Within a class, and among smaller gains, which come after
    all classes, the largest gain comes first. In an overload, a constraint is a cause only if the run keeps up without
    it, or gains nearly as much as with enough replicas; otherwise there are too few replicas.
    """
    enough = max((_net_gain(c, judged) for c in tried if c.mends and (c.name == REPLICA or c.settings)), default=0.0)

    def rank(c: Counterfactual) -> tuple[bool, int, float]:
        gain = _net_gain(c, judged)
        classes = 0 if gain < LEAST else 1 if c.name in MORE else 2 if c.name in WORK else 3
        if overloaded and classes == 3 and not c.mends and gain < _NEARLY * enough:
            classes = 1
        if overloaded and c.mends and (c.name == REPLICA or c.settings):
            return not c.skipped, 2, math.inf
        return not c.skipped, classes, gain

    return sorted(tried, key=rank, reverse=True)


def _net_gain(c: Counterfactual, name: str) -> float:
    """Return the gain of a lift in `name`, less what it adds to E2E.

    If lost requests are explained, a longer E2E is no cost, because more requests finish. If the lift that admits all
    requests makes E2E much longer, its gain is divided by the factor by which E2E grows.
    """
    lost = c.gain("e2e_ms")
    if c.name == ADMISSION and lost < -1:
        return c.gain(name) / (1 - lost)
    return c.gain(name) + (lost if lost < -LEAST and name != FINISHED else 0.0)
