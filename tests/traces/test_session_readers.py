"""Readers of agents' traces and of conversations: sessions, think times, and the prefixes that turns share."""

import csv
import json
import logging
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.traces.test_measured_readers import JUNK, paths_in
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.distributions import Exponential, Fixed, Poisson
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.formats.sessions import Assumed, Call, Turn, recorded_sessions, workload_of_sessions
from tokentwin.traces.formats.trace_file import read_workload
from tokentwin.traces.summary import summarise

SHARED = Path(__file__).parents[3] / "shared" / "data"
MOONCAKE = SHARED / "mooncake" / "conversation_trace.jsonl"
VLLM_SPANS = SHARED / "inference-sim" / "vllm0.11.0_h100_codellama34b_tp1_mbt4096_prefill"
POISSON = Poisson(kind="poisson", rate=2)


@pytest.fixture
def read(tmp_path):
    """Read objects from a file of JSON lines, or one object from a file of its own."""

    def read(*objects, whole=False, assumed=None) -> list[WorkloadRequest]:
        path = tmp_path / "trace"
        lines = [json.dumps(one, indent=1 if whole else None) for one in objects]
        path.write_text("\n".join(lines))
        return list(read_workload(path, assumed).requests)

    return read


def span(number: str, begins_s: float, ends_s: float, usage=(), parent="", trace="t1", **attributes) -> dict:
    names = {"gen_ai.usage.input_tokens": 0, "gen_ai.usage.output_tokens": 1}
    values = {name: {"intValue": str(usage[at])} for name, at in names.items() if usage}
    values |= {f"gen_ai.{name.replace('__', '.')}": {"stringValue": value} for name, value in attributes.items()}
    return {
        "traceId": trace,
        "spanId": number,
        "parentSpanId": parent,
        "startTimeUnixNano": str(round((1_700_000_000 + begins_s) * 1e9)),
        "endTimeUnixNano": str(round((1_700_000_000 + ends_s) * 1e9)),
        "attributes": [{"key": key, "value": value} for key, value in values.items()],
    }


def otlp(*spans: dict) -> dict:
    return {"resourceSpans": [{"resource": {}, "scopeSpans": [{"scope": {}, "spans": list(spans)}]}]}


AGENT = (
    span("a", 0, 20, operation__name="invoke_agent", conversation__id="c1", usage=(999, 99)),
    span("1", 1, 3, (1000, 50), "a", operation__name="chat"),
    span("s", 1.5, 3, (1000, 50), "1"),  # the server's span of the same call
    span("x", 3, 6, parent="a", operation__name="execute_tool"),
    span("y", 3, 8, parent="a", operation__name="execute_tool"),  # in parallel to x
    span("2", 8, 9, (1200, 30), "a", operation__name="chat"),
    span("3", 9, 10, (400, 10), "a", operation__name="chat"),  # the context was compacted
)


def test_spans_of_an_agent_are_a_session_and_its_tools_are_think_time(read):
    first, second, third = read(otlp(*AGENT[:4]), otlp(*AGENT[4:]))
    assert [(r.session, r.turn, r.think_ns) for r in (first, second, third)] == [
        ("c1", 0, None), ("c1", 1, 5 * 10**9), ("c1", 2, 0),
    ]  # fmt: skip
    assert first.prompt == (("p0", 1000),) and first.output_len == 50
    assert second.prompt == (("p0", 1000), ("out:0", 50), ("p1", 150))
    assert third.prompt == (("p2", 400),)
    assert [r.arrival_ns for r in (first, second, third)] == [0, 5 * 10**9, 5 * 10**9]  # as if answers took no time


def test_calls_that_overlap_are_sessions_of_their_own_which_later_calls_go_on(read, caplog):
    spans = [span(str(at), *times, (100, 10)) for at, times in enumerate([(0, 5), (1, 3), (4, 6), (7, 8)])]
    with caplog.at_level(logging.WARNING):
        requests = read(otlp(*spans))
    assert [(r.session, r.turn) for r in requests] == [("t1", 0), ("t1~2", 0), ("t1~2", 1), ("t1~2", 2)]
    assert [(r.arrival_ns, r.think_ns) for r in requests[1:3]] == [(10**9, None), (2 * 10**9, 10**9)]
    assert "1 calls overlap with others" in caplog.text


