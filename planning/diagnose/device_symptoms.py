"""What looks wrong with the device's work: what its time goes into, and what it waits for. See `symptoms`."""

from __future__ import annotations

from collections.abc import Callable

from calibration.steps.operation_cost import WAITING
from planning.diagnose.document import Symptom, shown_ms
from planning.diagnose.evidence import Evidence
from traces.distribution import Distribution

LOW_UTILISATION = "low utilisation"
_TAIL = 3.0  # p99 over p50 of gaps between tokens
_SHARE = 0.1  # of the time: below, nothing is said
_MUCH = 0.2  # of the time, for what every engine spends some of
_HALF = 0.5
_SMALL = 16  # requests in a step: fewer leave most FLOPs unused
_UNUSED = 0.1  # MFU below which most FLOPs are unused


def _prompts(e: Evidence) -> Symptom | None:
    if not e.has_steps or e.prompt_share < _HALF:
        return None
    prefill, step = e.metrics.distribution("prefill_ms"), e.metrics.distribution("step_ms")
    return Symptom(
        name="prompts take the device",
        lifecycle="compute",
        severity=e.prompt_share,
        metric="ttft_ms",
        evidence=f"{100 * e.prompt_share:.0f} % of the steps' time goes into prompts; prefill p99 "
        f"{shown_ms(prefill.p99)} ms, "
        f"step p50 {shown_ms(step.p50)} ms",
        proof="run the same arrivals with prompts cut to a tenth: if latencies fall as much, prefill is the cause",
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
        name="high ITL",
        lifecycle="memory and request",
        severity=0.7 * (1 - spread.p50 / spread.p99) if not bound else max(0.5, 1 - bound / tpot.p99),
        metric="itl_ms" if gaps.count and not bound else "tpot_ms",
        evidence=f"{name} p99 {shown_ms(spread.p99)} ms, p50 {shown_ms(spread.p50)}{mixed}",
        proof="halve max_num_batched_tokens: if the ITL p99 falls too, prompt chunks delay decodes",
    )


def _slow_host(e: Evidence) -> Symptom | None:
    if not e.has_steps or e.host_share < _SHARE:
        return None
    can_overlap = not e.deployment.scheduler.async_scheduling and e.deployment.pipeline_parallel_size == 1
    return Symptom(
        name="time between steps",
        lifecycle="compute",
        severity=e.host_share,
        metric="tpot_ms",
        evidence=f"no step ran in {100 * e.host_share:.0f} % of the time in which there was work",
        proof="run it again with --async-scheduling: the time that it saves was CPU time between steps"
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
        name=LOW_UTILISATION,
        lifecycle="compute and request",
        severity=0.3 * (1 - busy),
        metric="e2e_ms",
        evidence=f"steps take {100 * busy:.0f} % of the time, with {running} {requests} in them",
        proof="raise the load (--rate-scale 2): if latencies stay the same, there is capacity to spare",
    )


def _small_batches(e: Evidence) -> Symptom | None:
    """Busy all the time, and most of the device unused."""
    busy, mfu = (e.metrics.busy(), e.metrics.step_mean("mfu")) if e.has_steps else (None, None)
    running = e.metrics.step_mean("running") if e.has_steps else None
    if busy is None or mfu is None or running is None or busy < _HALF or mfu >= _UNUSED or running >= _SMALL:
        return None
    return Symptom(
        name="small batches",
        lifecycle="compute and request",
        severity=_HALF * busy * (1 - running / _SMALL),
        metric="tpot_ms",
        evidence=f"steps take {100 * busy:.1f} % of the time with {running:,.3g} requests in them: MFU "
        f"{100 * mfu:.2g} %, MBU {100 * (e.metrics.step_mean('mbu') or 0.0):.0f} %",
        proof="raise the load (--rate-scale 2): if TPOT stays the same, the device had room for more in each step",
    )


def _communication(e: Evidence) -> Symptom | None:
    share = e.parts.get("collectives", 0.0)
    if share < _MUCH:
        return None
    return Symptom(
        name="communication",
        lifecycle="compute",
        severity=share,
        metric="e2e_ms",
        evidence=f"{100 * share:.0f} % of the steps' time goes into collectives among {e.deployment.gpus} devices",
        proof="run it again with half the tensor_parallel_size and twice the replicas, or on GPUs with faster links",
    )


def _bubbles(e: Evidence) -> Symptom | None:
    bubble = e.metrics.scalars()["pipeline_bubble"]
    if bubble is None or bubble < _SHARE:
        return None
    return Symptom(
        name="pipeline bubbles",
        lifecycle="compute",
        severity=bubble,
        metric="e2e_ms",
        evidence=f"while a step is under way, {100 * bubble:.1f} % of the time of the "
        f"{e.deployment.pipeline_parallel_size} stages is idle",
        proof="run it again with as many GPUs in tensor parallelism, or with smaller chunks",
    )


def _launches(e: Evidence) -> Symptom | None:
    share = e.parts.get(WAITING, 0.0) + e.parts.get("host and launch", 0.0)
    if share < _MUCH:
        return None
    eager = " without CUDA graphs" if e.deployment.enforce_eager else ""
    return Symptom(
        name="launch-bound steps",
        lifecycle="compute",
        severity=share,
        metric="tpot_ms",
        evidence=f"{100 * share:.0f} % of the steps' time goes into launching kernels{eager}, and gaps between them",
        proof="run it again without enforce_eager, or with more requests in a step: if steps take as long, it is that",
    )


def _uneven_experts(e: Evidence) -> Symptom | None:
    imbalance = e.expert_imbalance
    waited = (1 - 1 / imbalance) * (
        e.parts.get("experts", 0.0) + e.parts.get("expert compute", 0.0) if e.parts else 1.0
    )
    if waited < _SHARE:
        return None
    return Symptom(
        name="expert imbalance",
        lifecycle="compute",
        severity=waited,
        metric="e2e_ms",
        evidence=f"the busiest of {e.deployment.expert_parallel_size} devices gets {imbalance:.2f} times the "
        f"mean of the tokens; the others wait for {100 * waited:.0f} % of the steps' time",
        proof="run it again with expert_imbalance 1, or without enable_expert_parallel",
    )


DEVICE_LOOKS: tuple[Callable[[Evidence], Symptom | None], ...] = (
    _prompts, _high_itl, _slow_host, _low_utilisation, _small_batches, _communication, _bubbles, _launches,
    _uneven_experts,
)  # fmt: skip
