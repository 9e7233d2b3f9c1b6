"""Learning what a server is: questions, and the settings and step times that explain the answers.

The settings are found by simulation. A twin with each candidate value answers the same questions, and the value that
makes the server's answers most likely wins. Step times are fitted again whenever settings change, because the sizes of
the steps that the client saw follow from the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any, NamedTuple, Protocol

import numpy as np

from calibration.steps.external_calibration import blind
from planning.learn import questions as ask
from planning.learn.answers import Answer
from planning.learn.questions import Bounds, Question
from planning.learn.seen_steps import chunk_ns
from planning.learn.step_times import CorrectedKernels, LinearPrices
from planning.learn.suspicions import suspicion
from planning.learn.twin import POLICIES, Setting, Twin
from serving.deployments.config import Deployment
from serving.deployments.engines import with_engine_defaults
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError

_BUDGETS = (512, 1024, 2048, 4096, 8192, 16_384)
_FINALISTS = 8  # combinations of settings for which launches are fitted again
_AROUND = 7  # number of token budgets that are tried around the likeliest
_BETWEEN = 12  # number of values that are tried in a range
_CLOSE = 3.0  # difference of log likelihoods below which the answers do not decide between two values
_UTILIZATION = 0.9
_BLOCKS_ASSUMED = 1000  # KV blocks of a device whose memory is not known
_MEMORY_ASKED = 4  # maximum number of questions about memory
_MORE = 1.25  # tokens that such a question asks for, in parts of the estimated capacity
_FINE = 0.7  # share of the requests that fit into memory at which its size is known finely
_SMALLER = 8  # divisor of the estimated capacity if no prompt fits
_AFTER = (0.0, 0.25, 0.5, 0.75)  # shares of the time outside of the engine that come after it, which are tried
_REQUEST_NS = (0.0, 1e5, 2e5, 4e5, 7e5, 1e6, 1.5e6, 2e6, 3e6)  # work of an API server on a request that is tried
_NARROWED = 3  # times that the range of KV blocks is narrowed


class TimeIsUp(Exception):
    """The time for questions is over."""


class Server(Protocol):
    """A server that answers questions."""

    def ask(self, question: Question) -> Answer:
        """Send the question's workload and return what its client saw. Raises TimeIsUp if no time is left."""
        ...


class Candidates(NamedTuple):
    """Values of a setting that were tried, the likeliest first, and how far their log likelihoods lie below it."""

    values: tuple[Any, ...]
    below: tuple[float, ...]

    @property
    def alike(self) -> tuple[Any, ...]:
        """The values that the answers do not tell apart from the likeliest."""
        return tuple(value for value, less in zip(self.values, self.below, strict=True) if 0 < less < _CLOSE)


