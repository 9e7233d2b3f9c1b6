"""Speculative decoding on the real engine: whatever is drafted, the outputs are those of plain decoding."""

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chi2

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402

from tests.budget import examples  # noqa: E402
from tokentwin.calibration.acceptance import with_acceptance  # noqa: E402
from tokentwin.calibration.validation.decision_replay import replay_decisions  # noqa: E402
from tokentwin.realengine.drafters import NgramDrafter  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.weights import load_model_files  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.realengine.sampling import SamplingParams, draw  # noqa: E402
from tokentwin.realengine.seating import Seating  # noqa: E402
from tokentwin.realengine.sequence import TokenSequence  # noqa: E402
from tokentwin.realengine.step import Step  # noqa: E402
from tokentwin.realengine.verification import judge, judged_tokens, verify  # noqa: E402
from tokentwin.serving.cost_model import TokenCost  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.request import Request  # noqa: E402
from tokentwin.serving.speculative import SpeculativeConfig  # noqa: E402
from tokentwin.serving.step_plan import Row  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402
from tokentwin.sim.cluster import Cluster  # noqa: E402
from tokentwin.sim.run_log import TableSink  # noqa: E402
from tokentwin.traces.metrics.run_metrics import RunMetrics  # noqa: E402
from tokentwin.traces.recording import Recording  # noqa: E402
from tokentwin.traces.synth import parse_spec, synthesise  # noqa: E402

pytestmark = pytest.mark.engine

OUTPUTS = 16
LARGEST = {"max_num_seqs": 6, "max_num_batched_tokens": 64, "num_blocks": 100}
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3, "prompt_lookup_min": 1}


def engine_for(speculative: dict[str, Any] | None, tensor_parallel_size: int = 1, **scheduler: Any) -> Engine:
    config = {"max_model_len": 128, "block_size": 4, **LARGEST, "speculative": speculative, **scheduler}
    deployment = Deployment(
        model="random:llama",
        dtype="float32",
        tensor_parallel_size=tensor_parallel_size,
        scheduler=SchedulerConfig(**config),
    )
    draft = (speculative or {}).get("model")
    return Engine(
        deployment, load_model_files("random:llama", Path()), load_model_files(draft, Path()) if draft else None
    )


def prompts() -> list[list[int]]:
    """Return prompts of few different tokens, so that lookup finds something to propose."""
    chance = random.Random(5)
    shared = [chance.randrange(6) for _ in range(20)]
    return [shared[: 20 * (i % 2)] + [chance.randrange(6) for _ in range(chance.randrange(1, 40))] for i in range(9)]


def run(
    engine: Engine, stop_ids: tuple[int, ...] = (), hung_up: int | None = None
) -> tuple[list[list[int]], list[Step]]:
    """Run every prompt, two arriving before each step and every other drawn; return outputs and steps.

    The client of `hung_up` hangs up while the third step after its first token runs, and, if the loop overlaps, another
    step is planned.
    """
    waiting, sequences, steps = list(enumerate(prompts())), [], []
    while waiting or engine.scheduler.requests:
        for number, prompt in waiting[:2]:
            how = SamplingParams(0.5, top_k=30, top_p=0.9, seed=number) if number % 2 else None
            arrived = WorkloadRequest(number, number, (("", len(prompt)),), OUTPUTS)
            engine.add(arrived, prompt, sampling=how, stop_ids=stop_ids)
            sequences.append(engine.sequences[number])
        del waiting[:2]
        while engine.has_room and engine.launch():
            pass
        if hung_up in engine.sequences and engine.sequences[hung_up].output_len > 3:
            engine.abort(hung_up)
        if (step := engine.finish()) is not None:
            steps.append(step)
        for request in engine.scheduler.requests.values():
            request.check()
        engine.scheduler.pool.check(engine.scheduler.requests.values())
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
    return [sequence.outputs for sequence in sequences], steps


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return run(engine_for(None))[0]


@pytest.fixture(scope="module")
def drafting() -> dict[bool, Engine]:
    return {overlapped: engine_for(NGRAM, async_scheduling=overlapped) for overlapped in (False, True)}


class Foreteller:
    """A drafter that knows the output, and gets a token wrong now and then."""

    def __init__(self, outputs: list[list[int]], seed: int, right: float) -> None:
        self._outputs, self._chance, self._right = outputs, random.Random(seed), right

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        drafts = {}
        for request, *_ in rows:
            said = sequences[request.id].output_len
            coming = self._outputs[request.id][said : said + self._chance.randrange(5)]
            drafts[request.id] = [token if self._chance.random() < self._right else 7 for token in coming]
        return drafts

    def leave(self, id: int) -> None:
        pass

    reset = leave


