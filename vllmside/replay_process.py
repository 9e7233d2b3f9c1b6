"""A process with vLLM's engine, which replays workloads in real time and records them.

It is started as `python -m tokentwin.vllmside.replay_process FD` in vLLM's environment. The other end of the pipe is
`tokentwin.planning.measure.vllm_process.VllmProcess`, and the messages are in `replay_messages`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter_ns, sleep
from typing import Any

from vllm import PoolingParams, RequestOutput, SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.sampling_params import StructuredOutputsParams
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1.engine.llm_engine import LLMEngine

from tokentwin.realengine.devices.speed import SpeedProbe, piece_of_work
from tokentwin.realengine.grammar import ENDLESS_OBJECTS
from tokentwin.realengine.logit_rules import PENALTIES
from tokentwin.realengine.offered_workload import OfferedRequests, Replayed, ReplayTexts
from tokentwin.realengine.parallel.replica_pipe import About, Arrival, End, HangUp, Inbox, Ran, Ready, Report
from tokentwin.realengine.undisturbed import no_cycle_search
from tokentwin.serving.canary import canary_rows
from tokentwin.serving.errors import UserError, raised
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.formats.trace_file import read_workload
from tokentwin.vllmside.engine_recorder import EngineRecorder
from tokentwin.vllmside.loaded_adapters import LoadedAdapters
from tokentwin.vllmside.record_settings import RecordSettings
from tokentwin.vllmside.replay_messages import Begin, Ended

_SCHEDULER = "tokentwin.vllmside.recording_scheduler.RecordingScheduler"
_POLICY = "tokentwin.vllmside.recording_policy.RecordingPolicyScheduler"
_SPIN_NS = 500_000  # time before an arrival when sleeping ends and spinning begins
_LONGEST_SLEEP_NS = 50_000_000  # maximum time between checks for a stop message
_CANARY_REPEATS = 5
Asked = Callable[[WorkloadRequest], dict[str, Any]]
_POOLING = ("embed", "classify")  # an embedding or a score of a prompt


class VllmReplayer:
    """A vLLM engine in this process, set up by the `words` of its command line."""

    def __init__(self, pipe: Connection, inbox: Inbox, words: list[str], model: str, adapters: str = "") -> None:
        self._model, self._folder = model, adapters or None
        self._pipe = pipe
        self._inbox = inbox
        self._chance = Random(0)
        self._number = 0
        self._scratch = tempfile.TemporaryDirectory(prefix="tokentwin-vllm-")
        parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
        arguments = EngineArgs.from_cli_args(parser.parse_args(words))
        stated = arguments.additional_config
        aside = {"tokentwin": {**stated.get("tokentwin", {}), "record": self._aside()}}
        arguments.additional_config = {**stated, **aside}
        arguments.scheduler_cls = _POLICY if "policy" in aside["tokentwin"] else _SCHEDULER
        self._engine = LLMEngine.from_engine_args(arguments)
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._vocab_size: int = self._engine.model_config.get_vocab_size()
        tasks = self._engine.get_supported_tasks()
        self._pooling = next((PoolingParams(task=task) for task in _POOLING if task in tasks), None)
        self._adapters: LoadedAdapters | None = None
        if adapters:
            worker = self._engine.engine_core.engine_core.model_executor.driver_worker.worker
            self._adapters = LoadedAdapters(adapters, worker.model_runner)
        self._probe = SpeedProbe(piece_of_work())

    def about(self) -> About:
        """Return a description of the engine."""
        recorder = self._scheduler.recorder
        return About(
            deployment=recorder.run["deployment"],
            hardware=json.loads(recorder.run["hardware"]),
            vocab_size=self._vocab_size,
            num_blocks=recorder.run["num_blocks"],
            notes=json.loads(recorder.run["notes"]),
            forces=False,
        )

    def warm_up(self) -> None:
        """Run steps of several sizes, so that nothing is compiled or allocated later."""
        config = self._engine.vllm_config
        most_rows, most_tokens = config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens
        for rows in (1, 2, most_rows // 2, most_rows):
            self.run_dummy([1] * max(rows, 1))
        self.run_dummy([min(most_tokens, config.model_config.max_model_len - 1)])

    def reset(self) -> None:
        """Drop all cached prefixes, including those of `canary`, and all LoRA adapters."""
        self._engine.reset_prefix_cache()
        if self._adapters is not None:
            self._adapters.forget()

    def check_adapters(self, names: list[str]) -> None:
        """Raise UserError for the first of the LoRA adapters `names` that does not exist."""
        if self._adapters is not None:
            self._adapters.check(names)
        elif names:
            raise UserError("adapter", names[0], "is wanted, and the deployment serves no adapters; set lora in it")

    def run_dummy(self, sizes: list[int]) -> int:
        """Run one step with a row for each of `sizes` (in tokens), and return its time in ns."""
        for size in sizes:
            self._number += 1
            tokens = [self._chance.randrange(3, self._vocab_size) for _ in range(size)]
            wanted = _sampling(1) if self._pooling is None else self._pooling.clone()
            self._engine.add_request(f"dummy-{self._number}", TokensPrompt(prompt_token_ids=tokens), wanted)
        began = perf_counter_ns()
        self._engine.step()
        taken = perf_counter_ns() - began
        while self._engine.has_unfinished_requests():
            self._engine.step()
        return taken

    def canary(self) -> int:
        """Return the median time of a fixed reference step, in ns."""
        rows = list(canary_rows(self._engine.vllm_config.scheduler_config.max_num_seqs))
        return int(median(self.run_dummy(rows) for _ in range(_CANARY_REPEATS)))

    def replay_workload(self, path: str, out: str) -> Replayed:
        """Replay the workload in the file `path`, and record it in the directory `out`, which must not exist yet."""
        workload = read_workload(path)
        before = self.canary()
        self.reset()
        names: dict[str, Any] = {"model": self._model, "adapters": self._folder, "workload": workload.name}
        self._scheduler.record(RecordSettings(record=out, numbered=True, **names))
        recorder = self._scheduler.recorder
        _must_go_on(recorder)
        recorder.watch_speed(self._probe)
        self._watch_adapters(recorder)
        replay = _Replay(self._engine, workload, self._vocab_size, recorder, self._asked)
        with no_cycle_search():
            status = replay.run(self._inbox, self._pipe)
        recorder.close(status)
        self._scheduler.record(RecordSettings(record=self._aside()))
        after = self.canary()
        list(self._inbox.take())  # a stop message that came too late
        return Replayed(status, replay.requests, replay.finished, replay.duration_ns, before, after)

    def replay(self) -> Ran:
        """Run the requests that arrive until `End`, and send reports on them.

        It first sends `Ready` and gets the start time of the run.
        """
        self.reset()
        with no_cycle_search():
            self._pipe.send(Ready())
            began_ns = self._inbox.next()
            sent = _SentRequests(self._engine, self._scheduler, self._inbox, self._pipe, began_ns, self._asked)
            sent.recorder.watch_speed(self._probe)
            self._watch_adapters(sent.recorder)
            sent.run()
        self._scheduler.record(RecordSettings(record=self._aside()))
        return Ran(launching_share=None)

    def close(self) -> None:
        """Shut the engine down."""
        self._engine.engine_core.shutdown()
        self._scratch.cleanup()

    def _asked(self, request: WorkloadRequest) -> dict[str, Any]:
        """Return what `request` asks of the model: tokens, or an embedding or a score, and an adapter."""
        if request.pools and self._pooling is not None:
            return {"params": self._pooling.clone()}
        adapter = None
        if request.adapter and self._adapters is not None:
            adapter = self._adapters.asked(request.adapter)
        return {"params": _asked_tokens(request), "lora_request": adapter}

    def _watch_adapters(self, recorder: EngineRecorder) -> None:
        if self._adapters is not None:
            self._adapters.taken()
            recorder.watch_adapters(self._adapters.taken)

    def _aside(self) -> str:
        """Return the path for a recorder while nothing has to be recorded."""
        return str(Path(self._scratch.name) / f"aside-{self._number}")


class _Replay:
    """The replay of a workload through the engine; times are those of its recording."""

    def __init__(
        self,
        engine: LLMEngine,
        workload: Workload,
        vocab_size: int,
        recorder: EngineRecorder,
        asked: Asked,
    ) -> None:
        requests = list(workload.requests)
        offered = replace(workload, requests=requests)
        self.requests = len(requests)
        self.finished = 0
        self.duration_ns = 0
        self._engine = engine
        self._offered = OfferedRequests(offered)
        self._texts = ReplayTexts(offered, vocab_size, forces=False)
        self._open: dict[str, WorkloadRequest] = {}
        self._ended = 0
        self._recorder = recorder
        self._asked = asked
        self._now = recorder.now

    def run(self, inbox: Inbox, pipe: Connection) -> str:
        """Replay until all requests have ended or a message arrives in `inbox`; return the status of the recording."""
        while self._open or not self._offered.exhausted:
            if inbox.wait(0):
                list(inbox.take())
                self._engine.abort_request(list(self._open), internal=False)
                self.duration_ns = self._now()
                return "interrupted"
            _must_go_on(self._recorder)
            self._send()
            before = self._ended
            if self._open:
                self._step()
            else:
                self._await()
            if self._ended > before:
                pipe.send(Ended(self._ended))
        self.duration_ns = self._now()
        return "complete"

    def _send(self) -> None:
        now = self._now()
        for id in self._offered.hang_ups(now):
            if (request := self._open.pop(str(id), None)) is not None:
                self._engine.abort_request([str(id)], internal=False)
                self._has_ended(request)
        for request in map(self._texts.sent, self._offered.arrivals(now)):
            prompt, _ = self._texts.tokens(request)
            self._open[str(request.id)] = request
            _add(self._engine, self._recorder, request, prompt, self._asked)

    def _step(self) -> None:
        for output in self._engine.step():
            if output.finished and (request := self._open.pop(output.request_id, None)) is not None:
                if not request.pools:
                    self._texts.said(request.id, list(output.outputs[0].token_ids))
                self.finished += 1
                self._has_ended(request)

    def _has_ended(self, request: WorkloadRequest) -> None:
        self._ended += 1
        self._offered.ended(request, self._now())

    def _await(self) -> None:
        """Wait for the next arrival."""
        if (arrival_ns := self._offered.next_ns) is None:
            return
        ahead_ns = min(arrival_ns - self._now() - _SPIN_NS, _LONGEST_SLEEP_NS)
        if ahead_ns > 0:
            sleep(ahead_ns / 1e9)


class _SentRequests:
    """Requests that arrive one by one and run through the engine, with reports on them (a `RecordedRows`)."""

    goes_on = True

    def __init__(
        self,
        engine: LLMEngine,
        scheduler: Any,
        inbox: Inbox,
        pipe: Connection,
        started_ns: int,
        asked: Asked,
    ) -> None:
        self._engine = engine
        self._asked = asked
        self._inbox = inbox
        self._pipe = pipe
        self._over = False
        self._open: dict[str, int] = {}  # number of tokens of each request, by name
        self._send_ns: dict[int, int] = {}
        self._requests: list[dict[str, Any]] = []
        self._steps: list[dict[str, Any]] = []
        self._said: dict[int, list[int]] = {}
        self.recorder: EngineRecorder = scheduler.record_rows(self, started_ns)

    def arrived(self, request: WorkloadRequest) -> None:
        """Do nothing, because the other end knows the requests that it has sent."""

    def add_request(self, row: Mapping[str, Any]) -> None:
        """Keep a row of `requests` for the next report."""
        self._requests.append({**row, "send_ns": self._send_ns.pop(row["request_id"])})

    def add_step(self, row: Mapping[str, Any]) -> None:
        """Keep a row of `steps` for the next report."""
        self._steps.append(dict(row))

    def close(self, **run: Any) -> None:
        """Do nothing, because all rows have been passed on."""

    def run(self) -> None:
        """Run the requests that arrive until `End`."""
        while not self._over:
            for message in self._inbox.take():
                self._hear(message)
            if self._open:
                self._step()
            elif not self._over:
                self._inbox.wait()
        self.recorder.close()  # requests that have not ended get the status `unfinished`
        self._engine.abort_request(list(self._open), internal=False)
        self._tell()

    def _hear(self, message: Arrival | HangUp | End) -> None:
        match message:
            case Arrival(request, prompt, _, send_ns):
                self._open[str(request.id)] = 0
                self._send_ns[request.id] = send_ns
                _add(self._engine, self.recorder, request, prompt, self._asked)
            case HangUp(id):
                if self._open.pop(str(id), None) is not None:
                    self._engine.abort_request([str(id)], internal=False)
                    self._tell()
            case End():
                self._over = True

    def _step(self) -> None:
        sampled: list[int] = []
        for output in self._engine.step():
            if output.request_id not in self._open:
                continue
            id = int(output.request_id)
            tokens = output.outputs[0].token_ids if isinstance(output, RequestOutput) else ()
            sampled += [id] * (len(tokens) - self._open[output.request_id])
            self._open[output.request_id] = len(tokens)
            if output.finished:
                del self._open[output.request_id]
                self._said[id] = list(tokens)
        self.recorder.settle()
        self._tell(sampled)

    def _tell(self, sampled: Sequence[int] = ()) -> None:
        """Send a report; `sampled` has a request id for every token of the step that has ended, if one has."""
        _must_go_on(self.recorder)
        requests, steps, said = self._requests, self._steps, self._said
        self._requests, self._steps, self._said = [], [], {}
        step = steps[-1]["step"] if steps else None
        if requests or steps:
            self._pipe.send(Report(requests, steps, said, step, tuple(sampled)))


def _must_go_on(recorder: EngineRecorder) -> None:
    """Raise RuntimeError if `recorder` has failed."""
    if not recorder.goes_on:
        raise RuntimeError("nothing is recorded any more; see vLLM's log")


def _add(
    engine: LLMEngine,
    recorder: EngineRecorder,
    request: WorkloadRequest,
    prompt: list[int],
    asked: Asked,
) -> None:
    """Send `request` to `engine`; `asked` returns its other arguments."""
    recorder.due_ns[request.id] = request.arrival_ns
    given = TokensPrompt(prompt_token_ids=prompt)
    engine.add_request(str(request.id), given, priority=request.priority, **asked(request))


def _labels(request: WorkloadRequest) -> dict[str, str]:
    """Return the labels of a request that our policies know."""
    labels = {name: getattr(request, name) for name in ("tenant", "slo_class", "session")}
    return {name: value for name, value in labels.items() if value}


def _asked_tokens(request: WorkloadRequest) -> SamplingParams:
    """Return sampling parameters for the tokens that `request` wants."""
    more: dict[str, Any] = {"extra_args": _labels(request) or None}
    if request.structured:
        more["structured_outputs"] = StructuredOutputsParams(json=ENDLESS_OBJECTS)
    if request.changes_logits:
        more |= {f"{name}_penalty": getattr(PENALTIES, name) for name in ("presence", "frequency", "repetition")}
    if request.scores_prompt:
        more["prompt_logprobs"] = 0
    return _sampling(request.output_len, **more)


def _sampling(tokens: int, **more: Any) -> SamplingParams:
    """Return sampling parameters for exactly `tokens` tokens, without a stop token."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, **more)


def main() -> None:
    """Answer calls until the pipe is closed."""
    pipe = Connection(int(sys.argv[1]))
    inbox = Inbox(pipe)
    replayer: VllmReplayer | None = None
    with suppress(EOFError, ConnectionError):
        while True:
            asked = inbox.next()
            if asked == "stop":  # meant for a replay that has already ended
                continue
            try:
                if isinstance(asked, Begin):
                    replayer = VllmReplayer(pipe, inbox, asked.words, asked.model, asked.adapters)
                    pipe.send(replayer.about())
                else:
                    name, arguments = asked
                    pipe.send(getattr(replayer, name)(*arguments))
            except (EOFError, ConnectionError):
                raise
            except UserError as error:
                pipe.send(error)
            except BaseException as error:
                pipe.send(RuntimeError(raised(error)))
    if replayer is not None:
        replayer.close()


if __name__ == "__main__":
    main()
