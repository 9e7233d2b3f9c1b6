"""A session that learns a server: questions, inference, proof, and the files of the twin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from tokentwin.calibration.steps.interval import REACH, Factors, factors_of
from tokentwin.planning.learn.alternatives import alternatives
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.document import (
    FILE,
    AskedQuestion,
    LearntServer,
    LearntSetting,
    PromptPoint,
    ProofFigure,
    StepPoint,
)
from tokentwin.planning.learn.http_server import HttpServer, check_folder
from tokentwin.planning.learn.learner import Learner
from tokentwin.planning.learn.proof import held_back, proof_rows, spread_pct
from tokentwin.planning.learn.questions import Bounds, Question
from tokentwin.planning.learn.recorded_steps import recorded_settings, recorded_steps
from tokentwin.planning.learn.request import LearnRequest
from tokentwin.planning.learn.seen_steps import seen_steps
from tokentwin.planning.learn.server import TimeIsUp
from tokentwin.planning.learn.step_times import Known
from tokentwin.planning.learn.twin import GROUPS, Setting, Twin, fitted_apart
from tokentwin.planning.traffic import Offered
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.whole_file import write_whole
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.recording_writer import DEPLOYMENT

_TO_LEARN = 0.7  # share of the time for questions; the rest is for the proof
_PROOF_REQUESTS = 300  # maximum number of requests of one's own traffic in the proof
_TAUGHT_REQUESTS = 60  # maximum number of requests of one's own traffic that teach
_FEWEST_TAUGHT = 20
_LEAST_ERROR = 0.01  # least standard deviation of the logarithm of step times between a fit and new traffic
_LARGEST_SHARE = 0.1  # larger errors of a TTFT are those of step times, which have an interval of their own
_NORMAL = 1.4826  # standard deviation of a normal distribution in medians of the absolute deviation
_SOURCE = "tokentwin learn"


def learn(request: LearnRequest, *, overwrite: bool = False, say: Callable[[str], None]) -> LearntServer:
    """Ask the server, infer what it is, prove the twin, and write it to the request's directory.

    `say` is called with a line for each step of the session. A stopped session goes on with the answers that it has.
    Raises UserError for a server that cannot be learnt, and Interrupted after Ctrl-C.
    """
    if request.gpu is not None:
        find_gpu(request.gpu)
    check_folder(request.out, request.url, overwrite)
    seconds, reads = 60 * request.minutes, not request.ignore_metrics
    server = HttpServer(request, request.out / "answers", request.model_name, _TO_LEARN * seconds, say, reads)
    deployment = request.deployment
    if not deployment.scheduler.states("max_model_len") and (longest := server.longest()):
        deployment = deployment.rescheduled(max_model_len=longest)
    known = _known_settings(request, deployment, server.reported() if reads else {})
    for name, (stated, reported) in known.contradictions.items():
        say(f"{name}: you state {stated}, but the server reports {reported}; taking yours")
    bounds = Bounds(request.max_concurrency, deployment.scheduler.max_model_len)
    learner = Learner(server, deployment, request.gpu, bounds, known.settings, say, within_pct=request.within_pct)
    if request.traffic is not None:
        own = OwnTraffic.of(Offered(traffic=request.traffic).workload(), bounds)
        learner.traffic = lambda twin, bounds: [own.proof]
        learner.own_questions = [] if own.taught is None else [own.taught]
    if request.recorder is not None:
        learner.recorded = partial(recorded_steps, request.recorder)
    twin = learner.learn()
    interval, late_ms = interval_of(learner, twin), late_ms_of(learner, twin)
    server.seconds = seconds
    traffic = [*learner.traffic(twin, learner.bounds), held_back(learner.bounds)]
    proof = prove(learner, twin, interval, late_ms, traffic, say)
    learnt = document(learner, twin, interval, proof, known, request.url, str(request.out))
    save(request.out, learner, twin, interval, learnt)
    return learnt


class KnownSettings(NamedTuple):
    """Settings of `Setting` that are not inferred: those that the user states, and those that the server reports."""

    stated: dict[str, Any]
    reported: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        """All of them; the user's win."""
        return {**self.reported, **self.stated}

    def source_of(self, name: str) -> str:
        """Return the source of a setting, as in `LearntSetting`."""
        if name in self.stated:
            return "stated"
        return "reported" if name in self.reported else "inferred"

    @property
    def contradictions(self) -> dict[str, tuple[Any, Any]]:
        """The stated and the reported value of settings for which they differ."""
        both = sorted(self.stated.keys() & self.reported.keys())
        pairs = {name: (self.stated[name], self.reported[name]) for name in both}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _known_settings(request: LearnRequest, deployment: Deployment, reported: dict[str, Any]) -> KnownSettings:
    recorded = {} if request.recorder is None else recorded_settings(request.recorder)
    return KnownSettings(stated_settings(deployment), reported | recorded)