@dataclass
class Learner:
    """A learner of one engine with the model and the parallelism of `base` on `gpu`.

    Attributes:
        known: settings that are known and not inferred, by name
        say: called with a line for each stage
        answers: the answers so far
        tried: the values of each inferred setting
        at_least: lower limits of settings that no question reached, by name; their values are assumed
        assumed: names of settings that were not asked about, because the time was up
    """

    server: Server
    base: Deployment
    gpu: str | None
    bounds: Bounds
    known: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda line: None
    answers: list[Answer] = field(default_factory=list)
    tried: dict[str, Candidates] = field(default_factory=dict)
    at_least: dict[str, int] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    _beliefs: dict[str, Twin] = field(default_factory=dict, init=False, repr=False)

    def learn(self) -> Twin:
        """Ask all questions and return the likeliest twin.

        Raises UserError for a server that is not one engine, and if the time is up before the settings are known.
        """
        bounds = self.bounds
        try:
            lone = self.ask(ask.lone_prompts(bounds))
            bounds = self.bounds = _as_answered(lone, bounds)
            repeated = self.ask(ask.repeated_prompt(bounds))
            calm = [lone, *self._ask(ask.plateaus(bounds))]
            burst = self.ask(ask.burst(bounds))
            telling = self._ask(
                [
                    ask.prompts_into_decodes(2, bounds),
                    ask.prompts_at_once(512, bounds),
                    ask.prompts_at_once(3000, bounds),
                    ask.closed_loop(min(16, bounds.concurrency), bounds),
                ]
            )
        except TimeIsUp:
            remedy = "are too few for the first questions; give more (a session goes on where it was stopped)"
            raise UserError("minutes", None, remedy) from None
        if strange := suspicion(lone, repeated, self.answers[1:]):
            raise UserError("url", "the server", strange)
        self.say("inferring the scheduler's settings")
        twin = self._scheduler(calm, burst, telling)
        twin = self._best(twin, "enable_prefix_caching", (False, True), [repeated])
        try:
            twin = self._memory(twin)
        except TimeIsUp:
            self.assumed.add("num_blocks")
        self.say("fitting settings and step times to all answers")
        return self._refined(twin)

    def ask(self, question: Question) -> Answer:
        """Ask a question, and keep its answer."""
        answer = self.server.ask(question)
        self.answers.append(answer)
        return answer

    def prior(self, policy: str) -> Twin:
        """Return the twin before any answer: the belief about this engine, with its defaults."""
        if policy not in self._beliefs:
            self._beliefs[policy] = self._believed(policy)
        return self._beliefs[policy]

    def _believed(self, policy: str) -> Twin:
        engine = {} if self.base.engine else {"policy": policy}
        deployment = self.base.model_copy(update=engine)
        if self.gpu is None:
            lone, *calm = self.answers
            setting = self._defaults(policy, deployment, _BLOCKS_ASSUMED)
            base = self.base.model_copy(update={"device": "cpu"})  # linear prices of a GPU would be those of our engine
            return Twin(base, setting, LinearPrices.guessed(lone, calm, setting.applied(base)))
        spec = find_gpu(self.gpu)
        deployment = with_engine_defaults(deployment, spec)
        sized = deployment.model_copy(update={"gpu_memory_utilization": _UTILIZATION})
        blocks = kv_capacity(find_model(deployment.model), spec, sized).num_blocks
        known = blind(self.gpu, deployment)
        times = CorrectedKernels(self.gpu, known.correction, known.host.launches)
        return Twin(self.base, self._defaults(policy, deployment, blocks), times)

    def _defaults(self, policy: str, deployment: Deployment, blocks: int) -> Setting:
        scheduler = deployment.scheduler
        setting = Setting(
            policy,
            scheduler.max_num_batched_tokens,
            scheduler.async_scheduling,
            scheduler.max_num_seqs,
            blocks,
            scheduler.enable_prefix_caching,
        )
        return setting._replace(**self.known)

    def _ask(self, questions: Iterable[Question]) -> list[Answer]:
        return [self.ask(question) for question in questions]

    def _scheduler(self, calm: Sequence[Answer], burst: Answer, telling: Sequence[Answer]) -> Twin:
        """Return the twin with the likeliest engine, token budget and loop, which are found together.

        Step times are fitted for each combination, because the sizes of steps depend on it. The cost of launches comes
        from answers that hardly depend on these settings; it is fitted again for the best combinations, which are
        compared behind the likeliest API server.
        """
        at_once, offered = burst.most_decoding, len(burst.tokens_ns)
        asked = [*calm, *telling, burst]
        names = ("max_num_batched_tokens", "async_scheduling")
        scored: list[tuple[float, Twin]] = []
        for policy in self._values("policy", POLICIES):
            start = self.prior(policy)
            if "max_num_seqs" not in self.known:
                limited = at_once < offered
                start = start.having(max_num_seqs=at_once if limited else max(start.setting.max_num_seqs, offered))
            prior = start.fitted(calm, start.times).times
            for values in product(self._values(names[0], _BUDGETS), self._values(names[1], (False, True))):
                twin = start.having(**dict(zip(names, values, strict=True))).fitted(asked, prior, fit_launches=False)
                scored.append((twin.likelihood(asked), twin))
        if at_once >= offered and "max_num_seqs" not in self.known:
            self.at_least["max_num_seqs"] = offered
        self._note_policies(scored)
        scored.sort(key=lambda pair: -pair[0])
        door = self._through_door(scored[0][1], asked).front_door
        finalists = [replace(twin, front_door=door) for _, twin in scored[:_FINALISTS]]
        fitted = [twin.fitted(asked, self.prior(twin.setting.policy).times) for twin in finalists]
        return max(fitted, key=lambda twin: twin.likelihood(asked))

    def _note_policies(self, scored: Sequence[tuple[float, Twin]]) -> None:
        best: dict[str, float] = {}
        for score, twin in scored:
            best[twin.setting.policy] = max(best.get(twin.setting.policy, -np.inf), score)
        self._note("policy", best)

    def _memory(self, twin: Twin) -> Twin:
        """Ask for more KV than there is, with smaller prompts until the number of blocks is known well."""
        if "num_blocks" in self.known:
            return twin
        limit = min(self.bounds.concurrency, twin.setting.max_num_seqs)
        blocks, asked = twin.setting.num_blocks, set[str]()
        for _ in range(_MEMORY_ASKED):
            tokens = round(_MORE * blocks * self.base.scheduler.block_size)
            question = ask.full_memory(tokens, limit, twin.setting.max_num_batched_tokens, self.bounds)
            if question.name in asked:
                break
            asked.add(question.name)
            answer = self.ask(question)
            first = next(iter(question.workload.requests))
            if not answer.tokens_ns:  # not even one of the prompts fits
                blocks = blocks // _SMALLER
            elif answer.most_decoding >= limit and not answer.waited:  # all of them fit
                self.at_least["num_blocks"] = self._blocks_of(limit, first.prompt_len)
                blocks = max(2 * blocks, self.at_least["num_blocks"])
            else:
                self.at_least.pop("num_blocks", None)
                twin = self._blocks(twin, answer, first.prompt_len, first.output_len)
                blocks = twin.setting.num_blocks
                if answer.most_decoding >= _FINE * limit:
                    break
        return twin.having(num_blocks=max(twin.setting.num_blocks, self.at_least.get("num_blocks", 0)))

    def _blocks_of(self, requests: int, tokens: int) -> int:
        """Return the KV blocks of `requests` requests with `tokens` tokens each."""
        return requests * -(-tokens // self.base.scheduler.block_size) + 1

    def _blocks(self, twin: Twin, answer: Answer, prompt: int, output: int) -> Twin:
        """Return the twin with the likeliest number of KV blocks: the middle of those that explain the answer alike."""
        running = answer.most_decoding
        low, high = self._blocks_of(max(running // 2, 1), prompt), self._blocks_of(running + 2, prompt + output)
        for _ in range(_NARROWED):
            values = [int(value) for value in np.unique(np.linspace(low, high, _BETWEEN + 1).round())]
            scores = [twin.having(num_blocks=value).likelihood([answer]) for value in values]
            alike = [at for at, score in enumerate(scores) if score > max(scores) - 0.5]
            low, high = values[max(alike[0] - 1, 0)], values[min(alike[-1] + 1, len(values) - 1)]
            twin = twin.having(num_blocks=(values[alike[0]] + values[alike[-1]]) // 2)
        return twin

    def _refined(self, twin: Twin) -> Twin:
        """Return the twin with the settings and step times that explain all answers best.

        Step times are fitted for each token budget: a larger chunk explains the same duration with faster kernels.
        """
        prior = self.prior(twin.setting.policy).times
        twin = self._through_door(twin.fitted(self.answers, prior), self.answers)
        if "max_num_batched_tokens" not in self.known:
            budget, near_these = twin.setting.max_num_batched_tokens, prior.with_launches_of(twin.times)
            near = np.geomspace(budget / 2, budget * 2, _AROUND).round().astype(int).tolist()
            tried = {
                value: twin.having(max_num_batched_tokens=value).fitted(self.answers, near_these, fit_launches=False)
                for value in sorted({*near, *_BUDGETS, budget})
            }
            twin = self._likeliest("max_num_batched_tokens", tried, self.answers)
        twin = self._best(twin, "async_scheduling", (False, True), self.answers)
        return self._through_door(twin.fitted(self.answers, prior), self.answers)

    def _through_door(self, twin: Twin, asked: Sequence[Answer]) -> Twin:
        """Return the twin with the API server's times that explain the answers best.

        The time of a lone request outside of the engine is known. Its parts are the work on a request, which delays the
        others; the transfer of tokens, which comes after the engine; and the rest, which comes before.
        """
        door = twin.front_door
        outside = door.client_ns + door.request_ns + door.outputs_ns
        twin = twin.with_front_door(chunk_ns=chunk_ns(asked), client_ns=outside, request_ns=0.0, outputs_ns=0.0)
        for name, times in (("outputs_ns", [share * outside for share in _AFTER]), ("request_ns", _REQUEST_NS)):
            left = twin.front_door.client_ns
            doors = [twin.with_front_door(**{name: ns, "client_ns": left - ns}) for ns in times if ns <= left]
            twin = max(doors, key=lambda one: one.likelihood(asked))
        return twin

    def _best(self, twin: Twin, name: str, values: Sequence[Any], judged: Sequence[Answer]) -> Twin:
        """Return the twin with the value of a setting that explains the answers best; note what was tried."""
        if name in self.known:
            return twin
        return self._likeliest(name, {value: twin.having(**{name: value}) for value in values}, judged)

    def _likeliest(self, name: str, tried: dict[Any, Twin], judged: Sequence[Answer]) -> Twin:
        """Return the twin that explains the answers best; `tried` are twins by their value of the setting `name`."""
        self._note(name, {value: one.likelihood(judged) for value, one in tried.items()})
        return tried[self.tried[name].values[0]]

    def _note(self, name: str, scores: dict[Any, float]) -> None:
        ranked = sorted(scores, key=lambda value: -scores[value])
        self.tried[name] = Candidates(tuple(ranked), tuple(scores[ranked[0]] - scores[value] for value in ranked))

    def _values(self, name: str, values: Sequence[Any]) -> tuple[Any, ...]:
        return (self.known[name],) if name in self.known else tuple(values)


def _as_answered(lone: Answer, bounds: Bounds) -> Bounds:
    """Return `bounds` with the longest prompt that was answered; some engines refuse prompts longer than a step."""
    if not lone.unanswered:
        return bounds
    answered = [r.prompt_len for r in lone.question.workload.requests if r.id in lone.tokens_ns]
    return bounds._replace(longest=max(answered, default=bounds.longest))
