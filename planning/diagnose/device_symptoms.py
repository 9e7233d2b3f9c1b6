"""Symptoms in the work of the device: the parts of its time, and the reasons why it waits. See `symptoms`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tokentwin.calibration.steps.operation_cost import WAITING
from tokentwin.planning.diagnose.document import LEAST, Finding
from tokentwin.planning.diagnose.evidence import Evidence
from tokentwin.planning.diagnose.lifted_costs import KV_PARTS
from tokentwin.serving.answers.figures import shown_number, shown_share, shown_time
from tokentwin.traces.recording import notes_of
from tokentwin.traces.tables import Distribution, Floats

LOW_UTILISATION, SMALL_BATCHES = "low utilisation", "small batches"
IDLE = (LOW_UTILISATION, SMALL_BATCHES)  # symptoms that make no request wait
UNBOUNDED = "high ITL", "itl_ms"  # a symptom, and the latency in which it shows if no SLO bounds the latency
_TAIL = 3.0  # p99 over p50 of gaps between tokens: the number of decodes alone seldom makes a step so much longer
_MUCH = 0.2  # share of the time from which a cost that every engine has is a symptom
_SMALL = 16  # requests in a step; an H100 needs 295 to use all FLOPs (989 TFLOP/s, 16-bit weights at 3.35 TB/s)
_UNUSED = 0.1  # MFU below which most FLOPs are unused
_REJECTED = 0.3  # accepted share of drafted tokens: at a, a step gives at most 1 / (1 - a) tokens (Leviathan 2023)
_CHUNKS = 4  # number of chunks of a prompt below which chunks cost little
SHARE = LEAST  # share below which there is no symptom: a lift that removes a smaller one gains too little for a cause
HALF = 0.5  # share from which something is most of the whole

Look = Callable[[Evidence], Finding | None]


def _prompts(e: Evidence) -> Finding | None:
    if not e.has_steps or e.prompt_share < HALF:
        return None
    prefill, step = e.metrics.distribution("prefill_ms"), e.metrics.distribution("step_ms")
    text = f"{shown_share(e.prompt_share)} of the steps' time goes into prompts; prefill p99 {shown_time(prefill.p99)}"
    return Finding(e.prompt_share, f"{text}, step p50 {shown_time(step.p50)}")


def _cut_small(e: Evidence) -> Finding | None:
    """Return a symptom if prompts are cut into many chunks, although their steps have room for more tokens."""
    if not e.has_steps or not e.step("prefill_rows").any():
        return None
    with_prompts, budget = e.step("prefill_rows") > 0, e.deployment.scheduler.most_step_tokens
    chunks = float(e.step("prefill_rows").sum() / np.isfinite(e.metrics.values("queue_ms")).sum())
    full = float(e.metrics.values("batch_tokens")[with_prompts].mean()) / budget
    if chunks < _CHUNKS or full > HALF:
        return None
    text = f"prompts are cut into {shown_number(chunks)} chunks on average, and their steps have"
    return Finding(1 - full, f"{text} {shown_share(full)} of the allowed tokens")


def _rejected_drafts(e: Evidence) -> Finding | None:
    rate = e.metrics.scalars()["draft_acceptance_rate"]
    if rate is None or rate >= _REJECTED:
        return None
    return Finding(1 - rate, f"{shown_share(rate)} of the drafted tokens are accepted")


def _high_itl(e: Evidence) -> Finding | None:
    itl = e.metrics.values("itl_ms")
    gaps = Distribution.from_values(itl[itl > 0])  # accepted drafts come in one step, with a gap of 0
    tpot = e.metrics.distribution("tpot_ms")
    spread, name = (gaps, "ITL") if gaps.count else (tpot, "TPOT")
    bound = e.metrics.slo.get("tpot_ms")
    if not spread.count or not (tpot.p99 > bound if bound else spread.p99 > _TAIL * spread.p50):
        return None
    mixed = ""
    if e.has_steps:
        prompts, decodes = e.step("prefill_rows") > 0, e.step("decode_rows") > 0
        if (prompts & decodes).any() and (~prompts).any():
            with_, without = (float(e.step_ns[steps].mean()) / 1e6 for steps in (prompts & decodes, ~prompts))
            mixed = f"; a step takes {shown_time(with_)} with prompts in it, {shown_time(without)} without"
    if bound:
        share = float((e.metrics.values("tpot_ms") > bound).sum() / tpot.count)
        beyond = f"{shown_share(share)} of the requests have a TPOT over {shown_time(bound)}"
    else:
        share = share_beyond(itl if gaps.count else e.metrics.values("tpot_ms"), _TAIL * spread.p50)
        beyond = f"{shown_share(share)} of all {name} is in values over {_TAIL:.0f} medians"
    text = f"{name} p99 {shown_time(spread.p99)}, p50 {shown_time(spread.p50)}; {beyond}{mixed}"
    return Finding(share, text, UNBOUNDED[1] if gaps.count and not bound else "")


def _slow_host(e: Evidence) -> Finding | None:
    if not e.has_steps or e.host_share < SHARE:
        return None
    can_overlap = not e.deployment.scheduler.async_scheduling
    overlap = "run it again with --async-scheduling: the saved time was CPU time between steps"
    text = f"no step ran in {shown_share(e.host_share)} of the time in which there was work"
    return Finding(e.host_share, text, proof=overlap if can_overlap else "")


def _low_utilisation(e: Evidence) -> Finding | None:
    busy = e.metrics.busy() if e.has_steps else None
    if busy is None or busy >= HALF:
        return None
    running = _requests(e.metrics.step_mean("running") or 0.0)
    return Finding(1 - busy, f"steps take {shown_share(busy)} of the time, with {running} on average")


def _requests(count: float) -> str:
    text = shown_number(count)
    return f"{text} request{'s' * (text != '1')}"


def _small_batches(e: Evidence) -> Finding | None:
    """Return a symptom if the device is busy, but most of its FLOPs are unused."""
    if not e.has_steps:
        return None
    busy, mfu, running = e.metrics.busy(), e.metrics.step_mean("mfu"), e.metrics.step_mean("running")
    if busy is None or mfu is None or running is None or busy < HALF or mfu >= _UNUSED or running >= _SMALL:
        return None
    text = f"steps take {shown_share(busy, 1)} of the time, with {_requests(running)} on average"
    text += f": MFU {shown_share(mfu, 1)}, MBU {shown_share(e.metrics.step_mean('mbu') or 0.0, 1)}"
    return Finding(1 - mfu, text)


def _communication(e: Evidence) -> Finding | None:
    share = e.parts.get("collectives", 0.0)
    text = f"{shown_share(share)} of the steps' time goes into collectives among {e.deployment.gpus} devices"
    return Finding(share, text) if share >= _MUCH else None


def _kv_reads(e: Evidence) -> Finding | None:
    share = sum(e.parts.get(part, 0.0) for part in KV_PARTS)
    text = f"{shown_share(share)} of the steps' time goes into attention to cached KV"
    return Finding(share, text) if share >= HALF else None


def _bubbles(e: Evidence) -> Finding | None:
    bubble = e.metrics.scalars()["pipeline_bubble"]
    if bubble is None or bubble < SHARE:
        return None
    stages = e.deployment.pipeline_parallel_size
    text = f"while a step is under way, {shown_share(bubble, 1)} of the time of the {stages} stages is idle"
    return Finding(bubble, text)


def _launches(e: Evidence) -> Finding | None:
    """Return a symptom if kernel launches take much time.

    The share of the time comes from a cost model, or from an engine that saw its host still launching kernels while the
    step already ran.
    """
    explained = e.parts.get(WAITING, 0.0) + e.parts.get("host and launch", 0.0)
    seen = notes_of(e.run).get("launching_share") or 0.0
    share, eager = max(explained, seen), " without CUDA graphs" if e.deployment.enforce_eager else ""
    more = "" if seen > explained else ", and gaps between them"
    text = f"{shown_share(share)} of the steps' time goes into launching kernels{eager}{more}"
    return Finding(share, text) if share >= _MUCH else None


def _uneven_experts(e: Evidence) -> Finding | None:
    imbalance = e.expert_imbalance
    of_experts = e.parts.get("experts", 0.0) + e.parts.get("expert compute", 0.0) if e.parts else 1.0
    waited = (1 - 1 / imbalance) * of_experts
    if waited < SHARE:
        return None
    return Finding(
        waited,
        f"the busiest of {e.deployment.expert_parallel_size} devices gets {imbalance:.2f} times the "
        f"mean number of tokens; the other devices wait for {shown_share(waited)} of the steps' time",
    )


def share_beyond(values: Floats, limit: float) -> float:
    """Return the share that the values over `limit` have of the sum of all values; missing values are left out."""
    return float(values[values > limit].sum() / np.nansum(values))


DEVICE_LOOKS: dict[str, Look] = {
    "prompts take the device": _prompts,
    "prompts cut small": _cut_small,
    "rejected drafts": _rejected_drafts,
    UNBOUNDED[0]: _high_itl,
    "time between steps": _slow_host,
    LOW_UTILISATION: _low_utilisation,
    SMALL_BATCHES: _small_batches,
    "communication": _communication,
    "KV reads": _kv_reads,
    "pipeline bubbles": _bubbles,
    "launch-bound steps": _launches,
    "expert imbalance": _uneven_experts,
}
