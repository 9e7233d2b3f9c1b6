"""Events of an engine become a recording, without vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.vllmside.stand_in import Scheduler, request
from tokentwin.calibration.validation.decision_replay import replay_decisions
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Item
from tokentwin.traces.live_recording import LiveRecording
from tokentwin.traces.recording import Recording
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.vllmside.engine_events import AdapterWork, EngineEvents, NotRecorded
from tokentwin.vllmside.recorded_run import RecordedRun

RUN = {
    "run_id": "fake", "clock": "wall", "workload": "served", "replicas": 1, "seed": 0, "num_blocks": 10,
    "block_size": 4, "calibration": "", "hardware": "{}",
    "deployment": Deployment(
        scheduler=SchedulerConfig(block_size=4, num_blocks=11, max_model_len=40, cut_at_max_model_len=True)
    ).model_dump_json(),
}  # fmt: skip


class Engine:
    """A scheduler with a recorder beside it; the clock advances by 1 us at every reading."""

    def __init__(self, path: Path, **more: bool) -> None:
        self.path = path
        self.scheduler = Scheduler()
        self.writer = RecordingWriter(path, RUN)
        self.run = RecordedRun(LiveRecording(self.writer, RUN), 4, 100)
        clock: Iterator[int] = count(0, 1000)
        self.events = EngineEvents(
            self.run.take, max_model_len=40, overlapped=False, times_thread=False, started_ns=0, started_s=100.0,
            now=lambda: next(clock), **{"drafts": False, **more},
        )  # fmt: skip

    def add(self, *args: Any, **kwargs: Any) -> Any:
        one = request(*args, **kwargs)
        self.events.arrived(one)
        self.scheduler.requests[one.request_id] = one
        return one

    def plan(self, *args: Any, **kwargs: Any) -> Any:
        began_ns = self.events.now()
        output = self.scheduler.plan(*args, **kwargs)
        self.events.planned(self.scheduler, output, began_ns)
        return output

    def back(
        self, output: Any, tokens: dict[str, int], finished: dict[str, str] | None = None, result: Any = None
    ) -> None:
        flight = self.events.returning(output, result)
        sent = self.scheduler.outputs(tokens, finished)
        if flight is not None:
            self.events.returned(flight, sent)

    def recording(self) -> Recording:
        self.events.settle()
        self.run.close(self.events.now(), "complete", {})
        return Recording.load(self.path)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Engine(tmp_path / "run")


def rows(recording: Recording) -> dict[int, dict[str, Any]]:
    return {row["request_id"]: row for row in recording.requests.to_pylist()}


def test_a_run_is_recorded_and_replayed(engine: Engine) -> None:
    """A prompt in two chunks is no row that samples; the second request finds a block of the first."""
    engine.add("a", 6, 2, [b"1"])
    engine.back(engine.plan({"a": 6}, {"a": 0}), {"a": 1})
    engine.add("b", 6, 1, [b"1"])
    engine.back(
        engine.plan({"a": 1, "b": 2}, {"b": 4}), {"a": 1, "b": 1}, dict.fromkeys("ab", "FINISHED_LENGTH_CAPPED")
    )
    recording = engine.recording()
    first, second = recording.steps.to_pylist()
    assert (first["prefill_tokens"], first["prefill_pairs"], first["sampled_rows"]) == (6, 21, 1)
    assert (second["decode_rows"], second["decode_context"], second["prefill_context"]) == (1, 6, 4)
    assert (second["row_ids"], second["row_tokens"], second["stopped_ids"]) == ([0, 1], [1, 2], [])
    assert first["used_blocks"] == 3 and first["forward_ns"] is None and first["thread_ns"] is None
    assert [one.prompt for one in recording.workload().requests] == [(("p0", 6),), (("p0", 4), ("p1", 2))]
    row = rows(recording)[1]
    assert (row["prefix_hit_tokens"], row["status"], row["output_tokens"]) == (4, "finished", 1)
    assert row["send_ns"] is None and row["client_id"] == "b"

    assert replay_decisions(recording).exact


@pytest.mark.parametrize(
    ("name", "client_id"),
    [
        ("cmpl-run-7-0-89abcdef", "run-7"),
        ("chatcmpl-run-7-89abcdef", "run-7"),
        ("17-89abcdef", "17-89abcdef"),
        ("mine", "mine"),
    ],
)
def test_a_request_has_the_name_that_its_client_gave_it(engine: Engine, name: str, client_id: str) -> None:
    engine.add(name, 6, 1)
    engine.back(engine.plan({name: 6}, {name: 0}), {name: 1}, {name: "FINISHED_LENGTH_CAPPED"})
    assert rows(engine.recording())[0]["client_id"] == client_id


def test_tenant_and_slo_class_are_what_the_client_states(engine: Engine) -> None:
    one = request("a", 6, 1)
    one.sampling_params = SimpleNamespace(extra_args={"tenant": "t", "slo_class": "chat", "other": 1})
    engine.events.arrived(one)
    engine.scheduler.requests["a"] = one
    engine.back(engine.plan({"a": 6}, {"a": 0}), {"a": 1}, {"a": "FINISHED_LENGTH_CAPPED"})
    recording = engine.recording()
    assert {name: rows(recording)[0][name] for name in ("tenant", "slo_class")} == {"tenant": "t", "slo_class": "chat"}
    assert next(iter(recording.workload().requests)).tenant == "t"


def test_adapters_images_and_embeddings_are_in_the_recording(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "run", adapters=True)
    engine.events.watch_adapters(lambda: AdapterWork(1, 300, 2, 400))
    picture = {"mm_position": SimpleNamespace(offset=1, length=4), "identifier": "a hash", "modality": "image"}
    engine.add("a", 6, 2, lora_request=SimpleNamespace(lora_name="legal"), mm_features=[SimpleNamespace(**picture)])
    engine.add("b", 5, 1, pooling_params=object(), lora_request=None)
    engine.back(engine.plan({"a": 6, "b": 5}, {"a": 0, "b": 0}), {"a": 1, "b": 0}, {"b": "FINISHED_STOPPED"})
    engine.back(engine.plan({"a": 1}), {"a": 1}, {"a": "FINISHED_LENGTH_CAPPED"})
    recording = engine.recording()
    adapted, embedded = recording.workload().requests
    assert adapted.adapter == "legal" and adapted.items == (Item(1, 4, "item0"),)
    assert embedded.pools and rows(recording)[1]["status"] == "finished" and not rows(recording)[1]["token_times_ns"]
    first = recording.steps.to_pylist()[0]
    assert first["sampled_rows"] == 1  # nothing is sampled for an embedding
    assert first["adapters"] == {"adapters": 1, "tokens": 6, "loads": 1, "load_ns": 300, "copies": 2, "copy_ns": 400}
    assert first["start_ns"] == first["plan_ns"] + first["schedule_ns"] + 700  # the step begins with its adapters


def test_a_turn_quotes_the_answer_before_it(engine: Engine) -> None:
    engine.add("a", 3, 6, []).block_hashes = [b"1", b"2"]
    engine.back(engine.plan({"a": 3}, {"a": 0}), {"a": 6}, {"a": "FINISHED_LENGTH_CAPPED"})
    engine.add("b", 10, 1, [b"1", b"2"])
    recording = engine.recording()
    prompts = [one.prompt for one in recording.workload().requests]
    assert prompts == [(("p0", 3),), (("p0", 3), ("out:0", 5), ("p1", 2))]
    assert json.loads(recording.run["notes"])["ambiguous_blocks"] == 0


def test_a_prompt_that_quotes_an_unfinished_answer_is_counted(engine: Engine) -> None:
    one = engine.add("a", 3, 6, [])
    planned = engine.plan({"a": 3}, {"a": 0})
    engine.add("b", 10, 1, [b"1", b"2"])
    one.block_hashes = [b"1", b"2"]
    engine.back(planned, {"a": 6}, {"a": "FINISHED_LENGTH_CAPPED"})
    assert json.loads(engine.recording().run["notes"])["ambiguous_blocks"] == 2


def test_a_stop_token_and_a_hang_up(engine: Engine) -> None:
    engine.add("a", 3, 9)
    engine.add("b", 3, 9)
    planned = engine.plan({"a": 3, "b": 3}, {"a": 0, "b": 0})
    leaving = engine.events.leaving("b")
    engine.scheduler.requests.pop("b").status = SimpleNamespace(name="FINISHED_ABORTED")
    engine.events.left(leaving)
    engine.back(planned, {"a": 1}, {"a": "FINISHED_STOPPED"})
    recording = engine.recording()
    assert recording.steps["stopped_ids"].to_pylist() == [[0]]
    stopped, gone = (rows(recording)[id] for id in (0, 1))
    assert (stopped["status"], stopped["output_tokens"], stopped["steps_before_end"]) == ("finished", 1, None)
    assert (gone["status"], gone["output_tokens"], gone["steps_before_end"]) == ("cancelled", 0, 0)
    offered = {one.id: one for one in recording.workload().requests}
    assert (offered[0].output_len, offered[0].max_tokens, offered[1].cancel_ns) == (1, 9, gone["end_ns"])
    assert replay_decisions(recording).exact


def test_drafts_are_known_when_the_next_are_proposed(tmp_path: Path) -> None:
    engine = Engine(tmp_path / "run", drafts=True)
    one = engine.add("a", 3, 9)
    engine.back(engine.plan({"a": 3}, {"a": 0}), {"a": 1})
    one.spec_token_ids = [5, 5]
    engine.events.proposing()
    drafted = engine.plan({"a": 3}, scheduled_spec_decode_tokens={"a": [5, 5]})
    result = SimpleNamespace(sampled_token_ids=[[7, 7]], req_id_to_index={"a": 0})
    one.spec_token_ids = []
    engine.back(drafted, {"a": 2}, result=result)
    recording = engine.recording()
    assert recording.steps["row_proposed"].to_pylist() == [[2], [0]]
    assert recording.steps["row_accepted"].to_pylist() == [None, [1]]
    assert recording.steps["draft_tokens"].to_pylist() == [None, 2]
    row = rows(recording)[0]
    assert (row["drafts"], row["draft_tokens"], row["accepted_tokens"], row["status"]) == (1, 2, 1, "unfinished")


def test_a_preempted_request_waits_and_computes_again(engine: Engine) -> None:
    one = engine.add("a", 3, 9)
    engine.back(engine.plan({"a": 3}, {"a": 0}), {"a": 1})
    engine.add("b", 3, 1)
    engine.events.preempting(one)
    one.num_computed_tokens = 0
    one.num_preemptions = 1
    engine.back(engine.plan({"b": 3}, {"b": 0}), {"b": 1}, {"b": "FINISHED_LENGTH_CAPPED"})
    again = engine.plan({"a": 4}, {"a": 0})
    engine.back(again, {"a": 1}, {"a": "FINISHED_STOPPED"})
    recording = engine.recording()
    assert recording.steps["preempted_ids"].to_pylist() == [[], [0], []]
    row = rows(recording)[0]
    starts, plans = (recording.steps[name].to_pylist() for name in ("start_ns", "plan_ns"))
    assert row["preempted_ns"] == starts[2] - plans[1]
    assert (row["preemptions"], row["recomputed_tokens"]) == (1, 3)


def test_steps_that_overlap_begin_when_the_one_before_ends(engine: Engine) -> None:
    engine.add("a", 3, 2)
    first = engine.plan({"a": 3}, {"a": 0})
    second = engine.plan({"a": 1})
    idle = engine.plan({})
    engine.back(first, {"a": 1})
    engine.back(second, {"a": 1}, {"a": "FINISHED_LENGTH_CAPPED"})
    engine.back(idle, {})
    steps = engine.recording().steps
    assert steps["in_flight"].to_pylist() == [0, 1]
    assert steps["start_ns"].to_pylist()[1] == steps["end_ns"].to_pylist()[0]


def test_a_grammar_is_waited_for(engine: Engine) -> None:
    waits = SimpleNamespace(name="WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR")
    one = engine.add("a", 3, 2, use_structured_output=True, status=waits)
    engine.add("b", 3, 1)
    engine.back(engine.plan({"b": 3}, {"b": 0}), {"b": 1}, {"b": "FINISHED_LENGTH_CAPPED"})
    one.status = SimpleNamespace(name="RUNNING")
    engine.back(engine.plan({"a": 3}, {"a": 0}, has_structured_output_requests=True), {"a": 1})
    recording = engine.recording()
    assert recording.steps["masked_rows"].to_pylist() == [None, 1]
    row = rows(recording)[0]
    assert row["queued_ns"] + row["grammar_compile_ns"] == recording.steps["plan_ns"].to_pylist()[1]


def test_penalties_and_scored_prompts_are_marked(engine: Engine) -> None:
    plain: dict[str, Any] = {"presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0, "min_p": 0.0}
    plain |= dict.fromkeys(("logit_bias", "bad_words", "allowed_token_ids", "prompt_logprobs"))
    marks: list[dict[str, Any]] = [{}, {"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"prompt_logprobs": 0}]
    for number, more in enumerate(marks):
        engine.add(str(number), 3, 2, sampling_params=SimpleNamespace(**{**plain, **more}))
    marked = [(one.changes_logits, one.scores_prompt) for one in engine.recording().workload().requests]
    assert marked == [(False, False), (True, False), (True, False), (False, True)]


def test_a_streaming_session_cannot_be_recorded(engine: Engine) -> None:
    engine.add("a", 3, 2)
    with pytest.raises(NotRecorded, match="goes on with new input"):
        engine.add("a", 3, 2)


def test_requests_that_come_out_of_order_make_a_readable_workload(engine: Engine) -> None:
    for _ in range(9):
        engine.events.now()
    engine.add("late", 3, 2, arrival_time=100.000008)
    engine.add("early", 3, 2, arrival_time=100.000001)
    recording = engine.recording()
    assert [(one.id, one.arrival_ns) for one in recording.workload().requests] == [(0, 8000), (1, 8000)]
    assert {id: row["arrival_ns"] for id, row in rows(recording).items()} == {0: 8000, 1: 1000}


def test_what_a_killed_server_left_is_made_a_recording(engine: Engine) -> None:
    """vLLM kills its engines as soon as it is asked to end, unless --shutdown-timeout says otherwise."""
    engine.add("a", 3, 9)
    engine.back(engine.plan({"a": 3}, {"a": 0}), {"a": 1})
    (engine.path / "deployment.yaml").write_text("{}")
    with pytest.raises(UserError, match="was not finished"):
        Recording.load(engine.path)
    engine.writer._lock.close()  # as the end of its process does
    command = [sys.executable, "-m", "tokentwin.traces.live_recording", str(engine.path)]
    subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
    recording = Recording.load(engine.path)
    assert recording.run["status"] == "interrupted"
    assert (rows(recording)[0]["status"], recording.rows("steps")) == ("unfinished", 1)
    assert replay_decisions(recording).exact
