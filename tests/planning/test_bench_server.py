"""`tokentwin bench --url`: what its client sends, when, and what it makes of the answers; against servers."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

pytest.importorskip("aiohttp", reason="the server extra is not installed")

from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.apiserver.served import TWIN, serving
from tests.command import tokentwin
from tests.planning.made_up_server import made_up
from tokentwin.calibration.validation.bands import run_metrics
from tokentwin.planning.bench.answer_stream import Answered, Events
from tokentwin.planning.bench.client import ChatPrompts, TokenPrompts, bench
from tokentwin.planning.bench.http_response import HttpResponse
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.realengine.offered_workload import SegmentTokens
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, STOPPED, Workload, WorkloadRequest
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.live_recording import entries
from tokentwin.traces.metrics.client_view import matched
from tokentwin.traces.metrics.run_metrics import SERVED_METRICS, RunMetrics
from tokentwin.traces.recording import JOURNAL, Recording

MS = 1_000_000
TIMES = (
    "received_ns", "arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "last_text_ns", "last_sent_ns"
)  # fmt: skip
SHARED = ("system", 64)


def conversations() -> Workload:
    """Eight conversations of three turns, each prompt the whole conversation so far; some requests by themselves."""
    requests = []
    for session in range(8):
        prompt: tuple[tuple[str, int], ...] = (SHARED,)
        for turn in range(3):
            id = 3 * session + turn
            prompt = (*prompt, (f"u{id}", 40))
            about = {"session": f"s{session}", "turn": turn, "think_ns": 5 * MS, "tenant": f"t{session % 2}"}
            requests.append(WorkloadRequest(id, 30 * MS * session, prompt, 20 + id, **about))
            prompt = (*prompt, (f"out:{id}", 20 + id))
    alone = [WorkloadRequest(100 + at, 35 * MS * at, ((PRIVATE, 90),), 10) for at in range(8)]
    return Workload(sorted([*requests, *alone], key=lambda r: (r.arrival_ns, r.id)), "conversations")


class Benched:
    """A workload sent to our twin, as its client and as it itself recorded it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        trace = folder / "trace.parquet"
        write_parquet(conversations(), trace)
        with serving(folder, *TWIN, "-o", folder / "served") as server:
            self.said = tokentwin("bench", trace, "--url", server.url, "-o", folder / "client")
        assert self.said.returncode == 0, self.said.stderr
        self.client, self.server = Recording.load(folder / "client"), Recording.load(folder / "served")

    @property
    def pairs(self) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        served = {row["client_id"]: row for row in self.server.requests.to_pylist()}
        return [(row, served[row["client_id"]]) for row in self.client.requests.to_pylist()]


@pytest.fixture(scope="module")
def benched(tmp_path_factory: pytest.TempPathFactory) -> Benched:
    return Benched(tmp_path_factory.mktemp("benched"))


# Against our own twin


def test_a_client_and_the_server_saw_the_same_requests(benched: Benched) -> None:
    assert "32 finished" in benched.said.stdout
    assert len(benched.pairs) == 32
    for seen, served in benched.pairs:
        asked = next(r for r in conversations().requests if r.id == seen["request_id"])
        assert seen["status"] == served["status"] == "finished"
        assert seen["prompt_tokens"] == served["prompt_tokens"] == asked.prompt_len
        assert seen["output_tokens"] == served["output_tokens"] == len(seen["token_times_ns"]) == asked.output_len
        assert seen["tenant"] == served["tenant"] == asked.tenant


def test_a_clients_times_follow_one_another(benched: Benched) -> None:
    for seen, _ in benched.pairs:
        times = seen["token_times_ns"]
        assert 0 <= seen["arrival_ns"] <= seen["send_ns"] < times[0] == seen["first_token_ns"]
        assert times == sorted(times) and times[-1] == seen["finish_ns"] <= seen["end_ns"]


def test_a_turn_follows_its_answer_and_quotes_it(benched: Benched) -> None:
    rows = {seen["request_id"]: (seen, served) for seen, served in benched.pairs}
    for seen, served in rows.values():
        if seen["session"] and seen["turn"]:
            before, _ = rows[seen["request_id"] - 1]
            assert seen["arrival_ns"] >= before["end_ns"] + 5 * MS
            known = before["prompt_tokens"] + before["output_tokens"] - 1
            assert served["prefix_hit_tokens"] == known // 16 * 16


