"""Worker counts of a measured run that prefills and decodes on separate workers: the fewest that keep pace.

They are for a run that does not state its counts. A closed loop of C requests finishes C of them in the time of their
output tokens, so decode workers set a rate, and prefill workers must make first tokens as fast (rate matching, as
NVIDIA's AIConfigurator sizes such fleets). The measured times choose nothing.
"""

from __future__ import annotations

from math import ceil

from calibration.validation.external.predictor import Prediction
from serving.deployments.config import Deployment
from serving.errors import UserError
from serving.step_plan import StepPlan
from traces.measured.run import MeasuredRun


def matched_workers(run: MeasuredRun, deployment: Deployment, prediction: Prediction) -> tuple[int, int]:
    """Return the numbers of prefill and decode workers.

    They are the fewest decode workers that can have all requests at once, and the fewest prefill workers that keep
    their pace. Raises UserError if more than `run.most_workers` of a kind would be needed.
    """
    assert run.lengths is not None and run.workload.concurrency is not None
    (prompt, output), requests = run.lengths, run.workload.concurrency
    config, ranks, cost = deployment.scheduler, deployment.data_parallel_size, prediction.cost
    blocks = -(-(prompt + output) // config.block_size) + config.state_blocks
    places = ranks * min(config.max_num_seqs, (prediction.num_blocks - 1) // blocks)
    decode = ceil(requests / places) if places else run.most_workers + 1
    rows, context = ceil(requests / decode / ranks), prompt + output // 2  # means
    squares = rows * context**2
    token = StepPlan.from_amounts(
        decode_rows=rows, decode_context=rows * context, decode_squares=squares, sampled_rows=rows
    )
    together = max(config.max_num_batched_tokens // prompt, 1)
    first = StepPlan.from_amounts(
        prefill_rows=together,
        prefill_tokens=together * prompt,
        prefill_pairs=together * prompt * (prompt + 1) // 2,
        sampled_rows=together,
    )
    finished_per_ns = requests / (output * cost.step_ns(token))
    prefill = max(ceil(finished_per_ns * cost.step_ns(first) / (ranks * together)), 1)
    if max(prefill, decode) > run.most_workers:
        remedy = f"need {prefill} workers for prefill and {decode} for decode; raise measured.search"
        raise UserError(run.name, run.most_workers, remedy)
    return prefill, decode