@examples(0.15)
@given(
    seed=st.integers(0, 2**32),
    right=st.sampled_from([0.0, 0.7, 1.0]),
    scheduler=st.fixed_dictionaries(
        {
            "num_blocks": st.sampled_from([24, 40, 100]),
            "max_num_seqs": st.sampled_from([1, 3, 6]),
            "max_num_batched_tokens": st.sampled_from([3, 9, 64]),
            "scheduler_reserve_full_isl": st.booleans(),
        }
    ),
    stops=st.booleans(),
    overlapped=st.booleans(),
    hung_up=st.none() | st.integers(0, 8),
)
def test_outputs_are_those_of_plain_decoding(seed, right, scheduler, stops, overlapped, hung_up, plain, drafting):
    """Greedy and drawn, whatever is proposed, under any batching and preemption, with stop tokens among the drafts, and
    though a client hangs up."""
    engine = drafting[overlapped]
    engine.limit(**{**LARGEST, "scheduler_reserve_full_isl": True} | scheduler)
    stop_ids = (plain[2][5], plain[3][1]) if stops else ()
    usual, engine._drafter = engine._drafter, Foreteller(plain, seed, right)  # type: ignore[assignment]
    try:
        outputs, steps = run(engine, stop_ids, hung_up)
    finally:
        engine._drafter = usual
    for number, (got, whole) in enumerate(zip(outputs, plain, strict=True)):
        ends = [i for i, token in enumerate(whole) if token in stop_ids]
        expected = whole[: ends[0] + 1 if ends else None]
        assert got == (expected[: len(got)] if number == hung_up else expected)
    for step in steps:
        assert sum(step.accepted.values()) == step.plan.accepted_tokens <= step.plan.draft_tokens
        if overlapped or hung_up is not None:  # rows may be for nobody, and drafts longer than anything proposed
            continue
        assert len(step.sampled) == step.plan.sampled_rows + step.plan.accepted_tokens
        for row in step.rows:
            nobodys = row.request in step.plan.admitted or row.request in step.finished  # padding, or beyond its output
            assert not row.drafts or step.accepted[row.request.id] == row.drafts or nobodys or right < 1 or stops
    assert sum(step.plan.draft_tokens for step in steps)


@pytest.mark.parametrize("overlapped", [False, True])
def test_prompt_lookup_drafts_and_changes_nothing(overlapped: bool, plain: list[list[int]]) -> None:
    outputs, steps = run(engine_for(NGRAM, async_scheduling=overlapped))
    assert outputs == plain
    assert any(step.plan.draft_tokens for step in steps)
    assert all(step.draft_ns is not None and step.end_ns >= step.computed_ns + step.draft_ns for step in steps)
    for before, after in pairwise(steps):
        assert before.end_ns <= after.start_ns
        assert (after.plan_ns < before.end_ns) == (after.plan.lag > 0)


@pytest.mark.parametrize(("num_blocks", "overlapped"), [(30, False), (100, False), (30, True), (100, True)])
@pytest.mark.parametrize("draft", ["random:llama", "random:qwen3"])
def test_a_draft_model_drafts_and_changes_nothing(draft, num_blocks, overlapped, plain):
    """The target itself as its draft is always right, also after a preemption, and also where tokens are drawn."""
    speculative = {"model": draft, "num_speculative_tokens": 3}
    engine = engine_for(
        speculative, num_blocks=num_blocks, scheduler_reserve_full_isl=False, async_scheduling=overlapped
    )
    outputs, steps = run(engine)
    assert outputs == plain
    assert any(step.plan.preempted for step in steps) == (num_blocks == 30)

    def goes_beyond(row: Row, step: Step) -> bool:
        """Return whether the overlapped loop may verify more tokens than the request has left."""
        return overlapped and row.request in step.finished

    drafted, accepted = (
        sum(count(row, s) for s in steps for row in s.rows if row.request.id in s.accepted and not goes_beyond(row, s))
        for count in (lambda row, _: row.drafts, lambda row, s: s.accepted[row.request.id])
    )
    assert accepted == drafted if draft == "random:llama" else accepted < drafted
    without = sum(step.plan.decode_rows for step in run(engine_for(None))[1])
    assert draft != "random:llama" or sum(step.plan.decode_rows for step in steps) < 0.5 * without


