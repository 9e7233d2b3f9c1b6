"""Proposers of draft tokens at the end of each step: a prompt lookup and a draft model.

Prompt lookup needs no model. It takes the longest run of tokens at the end of a request's text that also occurs earlier
in the text; the run has at least `prompt_lookup_min` and at most `prompt_lookup_max` tokens. The draft is what follows
the run's first occurrence. These are vLLM's rules.

A draft model is small and has the same vocabulary. Its KV is in blocks with the same ids as the target's. A first pass
processes the tokens that the step computed, prompts included, and the tokens that it sampled. It gives the first draft
token of every request that goes on, and each further pass gives one more. So a prefix that is in the target's cache is
also in the draft model's cache. A request gets only as many draft tokens as its blocks have room for.

Where the target draws a token, the draft model draws with the same temperature and limits, and with the same uniform
number. Similar distributions then choose the same token, and the more similar they are, the more drafts are accepted.
The output token is the target's draw, whatever the draft was. (Daliri, Musco and Suresh, "Coupling without
Communication and Drafter-Invariant Speculative Decoding", 2024, describe the idea with another coupling.) With
`draft_sample_method: probabilistic` the draft model draws with a uniform number of its own and keeps its probabilities,
as `verification` explains.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

from tokentwin.realengine.models.weights import ModelFiles
from tokentwin.realengine.runner import ModelRunner
from tokentwin.realengine.seating import Seating
from tokentwin.realengine.sequence import TokenSequence
from tokentwin.realengine.step_input import RowInput, pack
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec, check_vocabulary
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Status
from tokentwin.serving.speculative import SpeculativeConfig
from tokentwin.serving.step_plan import Row


class Drafter(Protocol):
    """A proposer of draft tokens at the end of each step; drafts never change the distribution of outputs.

    Attributes:
        runner: runner of the draft model, whose KV is in blocks with the same ids as the target's; None without a model
    """

    @property
    def runner(self) -> ModelRunner | None: ...

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        """Return the drafts of the requests `going_on`, by id.

        The step of `rows` has sampled for these requests, and they do not end with it. The sampled tokens are already
        in `sequences`. A request without a draft decodes one token in the next step.
        """

    def leave(self, id: int) -> None:
        """Forget a request that has ended or was preempted."""

    def reset(self) -> None:
        """Forget every request."""


class NgramDrafter:
    """A prompt lookup, which indexes each request's text as it grows, so that the cost of a token stays the same."""

    runner = None

    def __init__(self, config: SpeculativeConfig) -> None:
        self._most = config.num_speculative_tokens
        self._shortest, self._longest = config.prompt_lookup
        self._texts: dict[int, _Text] = {}

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        drafts = {}
        for id in (row.request.id for row in rows if row.request.id in going_on):
            text = self._texts.get(id)
            if text is None:
                text = self._texts[id] = _Text(self._shortest, self._longest)
            if draft := text.continuation(sequences[id].tokens, self._most):
                drafts[id] = draft
        return drafts

    def leave(self, id: int) -> None:
        self._texts.pop(id, None)

    def reset(self) -> None:
        self._texts.clear()


