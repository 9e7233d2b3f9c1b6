"""Learning what a server is: questions, and the settings and step times that explain the answers.

The settings are found by simulation. A twin with each candidate value answers the same questions, and the value that
makes the server's answers most likely wins. Step times are fitted again whenever settings change, because the sizes of
the steps that the client saw follow from the settings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from tokentwin.calibration.steps.iteration_fit import IterationLog
from tokentwin.planning.learn import questions
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.beliefs import believed_twin, guessed_twin
from tokentwin.planning.learn.committee import Committee, Member
from tokentwin.planning.learn.door_times import through_door
from tokentwin.planning.learn.engines import engines_of
from tokentwin.planning.learn.findings import Findings
from tokentwin.planning.learn.memory import with_block_size, with_memory
from tokentwin.planning.learn.proof import made_up_traffic
from tokentwin.planning.learn.questions import Bounds, Question
from tokentwin.planning.learn.server import Server, TimeIsUp
from tokentwin.planning.learn.step_times import StepTimes
from tokentwin.planning.learn.suspicions import suspicion
from tokentwin.planning.learn.twin import POLICIES, ROUTERS, Setting, Twin, fitted_apart
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor

_BUDGETS = (512, 1024, 2048, 4096, 8192, 16_384)
_FINALISTS = 8  # combinations of settings that are judged by further questions
_STREAMS = 12  # requests that decode while prompts are sent: as many on each of 2, 3, 4 or 6 engines
_QUESTION_S = 20.0  # time that the prompts of a question may take
_FEWEST_TOKENS = 2000
_STREAM_S = 8.0  # time that a lone request may decode while prompts are sent
_FEWEST_STEPS = 100
_AROUND = 7  # number of token budgets that are tried around the likeliest


@dataclass
class Learner:
    """A learner of equal engines with the model and the parallelism of `base` on `gpu`.

    Attributes:
        known: settings that are known and not inferred, by name
        say: called with a line for each stage
        traffic: what the twin is for: returns traffic that a twin can bear, within bounds
        within_pct: half of the 90 % interval of its mean or median latencies, in percent, that is narrow enough
        recorded: returns the steps that the server itself has recorded so far; None if it records none
        own_questions: further questions that may be asked: stretches of the user's own traffic
        answers: the answers so far
        findings: what was inferred of each setting
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
    own_questions: Sequence[Question] = ()
    answers: list[Answer] = field(default_factory=list)
    findings: Findings = field(init=False)
    replicas: int = field(default=1, init=False)
    _beliefs: dict[str, Twin] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        self.findings = Findings(self.known)

    def learn(self) -> Twin:
        """Ask, and return the likeliest twin.

        The first questions are always the same. Then those are asked that narrow the prediction of the traffic most,
        until it is narrow enough, or the time is up.

        Raises UserError for a server that is not one engine or several equal ones, and if the time is up before the
        first questions are answered.
        """
        try:
            lone = self.ask(questions.lone_prompts(self.bounds))
            bounds = self.bounds = _as_answered(lone, self.bounds)
            burst = self.ask(questions.burst(bounds))
            streams = min(_STREAMS, max(burst.most_decoding - 1, 1))
            mixed = self.ask(questions.prompts_into_decodes(streams, bounds))
            self.replicas = self.known.get("replicas") or engines_of(mixed)
            repeated = self.ask(questions.repeated_prompt(self.replicas, bounds))
            short = self._ask(questions.plateaus(bounds))
        except TimeIsUp:
            remedy = "are too few for the first questions; give more (a session goes on where it was stopped)"
            raise UserError("minutes", None, remedy) from None
        if strange := suspicion(lone, repeated, self.answers[1:]):
            raise UserError("url", "the server", strange)
        self.say("inferring the scheduler's settings")
        twin = self._after_more_questions(self._finalists([lone, *short], burst, mixed))
        twin = self.findings.best(twin, "enable_prefix_caching", (False, True), [repeated])
        twin = with_memory(twin, self.ask, self.bounds, self.findings)
        twin = with_block_size(twin, self.ask, self.bounds, self.findings)
        self.say("fitting settings and step times to all answers")
        return self._refined(twin)

    def ask(self, question: Question) -> Answer:
        """Ask a question, and keep its answer."""
        answer = self.server.ask(question)
        self.answers.append(answer)
        return answer

    def prior(self, policy: str) -> Twin:
        """Return the twin before the questions about its settings: the belief about this engine, with its defaults."""
        if policy not in self._beliefs:
            base = self.base if self.base.engine else self.base.model_copy(update={"policy": policy})
            known = {"policy": policy, "replicas": self.replicas} | self.known
            if self.gpu is None:
                self._beliefs[policy] = guessed_twin(base, self.answers, self.replicas, known)
            else:
                self._beliefs[policy] = believed_twin(base, self.gpu, known)
        return self._beliefs[policy]

    def _prior_of(self, twin: Twin) -> StepTimes:
        return self.prior(twin.setting.policy).times

    def _ask(self, asked: Iterable[Question]) -> list[Answer]:
        return [self.ask(question) for question in asked]

    def _finalists(self, calm: Sequence[Answer], burst: Answer, mixed: Answer) -> list[Twin]:
        """Return twins with the likeliest engines, token budgets and loops, which are found together.

        Step times are fitted for each combination, because the sizes of steps depend on it. The cost of launches comes
        from answers that hardly depend on these settings; it is fitted again for the best combinations. At least one
        twin of each engine is among them.
        """
        asked = [*calm, mixed, burst]
        policies = self.findings.values("policy", POLICIES)
        scored: list[tuple[float, Twin]] = []
        for policy in policies:
            start = self._with_limit(self.prior(policy), burst)
            prior = start.fitted(calm, start.times).times
            for budget, overlapped in product(
                self.findings.values("max_num_batched_tokens", _BUDGETS),
                self.findings.values("async_scheduling", (False, True)),
            ):
                twin = start.having(max_num_batched_tokens=budget, async_scheduling=overlapped)
                twin = twin.fitted(asked, prior, fit_launches=False)
                scored.append((twin.likelihood(asked), twin))
        scored.sort(key=lambda pair: -pair[0])
        likeliest = [twin for _, twin in scored]
        chosen = likeliest[:_FINALISTS]
        for policy in policies:
            if all(twin.setting.policy != policy for twin in chosen):
                chosen.append(next(twin for twin in likeliest if twin.setting.policy == policy))
        doors: dict[bool, FrontDoor] = {}
        for twin in likeliest:  # the overlapped loop delays requests, too, so that each loop has another API server
            if twin.setting.async_scheduling not in doors:
                doors[twin.setting.async_scheduling] = through_door(twin, asked).front_door
        return [
            replace(twin, front_door=doors[twin.setting.async_scheduling]).fitted(asked, self._prior_of(twin))
            for twin in chosen
        ]

    def _with_limit(self, twin: Twin, burst: Answer) -> Twin:
        """Return the twin with the number of requests that decoded at the same time in the burst as its limit."""
        if "max_num_seqs" in self.known:
            return twin
        at_once, offered = burst.most_decoding // self.replicas, len(burst.tokens_ns) // self.replicas
        if at_once < offered:
            return twin.having(max_num_seqs=at_once)
        self.findings.at_least["max_num_seqs"] = offered
        return twin.having(max_num_seqs=max(twin.setting.max_num_seqs, offered))

    def _after_more_questions(self, finalists: Sequence[Twin]) -> Twin:
        """Ask the questions that narrow the prediction of the traffic most, and return the likeliest of `finalists`."""
        members = [Member(twin) for twin in finalists]
        logs = [twin.likelihood(self.answers) for twin in finalists]
        traffic = self.traffic(finalists[int(np.argmax(logs))], self.bounds)
        left = [*_more_questions(self.bounds), *self.own_questions]
        while left:
            best = finalists[int(np.argmax(logs))]
            apart = [Member(twin) for twin in fitted_apart(best, self.answers, self._prior_of(best))]
            committee = Committee([*members, *apart], [*logs, *[max(logs)] * len(apart)], traffic)
            self.say(f"so far {_words(best.setting)}; prediction of traffic ±{committee.band_pct:.1f} %")
            if committee.band_pct <= self.within_pct:
                break
            question = committee.best_question(left)
            left.remove(question)
            try:
                answer = self.ask(question)
            except TimeIsUp:
                self.say("the time is up before the prediction was narrow enough")
                break
            logs = [log + twin.likelihood([answer]) for log, twin in zip(logs, finalists, strict=True)]
        by_policy: dict[str, float] = {}
        for log, twin in zip(logs, finalists, strict=True):
            by_policy[twin.setting.policy] = max(by_policy.get(twin.setting.policy, -np.inf), log)
        self.findings.note("policy", by_policy)
        return finalists[int(np.argmax(logs))]

    def _refined(self, twin: Twin) -> Twin:
        """Return the twin with the settings and step times that explain all answers best.

        Step times are fitted for each token budget: a larger chunk explains the same duration with faster kernels.
        """
        prior, recorded = self._prior_of(twin), self.recorded()
        twin = through_door(twin.fitted(self.answers, prior, recorded=recorded), self.answers)
        if "max_num_batched_tokens" not in self.known:
            budget, near_these = twin.setting.max_num_batched_tokens, prior.with_launches_of(twin.times)
            near = np.geomspace(budget / 2, budget * 2, _AROUND).round().astype(int).tolist()
            tried = {
                value: twin.having(max_num_batched_tokens=value).fitted(self.answers, near_these, fit_launches=False)
                for value in sorted({*near, *_BUDGETS, budget})
            }
            twin = self.findings.likeliest("max_num_batched_tokens", tried, self.answers)
        if self.replicas > 1:
            twin = self.findings.best(twin, "router", ROUTERS, self.answers)
        return self._with_loop(twin, prior, recorded)

    def _with_loop(self, twin: Twin, prior: StepTimes, recorded: IterationLog | None) -> Twin:
        """Return the twin with the likelier kind of loop.

        The overlapped loop lets a request wait one step longer. Prompts that are sent into a few decodes tell the loops
        apart: the tokens of the decodes count the steps, whether these are slow or fast.
        """
        name, tried = "async_scheduling", {}
        for overlapped in self.findings.values(name, (False, True)):
            one = twin.having(async_scheduling=overlapped).fitted(self.answers, prior, recorded=recorded)
            tried[overlapped] = through_door(one, self.answers)
        calm = [answer for answer in self.answers if answer.question.name.startswith(questions.INTO_DECODES)]
        if name in self.known:
            return tried[self.known[name]]
        self.findings.note(name, {value: one.likelihood_of_steps(calm) for value, one in tried.items()})
        return tried[self.findings.tried[name].values[0]]


def _more_questions(bounds: Bounds) -> list[Question]:
    """Return the questions of which the most telling are asked."""
    rows = [rows for rows in (16, 64) if rows <= bounds.concurrency]
    return [
        questions.prompts_into_decodes(2, bounds),
        questions.prompts_at_once(512, bounds),
        questions.prompts_at_once(3000, bounds),
        *(questions.closed_loop(count, bounds) for count in rows),
        *questions.long_plateaus(bounds),
    ]


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
    step_ns = np.median([np.median(np.diff(times)) for times in lone.tokens_ns.values() if len(times) > 1] or [1.0])
    steps = round(min(bounds.steps, max(_STREAM_S * 1e9 / step_ns, _FEWEST_STEPS)))
    return bounds._replace(longest=longest if lone.unanswered else bounds.longest, tokens=tokens, steps=steps)