def test_a_killed_client_loses_no_answer(tmp_path: Path) -> None:
    requests = [WorkloadRequest(at, 20 * MS * at, ((PRIVATE, 30),), 3 if at < 40 else 500) for at in range(60)]
    write_parquet(Workload(requests, "killed"), tmp_path / "trace.parquet")
    out = tmp_path / "client"
    with serving(tmp_path, *TWIN) as server:
        command = [
            sys.executable,
            "-m",
            "tokentwin",
            "bench",
            tmp_path / "trace.parquet",
            "--url",
            server.url,
            "-o",
            out,
        ]
        process = subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL)
        while sum(kind == "request" for kind, _ in (entries(out / JOURNAL) if (out / JOURNAL).exists() else ())) < 5:
            assert process.poll() is None
            time.sleep(0.02)
        process.kill()
        process.wait(60)
    noted = list(entries(out / JOURNAL))
    again = tokentwin("bench", tmp_path / "trace.parquet", "--url", "http://127.0.0.1:9", "-o", out)
    assert again.returncode == 2 and "contains a recording; replace it with --force" in again.stderr
    recording = Recording.load(out)
    rows = {row["request_id"]: row for row in recording.requests.to_pylist()}
    assert recording.run["status"] == "interrupted" and "origin_ns" in json.loads(recording.run["notes"])["client"]
    assert rows.keys() == {row["id"] for kind, row in noted if kind == "arrived"}
    for row in (row for kind, row in noted if kind == "request"):
        assert rows[row["request_id"]].items() >= row.items() and len(row["token_times_ns"]) == 3


def test_the_twin_decided_what_a_simulation_of_its_recording_decides(benched: Benched, tmp_path: Path) -> None:
    out = tmp_path / "again"
    done = tokentwin("simulate", benched.folder / "served", "--gpu", "H100", "-o", out, "--no-band")
    assert done.returncode == 0, done.stderr
    columns = ["request_id", "scheduled_ns", "first_token_ns", "finish_ns", "prefix_hit_tokens", "token_times_ns"]
    served, again = (r.table("requests", columns).sort_by("request_id") for r in (benched.server, Recording.load(out)))
    assert served.equals(again)


def joined(server: Recording, client: Recording) -> pa.Table:
    """What `server` recorded of the requests that `client` sent, with the time that is not the server's."""
    served, sent = matched(server, client)
    seen, inside = (
        pc.subtract(table[end], table[begin])
        for table, end, begin in ((sent, "finish_ns", "arrival_ns"), (served, "last_sent_ns", "received_ns"))
    )
    at = served.schema.get_field_index("client_ns")
    return served.set_column(at, served.schema.field(at), pc.subtract(seen, inside))


def test_what_a_client_saw_adds_up_to_the_nanosecond(benched: Benched) -> None:
    both = joined(benched.server, benched.client)
    seen = {row["client_id"]: row["finish_ns"] - row["arrival_ns"] for row in benched.client.requests.to_pylist()}
    assert both.num_rows == 32
    for row in both.to_pylist():
        ordered = [row[name] for name in TIMES]
        assert ordered == sorted(ordered)
        phases = [b - a for a, b in pairwise(ordered)]
        assert sum(phases) + row["client_ns"] == seen[row["client_id"]]
    metrics = RunMetrics(both)
    parts = sum(metrics.values(name) for name in ("queue_ms", "prefill_ms", "decode_ms", *SERVED_METRICS))
    assert parts == pytest.approx([ns / 1e6 for ns in map(seen.__getitem__, both.column("client_id").to_pylist())])


def test_recordings_of_two_runs_cannot_be_joined(benched: Benched, tmp_path: Path) -> None:
    with made_up(answering) as url:
        bench(alone(1), BenchTarget(url=url), tmp_path / "other")
    with pytest.raises(UserError, match="no request that"):
        joined(benched.server, Recording.load(tmp_path / "other"))