def test_one_call_of_a_trace_is_a_request_without_a_session(read):
    (alone,) = read(otlp(span("1", 0, 1, (70, 7))))
    assert (alone.session, alone.prompt) == ("", (("", 70),))


@pytest.mark.skipif(not VLLM_SPANS.exists(), reason="needs inference-sim in ../shared/data")
def test_the_spans_that_a_real_vllm_wrote_are_its_requests():
    """The table beside the spans was made from the same file, by another program."""
    with (VLLM_SPANS / "server_requests.csv").open() as file:
        rows = sorted(csv.DictReader(file), key=lambda row: float(row["arrival_s"]))
    requests = list(read_workload(VLLM_SPANS / "traces.json.gz").requests)
    assert len(requests) == len(rows) == 197
    for request, row in zip(requests, rows, strict=True):
        assert request.arrival_ns / 1e9 == pytest.approx(float(row["arrival_s"]), abs=1e-5)
        lengths = (request.prompt_len, request.output_len, request.max_tokens)
        assert lengths == tuple(int(row[name]) for name in ("prompt_tokens", "output_tokens", "max_tokens"))


def dynamo(
    number: int, begins_ms: int, took_ms: int, prompt: int, output: int, hashes=None, session="s", **more
) -> dict:
    request = {"request_received_ms": begins_ms, "total_time_ms": took_ms, "input_tokens": prompt, **more}
    if hashes is not None:
        request["replay"] = {"trace_block_size": 64, "input_length": prompt, "input_sequence_hashes": hashes}
    return {
        "schema": "dynamo.request.trace.v1",
        "event_type": "request_end",
        "event_time_unix_ms": begins_ms + took_ms,
        "agent_context": {"session_id": session} if session else {},
        "request": {"request_id": f"r{number}", "output_tokens": output, **request},
    }


TOOL = {"schema": "dynamo.request.trace.v1", "event_type": "tool_end", "session_id": "s", "tool": {"duration_ms": 9}}
BIG = 14879255164371896291  # a hash of 64 bits


def test_dynamos_hashes_are_prefixes_of_all_sessions_and_answers_are_found_again(read):
    rows = [
        dynamo(0, 1000, 500, 130, 70, [BIG, 2, 3]),
        TOOL,
        dynamo(1, 2000, 100, 210, 9, [BIG, 2, 4, 5], session="s"),
        dynamo(2, 2050, 100, 128, 9, [BIG, 2], session="other"),
        dynamo(3, 2060, 100, 140, 9, [BIG, 2, 6], session=""),
    ]
    first, again, other, alone = read(*({"timestamp": 1, "event": row} for row in rows))
    assert first.prompt == (("p0", 130),)
    assert again.prompt == (("p0", 130), ("out:0", 70), ("p1", 10)) and again.think_ns == 500 * 10**6
    assert other.prompt == (("p0", 128),) and (other.session, other.think_ns) == ("other", None)
    assert alone.prompt == (("p0", 128), ("p3", 12)) and alone.session == ""


def test_dynamos_agent_traces_have_trajectories_and_perhaps_no_hashes(read):
    row = dynamo(0, 1000, 500, 130, 70)
    row |= {"schema": "dynamo.agent.trace.v1", "agent_context": {"session_id": "run", "trajectory_id": "run:a"}}
    later = dynamo(1, 1700, 100, 200, 5) | {"agent_context": row["agent_context"]}
    del later["request"]["request_received_ms"]  # then the end and the duration tell it
    first, second = read(row, later)
    assert (first.session, second.think_ns, second.prompt) == ("run:a", 200 * 10**6, (("p0", 130), ("out:0", 70)))


