"""`tokentwin learn` and `watch` against servers: what is asked again, what is read, and what goes wrong."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="the server extra is not installed")

from tests.apiserver.served import TWIN, Server, serving
from tests.command import tokentwin
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.planning.learn import questions as ask
from tokentwin.planning.learn.http_server import HttpServer, check_folder
from tokentwin.planning.learn.questions import Bounds
from tokentwin.planning.learn.server import TimeIsUp
from tokentwin.serving.errors import UserError
from tokentwin.traces.measured.prometheus import labels_of

BOUNDS = Bounds(16, 2048)
TOLD = "model: Llama-3.1-8B\ndevice: cuda\ndtype: bfloat16\nscheduler: {max_model_len: 2048}\n"


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    deployment = tmp_path_factory.mktemp("served") / "server.yaml"
    deployment.write_text(
        "model: Llama-3.1-8B\ndevice: cuda\ndtype: bfloat16\n"
        "scheduler: {max_model_len: 2048, max_num_batched_tokens: 1024, max_num_seqs: 12, num_blocks: 2000}\n"
    )
    with serving(tmp_path_factory.mktemp("logs"), *TWIN[:3], "-d", str(deployment)) as server:
        yield server


@pytest.fixture
def server(twin: Server, tmp_path: Path) -> HttpServer:
    return HttpServer(BenchTarget(url=twin.url), tmp_path / "answers")


def test_an_answer_is_asked_for_once(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    question = ask.plateau(2, 64, BOUNDS)
    answer = server.ask(question)
    assert {len(times) for times in answer.tokens_ns.values()} == {64} and answer.unanswered == 0
    monkeypatch.setattr(
        "tokentwin.planning.learn.http_server.bench", lambda *args, **more: pytest.fail("it was asked again")
    )
    again = server.ask(question)
    assert again.sent_ns == answer.sent_ns
    server.seconds = 0.0
    with pytest.raises(TimeIsUp):
        server.ask(ask.plateau(4, 64, BOUNDS))


def test_another_question_of_the_same_name_is_asked(server: HttpServer) -> None:
    assert len(server.ask(ask.burst(Bounds(3, 2048))).tokens_ns) == 3
    assert len(server.ask(ask.burst(Bounds(4, 2048))).tokens_ns) == 4


def test_requests_of_others_are_noticed(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    server.say, server.counts = said.append, True
    server.ask(ask.plateau(2, 32, BOUNDS))
    server.ask(ask.plateau(3, 32, BOUNDS))
    assert not [line for line in said if "of others" in line]
    monkeypatch.setattr(server, "_get", lambda path: "vllm:num_requests_running 4\n")
    server.ask(ask.plateau(4, 32, BOUNDS))
    assert "4 requests of others running: they disturb the answer" in said


def test_what_the_server_reports_is_read(server: HttpServer) -> None:
    assert server.reported() == {"num_blocks": 2000, "block_size": 16, "enable_prefix_caching": True}
    assert server.longest() == 2048
    nobody = HttpServer(BenchTarget(url="http://127.0.0.1:1"), server.folder)
    assert nobody.reported() == {} and nobody.longest() is None


@pytest.mark.parametrize("page", ["/server_info", "/get_server_info"])
def test_sglang_has_two_names_for_a_page(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = json.dumps({"disable_radix_cache": True})
    monkeypatch.setattr(HttpServer, "_get", lambda self, path: info if path == page else "")
    server = HttpServer(BenchTarget(url="http://127.0.0.1:1"), tmp_path)
    assert server.reported() == {"policy": "sglang", "enable_prefix_caching": False}


def test_labels_of_a_metric() -> None:
    text = '# HELP a b\na{x="1",y="two words"} 1.0\na{x="2"} 2.0\nb 3\n'
    assert labels_of("a", text) == [{"x": "1", "y": "two words"}, {"x": "2"}]
    assert labels_of("b", text) == [{}] and labels_of("c", text) == []


def test_a_folder_keeps_the_answers_of_one_server(tmp_path: Path) -> None:
    check_folder(tmp_path, "http://a", False)
    check_folder(tmp_path, "http://a", False)  # an unfinished session goes on
    with pytest.raises(UserError, match="holds answers of http://a"):
        check_folder(tmp_path, "http://b", True)
    (tmp_path / "learnt.json").write_text("{}")
    with pytest.raises(UserError, match="--force"):
        check_folder(tmp_path, "http://a", False)
    check_folder(tmp_path, "http://a", True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--gpu", "H999"], "gpu: 'H999'"),
        (["--gpu", "H100"], "does not answer"),
        (["--gpu", "H100", "--max-concurrency", "3"], "max-concurrency"),
        (["--gpu", "H100", "--minutes", "0"], "minutes"),
        (["--gpu", "H100", "missing.csv"], "missing.csv"),
    ],
)
def test_mistakes_are_one_line(options: list[str], said: str, tmp_path: Path) -> None:
    (tmp_path / "told.yaml").write_text(TOLD)
    given = ["--url", "http://127.0.0.1:1", "-d", tmp_path / "told.yaml", "-o", tmp_path / "twin", *options]
    done = tokentwin("learn", *given, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_a_twin_that_is_none_is_one_line(tmp_path: Path) -> None:
    done = tokentwin("watch", "--url", "http://127.0.0.1:1", "--twin", tmp_path)
    assert done.returncode == 2 and "make one with learn" in done.stderr
    (tmp_path / "learnt.json").write_text("{")
    done = tokentwin("watch", "--url", "http://127.0.0.1:1", "--twin", tmp_path)
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.deep
def test_a_server_is_learnt_watched_and_simulated(twin: Server, tmp_path: Path) -> None:
    """With its settings right, over HTTP; it takes two minutes of the server."""
    (tmp_path / "told.yaml").write_text(TOLD)
    out = tmp_path / "my-twin"
    given = ["--url", twin.url, "--gpu", "H100", "-d", tmp_path / "told.yaml", "-o", out, "--max-concurrency", "16"]
    done = tokentwin("learn", *given, "--ignore-metrics")
    assert done.returncode == 0, done.stderr
    learnt = json.loads((out / "learnt.json").read_text())
    settings = {one["name"]: one["value"] for one in learnt["settings"]}
    assert (settings["policy"], settings["max_num_batched_tokens"], settings["max_num_seqs"]) == ("vllm", 1024, 12)
    errors = [abs(one["predicted"] / one["measured"] - 1) for one in learnt["proof"] if one["metric"] == "tpot_ms"]
    assert max(errors) < 0.1
    assert tokentwin("watch", "--url", twin.url, "--twin", out).returncode == 0
    trace = out / "answers" / "proof-chats" / "workload.parquet"
    simulate = ["-c", out, "-d", out / "deployment.yaml", "--front-door", out, "-o", tmp_path / "simulated"]
    done = tokentwin("simulate", trace, *simulate)
    assert done.returncode == 0, done.stderr