def test_an_own_server_is_held_against_its_twin_in_two_commands(benched: Benched, tmp_path: Path) -> None:
    (tmp_path / "deployment.yaml").write_text("model: Llama-3.1-8B\n")
    options = ("--recording", benched.folder / "client", "--gpu", "H100", "-d", tmp_path / "deployment.yaml")
    done = tokentwin("validate", "external", *options, "--format", "json")
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(done.stdout)["cases"]
    rows = {row["figure"]: row for row in found["rows"]}
    seen = RunMetrics.from_recording(benched.client)
    assert rows["tpot_ms.mean"]["measured"] == pytest.approx(seen.distribution("tpot_ms").mean)
    assert rows["ttft_ms.p99"]["measured"] == pytest.approx(seen.distribution("ttft_ms").p99)
    assert all(row["low"] <= row["blind"] <= row["high"] for row in rows.values())
    strict = tokentwin("validate", "external", *options, "--max-error", "0")
    assert strict.returncode == 3


def test_what_a_server_runs_must_be_said(benched: Benched) -> None:
    done = tokentwin("validate", "external", "--recording", benched.folder / "client", "--gpu", "H100")
    assert done.returncode == 2
    assert "deployment: is missing" in done.stderr


def test_a_front_door_is_learnt_simulated_and_held_against_clients(benched: Benched, tmp_path: Path) -> None:
    door, out = tmp_path / "door", tmp_path / "simulated"
    learnt = tokentwin(
        "calibrate", "--from-served", benched.folder / "served", "--client", benched.folder / "client", "-o", door
    )
    assert learnt.returncode == 0, learnt.stderr
    engine = ("--gpu", "H100", "--model", "Llama-3.1-8B", "--front-door", door)
    done = tokentwin("simulate", benched.folder / "client", *engine, "-o", out, "--no-band", "--format", "json")
    assert done.returncode == 0, done.stderr
    for served, client in ((out, benched.folder / "client"), (benched.folder / "served", out)):
        refused = tokentwin("calibrate", "--from-served", served, "--client", client, "-o", tmp_path / "none")
        assert refused.returncode == 2 and "simulated': was simulated" in refused.stderr
    assert "was simulated" in tokentwin("validate", "front-door", out, *engine).stderr
    assert set(SERVED_METRICS) <= set(json.loads(done.stdout)["distributions"])
    held = tokentwin("validate", "front-door", benched.folder / "client", *engine, "--format", "json")
    assert held.returncode == 0, held.stderr
    rows = {(row["metric"], row["statistic"]): row for row in json.loads(held.stdout)["rows"]}
    seen = RunMetrics.from_recording(benched.client)
    for metric in ("ttft_ms", "itl_ms", "e2e_ms"):
        assert rows[metric, "mean"]["real"] == pytest.approx(seen.distribution(metric).mean)
    ttft = rows["ttft_ms", "p50"]
    assert ttft["engine_alone"] < ttft["simulated"]
    again = tokentwin("validate", "front-door", benched.folder / "client", *engine, "--max-error", "0")
    assert again.returncode == 3


def test_the_real_engine_is_sent_a_workload_too(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="the engine extra is not installed")
    write_parquet(replace(alone(12, 20), concurrency=1), tmp_path / "trace.parquet")  # 240 steps, enough to learn from
    small = ("--max-model-len", 512, "--max-num-seqs", 4, "--max-num-batched-tokens", 64, "--dtype", "float32")
    with serving(tmp_path, "--model", "random:llama", *small, "-o", tmp_path / "served") as server:
        options = ("--url", server.url, "--vocab-size", 200, "-o", tmp_path / "client")
        done = tokentwin("bench", tmp_path / "trace.parquet", *options)
    assert done.returncode == 0, done.stderr
    served, client = Recording.load(tmp_path / "served"), Recording.load(tmp_path / "client")
    for row in joined(served, client).to_pylist():
        ordered = [row[name] for name in TIMES]
        assert ordered == sorted(ordered)
        assert (row["prompt_tokens"], row["output_tokens"]) == (8, 20)
    assert [len(times) for times in client.requests.column("token_times_ns").to_pylist()] == [20] * 12
    rung_6_is_climbed_on_the_real_engine(tmp_path)


