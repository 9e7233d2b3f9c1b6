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
from calibration.steps.iteration_fit import IterationLog
from planning.learn import questions as ask
from planning.learn.answers import Answer
from planning.learn.committee import Committee, Member
from planning.learn.engines import engines_of
from planning.learn.proof import made_up_traffic
from planning.learn.questions import Bounds, Question
from planning.learn.seen_steps import chunk_ns
from planning.learn.step_times import CorrectedKernels, LinearPrices, StepTimes
from planning.learn.suspicions import suspicion
from planning.learn.twin import POLICIES, ROUTERS, Setting, Twin, fitted_apart
from serving.deployments.config import Deployment
from serving.deployments.engines import with_engine_defaults
from serving.deployments.gpu_spec import find_gpu
from serving.deployments.kv_capacity import kv_capacity
from serving.deployments.model_catalogue import find_model
from serving.errors import UserError

_BUDGETS = (512, 1024, 2048, 4096, 8192, 16_384)
_FINALISTS = 8  # combinations of settings that are judged by further questions
_STREAMS = 12  # requests that decode while prompts are sent: as many on each of 2, 3, 4 or 6 engines
_BLOCK_SIZES = (1, 16, 32, 64, 128)
_QUESTION_S = 20.0  # time that the prompts of a question may take
_FEWEST_TOKENS = 2000
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
        traffic: what the twin is for: returns traffic that a twin can bear, within bounds
        within_pct: half of the 90 % interval of its mean or median latencies, in percent, that is narrow enough
        recorded: returns the steps that the server itself has recorded so far; None if it records none
        answers: the answers so far
        tried: the values of each inferred setting
        at_least: lower limits of settings that no question reached, by name; their values are assumed
        assumed: names of settings that were not asked about, because the time was up or no question can reveal them
        replicas: number of engines behind the URL
    """

    server: Server
    base: Deployment
    gpu: str | None
    bounds: Bounds
    known: dict[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = lambda line: None
    traffic: Callable[[Twin, Bounds], Sequence[Question]] = made_up_traffic
    within_pct: float = 3.0
    recorded: Callable[[], IterationLog | None] = lambda: None
    answers: list[Answer] = field(default_factory=list)
    tried: dict[str, Candidates] = field(default_factory=dict)
    at_least: dict[str, int] = field(default_factory=dict)
    assumed: set[str] = field(default_factory=set)
    replicas: int = 1
    _beliefs: dict[str, Twin] = field(default_factory=dict, init=False, repr=False)

    def learn(self) -> Twin:
        """Ask, and return the likeliest twin.

        The first questions are always the same. Then those are asked that narrow the prediction of the traffic most,
        until it is narrow enough, or the time is up.

        Raises UserError for a server that is not one engine, or equal ones, and if the time is up before the settings
        are known.
        """
        try:
            lone = self.ask(ask.lone_prompts(self.bounds))
            bounds = self.bounds = _as_answered(lone, self.bounds)
            mixed = self.ask(ask.prompts_into_decodes(_STREAMS, bounds))
            self.replicas = self.known.get("replicas") or engines_of(mixed)
            repeated = self.ask(ask.repeated_prompt(self.replicas, bounds))
            short = self._ask(ask.plateaus(bounds))
            burst = self.ask(ask.burst(bounds))
        except TimeIsUp:
            remedy = "are too few for the first questions; give more (a session goes on where it was stopped)"
            raise UserError("minutes", None, remedy) from None
        if strange := suspicion(lone, repeated, self.answers[1:]):
            raise UserError("url", "the server", strange)
        self.say("inferring the scheduler's settings")
        finalists = self._finalists([lone, *short], burst, [mixed])
        twin = self._best(self._after_more_questions(finalists), "enable_prefix_caching", (False, True), [repeated])
        twin = self._memory(twin)
        twin = self._block_size(twin)
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
            calm = [part for answer in calm for part in _dealt(answer, self.replicas)]
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
            scheduler.block_size,
            scheduler.enable_prefix_caching,
            self.replicas,
        )
        return setting._replace(**self.known)

    def _prior_of(self, twin: Twin) -> StepTimes:
        return self.prior(twin.setting.policy).times

    def _ask(self, questions: Iterable[Question]) -> list[Answer]:
        return [self.ask(question) for question in questions]

    def _finalists(self, calm: Sequence[Answer], burst: Answer, mixed: Sequence[Answer]) -> list[Twin]:
        """Return twins with the likeliest engines, token budgets and loops, which are found together.

        Step times are fitted for each combination, because the sizes of steps depend on it. The cost of launches comes
        from answers that hardly depend on these settings; it is fitted again for the best combinations, behind the
        likeliest API server. At least one twin of each engine is among them.
        """
        at_once, offered = burst.most_decoding // self.replicas, len(burst.tokens_ns) // self.replicas
        asked = [*calm, *mixed, burst]
        names = ("max_num_batched_tokens", "async_scheduling")
        scored: list[tuple[float, Twin]] = []
        policies = self._values("policy", POLICIES)
        for policy in policies:
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
        scored.sort(key=lambda pair: -pair[0])
        likeliest = [twin for _, twin in scored]
        first = {id(next(twin for twin in likeliest if twin.setting.policy == policy)): policy for policy in policies}
        chosen = [twin for at, twin in enumerate(likeliest) if at < _FINALISTS or id(twin) in first]
        door = self._through_door(likeliest[0], asked).front_door
        return [replace(twin, front_door=door).fitted(asked, self.prior(twin.setting.policy).times) for twin in chosen]

    def _after_more_questions(self, finalists: Sequence[Twin]) -> Twin:
        """Ask the questions that narrow the prediction of the traffic most, and return the likeliest of `finalists`."""
        members = [Member(twin) for twin in finalists]
        logs = [twin.likelihood(self.answers) for twin in finalists]
        traffic = self.traffic(finalists[int(np.argmax(logs))], self.bounds)
        open_questions = self._more_questions()
        while open_questions:
            best = int(np.argmax(logs))
            apart = [
                Member(twin) for twin in fitted_apart(finalists[best], self.answers, self._prior_of(finalists[best]))
            ]
            even = [logs[best]] * len(apart)
            committee = Committee([*members, *apart], [*logs, *even], traffic)
            self.say(f"so far {_words(finalists[best].setting)}; prediction of traffic ±{committee.band_pct:.1f} %")
            if committee.band_pct <= self.within_pct:
                break
            question = committee.best_question(open_questions)
            open_questions.remove(question)
            try:
                answer = self.ask(question)
            except TimeIsUp:
                self.say("the time is up before the prediction was narrow enough")
                break
            logs = [log + twin.likelihood([answer]) for log, twin in zip(logs, finalists, strict=True)]
        best_log: dict[str, float] = {}
        for log, twin in zip(logs, finalists, strict=True):
            best_log[twin.setting.policy] = max(best_log.get(twin.setting.policy, -np.inf), log)
        self._note("policy", best_log)
        return finalists[int(np.argmax(logs))]

    def _more_questions(self) -> list[Question]:
        """Return the questions of which the best are asked."""
        bounds = self.bounds
        rows = [rows for rows in (16, 64) if rows <= bounds.concurrency]
        return [
            ask.prompts_into_decodes(2, bounds),
            ask.prompts_at_once(512, bounds),
            ask.prompts_at_once(3000, bounds),
            *(ask.closed_loop(count, bounds) for count in rows),
            *ask.long_plateaus(bounds),
        ]

    def _memory(self, twin: Twin) -> Twin:
        """Ask for more KV than there is, with smaller prompts until the number of blocks is known well."""
        if "num_blocks" in self.known:
            return twin
        try:
            return self._asked_memory(twin)
        except TimeIsUp:
            self.assumed.add("num_blocks")
            return twin

    def _asked_memory(self, twin: Twin) -> Twin:
        replicas = self.replicas
        limit = min(self.bounds.concurrency, replicas * twin.setting.max_num_seqs)
        blocks, asked = twin.setting.num_blocks, set[str]()
        for _ in range(_MEMORY_ASKED):
            tokens = round(_MORE * blocks * twin.setting.block_size * replicas)
            question = ask.full_memory(tokens, limit, twin.setting.max_num_batched_tokens, self.bounds)
            if question.name in asked:
                break
            asked.add(question.name)
            answer = self.ask(question)
            first = next(iter(question.workload.requests))
            if not answer.tokens_ns:  # not even one of the prompts fits
                blocks = blocks // _SMALLER
            elif answer.most_decoding >= limit and not answer.waited:  # all of them fit
                self.at_least["num_blocks"] = _blocks_of(twin, limit // replicas, first.prompt_len)
                blocks = max(2 * blocks, self.at_least["num_blocks"])
            else:
                self.at_least.pop("num_blocks", None)
                twin = self._blocks(twin, answer, first.prompt_len, first.output_len)
                blocks = twin.setting.num_blocks
                if answer.most_decoding >= _FINE * limit:
                    break
        return twin.having(num_blocks=max(twin.setting.num_blocks, self.at_least.get("num_blocks", 0)))

    def _blocks(self, twin: Twin, answer: Answer, prompt: int, output: int) -> Twin:
        """Return the twin with the likeliest number of KV blocks: the middle of those that explain the answer alike."""
        running = answer.most_decoding // self.replicas
        low = _blocks_of(twin, max(running // 2, 1), prompt)
        high = _blocks_of(twin, running + 2, prompt + output)
        for _ in range(_NARROWED):
            values = [int(value) for value in np.unique(np.linspace(low, high, _BETWEEN + 1).round())]
            scores = [twin.having(num_blocks=value).likelihood([answer]) for value in values]
            alike = [at for at, score in enumerate(scores) if score > max(scores) - 0.5]
            low, high = values[max(alike[0] - 1, 0)], values[min(alike[-1] + 1, len(values) - 1)]
            twin = twin.having(num_blocks=(values[alike[0]] + values[alike[-1]]) // 2)
        return twin

    def _block_size(self, twin: Twin) -> Twin:
        """Ask for cached prefixes, of which each block size finds another part, and return the likeliest twin.

        The KV cache keeps its size in tokens.
        """
        if "block_size" in self.known:
            return twin
        setting = twin.setting
        question = ask.cached_prefixes(setting.max_num_batched_tokens, self.replicas, self.bounds)
        self.assumed.add("block_size")
        if question is None or not setting.enable_prefix_caching:
            return twin
        try:
            answer = self.ask(question)
        except TimeIsUp:
            return twin
        if answer.unanswered:  # the engine refuses prompts longer than a step
            return twin
        self.assumed.remove("block_size")
        tokens = setting.num_blocks * setting.block_size
        sizes = {setting.block_size} if "num_blocks" in self.known else set(_BLOCK_SIZES)
        tried = {size: twin.having(block_size=size, num_blocks=tokens // size) for size in sorted(sizes)}
        self._note("block_size", {size: one.likelihood_of_pattern(answer) for size, one in tried.items()})
        return tried[self.tried["block_size"].values[0]]

    def _refined(self, twin: Twin) -> Twin:
        """Return the twin with the settings and step times that explain all answers best.

        Step times are fitted for each token budget: a larger chunk explains the same duration with faster kernels.
        """
        prior = self.prior(twin.setting.policy).times
        recorded = self.recorded()
        twin = self._through_door(twin.fitted(self.answers, prior, recorded=recorded), self.answers)
        if "max_num_batched_tokens" not in self.known:
            budget, near_these = twin.setting.max_num_batched_tokens, prior.with_launches_of(twin.times)
            near = np.geomspace(budget / 2, budget * 2, _AROUND).round().astype(int).tolist()
            tried = {
                value: twin.having(max_num_batched_tokens=value).fitted(self.answers, near_these, fit_launches=False)
                for value in sorted({*near, *_BUDGETS, budget})
            }
            twin = self._likeliest("max_num_batched_tokens", tried, self.answers)
        if self.replicas > 1:
            twin = self._best(twin, "router", ROUTERS, self.answers)
        return self._with_loop(twin, prior, recorded)

    def _with_loop(self, twin: Twin, prior: StepTimes, recorded: IterationLog | None) -> Twin:
        """Return the twin with the likelier kind of loop.

        The overlapped loop lets a request wait one step longer. An API server with much to do delays requests, too, so
        only prompts that are sent into a few decodes tell the loops apart.
        """
        tried = {}
        for overlapped in self._values("async_scheduling", (False, True)):
            one = twin.having(async_scheduling=overlapped).fitted(self.answers, prior, recorded=recorded)
            tried[overlapped] = self._through_door(one, self.answers)
        calm = [answer for answer in self.answers if answer.question.name.startswith(ask.INTO_DECODES)]
        return self._likeliest("async_scheduling", tried, calm)

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


def _dealt(answer: Answer, replicas: int) -> list[Answer]:
    """Return the answer of each engine, as if a router had sent them requests in turn."""
    ids = sorted(answer.tokens_ns)
    return [answer.only(ids[engine::replicas]) for engine in range(replicas)]


def _blocks_of(twin: Twin, requests: int, tokens: int) -> int:
    """Return the KV blocks of `requests` requests with `tokens` tokens each."""
    return requests * -(-tokens // twin.setting.block_size) + 1


def _words(setting: Setting) -> str:
    loop = "overlapped" if setting.async_scheduling else "plain"
    return f"{setting.policy}, {setting.max_num_batched_tokens:,} tokens a step, {loop} loop"


def _as_answered(lone: Answer, bounds: Bounds) -> Bounds:
    """Return `bounds` with the longest prompt that was answered, and with as many tokens as take a reasonable time.

    Some engines refuse prompts longer than a step.
    """
    first = {one.prompt_len: lone.tokens_ns[one.id][0] - lone.sent_ns[one.id] for one in lone.as_sent.requests}
    if not first:
        return bounds
    longest = max(first)
    per_second = longest / first[longest] * 1e9
    tokens = round(min(bounds.tokens, max(_QUESTION_S * per_second, _FEWEST_TOKENS)))
    return bounds._replace(longest=longest if lone.unanswered else bounds.longest, tokens=tokens)
