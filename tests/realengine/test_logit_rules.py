"""What requests have done to their logits: each rule by its definition, and in every loop the same tokens."""

import math
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.budget import examples  # noqa: E402
from tests.realengine.test_engine_loop import engine_for, prompts  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.logit_rules import LogitRules, RuledLogits, step_changes  # noqa: E402
from tokentwin.realengine.sampling import SamplingParams, changed_logits  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine

VOCAB = 12
TOKENS = st.integers(0, VOCAB - 1)
RULES = st.builds(
    LogitRules,
    presence=st.sampled_from([0.0, 0.7, -1.0]),
    frequency=st.sampled_from([0.0, 0.5]),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    bias=st.dictionaries(TOKENS, st.sampled_from([-100.0, 2.0]), max_size=3).map(lambda bias: tuple(bias.items())),
    bad_words=st.lists(st.lists(TOKENS, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
    allowed=st.lists(TOKENS, max_size=4).map(tuple),
    min_p=st.sampled_from([0.0, 0.2]),
    min_tokens=st.integers(0, 4),
    late=st.lists(TOKENS, max_size=2).map(tuple),
)


def by_definition(logits: list[float], rules: LogitRules, prompt: list[int], outputs: list[int]) -> list[float]:
    """Apply each rule as vLLM's documentation defines it, token by token."""
    changed = list(logits)
    for token, number in rules.bias:
        changed[token] += number
    for token in range(VOCAB):
        if token in prompt or token in outputs:
            changed[token] *= 1 / rules.repetition if changed[token] > 0 else rules.repetition
        changed[token] -= rules.frequency * outputs.count(token) + rules.presence * (token in outputs)
    bad = {word[-1] for word in rules.bad_words if [*outputs, None][-len(word) : -1] == [*word[:-1]]}
    late = set(rules.late) if len(outputs) < rules.min_tokens else set()
    left = [
        -math.inf if token in bad | late or (rules.allowed and token not in rules.allowed) else number
        for token, number in enumerate(changed)
    ]
    least = max(left) + (0.5 * math.log(rules.min_p) if rules.min_p else -math.inf)
    left = [number if number >= least else -math.inf for number in left]
    return changed if max(left) == -math.inf else left


@examples(1)
@given(RULES, st.lists(TOKENS, max_size=5), st.lists(TOKENS, max_size=5), st.booleans(), st.integers(0, 1000))
def test_each_rule_does_what_it_says(
    rules: LogitRules, prompt: list[int], outputs: list[int], unseen: bool, seed: int
) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    known, last = (outputs[:-1], outputs[-1]) if unseen and outputs else (outputs, 0)
    changes = RuledLogits(rules, prompt).changes(known, unseen and bool(outputs), 0.5, False)
    packed = step_changes([None, changes, None])
    assert packed is not None
    changed = changed_logits(logits, packed, torch.tensor([1, last, 1], dtype=torch.int32))
    assert changed[[0, 2]].equal(logits[[0, 2]])
    wanted = by_definition(logits[1].tolist(), rules, prompt, outputs)
    assert changed[1].tolist() == pytest.approx(wanted, abs=1e-4)


RULED = [
    LogitRules(presence=0.5, frequency=0.3, repetition=1.3),
    LogitRules(repetition=1.5, min_p=0.05),
    LogitRules(bias=((3, 4.0), (5, -100.0)), frequency=2.0),
    LogitRules(allowed=tuple(range(40)), repetition=2.0),
]


def answers(engine: Engine) -> tuple[list[list[int]], list[Any]]:
    """Return the answers to several prompts side by side, and the reported log-probabilities of tokens.

    Every third prompt has no rules, and some answers are drawn.
    """
    logprobs: list[Any] = []
    sequences = []
    for number, prompt in enumerate(prompts(6)):
        rules = RULED[number % len(RULED)] if number % 3 else None
        how = SamplingParams(0.8, seed=number) if number % 2 else None
        arrived = WorkloadRequest(number, number, (("", len(prompt)),), 16)

        def take(token: int, logprob: Any) -> bool:
            logprobs.append(logprob)
            return False

        engine.add(arrived, prompt, sampling=how, rules=rules, on_token=take, logprobs=number if number else None)
        sequences.append(engine.sequences[number])
    while engine.scheduler.requests:
        engine.step()
    return [sequence.outputs for sequence in sequences], logprobs


def test_every_loop_gives_the_same_tokens() -> None:
    plain, logprobs = answers(engine_for(scheduler={"async_scheduling": False}))
    overlapped, _ = answers(engine_for(scheduler={"async_scheduling": True}))
    assert overlapped == plain
    assert {len(one.top) for one in logprobs if one is not None} == {1, 2, 3, 4, 5} and None in logprobs
    likely = [one for one in logprobs if one is not None]
    assert all(one.logprob <= one.top[0][1] + 1e-5 for one in likely)
    assert all(list(one.top) == sorted(one.top, key=lambda top: -top[1]) for one in likely)


def test_what_is_forbidden_does_not_come() -> None:
    engine = engine_for(scheduler={"async_scheduling": True})

    def outputs(rules: LogitRules | None) -> list[int]:
        engine.reset()
        engine.add(WorkloadRequest(0, 0, (("", 4),), 12), [1, 2, 3, 4], rules=rules, stop_ids=stops)
        sequence = engine.sequences[0]
        while engine.scheduler.requests:
            engine.step()
        return sequence.outputs

    stops: tuple[int, ...] = ()
    free = outputs(None)
    pair = (free[2], free[3])
    ruled = outputs(LogitRules(bad_words=(pair,)))
    assert ruled[:3] == free[:3] and ruled[3] != free[3]
    assert pair not in pairwise(ruled)
    stops = (free[0],)
    assert outputs(None) == free[:1]
    assert free[0] not in outputs(LogitRules(min_tokens=5, late=stops))[:5]