def rung_6_is_climbed_on_the_real_engine(folder: Path) -> None:
    """What it learns of a run, at the machine's speed in that run, explains where that run's time went."""
    served, client = folder / "served", folder / "client"
    engine, door = folder / "engine", folder / "door"
    assert tokentwin("calibrate", "--from-recordings", served, "-o", engine).returncode == 0
    learnt = tokentwin("calibrate", "--from-served", served, "--client", client, "--engine", engine, "-o", door)
    assert learnt.returncode == 0, learnt.stderr
    rung = ("validate", "front-door", client, "-c", engine, "--front-door", door)
    held = tokentwin(*rung, "--served", served, "--format", "json", "-o", folder / "rung")
    assert held.returncode == 0, held.stderr
    report = json.loads((folder / "rung" / "clients.json").read_text())
    assert report["rows"] == json.loads(held.stdout)["rows"] and report["clients"] == ["client"]
    rows = {(row["metric"], row["statistic"]): row for row in report["rows"]}
    itl = rows["itl_ms", "mean"]
    assert 0.5 < itl["in_weather"] / itl["real"] < 2, "what it learnt is of another run"
    two = tokentwin(*rung, "--served", served, "--served", served)
    assert two.returncode == 2 and "one for each client" in two.stderr


# Against servers that are made up


def alone(count: int, output_len: int = 3, **about: Any) -> Workload:
    return Workload([WorkloadRequest(at, 0, ((PRIVATE, 8),), output_len, **about) for at in range(count)])


def number_of(request: web.Request) -> int:
    """The id in the workload; -1 for what is asked before."""
    id = request.headers.get("X-Request-Id")
    return -1 if id is None else int(id.rsplit("-", 1)[1])


async def send(request: web.Request, *documents: Any, done: bool = True) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for document in documents:
        await response.write(f"data: {json.dumps(document)}\n\n".encode())
    if done:
        await response.write(b"data: [DONE]\n\n")
    return response


