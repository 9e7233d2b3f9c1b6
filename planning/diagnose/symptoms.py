"""Symptoms of a recorded run, with the numbers that show them.

Symptoms are found in a recording, real or simulated; if a cost model is given, it adds the parts of the device's time.
A symptom names its layers (compute, memory, request) and the measurement that would prove its cause. Its severity is
the share that it touches, from 0 to 1: of the requests, the time, a latency, the tokens, the memory or the FLOPs. The
share follows from the numbers of its evidence. The counterfactuals in `diagnosis` say how much a symptom matters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from tokentwin.planning.diagnose.constraint_lifts import dispersion
from tokentwin.planning.diagnose.device_symptoms import DEVICE_LOOKS, HALF, IDLE, SHARE, Look, share_beyond
from tokentwin.planning.diagnose.document import OVERLOAD, Finding, Symptom
from tokentwin.planning.diagnose.evidence import Evidence
from tokentwin.serving.answers.figures import shown_number, shown_share, shown_time
from tokentwin.serving.metrics import metric
from tokentwin.serving.workload import PRIVATE, WorkloadRequest
from tokentwin.traces.metrics.run_metrics import SERVED_METRICS, serving_ns, unserved_ns
from tokentwin.traces.recording import notes_of

_QUEUE_STEPS = 3  # a wait of this many steps is queueing; a shorter one is the wait for the next step
_SPIKE = 10.0  # p99 over p50 of TTFT: exponential waits give 6.6, log-normal prompts with sigma 1 give 10.2
_FEW = 0.01  # share of the requests, or of the run, from which the p99 is lost
_FULL = 0.95  # share of the KV blocks in use from which KV is full: few prompts fit into the rest
_CROWDED = 0.8  # the same if the running requests need more than the memory, so that the next one may be large
_BURSTY = 2.0  # index of dispersion: 4 in 100 Poisson runs of ten windows reach it (chi-squared), 6 in 1,000 of twenty
_UNEVEN = 1.5  # busiest replica over the mean: of two replicas, one has three quarters of the work
_P99_COUNT = 100  # number of requests below which the p99 is the maximum
_EFFECTS = ("high TTFT", "tail spikes", "high ITL")  # a long latency, whatever its cause


def symptoms(evidence: Evidence) -> list[Symptom]:
    """Return the symptoms, the largest share first.

    A long latency comes after the symptoms that may cause it. Symptoms that make no request wait come last.
    """
    looked = ((name, look(evidence)) for name, look in _LOOKS.items())
    present = [Symptom.from_finding(name, what) for name, what in looked if what]
    return sorted(present, key=lambda symptom: (symptom.name in IDLE, symptom.name in _EFFECTS, -symptom.severity))


def _overload(e: Evidence) -> Finding | None:
    verdict = e.metrics.saturation
    if verdict is None or verdict.verdict != "OVERLOADED":
        return None
    return Finding(
        min(verdict.trend.slope / verdict.arrival_rate, 1.0),
        f"{shown_number(verdict.arrival_rate)} requests/s arrive, and the backlog grows by "
        f"{shown_number(verdict.trend.slope)} requests/s",
    )


def _turned_away(e: Evidence) -> Finding | None:
    statuses = e.metrics.statuses()
    total = sum(statuses.values())
    lost = {name: count for name, count in sorted(statuses.items()) if name != "finished"}
    share = sum(lost.values()) / total
    if share < _FEW:
        return None
    shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in lost.items())
    return Finding(share, f"{shown} of {total:,}")


_PLURALS = {"crash": "crashes", "interruption": "interruptions"}


def _failures(e: Evidence) -> Finding | None:
    """Return a symptom of the pool that failures hit hardest, by its time without replicas or its lost replica time."""
    replica_lives, duration_ns = e.run["replica_lives"] or [], e.run["duration_ns"]
    worst, evidence = 0.0, ""
    pools = sorted({life["pool"] for life in replica_lives})
    for pool in pools:
        mine = [life for life in replica_lives if life["pool"] == pool]
        losses = Counter(life["ended_by"] for life in mine if life["ended_by"] in ("crash", "interruption"))
        first = sum(life["ready_ns"] == 0 for life in mine)
        none, ready = (time(mine, duration_ns) / duration_ns for time in (unserved_ns, serving_ns))
        lost = max(none, 1 - ready / first if first else 0.0)
        if losses and lost > worst and (none >= _FEW or lost >= SHARE):
            outage = f", and none for {shown_share(none, 1)} of the run" if none else ""
            where = f" in the pool {pool}" if len(pools) > 1 else ""
            named = [f"{n:,} {_PLURALS[cause] if n > 1 else cause}" for cause, n in sorted(losses.items())]
            text = f"{' and '.join(named)}{where}; {shown_number(ready)} replicas were"
            worst, evidence = lost, f"{text} ready on average, {first:,} at the start{outage}"
    return Finding(worst, evidence) if evidence else None


def _high_ttft(e: Evidence) -> Finding | None:
    ttft, queue, prefill = (e.metrics.distribution(name) for name in ("ttft_ms", "queue_ms", "prefill_ms"))
    bound = e.metrics.slo.get("ttft_ms")
    step = np.nanmax([0.0, *(e.metrics.distribution(name).p99 for name in ("step_ms", "tpot_ms"))])
    queues = queue.p99 > max(prefill.p99, _QUEUE_STEPS * step)
    if not (ttft.p99 > bound if bound else queues):
        return None
    share = queue.mean / ttft.mean if ttft.mean else 0.0
    late = float((e.metrics.values("ttft_ms") > bound).sum() / ttft.count) if bound else 0.0
    over = f"; {shown_share(late)} of the requests take longer than {shown_time(bound)}" if bound else ""
    return Finding(
        late if bound else share,
        f"TTFT p99 {shown_time(ttft.p99)} (p50 {shown_time(ttft.p50)}{over}); {shown_share(share)} of the mean TTFT is "
        f"queueing; prefill p99 {shown_time(prefill.p99)}",
    )


def _full_kv(e: Evidence) -> Finding | None:
    pressure = e.metrics.step_mean("kv_pressure") if e.has_steps else None
    blocked = e.time_share((e.kv_usage > _FULL) | (e.step("preempted") > 0)) if e.has_steps else 0.0
    waits = e.time_share((e.metrics.values("kv_pressure") > 1) & (e.kv_usage > _CROWDED)) if e.has_steps else 0.0
    share = max(blocked, waits)
    preempted = float((e.metrics.values("preempted_ms") > 0).sum() / e.metrics.finished.sum())
    if max(share, preempted) < SHARE:
        return None
    usage = ""
    if pressure is not None:
        full = 100 * (e.metrics.step_mean("kv_usage") or 0)
        usage = f"KV memory is full for {shown_share(share)} of the time ({shown_share(full / 100)} on average), and "
        usage += f"requests need {shown_number(pressure)} times its size; "
    return Finding(
        max(share, preempted),
        f"{usage}{shown_share(preempted)} of the requests are preempted, "
        f"{e.metrics.scalars()['recomputed_tokens']:,} tokens were computed again",
    )


def _no_places(e: Evidence) -> Finding | None:
    if not e.has_steps:
        return None
    most = e.deployment.scheduler.most_running
    stuck = (e.step("running") >= most) & (e.step("waiting") > 0) & (e.kv_usage < _FULL)
    share = e.time_share(stuck)
    if share < SHARE:
        return None
    return Finding(
        share,
        f"in {shown_share(share)} of the time {most} requests run (the maximum of max_num_seqs), "
        "while others wait and KV memory is free",
    )


def _no_slots(e: Evidence) -> Finding | None:
    lora = e.deployment.lora
    adapters = {request.adapter for request in e.requests} - {""}
    if lora is None or not e.has_steps or len(adapters) <= lora.max_loras:
        return None
    free = (e.step("running") < e.deployment.scheduler.most_running) & (e.kv_usage < _FULL)
    share = e.time_share(free & (e.step("waiting") > 0))
    if share < SHARE:
        return None
    return Finding(
        share,
        f"in {shown_share(share)} of the time requests wait while places and KV memory are free; requests with "
        f"{len(adapters):,} adapters share {lora.max_loras:,} slots (lora.max_loras)",
    )


def _encoding(e: Evidence) -> Finding | None:
    notes = notes_of(e.run)
    use = None if "encoders_apart" in notes else notes.get("encoder")
    share = min(use["encoding_ns"] / max(float(e.step_ns.sum()), 1.0), 1.0) if use and e.has_steps else 0.0
    if use is None or share < SHARE:
        return None
    return Finding(
        share,
        f"steps encode images, videos or audio in {shown_share(share)} of their time: {use['items']:,} items with "
        f"{use['tokens']:,} tokens",
    )


def _late_embeddings(e: Evidence) -> Finding | None:
    use = notes_of(e.run).get("encoders_apart")
    if use is None or not use["requests"]:
        return None
    waited_ms = (use["waiting_ns"] + use["sending_ns"]) / use["requests"] / 1e6
    busy = use["busy_ns"] / max(use["ready_ns"], 1)
    share = min(waited_ms / max(e.metrics.distribution("ttft_ms").mean, 1e-9), 1.0)
    if not share >= SHARE:
        return None
    return Finding(
        share,
        f"requests with images, videos or audio wait {shown_time(waited_ms)} for their embeddings, "
        f"{shown_share(share)} of the mean TTFT; encoder replicas ({use['replicas']:,}) are busy {shown_share(busy)} "
        f"of the time",
    )


def _bursts(e: Evidence) -> Finding | None:
    if not e.requests or any(request.think_ns is not None for request in e.requests):
        return None
    index = dispersion(e.requests)
    if index < _BURSTY:
        return None
    return Finding(
        1 - 1 / index,
        f"the number of arrivals varies {shown_number(index)} times as much as for Poisson (index of dispersion)",
    )


def _tail(e: Evidence) -> Finding | None:
    ttft = e.metrics.distribution("ttft_ms")
    if ttft.count < _P99_COUNT or not ttft.p99 > _SPIKE * ttft.p50:
        return None
    values = e.metrics.values("ttft_ms")
    spikes = values > _SPIKE * ttft.p50
    waited = e.metrics.values("queue_ms")[spikes].sum() / values[spikes].sum()
    share = share_beyond(values, _SPIKE * ttft.p50)
    return Finding(
        share,
        f"TTFT p99 is {ttft.p99 / ttft.p50:,.0f} times its median; the {spikes.sum():,} requests beyond {_SPIKE:.0f} "
        f"medians have {shown_share(share)} of all TTFT, and spent {shown_share(waited)} of it in the queue",
    )


def _fragmentation(e: Evidence) -> Finding | None:
    """Return a symptom if requests hold much empty KV memory, or if free KV memory is scattered."""
    scattered = e.metrics.scalars()["kv_external_fragmentation"] or 0.0
    running, empty = e.metrics.step_mean("running"), e.metrics.internal_fragmentation()
    used_blocks = float(np.average(e.step("used_blocks"), weights=e.step_ns)) if e.step_ns.sum() else 0.0
    if not running or not used_blocks:
        return None
    config = e.deployment.scheduler
    if empty is None:  # not every layer keeps every token: the last block of a request is half empty
        empty = min(running / 2 / used_blocks, 1.0)
    if max(empty, scattered) < SHARE or (e.metrics.step_mean("kv_usage") or 0.0) <= HALF:
        return None  # nobody waits for memory that is half free
    where = f"the empty end of blocks of {config.block_size} tokens"
    if config.kv_reservation != "paged":
        where = f"reserved for tokens that never come (kv_reservation {config.kv_reservation})"
    pieces = f"; {shown_share(scattered)} of the free memory is not in the longest piece" if scattered else ""
    text = f"about {shown_share(empty)} of the KV memory that requests hold is {where}{pieces}"
    return Finding(max(empty, scattered), text)


def _transfers(e: Evidence) -> Finding | None:
    transfer, whole = (e.metrics.distribution(name) for name in ("transfer_ms", "e2e_ms"))
    share = transfer.mean / whole.mean if transfer.count else 0.0
    text = f"KV transfers from prefill to decode replicas take {shown_time(transfer.mean)} on average"
    return Finding(share, f"{text}, {shown_share(share)} of E2E") if share >= SHARE else None


def _tier_reads(e: Evidence) -> Finding | None:
    load_ms, link = e.tier_loads
    share = load_ms / e.metrics.distribution("ttft_ms").mean if load_ms else 0.0
    if share < SHARE and link < HALF:
        return None
    text = f"loading KV from tiers takes {shown_time(load_ms)} per request on average, without waits for other loads"
    bad = min(max(share, link), 1.0)
    return Finding(
        bad, f"{text} ({shown_share(share)} of TTFT); the tiers' links are busy {shown_share(link)} of the time"
    )


def _admission(e: Evidence) -> Finding | None:
    limits = e.deployment.fleet.admission if e.deployment.fleet else None
    statuses = e.metrics.statuses()
    lost, total = statuses.get("rejected", 0) + statuses.get("timed_out", 0), sum(statuses.values())
    limited = limits and (limits.max_queued_per_replica or limits.max_queued or limits.queue_timeout_s)
    if not limited or lost < _FEW * total:
        return None
    busy = e.metrics.busy() if e.has_steps else None
    meanwhile = "" if busy is None else f"; steps take {shown_share(busy)} of the time"
    return Finding(lost / total, f"admission limits turn {lost:,} of {total:,} requests away{meanwhile}")


def _front_door(e: Evidence) -> Finding | None:
    """Return a symptom if clients wait long outside the engine, for an answer or for its first token."""
    outside = {name: e.metrics.distribution(name).mean for name in SERVED_METRICS}
    known = {name: mean for name, mean in outside.items() if mean > 0}
    if not known:
        return None
    of_all = sum(known.values()) / (e.metrics.distribution("e2e_ms").mean + sum(known.values()))
    of_first = 1 - e.metrics.distribution("ttft_ms").mean / e.seen.distribution("ttft_ms").mean
    if of_all < SHARE and of_first < HALF:
        return None
    text = ", ".join(f"{metric(name).label} {shown_time(mean)}" for name, mean in known.items())
    said = f"{shown_share(of_all)} of E2E and {shown_share(of_first)} of TTFT are spent outside the engine"
    latency = "e2e_ms" if of_all > of_first else "ttft_ms"
    return Finding(max(of_all, of_first), f"{said}: {text} on average", latency)


def _uneven_replicas(e: Evidence) -> Finding | None:
    """Return a symptom if one of several identical, permanent replicas is much busier than the mean."""
    fleet, count = e.deployment.fleet, e.run["replicas"] or 1
    if not e.has_steps or count == 1 or (fleet and (len(fleet.pools) > 1 or fleet.autoscaler)):
        return None
    _, whose = np.unique(e.step("replica"), return_inverse=True)
    busy = np.bincount(whose, weights=e.step_ns) / (e.run["duration_ns"] or 1)
    mean = float(busy.sum()) / count
    if busy.max() < max(HALF, _UNEVEN * mean):
        return None
    text = (
        f"steps take {shown_share(busy.max())} of the time on one of {count} replicas, {shown_share(mean)} on average"
    )
    return Finding(float(1 - mean / busy.max()), text)


def _missed_prefixes(e: Evidence) -> Finding | None:
    hit = e.metrics.prefix_hit_rate()
    if hit is None or not e.requests:
        return None
    loaded = sum(e.metrics.tier_hit_rates().values())
    missed = attainable_hit_rate(e.requests) - hit - loaded
    if missed < SHARE:
        return None
    tiers = f", {shown_share(loaded)} in KV tiers" if loaded else ""
    return Finding(
        missed,
        f"{shown_share(hit)} of the prompt tokens were found in the prefix cache{tiers}; "
        f"{shown_share(missed)} were part of an earlier prompt, but were computed again",
    )


_LOOKS: dict[str, Look] = {
    OVERLOAD: _overload,
    "unfinished requests": _turned_away,
    "admission limits": _admission,
    "replicas fail": _failures,
    "high TTFT": _high_ttft,
    **DEVICE_LOOKS,
    "full KV memory": _full_kv,
    "KV fragmentation": _fragmentation,
    "slow KV transfers": _transfers,
    "slow KV tiers": _tier_reads,
    "max_num_seqs reached": _no_places,
    "adapter slots taken": _no_slots,
    "images take the device": _encoding,
    "embeddings come late": _late_embeddings,
    "bursty arrivals": _bursts,
    "uneven replicas": _uneven_replicas,
    "tail spikes": _tail,
    "missed prefixes": _missed_prefixes,
    "slow front door": _front_door,
}


def attainable_hit_rate(requests: Iterable[WorkloadRequest]) -> float:
    """Return the share of prompt tokens in a prefix that an earlier request also has: the hits of an unlimited cache.

    An output counts as cached from the arrival of its request, so the share is an upper bound.
    """
    root: dict[str, Any] = {}  # a trie: segment -> (longest length so far, {length: next segments})
    tokens = hits = 0
    for request in requests:
        tokens += request.prompt_len
        node, seen = root, True
        for name, length in (*request.prompt, (f"out:{request.id}", request.output_len)):
            if name == PRIVATE:
                break
            longest, followers = node.get(name, (0, {}))
            if seen:
                hits += min(length, longest)
                seen = length <= longest
            node[name] = (max(length, longest), followers)
            node = followers.setdefault(length, {})
    return hits / tokens if tokens else 0.0