def test_mooncake_rows_with_sessions_are_whole_prompts_with_hashes_and_additions_without(read):
    hashed = {"session_id": "a", "output_length": 600, "hash_ids": [1, 2]}
    requests = read(
        {**hashed, "timestamp": 100, "input_length": 1000},
        {**hashed, "input_length": 2000, "delay": 5, "tool_wait_ms": 45, "hash_ids": [1, 7, 8, 9], "wait_for": ["r"]},
        {"session_id": "b", "timestamp": 200, "input_length": 300, "output_length": 40},
        {"session_id": "b", "timestamp": 900, "input_length": 150, "output_length": 20},
    )
    _, a1, b0, b1 = sorted(requests, key=lambda r: (r.session, r.turn))
    assert a1.prompt == (("p0", 1000), ("out:0", 600), (f"p{a1.id}", 400)) and a1.think_ns == 50 * 10**6
    assert b1.prompt == (*b0.prompt, (f"out:{b0.id}", 40), (f"p{b1.id}", 150))
    assert (b1.arrival_ns, b1.think_ns) == (900 * 10**6, 0)  # at its time, but not before the answer


MULTI = {
    "session_id": "u1",
    "turns": [
        {"role": "system", "text": "x" * 64},
        {"text": "a" * 40, "output_length": 10},
        {"texts": [{"name": "t", "contents": ["b" * 8]}], "delay": 1500, "output_length": 4},
    ],
}


def test_aiperfs_inputs_share_equal_texts_and_add_answers_of_the_run(read):
    other = {"session_id": "u2", "turns": [MULTI["turns"][0], {"text": "c" * 40, "output_length": 10}]}
    requests = read(MULTI, other, assumed=Assumed(arrivals=POISSON, seed=3))
    turns = sorted(requests, key=lambda r: (r.session, r.turn))
    first, second, third = turns
    assert [r.prompt_len for r in turns] == [26, 38, 26]
    assert second.prompt == (*first.prompt, (f"out:{first.id}", 10), (f"p{second.id}", 2))
    assert second.think_ns == 1500 * 10**6
    shared = first if first.id < third.id else third
    assert {r.prompt[0][0] for r in (first, third)} == {f"p{shared.id}"}  # the block of the system prompt


def test_payloads_are_whole_conversations_if_they_begin_with_the_last(read):
    asked, answer, more = (
        {"role": r, "content": c * 80} for r, c in (("user", "a"), ("assistant", "b"), ("user", "c"))
    )
    sessions = [
        {"session_id": "whole", "payloads": [{"messages": [asked], "max_tokens": 20},
                                             {"messages": [asked, answer, more], "max_tokens": 5}]},
        {"session_id": "added", "payloads": [{"messages": [asked]}, {"messages": [more]}]},
    ]  # fmt: skip
    answers = Assumed(arrivals=POISSON, output=7, think_ms=1000)
    requests = read({"data": sessions}, whole=True, assumed=answers)
    lengths = [(r.session, r.prompt_len, r.output_len) for r in sorted(requests, key=lambda r: (r.session, r.turn))]
    assert lengths == [("c0", 20, 20), ("c0", 60, 5), ("c1", 20, 7), ("c1", 47, 7)]


SHAREGPT = [
    {"id": "x", "conversations": [{"from": "human", "value": "h" * 100}, {"from": "gpt", "value": "g" * 40},
                                  {"from": "human", "value": "i" * 60}, {"from": "gpt", "value": "k" * 8}]},
    {"id": "y", "conversations": [{"from": "gpt", "value": "starts with an answer"}]},
    {"id": "z", "conversations": [{"from": "human", "value": "h" * 100}, {"from": "gpt", "value": "other"}]},
]  # fmt: skip


def test_sharegpt_turns_contain_all_that_was_said(read):
    assumed = Assumed(arrivals=POISSON, think_ms=Exponential(kind="exponential", mean=3000), seed=1)
    requests = read(SHAREGPT, assumed=assumed)
    assert requests == read(*SHAREGPT, assumed=assumed)  # an array, or lines
    first, second, other = sorted(requests, key=lambda r: (r.session, r.turn))
    assert [(r.prompt_len, r.output_len) for r in (first, second, other)] == [(25, 10), (50, 2), (25, 2)]
    assert second.prompt[: len(first.prompt)] == first.prompt and second.prompt[-2] == (f"out:{first.id}", 10)
    assert second.think_ns and second.arrival_ns == first.arrival_ns + second.think_ns
    assert {r.prompt[0] for r in (first, other)} == {(f"p{min(first.id, other.id)}", n) for n in (25, 16)}