def word(text: str, finish: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": 0, "text": text, "finish_reason": finish, **more}]}


async def answering(request: web.Request) -> web.StreamResponse:
    return await send(request, word(" a"), word(" b"), word(" c", "length"))


def benched_rows(answer: Any, workload: Workload, out: Path, **settings: Any) -> dict[int, dict[str, Any]]:
    said: list[str] = settings.pop("said", [])
    with made_up(answer) as url:
        bench(workload, BenchTarget(url=url, **settings), out, say=said.append)
    return {row["request_id"]: row for row in Recording.load(out).requests.to_pylist()}


def test_whatever_goes_wrong_becomes_a_row_that_says_so(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        match number_of(request):
            case 0:
                return web.json_response({"error": {"message": "too many\n requests"}}, status=429)
            case 1:
                return web.Response(text="<html>broken</html>", status=500)
            case 2:
                return await send(request, word(" a"), done=False)
            case 3:
                return await send(request, word(" a"), {"error": {"message": "the engine is gone"}})
            case 4:
                await send(request, word(" a"), done=False)
                await asyncio.sleep(30)
            case 5:
                response = await send(request, word(" a"), done=False)
                await response.write(b"data: {no json}\n\n")
                return response
            case 6:
                assert request.transport is not None
                request.transport.close()
            case 7:
                return web.json_response({}, status=504)
            case 8:
                return await send(request, {"choices": [5]})
        return await answering(request)

    rows = benched_rows(answer, alone(10), tmp_path / "out", timeout_s=1.0)
    assert [(row["status"], row["reason"].split(":")[0]) for _, row in sorted(rows.items())] == [
        ("rejected", "429 too many requests"),
        ("rejected", "500 <html>broken</html>"),
        ("cancelled", "the stream was cut"),
        ("cancelled", "the server ended the stream"),
        ("timed_out", "no complete answer within 1 s"),
        ("cancelled", "the stream cannot be read"),
        ("rejected", "no connection"),
        ("timed_out", "504 {}"),
        ("cancelled", "the stream cannot be read"),
        ("finished", ""),
    ]
    assert rows[4]["first_token_ns"] is not None and rows[4]["finish_ns"] is None


def test_a_request_on_a_connection_that_its_server_closes_is_sent_again(tmp_path: Path) -> None:
    used: list[asyncio.Transport | None] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if number_of(request) >= 0 and request.transport in used:
            assert request.transport is not None
            request.transport.close()
        used.append(request.transport)
        return await answering(request)

    rows = benched_rows(answer, Workload(list(alone(4).requests), concurrency=1), tmp_path / "out")
    assert [row["status"] for row in rows.values()] == ["finished"] * 4
    assert len(used) > 1 + 4  # the one before the run, and the four that were answered


def test_a_client_that_hangs_up_does_so_at_its_time(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        if number_of(request) == 0:
            await asyncio.sleep(30)
        return await answering(request)

    rows = benched_rows(answer, alone(1, cancel_ns=50 * MS), tmp_path / "out")
    assert (rows[0]["status"], rows[0]["reason"]) == ("cancelled", "its client hung up")


def test_a_client_leaves_where_a_stop_string_ended_the_answer_and_has_it(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        response = await send(request, word(" a"), word(" b"), done=False)
        await asyncio.sleep(2)
        return response

    rows = benched_rows(answer, alone(1, stop_ns=300 * MS), tmp_path / "out")
    assert (rows[0]["status"], rows[0]["reason"], rows[0]["output_tokens"]) == ("finished", STOPPED, 2)


def test_wishes_that_a_server_refuses_are_dropped_and_told(tmp_path: Path) -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        for name in ("ignore_eos", "return_token_ids"):
            if name in body:
                error = {"message": f"Unrecognized request argument supplied: {name}"}
                return web.json_response({"error": error}, status=400)
        asked.append(body)
        return await send(request, word(" a"), word(" b c"), word("", "stop"), {"choices": [], "usage": USAGE})

    said: list[str] = []
    rows = benched_rows(answer, alone(1), tmp_path / "out", said=said)
    assert [line.split(":")[0] for line in said] == [
        "the server does not take ignore_eos",
        "the server does not take return_token_ids",
    ]
    assert asked[-1]["stream_options"] == {"include_usage": True} and asked[-1]["max_tokens"] == 3
    assert (rows[0]["prompt_tokens"], rows[0]["output_tokens"], rows[0]["prefix_hit_tokens"]) == (11, 3, 4)
    assert len(rows[0]["token_times_ns"]) == 2  # chunks, where nobody says how many tokens are in them


USAGE = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def test_an_open_loop_waits_for_nobody(tmp_path: Path) -> None:
    here = asyncio.Barrier(6)

    async def answer(request: web.Request) -> web.StreamResponse:
        if number_of(request) >= 0:
            await here.wait()  # no answer before all six have been sent
        return await answering(request)

    rows = benched_rows(answer, alone(6), tmp_path / "out", timeout_s=30.0)
    assert {row["status"] for row in rows.values()} == {"finished"}


def test_no_run_finds_the_prompts_of_another_in_a_cache(tmp_path: Path) -> None:
    asked = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if number_of(request) >= 0:
            asked.append((await request.json())["prompt"])
        return await answering(request)

    shared = Workload([WorkloadRequest(at, 0, (SHARED, (PRIVATE, 8)), 3) for at in range(2)])
    for name in ("once", "again"):
        benched_rows(answer, shared, tmp_path / name)
    (one, two), (three, four) = asked[:2], asked[2:]
    assert one[:64] == two[:64] and three[:64] == four[:64]
    assert one[:16] != three[:16] and one[64:] != two[64:]


def test_a_closed_loop_keeps_its_concurrency(tmp_path: Path) -> None:
    here: set[int] = set()
    most = [0]

    async def answer(request: web.Request) -> web.StreamResponse:
        here.add(number_of(request))
        most[0] = max(most[0], len(here))
        await asyncio.sleep(0.01)
        here.discard(number_of(request))
        return await answering(request)

    closed = Workload(list(alone(8).requests), concurrency=2)
    rows = benched_rows(answer, closed, tmp_path / "out")
    assert most == [2] and len(rows) == 8
    assert Recording.load(tmp_path / "out").workload().concurrency == 2


def test_latencies_count_from_the_intended_arrival(tmp_path: Path) -> None:
    benched_rows(answering, alone(3), tmp_path / "out")
    recording = Recording.load(tmp_path / "out")
    seen = RunMetrics.from_recording(recording)
    rows = recording.requests
    assert rows.column("arrival_ns").to_pylist() == [0, 0, 0]
    assert seen.values("ttft_ms") == pytest.approx(pc.divide(rows.column("first_token_ns"), 1e6).to_pylist())
    assert (seen.values("send_delay_ms") >= 0).all()
    assert seen.scalars()["preemptions"] is None  # a client cannot know


def test_a_key_is_sent_and_never_recorded(tmp_path: Path) -> None:
    keys = set()

    async def answer(request: web.Request) -> web.StreamResponse:
        keys.add(request.headers.get("Authorization"))
        return await answering(request)

    benched_rows(answer, alone(1), tmp_path / "out", api_key="secret-key")
    assert keys == {"Bearer secret-key"}
    assert not any(b"secret-key" in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_a_server_that_refuses_everything_says_why(tmp_path: Path) -> None:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": "no prompts today"}}, status=400)

    with pytest.raises(UserError, match="400 no prompts today"):
        benched_rows(answer, alone(1), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "line"),
    [
        (("--url", "http://127.0.0.1:9"), "does not answer"),
        (("--url", "127.0.0.1:9"), "must be http://HOST:PORT"),
        (("--url", "http://127.0.0.1:9", "--minutes", "1"), "leave it out with --url"),
        (("--url", "http://127.0.0.1:9", "--dtype", "float16"), "give --deployment"),
        (("--endpoint", "chat"), "add --url"),
    ],
)
def test_a_mistake_is_one_line(options: tuple[str, ...], line: str, tmp_path: Path) -> None:
    write_parquet(alone(1), tmp_path / "trace.parquet")
    done = tokentwin("bench", tmp_path / "trace.parquet", "-o", tmp_path / "out", *options)
    assert done.returncode == 2
    assert line in done.stderr and len(done.stderr.splitlines()) == 1


# Prompts and events


def test_equal_segments_are_equal_tokens_and_answers_are_quoted_as_they_came() -> None:
    prompts = TokenPrompts(SegmentTokens(20_000, 1000), {1})
    first = WorkloadRequest(1, 0, (SHARED, ("u1", 5)), 4)
    later = WorkloadRequest(2, 0, (SHARED, ("u1", 5), ("out:1", 4), ("u2", 3)), 4)
    prompts.answered(first, "", [7, 8, 9])
    one, two = (prompts.body(request)["prompt"] for request in (first, later))
    assert len(one) == 69 and len(two) == 76
    assert two[:69] == one and two[69:72] == [7, 8, 9]  # the answer's fourth token is made up: it never came
    assert all(1000 <= token < 20_000 for token in one)


def test_a_chat_tells_who_said_what() -> None:
    prompts = ChatPrompts({1})
    first = WorkloadRequest(1, 0, (SHARED, ("u1", 5)), 4)
    prompts.answered(first, " so it is", [])
    later = WorkloadRequest(2, 0, (SHARED, ("u1", 5), ("out:1", 4), (PRIVATE, 3)), 4)
    (asked,), (again, said, new) = (prompts.body(request)["messages"] for request in (first, later))
    assert asked == again and len(asked["content"].split()) == 69
    assert said == {"role": "assistant", "content": " so it is"}
    assert new["role"] == "user" and len(new["content"].split()) == 3


def streams() -> Iterator[bytes]:
    text = json.dumps(word(" é\n", None, token_ids=[5])).encode()
    yield b": a comment\r\n\r\ndata: " + text + b"\r\n\r\nevent: x\ndata:" + text + b"\n\ndata: [DONE]\n\n"


@given(st.lists(st.integers(0, 250), max_size=6))
def test_events_come_out_alike_however_the_bytes_are_cut(cuts: list[int]) -> None:
    (data,) = streams()
    ends = [*sorted(min(cut, len(data)) for cut in cuts), len(data)]
    events, answer = Events(), Answered()
    for begin, end in zip([0, *ends], ends, strict=False):
        for document in events.push(data[begin:end]):
            answer.take(document, end)
    assert (answer.text, answer.tokens, len(answer.times_ns), answer.ended) == (" é\n é\n", [5, 5], 2, True)


OK = b"HTTP/1.1 200 OK\r\n"
IN_CHUNKS = OK + b"transfer-encoding: Chunked\r\n\r\n"
RESPONSES = {
    IN_CHUNKS + b"3;x=y\r\nab\n\r\n2\r\ncd\r\n0\r\nsum: 1\r\n\r\n": (200, b"ab\ncd", True),
    b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Made\r\nContent-Length: 5\r\n\r\nab\ncd": (201, b"ab\ncd", True),
    OK + b"Content-Length: 0\r\nConnection: close\r\n\r\n": (200, b"", False),
    b"HTTP/1.1 200 OK\nContent-Length: 5\n\nab\ncd": (200, b"ab\ncd", True),
    b"HTTP/1.1 429 No\r\nContent-Encoding: br\r\nContent-Length: 4\r\n\r\nno!!": (429, b"", True),
}


@given(st.sampled_from(sorted(RESPONSES)), st.lists(st.integers(0, 120), max_size=6))
def test_a_response_is_the_same_however_its_bytes_are_cut(data: bytes, cuts: list[int]) -> None:
    ends = sorted({*(cut for cut in cuts if 0 < cut < len(data)), len(data)})
    took: list[bytes] = []
    response = HttpResponse(lambda piece, at_ns: took.append(piece))
    ended = [response.push(data[a:b], b) for a, b in zip([0, *ends], ends, strict=False)]
    assert ended[-1] and (response.status, b"".join(took), response.reusable) == RESPONSES[data]
    assert response.ok or response.body == b"no!!"


def test_a_response_without_a_length_ends_with_its_connection() -> None:
    took: list[bytes] = []
    response = HttpResponse(lambda piece, at_ns: took.append(piece))
    assert not response.push(OK + b"\r\nab", 1) and response.push(None, 2)
    assert took == [b"ab"] and not response.reusable


@pytest.mark.parametrize("data", [b"", OK, OK + b"Content-Length: 5\r\n\r\nab", IN_CHUNKS + b"2\r\nab\r\n"])
def test_a_response_that_its_server_breaks_off_is_no_answer(data: bytes) -> None:
    response = HttpResponse(lambda piece, at_ns: None)
    assert not (data and response.push(data, 0))
    with pytest.raises(ConnectionError):
        response.push(None, 0)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 2000 OK\r\n\r\n",
        b"HTTP/1.1 101 Other\r\n\r\n",
        OK + b"no colon\r\n\r\n",
        OK + b"Content-Length: -5\r\n\r\n",
        OK + b"Content-Length: five\r\n\r\n",
        OK + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n",
        OK + b"Content-Encoding: gzip\r\n\r\n",
        OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
        IN_CHUNKS + b"-5\r\n",
        IN_CHUNKS + b"0x5\r\n",
        IN_CHUNKS + b"2\r\nabc\r\n",
        IN_CHUNKS + b"1" * 100_000,
        OK + b"A: " + b"1" * 100_000,
        OK + b"A: " + b"1" * 100_000 + b"\r\n\r\n",
    ],
)
def test_what_cannot_be_read_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError):
        HttpResponse(lambda piece, at_ns: None).push(data, 0)


def test_bytes_that_are_no_answer_fail_one_request(tmp_path: Path) -> None:
    event = b"data: %s\n\n"
    bodies = (
        event % b"{" + b"[" * 100_000,
        event % (b'{"error":' * 900 + b"1" + b"}" * 900),
        event % (b"[" * 100_000),
        event % b'{"choices": [{"text": "a", "token_ids": ["5"]}]}',
        event % b'{"choices": [], "usage": {"prompt_tokens": %d}}' % 10**30,
        event % b'{"error": {"message": "half of a pair: \\ud800"}}',
    )
    finished = event % json.dumps(word("a", "stop")).encode()
    gzip = b"Content-Encoding: gzip\r\n"
    sent = [OK + gzip + b"\r\n", *(OK + b"\r\n" + body for body in (*bodies, finished)), b"\0" * 9, OK]

    async def answer(request: web.Request) -> web.StreamResponse:
        if (number := number_of(request)) < 0:
            return await answering(request)
        transport = request.transport
        assert isinstance(transport, asyncio.Transport)
        transport.write(sent[number])
        transport.close()
        return web.Response()

    rows = benched_rows(answer, alone(len(sent)), tmp_path / "out")
    said = [f"{row['status']}: {row['reason']}" for _, row in sorted(rows.items())]
    unread = "cancelled: the stream cannot be read: "
    begins = [
        unread + "content-encoding gzip",
        unread + "Expecting property name",
        "cancelled: the s",  # too deep, or not, by the depth of the call
        unread + "an event is nested too deeply",
        unread + "an event is not in OpenAI's format: {'choices'",
        unread + "an event is not in OpenAI's format: {'choices'",
        "cancelled: the server ended the stream: half of a pair: ?",
        "finished: ",
        unread + "no HTTP response",
        "rejected: no connection",
    ]
    assert [line[: len(begin)] for line, begin in zip(said, begins, strict=True)] == begins


def test_simulations_know_of_no_api_server() -> None:
    from tokentwin.serving.cost_model import TokenCost
    from tokentwin.serving.deployments.config import Deployment

    simulated = run_metrics(alone(2), Deployment(), TokenCost(MS, 1000, 1))
    assert all(not simulated.distribution(name).count for name in SERVED_METRICS)
