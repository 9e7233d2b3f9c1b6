"""Sampling: what can be drawn, how often, and that a draw depends on the request alone."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tokentwin.realengine.sampling import SamplingParams, draw  # noqa: E402
from tokentwin.realengine.sequence import TokenSequence  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.request import Request  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine


def rows_of(seed: int, rows: int, vocab: int) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


def sample(logits: torch.Tensor, params: list[SamplingParams], steps: list[int]) -> list[int]:
    """Return one sampled token for each row, as the engine asks for it; `steps[i]` counts row i's tokens so far."""
    how = [p.draw(step) or (0.0, 0, 1.0, 0.0) for p, step in zip(params, steps, strict=True)]
    temperature, top_k, top_p, uniform = (torch.tensor(column) for column in zip(*how, strict=True))
    tokens: list[int] = draw(logits, temperature, top_k, top_p, uniform).tolist()
    return tokens


def nucleus(logits: torch.Tensor, how: SamplingParams) -> set[int]:
    """Return the tokens that `how` allows by definition: top-k, then the fewest remaining ones that reach top-p."""
    order = logits.argsort(descending=True)
    order = order[: how.top_k or len(order)]
    probabilities = torch.softmax(logits[order].double() / how.temperature, -1)
    kept, total = set(), 0.0
    for token, probability in zip(order.tolist(), probabilities.tolist(), strict=True):
        kept.add(token)
        total += probability
        if total >= how.top_p + 1e-6:
            break
    return kept


@examples(0.5)
@given(st.integers(0, 2**31), st.integers(0, 25), st.floats(0.05, 1.0), st.floats(0.2, 3.0))
def test_only_what_top_k_and_then_top_p_leave_is_drawn(seed: int, k: int, p: float, temperature: float) -> None:
    logits = rows_of(seed, 1, 20)
    how = SamplingParams(temperature=temperature, top_k=k, top_p=p, seed=seed)
    assert {sample(logits, [how], [step])[0] for step in range(30)} <= nucleus(logits[0], how)


@pytest.mark.parametrize(
    "how",
    [
        SamplingParams(1.0, seed=4),
        SamplingParams(0.5, seed=4),
        SamplingParams(2.0, seed=4),
        SamplingParams(1.0, top_k=3, seed=4),
        SamplingParams(1.0, top_p=0.75, seed=4),
        SamplingParams(1.5, top_k=4, top_p=0.7, seed=4),
    ],
)
def test_frequencies_are_the_probabilities(how: SamplingParams) -> None:
    draws = 1500
    logits = torch.log(torch.tensor([[0.03, 0.4, 0.2, 0.25, 0.07, 0.05]]))
    allowed = sorted(nucleus(logits[0], how))
    shares = torch.softmax(logits[0, allowed] / how.temperature, -1).tolist()
    drawn = [sample(logits, [how], [step])[0] for step in range(draws)]
    assert set(drawn) == set(allowed)
    for token, share in zip(allowed, shares, strict=True):
        assert abs(drawn.count(token) / draws - share) < 4.5 * (share * (1 - share) / draws) ** 0.5


@pytest.mark.parametrize("how", [SamplingParams(1.0, top_p=0.9, seed=1), SamplingParams(5.0, top_p=0.9, seed=1)])
def test_a_nucleus_in_a_large_vocabulary_is_exact(how: SamplingParams) -> None:
    """Peaked, it lies among the first few hundred tokens; flat, it takes the whole vocabulary to find."""
    logits = 3 * rows_of(1, 1, 20_000)
    kept = nucleus(logits[0], how)
    drawn = {sample(logits, [how], [step])[0] for step in range(200)}
    assert drawn <= kept
    assert len(drawn) > 100


def test_greedy_is_the_argmax_beside_anything() -> None:
    logits = rows_of(0, 4, 30).to(torch.bfloat16)
    greedy = logits.argmax(-1).tolist()
    assert sample(logits, [SamplingParams()] * 4, [0] * 4) == greedy
    mixed = sample(logits, [SamplingParams(), SamplingParams(3.0), SamplingParams(), SamplingParams(3.0)], [0] * 4)
    assert [mixed[0], mixed[2]] == [greedy[0], greedy[2]]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6, 1e-3])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = 5 * rows_of(3, 1, 40)
    draws = {sample(logits, [SamplingParams(temperature, seed=s)], [0])[0] for s in range(50)}
    assert draws == {int(logits.argmax())}


@pytest.mark.parametrize("how", [{"top_k": 1}, {"top_p": 1e-9}, {"top_k": 1, "top_p": 0.5}])
def test_the_narrowest_limits_are_greedy(how: dict[str, float]) -> None:
    logits = rows_of(5, 1, 40)
    draws = {sample(logits, [SamplingParams(2.0, seed=s, **how)], [0])[0] for s in range(50)}  # type: ignore[arg-type]
    assert draws == {int(logits.argmax())}


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = rows_of(6, 1, 8)
    logits[0, ::2] = -float("inf")
    assert {sample(logits, [SamplingParams(9.0)], [step])[0] for step in range(300)} == {1, 3, 5, 7}


@examples(0.3)
@given(st.permutations(range(6)), st.integers(1, 6), st.integers(0, 1000))
def test_a_draw_does_not_depend_on_the_batch(order: list[int], rows: int, step: int) -> None:
    logits = rows_of(7, 6, 50)
    params = [SamplingParams(1.0, top_k=0 if s % 2 else 20, top_p=0.9 if s % 3 else 1.0, seed=s) for s in range(6)]
    alone = [sample(logits[i : i + 1], [params[i]], [step + i])[0] for i in range(6)]
    chosen = order[:rows]
    together = sample(logits[chosen], [params[i] for i in chosen], [step + i for i in chosen])
    assert together == [alone[i] for i in chosen]


def test_seeds_and_steps_differ_and_repeat() -> None:
    logits = rows_of(8, 1, 1000)

    def drawn(seed: int, step: int) -> int:
        return sample(logits, [SamplingParams(1.0, seed=seed)], [step])[0]

    by_seed = [drawn(seed, 0) for seed in range(200)]
    by_step = [drawn(0, step) for step in range(200)]
    assert len(set(by_seed)) > 100
    assert len(set(by_step)) > 100
    assert by_seed == [drawn(seed, 0) for seed in range(200)]
    assert by_seed != by_step


def test_requests_without_a_seed_draw_by_their_ids() -> None:
    def sampling(id: int, **how: int) -> SamplingParams:
        return TokenSequence(
            Request(WorkloadRequest(id, 0, (("", 1),), 1)), [0], sampling=SamplingParams(1.0, **how)
        ).sampling

    assert [sampling(3).seed, sampling(4).seed, sampling(4, seed=0).seed] == [3, 4, 0]


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": -1.0}, {"temperature": float("nan")}, {"temperature": float("inf")}, {"top_k": -1}]
    + [{"top_p": p} for p in (0.0, 1.5, float("nan"))],
)
def test_impossible_sampling_is_one_line(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(wrong))) as caught:
        SamplingParams(**wrong)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