def test_messages_with_times_need_no_arrivals(read):
    said = [("user", "2026-01-01T00:00:05Z"), ("assistant", "2026-01-01T00:00:09Z"), ("user", "2026-01-01T00:01:09Z"),
            ("assistant", "2026-01-01T00:01:10Z")]  # fmt: skip
    messages = [{"role": role, "content": "words " * 9, "timestamp": at} for role, at in said]
    early = [{"role": "user", "content": "hello", "create_time": 1767225600}, {"role": "assistant", "content": "yes"}]
    requests = read({"messages": messages}, {"messages": early})
    assert [(r.session, r.arrival_ns, r.think_ns) for r in requests] == [
        ("c1", 0, None), ("c0", 5 * 10**9, None), ("c0", 65 * 10**9, 60 * 10**9),
    ]  # fmt: skip


def test_a_tokenizer_counts_instead_of_four_characters(read, caplog):
    with caplog.at_level(logging.WARNING):
        words = read(*SHAREGPT, assumed=Assumed(arrivals=POISSON, tokenizer=list))
        assert "four characters" not in caplog.text
        quarters = read(*SHAREGPT, assumed=Assumed(arrivals=POISSON))
    assert [r.prompt_len for r in words] == [4 * r.prompt_len for r in quarters]
    assert "four characters count as a token" in caplog.text and "1 think times are not stated" in caplog.text


def test_conversations_of_aiperfs_records_are_sessions(tmp_path):
    def record(session: str, turn: int, begins_ms: int, prompt: int) -> dict:
        metrics = {"input_sequence_length": prompt, "output_sequence_length": 10, "time_to_first_token": 5.0,
                   "request_latency": 20.0}  # fmt: skip
        about = {"x_correlation_id": session, "conversation_id": "c", "turn_index": turn,
                 "benchmark_phase": "profiling", "request_start_ns": 10**18 + begins_ms * 10**6}  # fmt: skip
        return {"metadata": about, "metrics": {k: {"value": v} for k, v in metrics.items()}, "error": None}

    rows = [record("a", 0, 0, 100), record("b", 0, 7, 100), record("a", 1, 50, 130), record("b", 1, 30, 130)]
    (tmp_path / "profile_export.jsonl").write_text("\n".join(map(json.dumps, rows)))
    phases = [{"type": "concurrency", "concurrency": 2, "kind": "profiling"}]
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps({"input_config": {"phases": phases}}))
    requests = list(read_workload(tmp_path).requests)
    turns = {(r.session, r.turn): r for r in requests}
    assert turns["a", 1].think_ns == 30 * 10**6 and turns["b", 1].think_ns == 3 * 10**6
    assert turns["a", 1].prompt == (
        *turns["a", 0].prompt,
        (f"out:{turns['a', 0].id}", 10),
        (f"p{turns['a', 1].id}", 20),
    )