def stated_settings(deployment: Deployment) -> dict[str, Any]:
    """Return the settings of `Setting` that a deployment states."""
    scheduler = deployment.scheduler
    stated = {name: getattr(scheduler, name) for name in Setting._fields if scheduler.states(name)}
    if deployment.fleet is not None:
        stated["replicas"] = sum(pool.replicas for pool in deployment.fleet.pools)
    if deployment.states("policy") or deployment.engine:
        stated["policy"] = deployment.policy
    return stated


class OwnTraffic(NamedTuple):
    """The beginning of one's own traffic: a stretch that is asked, and the next one, which is held back for the proof.

    `taught` is None if there are too few requests for both.
    """

    taught: Question | None
    proof: Question

    @classmethod
    def of(cls, workload: Workload, bounds: Bounds) -> OwnTraffic:
        """Cut the traffic, at its own rate but never with too many requests at a time."""
        fitting = (one for one in workload.requests if one.prompt_len + one.output_len <= bounds.longest)
        first = list(islice(fitting, _TAUGHT_REQUESTS + _PROOF_REQUESTS))
        concurrency = min(workload.concurrency or bounds.concurrency, bounds.concurrency)
        cut = min(_TAUGHT_REQUESTS, len(first) // 4)

        def question(name: str, reveals: str, requests: Sequence[WorkloadRequest]) -> Question:
            began_ns = requests[0].arrival_ns
            moved = [replace(one, arrival_ns=one.arrival_ns - began_ns) for one in requests]
            return Question(name, reveals, replace(workload, requests=moved, concurrency=concurrency))

        reveals = "how far the twin is off on your traffic"
        if cut < _FEWEST_TAUGHT or any(one.session for one in first):  # a session is not cut
            return cls(None, question("proof-own-traffic", reveals, first[:_PROOF_REQUESTS]))
        taught = question("own-traffic", "what your traffic is like", first[:cut])
        return cls(taught, question("proof-own-traffic", reveals, first[cut:]))


def interval_of(learner: Learner, twin: Twin) -> Factors:
    """Return the 90 % interval of step times: groups of questions are predicted from a fit to the other questions."""
    prior, asked = learner.prior(twin.setting.policy).times, learner.answers
    errors = []
    for group, apart in enumerate(fitted_apart(twin, asked, prior)):
        for answer, said in zip(asked[group::GROUPS], apart.answers(asked[group::GROUPS]), strict=True):
            steps = seen_steps(answer, said)
            if len(steps):
                errors.append(abs(np.log(np.median(steps.measured_ns / apart.step_ns(steps.sizes)))))
    spread = float(np.hypot(_NORMAL * np.median(errors or [0.0]), _LEAST_ERROR))
    return factors_of(REACH * spread)


def late_ms_of(learner: Learner, twin: Twin) -> float:
    """Return half of the 90 % interval of what an API server adds to a TTFT: how far questions' medians are off, in ms.

    Most of the error of a short TTFT comes from outside of the engine, and step times do not explain it.
    """
    errors = []
    for answer, said in zip(learner.answers, twin.answers(learner.answers), strict=True):
        ids = sorted(answer.tokens_ns.keys() & said.tokens_ns.keys())
        if ids:
            seen, own = (np.median([one.tokens_ns[id][0] - one.sent_ns[id] for id in ids]) for one in (answer, said))
            errors.append(min(abs(seen - own), _LARGEST_SHARE * seen))
    return REACH * _NORMAL * float(np.median(errors or [0.0])) / 1e6


def prove(
    learner: Learner,
    twin: Twin,
    interval: Factors,
    late_ms: float,
    traffic: Sequence[Question],
    say: Callable[[str], None],
) -> list[ProofFigure]:
    """Ask for traffic that taught nothing, the first kind twice, and compare it with the twin."""
    figures: list[ProofFigure] = []
    try:
        for question in traffic:
            answer = learner.server.ask(question)
            floors: dict[tuple[str, str], float] = {}
            if question is traffic[0]:
                floors = spread_pct(answer, learner.server.ask(replace(question, name=f"{question.name}-again")))
            name = question.name.removeprefix("proof-")
            figures += [
                ProofFigure(
                    traffic=name,
                    metric=metric,
                    statistic=statistic,
                    measured=seen,
                    predicted=said,
                    low=low,
                    high=high,
                    floor_pct=floors.get((metric, statistic)),
                )
                for metric, statistic, seen, said, low, high in proof_rows(twin, answer, interval, late_ms)
            ]
    except TimeIsUp:
        say("the time is up before all traffic of the proof was sent")
    return figures


def document(
    learner: Learner,
    twin: Twin,
    interval: Factors,
    proof: Sequence[ProofFigure],
    known: KnownSettings,
    url: str,
    folder: str,
) -> LearntServer:
    """Return what was learnt as a document."""
    settings = []
    claims_blocks = "block_size" not in learner.findings.assumed | learner.findings.undecided
    for name, value in twin.setting._asdict().items():
        if name == "router" and twin.setting.replicas == 1:
            continue
        tried = learner.findings.tried.get(name)
        source = known.source_of(name)
        if name in learner.findings.at_least:
            source = "at least"
        if name in learner.findings.assumed:
            source = "assumed"
        if name in learner.findings.undecided:
            source = "undecided"
        also = tried.alike_but(value) if tried and source in ("inferred", "undecided") else ()
        _, other = known.contradictions.get(name, (None, None))
        limits = {"at_least": learner.findings.at_least.get(name), "reported": other}
        least, greatest = learner.findings.ranges.get(name, (None, None)) if source == "inferred" else (None, None)
        if name == "num_blocks" and not claims_blocks and source not in ("stated", "reported"):
            name = "kv_tokens"  # so many blocks of a size that is not claimed
            tokens = twin.setting.block_size
            value *= tokens
            least, greatest = (None if number is None else number * tokens for number in (least, greatest))
            limits["at_least"] = limits["at_least"] and limits["at_least"] * tokens
        setting = {"name": name, "value": value, "source": source, "also": also, "least": least, "greatest": greatest}
        settings.append(LearntSetting.model_validate(setting | limits))
    asked = [answer.question for answer in learner.answers]
    return LearntServer(
        url=url,
        model=learner.base.model,
        gpu=None if learner.gpu is None else find_gpu(learner.gpu).name,
        created=f"{datetime.now(UTC):%Y-%m-%d}",
        settings=tuple(settings),
        alternatives=tuple(alternatives(twin, learner.findings, asked, learner.traffic(twin, learner.bounds))),
        request_ms=twin.front_door.outside_ms,
        low_factor=interval[0],
        high_factor=interval[1],
        proof=tuple(proof),
        asked=tuple(map(_asked, learner.answers)),
        steps=tuple(_step_points(learner.answers, twin)),
        prompts=tuple(_prompt_points(learner.answers, twin)),
        folder=folder,
    )


def save(folder: Path, learner: Learner, twin: Twin, interval: Factors, learnt: LearntServer) -> None:
    """Write the calibration, the front door, the deployment and the document; a failed write leaves no partial file."""
    deployment, source = twin.deployment, f"{_SOURCE} of {learnt.url}"
    twin.times.save(folder, deployment, Known(source, learnt.created, interval, learnt.request_ms))
    twin.front_door.model_copy(update={"learnt": True, "source": f"{source}, {learnt.created}"}).save(folder)
    stated = deployment.model_dump(mode="json", exclude_unset=True, exclude_none=True)
    text = f"# {source}, {learnt.created}\n" + yaml.safe_dump(stated, sort_keys=False)
    write_whole(folder / DEPLOYMENT, lambda file: file.write_text(text, encoding="utf-8"), overwrite=True)
    write_whole(folder / FILE, lambda file: file.write_text(learnt.dumps(indent=1), encoding="utf-8"), overwrite=True)


def _asked(answer: Answer) -> AskedQuestion:
    last = max((int(times[-1]) for times in answer.tokens_ns.values()), default=0)
    question = answer.question
    count = len(answer.tokens_ns) + answer.unanswered
    return AskedQuestion(name=question.name, reveals=question.reveals, requests=count, seconds=last / 1e9)


def _step_points(answers: Sequence[Answer], twin: Twin) -> list[StepPoint]:
    """Return a point for each plateau: the decode steps of all its requests."""
    plateaus = [answer for answer in answers if answer.question.name.startswith("plateau")]
    points = []
    for answer, said in zip(plateaus, twin.answers(plateaus), strict=True):
        steps = seen_steps(answer, said)
        rows = np.asarray(steps.sizes.decode_rows)
        pure = np.asarray(steps.sizes.prefill_tokens) == 0
        if not pure.any():
            continue
        chosen = pure & (rows == rows[pure].max())
        times = twin.step_ns(steps.sizes)[chosen]
        points.append(
            StepPoint(
                rows=int(rows[chosen][0]),
                context=float(np.mean(np.asarray(steps.sizes.decode_context)[chosen] / rows[chosen])),
                measured_ms=float(np.median(steps.measured_ns[chosen])) / 1e6,
                twin_ms=float(np.median(times)) / 1e6,
            )
        )
    return points


def _prompt_points(answers: Sequence[Answer], twin: Twin) -> list[PromptPoint]:
    """Return a point for each length of a lone prompt."""
    lone = next(answer for answer in answers if answer.question.name == "lone-prompts")
    (said,) = twin.answers([lone])
    by_length: dict[int, list[tuple[float, float]]] = {}
    for one in lone.as_sent.requests:
        if one.id in said.tokens_ns:
            seen = lone.tokens_ns[one.id][0] - lone.sent_ns[one.id]
            by_length.setdefault(one.prompt_len, []).append((seen, said.tokens_ns[one.id][0] - said.sent_ns[one.id]))
    return [
        PromptPoint(
            tokens=length, measured_ms=float(np.median(pair[:, 0])) / 1e6, twin_ms=float(np.median(pair[:, 1])) / 1e6
        )
        for length, pair in ((length, np.array(pairs)) for length, pairs in sorted(by_length.items()))
    ]
