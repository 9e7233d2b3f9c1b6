"""Answers that keep to a grammar: their text, their neighbours, and what their masks cost on both clocks."""

import json
import re
import signal
from pathlib import Path
from time import sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.realengine import tiny_models  # noqa: E402
from tests.realengine.test_speculative import Foreteller  # noqa: E402
from tokentwin.calibration.acceptance import as_accepted, with_drafts  # noqa: E402
from tokentwin.calibration.steps.features import MeasuredSteps  # noqa: E402
from tokentwin.calibration.validation.decision_replay import recorded_deployment, replay_decisions  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.grammar import grammar_of_rules, json_grammar, regex_grammar  # noqa: E402
from tokentwin.realengine.models.weights import load_model_files  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.realengine.sampling import SamplingParams  # noqa: E402
from tokentwin.realengine.step import Step  # noqa: E402
from tokentwin.realengine.tokenizer import Tokenizer  # noqa: E402
from tokentwin.serving.cost_model import MASK_NS, TokenCost  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import Workload, WorkloadRequest  # noqa: E402
from tokentwin.sim.cluster import Cluster  # noqa: E402
from tokentwin.sim.run_log import TableSink  # noqa: E402
from tokentwin.traces.recording import Recording  # noqa: E402

pytestmark = pytest.mark.engine

