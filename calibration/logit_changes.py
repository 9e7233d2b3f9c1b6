"""The operations that penalties, biases and log-probabilities of prompts add to a step; none of them was measured.

vLLM's kernel of penalties (vLLM 0.32, `v1/worker/gpu/sample/penalties.py`) reads a logit, the number of times that its
token occurs in the answer, and a bit that says whether the prompt has it, and writes the logit. So it is bound by
memory: 4 + 4 + 4 + 1/8 bytes for each token of the vocabulary. Rules that change few logits (a bias) cost at most this,
and count the same. Log-probabilities of a prompt need what a sampled row needs, the head and two passes over the
logits, for at most 1,024 tokens at a time (`prompt_logprob.py`).
"""

from __future__ import annotations

from tokentwin.calibration.operations import Elementwise, Operation
from tokentwin.calibration.step_operations import logit_operations
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec

SCORED_AT_A_TIME = 1024
_CHANGED_BYTES = 4 + 4 + 4 + 1 / 8


def changing_operations(model: ModelSpec, rows: int) -> list[Operation]:
    """Return the operation that changes `rows` rows of logits, if there are any; every device has all logits."""
    return [Elementwise("penalties", rows * (_CHANGED_BYTES * model.vocab_size))] if rows else []


def scoring_operations(model: ModelSpec, deployment: Deployment, tokens: int) -> list[Operation]:
    """Return the operations that compute log-probabilities of `tokens` tokens of prompts."""
    whole, rest = divmod(tokens, SCORED_AT_A_TIME)
    at_a_time = [SCORED_AT_A_TIME] * whole + ([rest] if rest else [])
    return [operation for some in at_a_time for operation in logit_operations(model, deployment, some)]
