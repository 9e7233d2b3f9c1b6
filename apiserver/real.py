"""A server's real engine in a process of its own, which runs the requests that the routing process sends."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from time import perf_counter_ns, time
from typing import Any

from tokentwin.apiserver.engine_messages import KvBatch, Routed, Row
from tokentwin.apiserver.kv_cache_events.events import KvEvents
from tokentwin.apiserver.kv_cache_events.feeds import observe
from tokentwin.apiserver.live_metrics import step_end
from tokentwin.apiserver.log import LOG, log_to_stderr
from tokentwin.apiserver.messages import GRAMMAR_FAILED, Abort, About, Output, Outputs
from tokentwin.apiserver.settings import KvEventSettings
from tokentwin.planning.measure.real_engine import load_engine
from tokentwin.realengine.devices.machine import describe
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.logit_rules import Logprob, PromptLogprob
from tokentwin.realengine.loop import drive
from tokentwin.realengine.parallel.replica_pipe import End, Inbox
from tokentwin.realengine.run_recorder import RunRecorder
from tokentwin.realengine.sampling import SamplingParams
from tokentwin.realengine.step import Step
from tokentwin.realengine.undisturbed import no_cycle_search
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request, Status
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import STOPPED


def serve_engine(
    deployment: Deployment,
    name: str,
    adapters: Sequence[str],
    kv_events: KvEventSettings | None,
    begun_again: bool,
    origin_ns: int,
    inbox: Inbox,
    pipe: Connection,
) -> None:
    """Load an engine and run requests until `End`; the model's name is `name`, and the run began at `origin_ns`.

    `adapters` are the names of LoRA adapters that clients may ask for; without any, those in the deployment's folder.
    If the engine was `begun_again` (restarted), its first KV event states that its cache is empty. Raises UserError if
    the engine cannot be loaded, or if KV events are wanted but it has no prefix cache.
    """
    log_to_stderr()
    engine = load_engine(deployment, LOG.info)
    try:
        served = _adapters(engine, adapters)
        events = None if kv_events is None else _followed(engine, kv_events, begun_again)
        with suppress(UserError):
            engine.grammars  # noqa: B018 - begun now, because reading the tokenizer takes a second
        engine.watch_speed()
        requests = Requests(engine, events, inbox, pipe.send, origin_ns)
        requests.serve(_about(engine, name, served))
    finally:
        engine.close()


def _followed(engine: Engine, settings: KvEventSettings, begun_again: bool) -> KvEvents:
    def tokens(request: Request, begin: int, end: int) -> list[int]:
        return engine.sequences[request.id].tokens[begin:end]

    def salt(request: Request) -> str:
        return engine.sequences[request.id].salt

    events = KvEvents(settings, engine.deployment.scheduler.block_size, tokens, salt)
    observe(engine.scheduler.pool, events, settings)
    if begun_again:
        events.cleared()
    return events


def _adapters(engine: Engine, named: Sequence[str]) -> list[str]:
    """Return the names of the adapters to serve. Raises UserError if none is known, or if one cannot run."""
    if engine.adapters is None:
        return []
    names = list(named) or engine.adapters.names
    if not names:
        raise UserError("lora_modules", None, "is missing; name the adapters that clients may ask for")
    engine.check_adapters(names)
    return names


def _about(engine: Engine, name: str, adapters: list[str]) -> About:
    spec, folder, deployment = engine.spec, engine.folder, engine.deployment
    return About(
        name,
        deployment.scheduler.max_model_len,
        list(spec.eos_ids),
        str(folder) if folder is not None and (folder / "tokenizer.json").is_file() else "",
        spec.vocab_size,
        False,
        deployment.scheduler.block_size,
        {
            "clock": "wall",
            "deployment": deployment.model_dump_json(),
            "replicas": 1,
            "hardware": json.dumps(describe(deployment.device)),
            "calibration": "",
            "num_blocks": engine.scheduler.pool.total,
            "block_size": deployment.scheduler.block_size,
            "notes": json.dumps({"served": {}, **engine.notes}),
        },
        adapters=adapters,
        embedding_size=spec.hidden_size,
    )


class Requests:
    """The requests that arrive, as the `tokentwin.realengine.loop.Clientele` of the engine's loop.

    `send` sends a list of messages to the routing process: all messages of a step at once.
    """

    busy = True

    def __init__(
        self, engine: Engine, events: KvEvents | None, inbox: Inbox, send: Callable[[list[Any]], None], origin_ns: int
    ) -> None:
        self._engine = engine
        self._events = events
        self._inbox = inbox
        self._send = send
        self._recorder = RunRecorder(self, origin_ns, tier=engine.tier_name)
        self._over = False
        self._open: set[int] = set()
        self._failed: set[int] = set()  # requests whose grammar has failed in the step that ends
        self._outputs: dict[int, Output] = {}  # outputs that were not sent yet, by request
        self._messages: list[Any] = []
        self._lora = False

    def serve(self, about: About) -> None:
        """Send `about`, and run the requests that arrive until `End`."""
        self._messages.append(about)
        self._lora = bool(about.adapters)
        self._note_kv()
        self._flush()
        with no_cycle_search():
            drive(self._engine, self, self._recorder, lambda: self._over)
        self._recorder.close()
        self._flush()

    def add_request(self, **row: Any) -> None:
        self._messages.append(Row("requests", row))

    def add_step(self, **row: Any) -> None:
        self._messages.append(Row("steps", row))

    def take(self) -> None:
        for message in self._inbox.take():
            match message:
                case Routed():
                    self._add(message)
                case Abort() if message.id in self._open:
                    self._abort(message.id, message.why)
                case End():
                    self._over = True

    def ran(self, step: Step) -> None:
        for request in step.finished:
            self._open.remove(request.id)
            stops = request.pools or request.id in step.stopped
            output = self._output(request.id)
            output.finish = "stop" if stops else "length"
            if request.id in self._failed:
                output.finish, output.reason, output.status = "failed", GRAMMAR_FAILED, 500
        self._failed.clear()
        self._tell(step.plan, step.end_ns)

    def await_(self, stopped: Callable[[], bool]) -> None:
        if not stopped():
            self._inbox.wait()

    def _now(self) -> int:
        return perf_counter_ns() - self._recorder.started_ns

    def _output(self, id: int) -> Output:
        return self._outputs.setdefault(id, Output(id, []))

    def _add(self, routed: Routed) -> None:
        asked, arrived = routed
        came_ns, taken, stop_ids = self._now(), 0, {*asked.stop_ids, *asked.also_stop_ids}

        scores: dict[int, PromptLogprob] = {}  # by position

        def take(token: int, logprob: Logprob | None) -> bool:
            nonlocal taken
            taken += 1
            output = self._output(arrived.id)
            if taken == 1:
                output.cached = min(request.cached, len(asked.prompt))
                if asked.prompt_logprobs is not None:
                    output.prompt_logprobs = [scores[position] for position in range(1, len(asked.prompt))]
            output.tokens.append(token)
            if logprob is not None:
                output.logprobs = [*(output.logprobs or ()), logprob]
            return taken >= asked.min_tokens and token in stop_ids

        def pool(state: list[float]) -> None:
            self._output(arrived.id).pooled = state

        def score(position: int, logprobs: list[PromptLogprob]) -> None:
            scores.update(enumerate(logprobs, position))

        def fail() -> None:
            request.reason = GRAMMAR_FAILED
            self._failed.add(arrived.id)

        request = self._engine.add(
            arrived,
            asked.prompt,
            on_failed=fail,
            on_pooled=pool,
            score_top=asked.prompt_logprobs,
            on_scored=score,
            grammar=asked.grammar,
            sampling=SamplingParams(asked.temperature, asked.top_k, asked.top_p, asked.seed),
            on_token=take,
            logprobs=asked.logprobs,
            rules=asked.rules,
            salt=asked.cache_salt,
        )
        self._recorder.arrived(request, arrived.arrival_ns, came_ns, self._now())
        if request.status is Status.REJECTED:
            self._recorder.left(request, "rejected", end_ns=self._now())
            self._messages.append(Outputs(0, [Output(request.id, [], finish="refused", reason=request.reason)]))
            self._flush()
        else:
            self._open.add(request.id)

    def _abort(self, id: int, why: str) -> None:
        self._open.remove(id)
        request, stopped, now_ns = self._engine.abort(id), why == "stop", self._now()
        assert request is not None
        if stopped:
            self._recorder.left(request, "finished", now_ns, STOPPED, now_ns)
        else:
            self._recorder.left(request, "cancelled", None, why, now_ns)
        self._outputs[id] = Output(id, [], finish="stop" if stopped else "abort")
        self._tell(StepPlan.from_amounts(), perf_counter_ns())

    def _tell(self, plan: StepPlan, end_ns: int) -> None:
        """Send the new outputs, and report the end of a step or, with an empty plan, the state after an abort."""
        outputs, self._outputs = self._outputs, {}
        sampled = [output.id for output in outputs.values() if output.tokens]
        generated = sum(len(output.tokens) for output in outputs.values())
        now_ns = end_ns - self._recorder.started_ns
        self._messages.append(step_end(0, self._engine.scheduler, plan, now_ns, sampled, generated, self._lora))
        self._recorder.flush_steps()
        self._note_kv()
        self._messages.append(Outputs(end_ns, list(outputs.values())))
        self._flush()

    def _note_kv(self) -> None:
        if self._events is not None and (batch := self._events.take(time())) is not None:
            self._messages.append(KvBatch(batch))

    def _flush(self) -> None:
        messages, self._messages = self._messages, []
        if messages:
            self._send(messages)
