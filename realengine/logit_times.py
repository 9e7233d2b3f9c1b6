"""The times of what requests do with logits: penalties, and log-probabilities of prompts, measured on an engine.

A step with them is compared with the same step without them. Replays of traces use the same penalties.
"""

from __future__ import annotations

from statistics import median

from tokentwin.realengine.logit_rules import PENALTIES, RuledLogits
from tokentwin.realengine.runner import ModelRunner

_ROWS = 8
_TOKENS = 256  # of a prompt, and of the answer whose tokens have penalties
_REPEATS = 9


def logit_times(runner: ModelRunner) -> tuple[int, int]:
    """Return the time in ps of the penalties of one row, and of the log-probabilities of one token of a prompt."""
    limits = runner.deployment.scheduler
    rows = [1] * min(_ROWS, limits.max_num_seqs)
    prompts = runner.prompts(min(_TOKENS, limits.max_num_batched_tokens))
    answer = range(min(_TOKENS, runner.spec.vocab_size))
    changes = RuledLogits(PENALTIES, answer).changes(answer, unseen=False, temperature=0.0, in_grammar=False)
    plain, changed, prompt, scored = zip(
        *(
            (
                runner.dummy_step(rows),
                runner.dummy_step(rows, changes=changes),
                runner.dummy_step(prompts),
                runner.dummy_step(prompts, scored=True),
            )
            for _ in range(_REPEATS)
        ),
        strict=True,
    )
    return _each_ps(changed, plain, len(rows)), _each_ps(scored, prompt, sum(prompts))


def _each_ps(longer: tuple[int, ...], shorter: tuple[int, ...], count: int) -> int:
    return max(round(1000 * (median(longer) - median(shorter)) / count), 0)