EOS = 95
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "old": {"type": "boolean"}},
    "required": ["name", "old"],
    "additionalProperties": False,
}
GIVES_UP = {"anyOf": [{"type": "object", "properties": {f"p{name}": {} for name in range(60)}}] * 80}
ASKED = {"json": json_grammar(SCHEMA), "regex": regex_grammar("(ab|c){2,5}-[0-9]"), "": ""}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny model whose tokens are the printable ASCII characters and an end token."""
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Built

    folder = tmp_path_factory.mktemp("model")
    tiny_models.save("llama", folder)
    (folder / "generation_config.json").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": EOS}))
    vocab = {("Ġ" if code == 32 else chr(code)): code - 32 for code in range(32, 127)}
    built = Built(models.BPE(vocab=vocab, merges=[]))
    built.decoder = decoders.ByteLevel()
    built.add_special_tokens([AddedToken("<end>", special=True)])
    built.save(str(folder / "tokenizer.json"))
    return folder


def engine_for(folder: Path, **scheduler: Any) -> Engine:
    config = {"max_model_len": 128, "max_num_batched_tokens": 32, "num_blocks": 40, "block_size": 4, "max_num_seqs": 4}
    deployment = Deployment(model=str(folder), dtype="float32", scheduler=SchedulerConfig(**{**config, **scheduler}))
    return Engine(deployment, load_model_files(str(folder), Path()))


def run(engine: Engine, asked: list[tuple[str, float]], tokens: int = 60) -> tuple[list[list[int]], list[Step]]:
    """Return the answers to requests with these grammars and temperatures, all offered at once, and the steps."""
    answers = []
    for id, (name, temperature) in enumerate(asked):
        arrived = WorkloadRequest(id, 0, (("", 5 + 7 * id),), tokens, structured=bool(name))
        prompt = [(3 * id + at) % EOS for at in range(arrived.prompt_len)]
        how = SamplingParams(temperature, seed=id)
        engine.add(arrived, prompt, sampling=how, stop_ids=engine.spec.eos_ids, grammar=ASKED[name])
        answers.append(engine.sequences[id])
    steps = []
    while engine.scheduler.requests:
        if (step := engine.step()) is not None:
            steps.append(step)
    return [answer.outputs for answer in answers], steps


@settings(max_examples=5, deadline=None)
@given(
    asked=st.lists(st.tuples(st.sampled_from(sorted(ASKED)), st.sampled_from([0.0, 0.7, 3.0])), min_size=1, max_size=5),
    overlapped=st.booleans(),
    num_blocks=st.sampled_from([34, 100]),
)
def test_answers_keep_to_their_grammar_and_leave_others_alone(folder, asked, overlapped, num_blocks):
    engine = engine_for(folder, async_scheduling=overlapped, num_blocks=num_blocks)
    answers, steps = run(engine, asked)
    text_of = Tokenizer(folder).decode
    for (name, _), answer in zip(asked, answers, strict=True):
        text = text_of(answer)
        if name == "json":
            value = json.loads(text)
            assert list(value) == ["name", "old"] and isinstance(value["old"], bool)
            assert re.fullmatch(r'\{"name":".*","old":(true|false)\}', text, re.DOTALL)
        elif name == "regex":
            assert re.fullmatch("(ab|c){2,5}-[0-9]", text)
    for step in steps:
        assert (step.mask_ns > 0) == (step.plan.masked_rows > 0)
        assert step.plan.masked_rows == sum(request.arrived.structured for request in step.sampled) or overlapped
    engine.reset()
    plain, _ = run(engine, [("", temperature) for _, temperature in asked])
    for (name, _), answer, without in zip(asked, answers, plain, strict=True):
        assert name or answer == without


@pytest.mark.parametrize(("right", "overlapped"), [(0.0, False), (0.6, False), (1.0, False), (0.6, True)])
def test_drafts_change_no_answer(folder: Path, right: float, overlapped: bool) -> None:
    """Drafts that the grammar forbids, that go beyond its end, and good ones."""
    asked = [("json", 0.7), ("regex", 3.0), ("", 0.7), ("regex", 0.0)]
    plain, _ = run(engine_for(folder), asked)
    drafting = engine_for(
        folder, speculative={"method": "ngram", "num_speculative_tokens": 4}, async_scheduling=overlapped
    )
    drafting._drafter = Foreteller([[*answer, 1, 2] for answer in plain], 3, right)  # type: ignore[assignment]
    answers, steps = run(drafting, asked)
    assert answers == plain
    assert any(step.plan.draft_tokens and step.plan.masked_rows for step in steps)
    assert any(step.plan.accepted_tokens for step in steps) == (right > 0)


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_grammar_that_gives_up_ends_its_request_alone_and_says_so(folder: Path, overlapped: bool) -> None:
    """llguidance finds the schema valid, but takes no token of it: then only the end token may follow."""
    engine, failed = engine_for(folder, async_scheduling=overlapped), []
    plain, _ = run(engine, [("", 0.7)])
    engine.reset()
    arrived = WorkloadRequest(9, 0, (("", 5),), 60, structured=True)
    tokens = {"stop_ids": engine.spec.eos_ids, "on_failed": lambda: failed.append(9)}
    engine.add(arrived, [1, 2, 3, 4, 5], grammar=json_grammar(GIVES_UP), **tokens)
    answers, _ = run(engine, [("", 0.7)])
    assert failed == [9] and answers == plain


ENDLESS = [  # llguidance has not compiled one of them after minutes
    r"start: A%sA: ~/(.*a.{20}.*)/ & /.{100}/",
    r"start: A%sA: /(.*b.{19})+.*/ & ~/(.*a.{20}.*)/ & /[ab]{100,200}/",
]


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_grammar_without_end_ends_its_request_alone_and_no_close_waits_for_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, overlapped: bool
) -> None:
    monkeypatch.setattr("tokentwin.realengine.grammar_compiler._COMPILE_S", 0.3)
    engine, failed = engine_for(folder, async_scheduling=overlapped), []

    def add(id: int, rules: str) -> None:
        arrived = WorkloadRequest(id, 0, (("", 5),), 60, structured=True)
        tokens = {"stop_ids": engine.spec.eos_ids, "on_failed": lambda: failed.append(id)}
        engine.add(arrived, [1, 2, 3, 4, 5], grammar=grammar_of_rules(rules % "\n"), **tokens)

    for id, rules in enumerate(ENDLESS, 10):
        add(id, rules)
    (answer, other), _ = run(engine, [("json", 0.7), ("regex", 0.7)])
    assert json.loads(Tokenizer(folder).decode(answer)) and other
    assert sorted(failed) == [10, 11], "a grammar that takes too long ends only its own request"
    add(12, ENDLESS[0] + " ")
    engine.launch()
    first = engine.grammars._first
    engine.close()
    assert first.returncode == -signal.SIGKILL


def test_requests_with_one_grammar_share_what_is_compiled_once(folder: Path) -> None:
    engine = engine_for(folder)
    answers, _ = run(engine, [("json", 0.7), ("json", 3.0), ("regex", 0.7), ("json", 0.0)])
    assert len(engine._compiler._processes) == 2 and all(answers)
    assert not any(process.requests for process in engine._compiler._processes.values())
    engine.close()


def test_a_step_with_masks_is_not_overlapped(folder: Path) -> None:
    engine = engine_for(folder, async_scheduling=True)
    _, steps = run(engine, [("json", 0.7)])
    assert all(step.plan.lag == 0 for step in steps if step.plan.masked_rows) and len(steps) > 5
    engine.reset()
    _, steps = run(engine, [("", 0.7)])
    assert any(step.plan.lag for step in steps)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_recorded_run_is_decided_again_and_its_masks_have_a_price(folder, tmp_path, overlapped, drafts):
    requests = [WorkloadRequest(id, 0, (("", 20),), 15, structured=id % 2 == 0) for id in range(8)]
    speculative = {"method": "ngram", "num_speculative_tokens": drafts} if drafts else None
    engine = engine_for(folder, async_scheduling=overlapped, speculative=speculative)
    record(Workload(requests), engine, tmp_path / "run")
    recording = Recording.load(tmp_path / "run")
    assert list(recording.workload().requests) == requests
    assert recording.requests["output_tokens"].to_pylist() == [15] * 8
    replayed = replay_decisions(recording)
    assert replayed.identical == replayed.steps and replayed.exact
    steps = recording.steps
    rows = zip(*(steps[name].combine_chunks().flatten().to_pylist() for name in ("row_ids", "row_tokens")), strict=True)
    masked = sum(filter(None, steps["masked_rows"].to_pylist()))
    assert masked == sum(tokens for id, tokens in rows if id % 2 == 0) - 4 * 20 + 4  # a prompt has one
    assert (masked > 4 * 15) == (drafts > 0)
    measured = MeasuredSteps([steps])
    assert measured.mask_ns is not None and measured.mask_ns > 0
    assert measured.mask_ns * masked == pytest.approx(sum(filter(None, steps["mask_ns"].to_pylist())))
    simulated, workload = TableSink(), with_drafts(recording.workload(), recording)
    Cluster(
        as_accepted(recorded_deployment(recording), [recording]), TokenCost(10**6, 0, 0), simulated, tokens=True
    ).run(workload)
    assert sum(filter(None, simulated.steps["masked_rows"].to_pylist())) == masked


@pytest.mark.parametrize("overlapped", [False, True])
def test_others_run_while_a_grammar_is_compiled_and_that_is_decided_again(folder, tmp_path, monkeypatch, overlapped):
    engine = engine_for(folder, async_scheduling=overlapped, max_num_seqs=3, max_num_batched_tokens=24)
    compiled = engine._compiler.compiled

    def late(wait: bool = False) -> Any:
        sleep(0.03)
        return compiled(wait)

    monkeypatch.setattr(engine._compiler, "compiled", late)
    hang_up = {3: 10_000_000, 5: 200_000_000}  # while it is compiled, and while it runs or has ended
    requests = [
        WorkloadRequest(id, id * 500_000, (("", 20),), 15, structured=id % 2 == 1, cancel_ns=hang_up.get(id))
        for id in range(9)
    ]
    record(Workload(requests), engine, tmp_path / "run")
    recording = Recording.load(tmp_path / "run")
    rows = {row["request_id"]: row for row in recording.requests.to_pylist()}
    for id, row in rows.items():
        waited_ns = row["grammar_compile_ns"]
        if id % 2 == 0:
            assert waited_ns is None
            assert id or row["scheduled_ns"] < rows[1]["scheduled_ns"]
        elif row["scheduled_ns"] is not None:
            assert 20_000_000 < waited_ns <= row["scheduled_ns"] - row["queued_ns"]
    assert rows[3]["status"] == "cancelled" and rows[3]["scheduled_ns"] is None
    replayed = replay_decisions(recording)
    assert replayed.exact, replayed.first_difference


@pytest.mark.parametrize("overlapped", [False, True])
def test_on_the_virtual_clock_each_structured_token_waits_for_its_mask(overlapped: bool) -> None:
    class Masks(TokenCost):
        def cpu_ns(self, plan: Any) -> int:
            return MASK_NS * plan.masked_rows

    def ends(structured: bool) -> int:
        config = SchedulerConfig(num_blocks=100, async_scheduling=overlapped)
        requests = [WorkloadRequest(id, 0, (("", 10),), 50, structured=structured) for id in range(2)]
        sink = TableSink()
        Cluster(Deployment(scheduler=config), Masks(10**6, 0, 0), sink).run(Workload(requests))
        return max(sink.requests["finish_ns"].to_pylist())

    assert ends(True) - ends(False) == 50 * 2 * MASK_NS


def test_what_cannot_be_kept_to_is_refused_in_one_line() -> None:
    with pytest.raises(UserError, match=r"regex: '\(a': cannot be kept to: unclosed group"):
        regex_grammar("(a")
    with pytest.raises(UserError, match=r"json_schema: .* cannot be kept to"):
        json_grammar({"type": "objec"})
    scheduler = SchedulerConfig(max_model_len=64)
    engine = Engine(Deployment(model="random:llama", scheduler=scheduler), load_model_files("random:llama", Path()))
    with pytest.raises(UserError, match="has no tokenizer"):
        _ = engine.grammars
