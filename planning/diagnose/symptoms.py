"""What looks wrong in a recorded run, with the numbers that show it.

A symptom is read from the recording alone, whichever clock wrote it: no model is used. It names the lifecycle it
belongs to (token, compute, memory, request) and the measurement that would prove what is behind it. What it is
worth is for the counterfactuals to say (`diagnosis`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from planning.diagnose.constraint_lifts import Lifecycle, dispersion
from planning.diagnose.document import shown_ms
from planning.diagnose.evidence import Evidence
from serving.workload import PRIVATE, WorkloadRequest
from traces.distribution import Distribution
from traces.replica_lives import Lives, serving_ns, unserved_ns

LOW_UTILISATION = "low utilisation"
_QUEUE_STEPS = 3  # waiting for so many steps is queueing, for fewer it is waiting for the next step
_TAIL = 3.0  # p99 over p50 of gaps between tokens
_SPIKE = 10.0  # p99 over p50 of TTFT
_SHARE = 0.1  # of the time: below, nothing is said
_HALF = 0.5
_OUTAGE = 0.01  # of the run
_FULL = 0.95  # of the KV blocks
_BURSTY = 2.0  # index of dispersion


@dataclass(frozen=True, slots=True)
class Symptom:
    """Something that looks wrong. `severity` is between 0 and 1, `metric` the latency that it shows in."""

    name: str
    lifecycle: Lifecycle
    severity: float
    metric: str
    evidence: str
    proof: str


def symptoms(evidence: Evidence) -> list[Symptom]:
    """The worst first."""
    found = [symptom for look in _LOOKS if (symptom := look(evidence)) is not None]
    return sorted(found, key=lambda symptom: -symptom.severity)


def _overload(e: Evidence) -> Symptom | None:
    verdict = e.metrics.saturation
    if verdict is None or verdict.verdict != "OVERLOADED":
        return None
    return Symptom(
        "overload",
        "request",
        0.9,
        "e2e_ms",
        f"{verdict.arrival_rate:.3g} requests/s arrive, and the backlog grows by {verdict.slope:.3g} requests/s",
        "lower the load (--rate-scale 0.9, 0.8, ...) until the run is STABLE: that rate is the capacity",
    )


def _turned_away(e: Evidence) -> Symptom | None:
    statuses = e.metrics.statuses()
    total = sum(statuses.values())
    lost = {name: count for name, count in sorted(statuses.items()) if name != "finished"}
    share = sum(lost.values()) / total
    if share < 0.01:
        return None
    shown = ", ".join(f"{count:,} {name.replace('_', ' ')}" for name, count in lost.items())
    return Symptom(
        "unfinished requests",
        "request",
        max(share, _HALF),
        "e2e_ms",
        f"{shown} of {total:,}",
        "read the column `reason` of the requests: those that never fit need a larger max_model_len or more KV blocks, "
        "those that were turned away or gave up need shorter waits",
    )


class _Crashes(NamedTuple):
    """Of a pool: how many, the share of the run without a replica, replicas ready on average and at the start."""

    pool: str
    crashes: int
    none: float
    ready: float
    first: int

    @classmethod
    def of(cls, pool: str, lives: Lives, duration_ns: int) -> _Crashes:
        crashes = sum(life["ended_by"] == "crash" for life in lives)
        first = sum(life["ready_ns"] == 0 for life in lives)
        none, ready = unserved_ns(lives, duration_ns), serving_ns(lives, duration_ns)
        return cls(pool, crashes, none / duration_ns, ready / duration_ns, first)

    @property
    def lost(self) -> float:
        """The share of the run, or of the replicas that it began with."""
        return max(self.none, 1 - self.ready / self.first if self.first else 0.0)


def _failures(e: Evidence) -> Symptom | None:
    """Of the pool that lost most."""
    lives, duration_ns = e.run["replica_lives"] or [], e.run["duration_ns"]
    pools = sorted({life["pool"] for life in lives})
    crashed = [_Crashes.of(pool, [life for life in lives if life["pool"] == pool], duration_ns) for pool in pools]
    worst = max((pool for pool in crashed if pool.crashes), key=lambda pool: pool.lost, default=None)
    if worst is None or (worst.none < _OUTAGE and worst.lost < _SHARE):
        return None
    outage = f", none for {100 * worst.none:.1f} % of the run" if worst.none else ""
    return Symptom(
        "replicas fail",
        "request",
        _HALF + _HALF * worst.lost,
        "e2e_ms",
        f"{worst.crashes:,} {'crash' if worst.crashes == 1 else 'crashes'}"
        f"{f' in the pool {worst.pool}' if len(pools) > 1 else ''}; {worst.ready:.3g} replicas were ready on average, "
        f"{worst.first:,} at the start{outage}",
        "simulate the same run without failures",
    )


def _high_ttft(e: Evidence) -> Symptom | None:
    ttft, queue, prefill = (e.metrics.distribution(name) for name in ("ttft_ms", "queue_ms", "prefill_ms"))
    bound = e.metrics.slo.get("ttft_ms")
    step = np.nanmax([0.0, *(e.metrics.distribution(name).p99 for name in ("step_ms", "tpot_ms"))])
    queues = queue.p99 > max(prefill.p99, _QUEUE_STEPS * step)
    if not (ttft.p99 > bound if bound else queues):
        return None
    share = queue.mean / ttft.mean if ttft.mean else 0.0
    over = f", the bound is {shown_ms(bound)}" if bound else ""
    return Symptom(
        "high TTFT",
        "request",
        0.4 + 0.45 * share,
        "ttft_ms",
        f"TTFT p99 {shown_ms(ttft.p99)} ms (p50 {shown_ms(ttft.p50)}{over}); {100 * share:.0f} % of the mean is "
        f"queueing, prefill p99 {shown_ms(prefill.p99)} ms",
        "run the same requests at half the rate (--rate-scale 0.5): TTFT that remains is prefill, the rest is queueing",
    )


def _prompts(e: Evidence) -> Symptom | None:
    if not e.has_steps or e.prompt_share < _HALF:
        return None
    prefill, step = e.metrics.distribution("prefill_ms"), e.metrics.distribution("step_ms")
    return Symptom(
        "prompts take the device",
        "compute",
        e.prompt_share,
        "ttft_ms",
        f"{100 * e.prompt_share:.0f} % of the steps' time goes into prompts; prefill p99 {shown_ms(prefill.p99)} ms, "
        f"step p50 {shown_ms(step.p50)} ms",
        "run the same arrivals with prompts cut to a tenth: if latencies fall as much, prefill is the cause",
    )


def _high_itl(e: Evidence) -> Symptom | None:
    itl = e.metrics.values("itl_ms")
    gaps = Distribution.of(itl[itl > 0])  # tokens of one step, accepted drafts, come together
    name = "ITL" if gaps.count else "TPOT"
    tpot = e.metrics.distribution("tpot_ms")
    spread = gaps if gaps.count else tpot
    bound = e.metrics.slo.get("tpot_ms")
    if not spread.count or not (tpot.p99 > bound if bound else spread.p99 > _TAIL * spread.p50):
        return None
    mixed = ""
    if e.has_steps:
        prompts, decodes = e.step("prefill_rows") > 0, e.step("decode_rows") > 0
        if (prompts & decodes).any() and (~prompts).any():
            with_, without = (float(e.step_ns[of].mean()) / 1e6 for of in (prompts & decodes, ~prompts))
            mixed = f"; a step takes {with_:,.3g} ms with prompts in it, {without:,.3g} ms without"
    return Symptom(
        "high ITL",
        "token",
        0.7 * (1 - spread.p50 / spread.p99) if not bound else max(0.5, 1 - bound / tpot.p99),
        "itl_ms" if gaps.count and not bound else "tpot_ms",
        f"{name} p99 {shown_ms(spread.p99)} ms, p50 {shown_ms(spread.p50)}{mixed}",
        "halve max_num_batched_tokens: if the ITL p99 falls too, prompt chunks delay decodes",
    )


def _slow_host(e: Evidence) -> Symptom | None:
    if not e.has_steps or e.host_share < _SHARE:
        return None
    can_overlap = not e.deployment.scheduler.async_scheduling and e.deployment.pipeline_parallel_size == 1
    return Symptom(
        "time between steps",
        "compute",
        e.host_share,
        "tpot_ms",
        f"no step ran in {100 * e.host_share:.0f} % of the time in which there was work",
        "run it again with --async-scheduling: the time that it saves was CPU time between steps"
        if can_overlap
        else "profile the host between two steps",
    )


def _low_utilisation(e: Evidence) -> Symptom | None:
    busy = e.metrics.busy() if e.has_steps else None
    if busy is None or busy >= _HALF:
        return None
    running = f"{e.metrics.step_mean('running') or 0.0:,.3g}"
    requests = "request" if running == "1" else "requests"
    return Symptom(
        LOW_UTILISATION,
        "compute",
        0.3 * (1 - busy),
        "e2e_ms",
        f"steps take {100 * busy:.0f} % of the time, with {running} {requests} in them",
        "raise the load (--rate-scale 2): if latencies stay the same, there is capacity to spare",
    )


def _full_kv(e: Evidence) -> Symptom | None:
    preemptions = e.metrics.scalars()["preemptions"]
    pressure = e.metrics.step_mean("kv_pressure") if e.has_steps else None
    blocked = e.time_share((e.kv_usage > _FULL) | (e.step("preempted") > 0)) if e.has_steps else 0.0
    waits = e.time_share((e.metrics.values("kv_pressure") > 1) & (e.kv_usage > 0.8)) if e.has_steps else 0.0
    share = max(blocked, waits)
    finished = int(e.metrics.finished.sum())
    if share < _SHARE and preemptions < _SHARE * finished:
        return None
    usage = ""
    if pressure is not None:
        full = 100 * (e.metrics.step_mean("kv_usage") or 0)
        usage = f"KV {full:.0f} % full on average, {pressure:.2g} times its size demanded; "
    return Symptom(
        "full KV memory",
        "memory",
        min(max(share, preemptions / finished), 1.0) * 0.98,
        "e2e_ms",
        f"{usage}{preemptions} preemptions of {finished} requests, "
        f"{e.metrics.scalars()['recomputed_tokens']:,} tokens computed again",
        "run it again with twice the num_blocks: preemptions and queueing should both go away",
    )


def _no_places(e: Evidence) -> Symptom | None:
    if not e.has_steps:
        return None
    most = e.deployment.scheduler.max_num_seqs
    stuck = (e.step("running") >= most) & (e.step("waiting") > 0) & (e.kv_usage < 0.9)
    share = e.time_share(stuck)
    if share < _SHARE:
        return None
    return Symptom(
        "max_num_seqs reached",
        "request",
        0.86 * share / e.time_share(e.step("waiting") > 0),
        "ttft_ms",
        f"in {100 * share:.0f} % of the time {most} requests run, as many as max_num_seqs allows, while others wait "
        "and KV memory is free",
        "run it again with twice the max_num_seqs",
    )


def _bursts(e: Evidence) -> Symptom | None:
    if not e.requests or any(request.think_ns is not None for request in e.requests):
        return None
    index = dispersion(e.requests)
    if index < _BURSTY:
        return None
    return Symptom(
        "bursty arrivals",
        "request",
        (0.9 if (e.metrics.busy() or 1.0) < _HALF else 0.6) * (1 - 1 / index),
        "ttft_ms",
        f"the number of arrivals varies {index:.3g} times as much as Poisson's (index of dispersion)",
        "run the same requests evenly spaced: if the tail goes away, bursts are the cause",
    )


def _tail(e: Evidence) -> Symptom | None:
    ttft = e.metrics.distribution("ttft_ms")
    if ttft.count < 100 or not ttft.p99 > _SPIKE * ttft.p50:
        return None
    values = e.metrics.values("ttft_ms")
    worst = np.flatnonzero(values >= ttft.p99)
    waited = e.metrics.values("queue_ms")[worst].sum() / values[worst].sum()
    return Symptom(
        "tail spikes",
        "request",
        0.5 * (1 - ttft.p50 / ttft.p99),
        "ttft_ms",
        f"TTFT p99 is {ttft.p99 / ttft.p50:,.0f} times its median; the worst {len(worst)} requests queued for "
        f"{100 * waited:.0f} % of theirs",
        "look when the worst requests arrived: together (a burst, a stall) or apart (long prompts)",
    )


def _missed_prefixes(e: Evidence) -> Symptom | None:
    hit = e.metrics.prefix_hit_rate()
    if hit is None or not e.requests:
        return None
    loaded = sum(e.metrics.tier_hit_rates().values())
    missed = attainable_hit_rate(e.requests) - hit - loaded
    if missed < _SHARE:
        return None
    tiers = f", {100 * loaded:.0f} % in KV tiers" if loaded else ""
    return Symptom(
        "missed prefixes",
        "memory",
        0.9 * missed,
        "ttft_ms",
        f"{100 * hit:.0f} % of the prompt tokens were found in the prefix cache{tiers}; {100 * missed:.0f} % had been "
        "seen and were computed again",
        "run it again with many more num_blocks (eviction), or on one replica (routing)",
    )


_LOOKS: tuple[Callable[[Evidence], Symptom | None], ...] = (
    _overload, _turned_away, _failures, _high_ttft, _prompts, _high_itl, _slow_host, _low_utilisation, _full_kv,
    _no_places, _bursts, _tail, _missed_prefixes,
)  # fmt: skip


def attainable_hit_rate(requests: Iterable[WorkloadRequest]) -> float:
    """Share of the prompt tokens that an earlier request began with too: what one endless cache would find.

    Outputs count from the arrival of their request on, so that it is a bound.
    """
    root: dict[str, Any] = {}  # a trie: segment -> its longest use so far, and what followed each length of it
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