@pytest.mark.parametrize(
    ("draft", "overlapped"), [("random:llama", False), ("random:qwen3", False), ("random:llama", True)]
)
def test_a_draft_model_may_draw_by_itself(draft: str, overlapped: bool, plain: list[list[int]]) -> None:
    """Greedy outputs stay; the target as its own draft is as good as always right where tokens are drawn."""
    method = {"draft_sample_method": "probabilistic", "num_speculative_tokens": 3}
    settings = {"num_blocks": 40, "scheduler_reserve_full_isl": False, "async_scheduling": overlapped}
    outputs, steps = run(engine_for({"model": draft, **method}, **settings))
    assert outputs[::2] == plain[::2]
    assert outputs[1::2] != plain[1::2] and all(len(output) == OUTPUTS for output in outputs)
    drafted, accepted = (sum(getattr(s.plan, name) for s in steps) for name in ("draft_tokens", "accepted_tokens"))
    if overlapped:  # as many are verified as there can be, also beyond an output's end
        assert accepted > 0.6 * drafted
    else:
        assert accepted >= 0.99 * drafted if draft == "random:llama" else 0 < accepted < drafted


class Waits(TorchDispatchMode):
    """Count the times at which the host reads a number from a tensor; on a GPU it would wait for the device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("how", [SamplingParams(1.0), SamplingParams(0.7, top_k=3)])
def test_the_host_waits_for_no_single_draft(how: SamplingParams) -> None:
    """A draft is judged on the device; the limit top-p has another way there than on the CPU."""
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(3))
    sequence = TokenSequence(Request(WorkloadRequest(5, 0, (("", 1),), 9)), [0], sampling=how)
    with Waits() as waits:
        sequence.odds = [sequence.sampling.probabilities(row) for row in logits[:3].flip(0)]
        answers = judge(sequence, logits, [3, 14, 15])
    assert waits.count == 0
    assert len(judged_tokens(answers.tolist(), [3, 14, 15])) <= 4
    with waits:
        float(logits[0, 0])
    assert waits.count == 1


def test_kv_of_a_draft_model_is_counted() -> None:
    engine = engine_for({"model": "random:llama", "num_speculative_tokens": 3})
    target, draft = (runner.budget(0.9) for runner in engine._runners)
    assert target.beside(draft).block == 2 * target.block


def test_a_draft_model_of_another_vocabulary_is_one_line() -> None:
    with pytest.raises(UserError, match=r"scheduler\.speculative\.model.*has 49152 tokens"):
        engine_for({"model": "random:smollm2", "num_speculative_tokens": 3})


def test_two_ranks_verify_drafts(plain: list[list[int]]) -> None:
    speculative = {"model": "random:llama", "num_speculative_tokens": 3}
    engine = engine_for(speculative, tensor_parallel_size=2, async_scheduling=True)
    try:
        outputs, steps = run(engine)
    finally:
        engine.close()
    assert outputs == plain
    assert sum(step.plan.accepted_tokens for step in steps) > 0.5 * OUTPUTS * len(outputs)
    assert any(step.plan.lag for step in steps)


@examples(0.1)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_what_followed_the_longest_run_first_is_proposed(text: list[int], k: int, low: int, more: int) -> None:
    config = SpeculativeConfig(
        method="ngram", num_speculative_tokens=k, prompt_lookup_min=low, prompt_lookup_max=low + more
    )
    drafter, seating = NgramDrafter(config), Seating(SchedulerConfig(), lambda request: (request.blocks,))
    request = Request(WorkloadRequest(0, 0, (("", 1),), len(text)))
    sequence = TokenSequence(request, text[:1])
    for upto in range(1, len(text) + 1):
        sequence.tokens = text[:upto]
        if upto % 2 and upto < len(text):  # a step may bring several tokens
            continue
        expected: list[int] = []
        for length in range(low + more, low - 1, -1):
            suffix = text[upto - length : upto]
            ends = [e for e in range(length, upto) if text[e - length : e] == suffix]
            if len(suffix) == length and ends:
                expected = text[ends[0] : upto][:k]
                break
        assert drafter.draft([Row(request, 0, 1, True)], {0}, {0: sequence}, seating).get(0, []) == expected


@pytest.mark.parametrize(("certain", "planned"), [(True, 2), (False, 2), (True, 3), (False, 3)])
@pytest.mark.parametrize("how", [SamplingParams(1.0), SamplingParams(0.7, top_k=3, top_p=0.9)])
def test_drawn_tokens_have_the_distribution_of_plain_sampling(how: SamplingParams, certain: bool, planned: int) -> None:
    """Chi-square over all texts of three tokens, with drafts of two, against products of probabilities.

    Drafts are proposed with certainty, or drawn from another table. In the overlapped loop more are planned for.
    """
    vocab, n = 4, 800
    table, other = torch.randn(2, vocab, vocab, generator=torch.Generator().manual_seed(1))  # of a token, after another
    exact = torch.tensor([_probabilities(row, how) for row in table]).double().numpy()
    counts, accepted = np.zeros((vocab,) * 3), 0
    for number in range(n):
        seeded = replace(how, seed=number)
        sequence = TokenSequence(Request(WorkloadRequest(number, 0, (("", 1),), 9)), [0], sampling=seeded)
        while (said := sequence.output_len) < 3:
            if certain:
                sequence.drafts = [number % vocab, 1]
            else:
                first = _drawn(other[sequence.tokens[-1:]], [seeded.draw(said, "draft")])[0]
                sequence.drafts = [first, *_drawn(other[[first]], [seeded.draw(said + 1, "draft")])]
                sequence.odds = [seeded.probabilities(other[at]) for at in (sequence.tokens[-1], first)]
            nowhere = torch.tensor([[0.0, 0.0, 0.0, 9.0]] * (planned - 2)).reshape(-1, vocab)
            logits = torch.cat([table[[sequence.tokens[-1], *sequence.drafts]], nowhere])
            if certain:
                draws = [seeded.draw(said + place) for place in range(1 + planned)]
                chosen = [(token, None) for token in _drawn(logits, draws)]
            else:
                answers = judge(sequence, logits, sequence.drafts).tolist()
                chosen = [(token, None) for token in judged_tokens(answers, sequence.drafts)]
            accepted += verify(sequence, planned, chosen)[0]
        counts[tuple(sequence.outputs[:3])] += 1
    assert accepted > n / 4
    expected = n * exact[0][:, None, None] * exact[:, :, None] * exact[None]
    assert not counts[expected == 0].any()
    rare = expected < 5
    pairs = [*zip(counts[~rare], expected[~rare], strict=True)]
    if expected[rare].sum():
        pairs.append((counts[rare].sum(), expected[rare].sum()))
    statistic = sum((seen - wanted) ** 2 / wanted for seen, wanted in pairs)
    assert len(pairs) > 8 and chi2.sf(statistic, len(pairs) - 1) > 1e-3


def _drawn(logits: torch.Tensor, draws: list[Any]) -> list[int]:
    return draw(logits, *(torch.tensor(column) for column in zip(*draws, strict=True))).tolist()


def _probabilities(logits: torch.Tensor, how: SamplingParams) -> list[float]:
    """Return probabilities after temperature, then top-k, then top-p, by their definitions."""
    order = logits.argsort(descending=True)[: how.top_k or None]
    weights = torch.softmax(logits[order].double() / how.temperature, -1)
    kept = int((weights.cumsum(-1) - weights < how.top_p).sum())
    probabilities = torch.zeros(len(logits), dtype=torch.double)
    probabilities[order[:kept]] = weights[:kept] / weights[:kept].sum()
    return probabilities.tolist()


# Recorded, replayed, and fed to the simulator


@pytest.mark.parametrize(
    ("speculative", "overlapped"),
    [(NGRAM, False), (NGRAM, True), ({"model": "random:qwen3", "num_speculative_tokens": 3}, False)],
)
def test_a_recorded_run_is_replayed_and_its_acceptance_simulated(speculative, overlapped, tmp_path):
    spec = {
        "name": "chat",
        "seed": 4,
        "requests": 24,
        "arrivals": {"kind": "poisson", "rate": 300.0},
        "prompt": {"kind": "lognormal", "mean": 12, "sigma": 0.6, "max": 30},
        "output": {"kind": "lognormal", "mean": 30, "sigma": 0.5, "max": 60},
    }
    engine = engine_for(speculative, num_blocks=40, scheduler_reserve_full_isl=False, async_scheduling=overlapped)
    workload = synthesise(parse_spec(spec, where="x"))
    record(workload, engine, tmp_path / "run")
    recording = Recording.load(tmp_path / "run")
    replay = replay_decisions(recording)
    assert replay.exact, replay.first_difference
    assert replay.identical_requests == 24
    metrics = RunMetrics.from_recording(recording).scalars()
    config = engine.deployment.scheduler.speculative
    assert config is not None and metrics["acceptance_length"] is not None
    stated = with_acceptance(config, [recording])
    sums = []
    for seed in range(24):
        drawn = stated.model_copy(update={"seed": seed})
        sink = TableSink()
        simulated = engine.deployment.rescheduled(speculative=drawn)
        Cluster(simulated, TokenCost(1_000_000, 0, 0), sink, shares_prefixes=False).run(workload)
        sums.append([sum(sink.requests[name].to_pylist()) for name in ("drafts", "draft_tokens", "accepted_tokens")])
    requests = recording.table("requests", ["drafts", "draft_tokens", "accepted_tokens"])
    real = [pc.sum(column).as_py() for column in requests.columns]
    assert real[2] and np.mean(sums, axis=0) == pytest.approx(real, rel=0.1)


@pytest.mark.parametrize(
    ("speculative", "more", "said"),
    [({"method": "eagle", "num_speculative_tokens": 2}, {}, r"scheduler\.speculative\.method: 'eagle'")],
)
def test_what_the_engine_cannot_draft_is_one_line(speculative: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        engine_for(speculative, **more)
