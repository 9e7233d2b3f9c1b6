"""The measurement that would narrow the latencies of the recommended fleet most, with the command that makes it."""

from __future__ import annotations

import shlex

from tokentwin.calibration.steps.measured_runs import MeasuredRuns
from tokentwin.planning.plan.document import NextMeasurement
from tokentwin.planning.plan.plan import Offer
from tokentwin.planning.plan.pricing import KernelPricing
from tokentwin.planning.plan.trial import Pricing
from tokentwin.serving.deployments.model_catalogue import hub_id
from tokentwin.serving.workload import Workload

_WAVES, _FEWEST = 10, 20  # requests to send: 10 per slot, and at least 20


def next_measurement(pricing: Pricing, offer: Offer, workload: Workload) -> NextMeasurement | None:
    """Return the next run to measure on one replica; None if kernel tables and published runs do not time its steps.

    A replica with separate prefill and decode engines, or with a draft model, has no answer either, nor has a fleet for
    pooling requests.
    """
    engine, figures = offer.engine, offer.trial.figures
    assert figures is not None
    drafts = engine.deployment.scheduler.speculative
    if not isinstance(pricing, KernelPricing) or engine.split or (drafts and drafts.method != "mtp"):
        return None
    from tokentwin.calibration.steps.evidence import bundled_evidence
    from tokentwin.calibration.steps.external_calibration import blind_doubts
    from tokentwin.calibration.steps.interval import widened
    from tokentwin.calibration.validation.external.next_run import next_run

    learnt = pricing.learnt
    if learnt is not None and not isinstance(learnt, MeasuredRuns):
        return None
    requests = list(workload.requests)
    if all(request.pools for request in requests):
        return None  # the measured runs are of generation
    prompt = round(sum(request.prompt_len for request in requests) / len(requests))
    output = max(round(sum(request.output_len for request in requests) / len(requests)), 2)
    per_replica = figures.steady.output_throughput / offer.trial.replicas
    running = round(per_replica / figures.tok_s_user) if figures.tok_s_user > 0 else 1  # NaN: answers of one token
    evidence = learnt.evidence if learnt else bundled_evidence()
    best = next_run(evidence, engine.gpu, engine.deployment, prompt, output, running)
    tpot, ttft = best.tpot[0], best.ttft[0]
    for doubt in blind_doubts(engine.gpu, engine.deployment, learnt):  # a run of this deployment ends them
        tpot, ttft = widened(tpot, *doubt.of_decode), widened(ttft, *doubt.of_prompts)
    options = {
        "--model": hub_id(engine.deployment.model),
        "--dataset-name": "random",
        "--random-input-len": prompt,
        "--random-output-len": output,
        "--max-concurrency": best.concurrency,
        "--num-prompts": max(_WAVES * best.concurrency, _FEWEST),
    }
    flags = ("--ignore-eos", "--save-result", "--save-detailed", "--result-filename", "next.json")
    stated = [str(part) for option in options.items() for part in option]
    return NextMeasurement(
        concurrency=best.concurrency,
        prompt_tokens=prompt,
        output_tokens=output,
        tpot_interval=tpot,
        tpot_interval_after=best.tpot[1],
        ttft_interval=ttft,
        ttft_interval_after=best.ttft[1],
        command=shlex.join(["vllm", "bench", "serve", *stated, *flags]),
    )