CALL = span("1", 5, 6, (70, 7))
MISTAKES = {
    "no usage": (otlp(span("1", 0, 1)), {}, "holds no requests"),
    "usage is a word": (otlp(span("1", 0, 1, ("many", 7))), {}, ":1: gen_ai.usage.input_tokens: 'many': must be a num"),
    "time backwards": (otlp(CALL | {"endTimeUnixNano": "5"}), {}, ":1: endTimeUnixNano: 5: must not be before"),
    "no time": (otlp(CALL | {"startTimeUnixNano": ""}), {}, ":1: startTimeUnixNano: is missing"),
    "spans are an object": ({"resourceSpans": {}}, {}, ":1: resourceSpans: {}: must be an array of objects"),
    "needless arrivals": (otlp(CALL), {"arrivals": POISSON}, "arrivals: is not needed, because trace states it all"),
    "needless think": (otlp(CALL), {"think_ms": Fixed(tokens=1)}, "think_ms: is not needed"),
    "needless seed": (otlp(CALL), {"seed": 1}, "seed: is not needed"),
    "needless tokenizer": (otlp(CALL), {"tokenizer": list}, "tokenizer: is not needed, because trace states tokens"),
    "dynamo hashes": (dynamo(0, 1, 1, 130, 5, [1]), {}, ":1: input_sequence_hashes: '1 hashes': must have 2 or 3"),
    "dynamo hash": (dynamo(0, 1, 1, 64, 5, ["x"]), {}, ":1: input_sequence_hashes: .*whole numbers only"),
    "dynamo context": (dynamo(0, 1, 1, 64, 5) | {"agent_context": 3}, {}, ":1: agent_context: 3: must be an object"),
    "dynamo prompt": (dynamo(0, 1, 1, 0, 5), {}, ":1: input_tokens: 0: must be at least 1"),
    "cake field": ({"session_id": "a", "input_length": 1, "text_input": "x"}, {}, ":1: text_input: .*not a known"),
    "cake ids": (
        {"session_id": "a", "input_length": 1000, "output_length": 1, "hash_ids": [1]},
        {},
        ":1: hash_ids: '1 ids': must have an entry for each block of input_length 1000",
    ),
    "no times": (MULTI, {}, "states no arrival times; tokentwin trace convert --arrivals poisson:rate=2 adds them"),
    "image": ({"turns": [{"text": "a", "image": "x.png"}]}, {}, ":1: image: 'a file': is not supported; only text"),
    "no answer length": ({"turns": [{"text": "a"}]}, {"arrivals": POISSON}, "states no length of an answer"),
    "turns": ({"turns": 3}, {}, ":1: turns: 3: must be an array"),
    "no text": ({"turns": [{"delay": 3}]}, {}, ":1: text: is missing"),
    "payload": ({"data": [{"payloads": [{"messages": []}]}]}, {}, ":1: messages: must have a text"),
    "conversation": ({"conversations": "hello"}, {}, ":1: conversations: 'hello': must be an array"),
    "message": ({"conversations": ["hello"]}, {}, ":1: conversations: 'hello': must hold objects with from and value"),
    "message text": ({"messages": [{"role": "user", "content": 3}]}, {}, ":1: content: 3: must be a text"),
    "message time": ({"messages": [{"role": "user", "content": "a", "timestamp": "noon"}]}, {}, ":1: timestamp: 'noo"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(read, name):
    content, assumed, message = MISTAKES[name]
    with pytest.raises(UserError, match=message) as caught:
        read(content, assumed=Assumed(**assumed) if assumed else None)
    assert "\n" not in str(caught.value)


def test_formats_with_times_and_lengths_refuse_what_they_do_not_need(tmp_path):
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,1,1\n")
    with pytest.raises(UserError, match="has the format simple CSV, which needs no arrivals; leave it out"):
        read_workload(tmp_path / "t.csv", Assumed(arrivals=POISSON))


def test_half_of_the_sessions_without_times_is_a_mistake(read):
    row = {"session_id": "a", "input_length": 9, "output_length": 9}
    with pytest.raises(UserError, match="states no arrival for 1 of 2 sessions"):
        read(row | {"timestamp": 5}, row | {"session_id": "b"})


@st.composite
def recorded_calls(draw: st.DrawFn) -> list[Call]:
    whole = st.integers(0, 50)
    return [
        Call(begins, begins + draw(whole), draw(st.sampled_from(["", "a", "b"])), Turn(draw(st.integers(1, 9)), prompt))
        for begins, prompt in draw(st.lists(st.tuples(whole, st.integers(1, 99)), min_size=1, max_size=20))
    ]


@given(calls=recorded_calls())
def test_recorded_calls_happen_again_at_their_times_if_answers_take_as_long(
    calls: list[Call], tmp_path_factory
) -> None:
    """Replaying the recorded durations gives back every begin, and a Parquet file keeps all of it."""
    sessions, _ = recorded_sessions(calls)
    workload = workload_of_sessions(Path("calls"), sessions)
    assert sum(len(session.turns) for session in sessions) == len(calls)
    first = min(call.begins_ns for call in calls)
    begins = sorted((call.begins_ns - first, call.turn.prompt) for call in calls)
    ends = {call.turn.prompt: call.ends_ns - first for call in calls}
    if len(ends) == len(calls):  # a prompt's length tells its call
        now: dict[str, int] = {}
        seen = []
        for request in sorted(workload.requests, key=lambda r: (r.session, r.turn)):
            at = request.arrival_ns if request.think_ns is None else now[request.session] + request.think_ns
            now[request.session] = ends[request.prompt_len]
            seen.append((at, request.prompt_len))
        assert sorted(seen) == begins
    stored = tmp_path_factory.mktemp("w") / "w.parquet"
    write_parquet(workload, stored)
    assert list(read_workload(stored).requests) == list(workload.requests)


@given(lengths=st.lists(st.tuples(st.integers(1, 300), st.integers(1, 60)), min_size=2, max_size=8))
def test_hashes_of_blocks_share_exactly_what_equal_tokens_share(
    lengths: list[tuple[int, int]], tmp_path_factory
) -> None:
    """A session whose every prompt contains the one before with its answer finds all of it, except the last token."""
    rows, tokens = [], 0
    for at, (added, output) in enumerate(lengths):
        tokens += added
        hashes = [1000 * 7 + block for block in range(-(-tokens // 64))]
        rows.append(dynamo(at, 1000 * at, 10, tokens, output, hashes))
        tokens += output
    path = tmp_path_factory.mktemp("d") / "d"
    path.write_text("\n".join(map(json.dumps, rows)))
    workload = read_workload(path)
    expected = sum(before.prompt_len + before.output_len - 1 for before, _ in pairwise(workload.requests))
    assert summarise(workload).prefix_hit_tokens == expected


@pytest.mark.skipif(not MOONCAKE.exists(), reason="needs mooncake/conversation_trace.jsonl in ../shared/data")
@pytest.mark.parametrize("as_dynamo", [True, False])
def test_a_real_trace_shares_in_every_format_what_it_shares_as_mooncake(as_dynamo: bool, tmp_path: Path) -> None:
    with MOONCAKE.open() as file:
        rows = [json.loads(line) for _, line in zip(range(3000), file, strict=False)]
    for at, row in enumerate(rows):
        row["session_id"] = f"s{at}"
    told = [
        dynamo(at, r["timestamp"], 1, r["input_length"], r["output_length"], r["hash_ids"], "")
        for at, r in enumerate(rows)
    ]
    for one in told:
        one["request"]["replay"]["trace_block_size"] = 512
    (tmp_path / "t").write_text("\n".join(map(json.dumps, told if as_dynamo else rows)))
    (tmp_path / "m").write_text("\n".join(json.dumps({k: v for k, v in r.items() if k != "session_id"}) for r in rows))
    here, mooncake = (summarise(read_workload(tmp_path / name), block_size=512) for name in "tm")
    assert here.prefix_hit_tokens == mooncake.prefix_hit_tokens > 0
    assert (here.prompt_tokens, here.output_tokens, here.span_s) == (
        mooncake.prompt_tokens,
        mooncake.output_tokens,
        mooncake.span_s,
    )


WHOLE_FILES = {
    "spans": [otlp(*AGENT)],
    "dynamo": [dynamo(0, 1000, 500, 130, 70, [BIG, 2, 3]), dynamo(1, 2000, 100, 210, 9, [BIG, 2, 4, 5]), TOOL],
    "mooncake": [
        {"session_id": "a", "timestamp": 1, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]},
        {"session_id": "a", "delay": 1.5, "input_length": 700, "output_length": 5, "hash_ids": [1, 3]},
    ],
    "multi_turn": [MULTI],
    "inputs": [{"data": [{"session_id": "s", "payloads": [{"messages": [{"content": "a"}], "max_tokens": 20}]}]}],
    "sharegpt": SHAREGPT,
    "messages": [{"messages": [{"role": "user", "content": "a", "timestamp": 5}, {"role": "gpt", "content": "b"}]}],
}


@given(st.data())
def test_junk_anywhere_is_read_or_refused_in_one_line(tmp_path_factory, data: st.DataObject) -> None:
    rows = json.loads(json.dumps(data.draw(st.sampled_from(list(WHOLE_FILES.values())))))
    *way, last = data.draw(st.sampled_from(list(paths_in(rows))))
    inner = rows
    for key in way:
        inner = inner[key]
    inner[last] = data.draw(JUNK)
    path = tmp_path_factory.mktemp("junk") / "trace"
    path.write_text("\n".join(map(json.dumps, rows)))
    try:
        workload = read_workload(path, Assumed(arrivals=POISSON) if data.draw(st.booleans()) else None)
        write_parquet(workload, path.with_name("w"))
        assert list(read_workload(path.with_name("w")).requests) == list(workload.requests)
    except UserError as error:
        assert "\n" not in str(error)