class _Text:
    """An index of one text: where each run of `shortest` to `longest` tokens first ends."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._ends: dict[tuple[int, ...], int] = {}
        self._lengths = range(longest, shortest - 1, -1)
        self._indexed = 0  # ends of runs up to here are indexed

    def continuation(self, tokens: Sequence[int], most: int) -> list[int]:
        """Return up to `most` draft tokens; none if no run at the end of the text has occurred before."""
        for end in range(self._indexed + 1, len(tokens)):
            for length in self._lengths:
                if length <= end:
                    self._ends.setdefault(tuple(tokens[end - length : end]), end)
        self._indexed = max(self._indexed, len(tokens) - 1)
        for length in self._lengths:
            first_end = self._ends.get(tuple(tokens[-length:]))
            if length < len(tokens) and first_end is not None:
                return list(tokens[first_end : first_end + most])
        return []


class ModelDrafter:
    """The draft model of `deployment`, whose weights are in `files`.

    Raises UserError for a model that cannot draft for the target.
    """

    def __init__(self, deployment: Deployment, files: ModelFiles) -> None:
        config = deployment.scheduler
        assert config.speculative is not None
        if files.spec.max_positions < config.max_model_len:
            remedy = f"has only {files.spec.max_positions} positions; lower scheduler.max_model_len to that"
            raise UserError("scheduler.speculative.model", files.spec.name, remedy)
        self._most = config.speculative.num_speculative_tokens
        self._block_size, self._null_seat = config.block_size, config.max_num_seqs
        tokens = config.max_num_batched_tokens + config.max_num_seqs  # sampled tokens are also processed
        own = deployment.rescheduled(speculative=None, async_scheduling=False, max_num_batched_tokens=tokens)
        changes = {"model": config.speculative.model, "quantization": "none", "tensor_parallel_size": 1, "lora": None}
        self.runner = ModelRunner(own.model_copy(update=changes), files)
        self._number = ""  # name of the uniform number that draws a draft token; empty for the target's number
        if config.speculative.draft_sample_method == "probabilistic":
            self._number = "draft"
            self.runner.keep_logits()
        self._known: dict[int, int] = {}  # number of tokens with KV, if all drafts are accepted

    def draft(
        self, rows: Sequence[Row], going_on: Collection[int], sequences: Mapping[int, TokenSequence], seating: Seating
    ) -> dict[int, list[int]]:
        inputs: dict[int, RowInput] = {}
        most: dict[int, int] = {}
        for request, start, tokens, samples, _ in rows:
            sequence = sequences[request.id]
            known, room = len(sequence.tokens), request.block_count * self._block_size
            first = min(self._known.pop(request.id, start), known - 1)
            if request.id in going_on:
                last = min(known, room)
                count = min(self._most, request.max_len - known - 1, room - known + 1)
            else:
                last = known - 1 if samples else start + tokens
                count = 0
            most[request.id] = count
            self._known[request.id] = max(last, known - 1 + count) if samples else last
            if first < last:
                draws = (sequence.sampling.draw(sequence.output_len, self._number),) if count > 0 else ()
                (blocks,) = seating.blocks(request, last)
                inputs[request.id] = RowInput(sequence.tokens[first:last], first, blocks, self._null_seat, draws)
            sequence.odds = []
        drafts: dict[int, list[int]] = {}
        while inputs:
            for id, token in self._pass(inputs, sequences).items():
                drafts.setdefault(id, []).append(token)
            inputs = {
                row.request.id: self._next(row, sequences[row.request.id], drafts[row.request.id], seating)
                for row in rows
                if 0 < len(drafts.get(row.request.id, ())) < most[row.request.id]
            }
        return drafts

    def _next(self, row: Row, sequence: TokenSequence, drafts: list[int], seating: Seating) -> RowInput:
        """Return the input from which the next draft token is computed: the last of `drafts`."""
        place = len(sequence.tokens) + len(drafts) - 1
        draw = sequence.sampling.draw(sequence.output_len + len(drafts), self._number)
        (blocks,) = seating.blocks(row.request, place + 1)
        return RowInput(drafts[-1:], place, blocks, self._null_seat, (draw,))

    def _pass(self, inputs: Mapping[int, RowInput], sequences: Mapping[int, TokenSequence]) -> dict[int, int]:
        """Return the next token of each input that samples, by request id."""
        packed = pack(list(inputs.values()), self._block_size, self._null_seat, self.runner.attention.tiles)
        launched, ids = self.runner.launch(packed.step), list(inputs)
        tokens = launched.wait()
        samples = {ids[row]: sample for sample, row in enumerate(packed.sample_rows) if row is not None}
        if launched.logits is not None:
            for id, sample in samples.items():
                sequence = sequences[id]
                if not sequence.sampling.greedy:
                    sequence.odds.append(sequence.sampling.probabilities(launched.logits[sample]))
        return {id: tokens[sample] for id, sample in samples.items()}

    def leave(self, id: int) -> None:
        self._known.pop(id, None)

    def reset(self) -> None:
        self._known.clear()


def find_drafter(deployment: Deployment, target: ModelSpec, draft: ModelFiles | None) -> Drafter | None:
    """Return the deployment's drafter, or None without speculative decoding; `draft` is the files of a draft model.

    Raises UserError for a model that cannot draft for the target.
    """
    speculative = deployment.scheduler.speculative
    if speculative is None:
        return None
    if speculative.method == "ngram":
        return NgramDrafter(speculative)
    if draft is None:
        raise ValueError("method draft_model needs the files of the draft model")
    check_vocabulary(target, draft.spec)
    return ModelDrafter(deployment, draft)


def propose(
    drafter: Drafter,
    rows: Sequence[Row],
    stopped: Collection[int],
    sequences: Mapping[int, TokenSequence],
    seating: Seating,
) -> dict[int, int]:
    """Give drafts to the requests that a step of `rows` sampled for and that go on; return the draft lengths by id.

    In the overlapped loop the next step is already planned. A request that this plan preempted gets no draft. But its
    prefix may be reused later, so a draft model computes the prefix's KV before another request writes to the blocks.
    """
    alive = {row.request.id: sequences[row.request.id] for row in rows if not row.request.ended}
    running = [row for row in rows if row.request.status is Status.RUNNING]
    if preempted := [row for row in rows if row.request.status is Status.WAITING]:
        drafter.draft(preempted, (), alive, seating)
        for row in preempted:
            drafter.leave(row.request.id)
    complete = {id for id, sequence in alive.items() if len(sequence.tokens) == sequence.request.true_len}
    going_on = {row.request.id for row in running if row.samples} - complete - set(stopped)
    drafts = drafter.draft(running, going_on, alive, seating)
    lengths = {}
    for row in running:
        id = row.request.id
        if id in going_on:
            alive[id].drafts = drafts.get(id, [])
            lengths[id] = len(alive[id].drafts)
    return lengths
