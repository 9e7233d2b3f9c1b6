"""A look at a server's own metrics: an unchanged server is not suspected, and a changed layer is named."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.command import tokentwin
from tests.planning.learn_servers import GPU, server, told
from tests.planning.scrapes import URL, scrapes, traffic
from tokentwin.dashboard.bundled import SAMPLES
from tokentwin.planning.learn import passive_look as passive
from tokentwin.planning.learn.document import FILE, LearntServer
from tokentwin.planning.learn.kept_twin import KeptTwin
from tokentwin.planning.learn.learner import Learner
from tokentwin.planning.learn.passive_look import PassiveWatch, Scrape, passive_look
from tokentwin.planning.learn.questions import Bounds
from tokentwin.planning.learn.request import MetricsPage
from tokentwin.planning.learn.twin import Twin
from tokentwin.planning.learn.watched import WatchedServer
from tokentwin.serving.errors import UserError

TIMES_S = 10.0, 50.0
SETTINGS = {"max_num_batched_tokens": 2048, "async_scheduling": False, "max_num_seqs": 24, "num_blocks": 3000}


@pytest.fixture(scope="module")
def kept() -> KeptTwin:
    learner = Learner(server(), told(), GPU, Bounds(32, 8192), {"policy": "vllm", "enable_prefix_caching": True})
    twin = learner.prior("vllm").having(**SETTINGS, enable_prefix_caching=True)
    learnt = LearntServer.read(json.loads((SAMPLES / FILE).read_text()))
    return KeptTwin(twin, learnt.model_copy(update={"low_factor": 0.97, "high_factor": 1.03}))


def seen(kept: KeptTwin, now: Twin, *, rate: float = 4, prompt: int = 200, output: int = 40, **how) -> WatchedServer:
    workload = traffic(rate, TIMES_S[1], prompt, output, how.pop("seed", 1), how.pop("burstiness", 1.0))
    return passive_look(kept, *scrapes(now, workload, TIMES_S, **how))


def names(look: WatchedServer) -> list[str]:
    return [layer.layer for layer in look.drifted]


@pytest.mark.parametrize(("rate", "prompt", "burstiness"), [(1, 600, 1), (4, 50, 4), (12, 600, 1), (12, 50, 4)])
def test_an_unchanged_server_is_not_suspected(kept, rate: float, prompt: int, burstiness: float) -> None:
    look = seen(kept, kept.twin, rate=rate, prompt=prompt, burstiness=burstiness, seed=2)
    assert not look.drifted and look.judged, look.headline()
    assert {"decode steps", "prefill", "queueing", "API server", "KV blocks", "block size"} <= {
        layer.layer for layer in look.layers
    }


def slower(twin: Twin, decode: float, prompts: float) -> Twin:
    return replace(twin, times=replace(twin.times, correction=twin.times.correction.scaled(decode, prompts)))


def test_slower_decode_steps_are_named(kept) -> None:
    look = seen(kept, slower(kept.twin, 1.3, 1.0))
    assert names(look) == ["decode steps"]
    assert look.drifted[0].change_pct == pytest.approx(30, abs=6)


def test_slower_prompts_are_named(kept) -> None:
    assert "prefill" in names(seen(kept, slower(kept.twin, 1.0, 2.0), rate=2, prompt=3000, output=4))


def test_a_slower_api_server_is_named_and_a_fast_one_is_not(kept) -> None:
    assert names(seen(kept, kept.twin.with_front_door(client_ns=60e6))) == ["API server"]
    assert not seen(kept, kept.twin.with_front_door(client_ns=0.0)).drifted  # the twin has the client's time, too


def test_fewer_blocks_and_other_settings_are_named(kept) -> None:
    assert names(seen(kept, kept.twin.having(num_blocks=1000))) == ["KV blocks"]
    assert names(seen(kept, kept.twin.having(enable_prefix_caching=False))) == ["prefix caching"]


def test_without_labels_a_full_server_is_seen_by_its_queue(kept) -> None:
    look = seen(kept, kept.twin.having(max_num_seqs=2), rate=8, without="cache_config")
    assert names(look) == ["queueing"] and "times as long" in look.headline()


def test_an_engine_that_exports_only_ttft_has_a_layer_for_it(kept) -> None:
    look = seen(kept, kept.twin, without="request_queue")
    assert not look.drifted and {"first token", "decode steps"} <= {layer.layer for layer in look.layers}
    slow = replace(kept.twin, times=kept.twin.times.scaled(3.0))
    assert "first token" in names(seen(kept, slow, without="request_queue"))


def test_few_requests_give_no_verdict_but_a_changed_setting_is_one(kept) -> None:
    look = seen(kept, kept.twin, rate=0.3)
    assert not look.judged and look.headline().startswith(f"No verdict: {look.requests} requests ended")
    assert WatchedServer.read(json.loads(look.dumps())) == look
    look = seen(kept, kept.twin.having(num_blocks=1000), rate=0.3)
    assert look.judged and names(look) == ["KV blocks"]


def test_metrics_that_cannot_be_compared_are_one_line(kept) -> None:
    before, after = scrapes(kept.twin, traffic(4, TIMES_S[1], 200, 40, 1), TIMES_S)
    with pytest.raises(UserError, match="was the server restarted"):
        passive_look(kept, after, before)
    with pytest.raises(UserError, match="has no vllm:request_generation_tokens"):
        passive_look(kept, before, Scrape(URL, "up 1\n", 50.0))
    with pytest.raises(UserError, match="is not a Prometheus sample"):
        passive_look(kept, before, Scrape(URL, "<html>", 50.0))
    two = after.text + '\nvllm:cache_config_info{engine="1"} 1'
    with pytest.raises(UserError, match="2 engines"):
        passive_look(kept, before, Scrape(URL, two, 50.0))


def test_a_window_begins_where_the_last_one_ended(kept, monkeypatch: pytest.MonkeyPatch) -> None:
    now, taken = [0.0], []

    def read_page(url: str, key: object) -> str:
        taken.append(now[0])
        return scrapes(kept.twin, traffic(4, 10, 200, 40, 1), (9.0, 10.0))[0].text

    monkeypatch.setattr(passive, "read_page", read_page)
    monkeypatch.setattr(passive, "monotonic", lambda: now[0])
    monkeypatch.setattr(passive, "sleep", lambda s: now.__setitem__(0, now[0] + s))
    watch = PassiveWatch(kept, MetricsPage(metrics="http://server:8000/v1", window=2))
    assert not watch.look().judged  # nothing ended in the window
    now[0] += 600  # --every 10
    watch.look()
    watch.look()
    assert taken == [0.0, 120.0, 720.0, 840.0]


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/metrics", "http://a:1/v1/"])
def test_the_url_may_be_that_of_the_server(url: str) -> None:
    assert MetricsPage(metrics=url).metrics == "http://a:1/metrics"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "url: is missing; give --url, or --metrics"),
        (
            ["--url", "http://127.0.0.1:1", "--metrics", "http://127.0.0.1:1"],
            "metrics: 'http://127.0.0.1:1': cannot be",
        ),
        (["--url", "http://127.0.0.1:1", "--window", "2"], "window: 2.0: needs --metrics"),
        (["--metrics", "http://127.0.0.1:1", "--endpoint", "chat"], "endpoint: 'chat': needs --url"),
        (["--metrics", "http://127.0.0.1:1", "--window", "0"], "window: 0.0: must be"),
        (["--metrics", "host"], "metrics: 'host': must be http://HOST:PORT"),
        (
            ["--metrics", "http://127.0.0.1:1"],
            "metrics: 'http://127.0.0.1:1/metrics': cannot be read: Connection refused",
        ),
    ],
)
def test_mistakes_are_one_line(kept, options: list[str], said: str, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(KeptTwin, "load", lambda folder: kept)
    done = tokentwin("watch", "--twin", tmp_path, *options)
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_the_command_reports_what_two_windows_show(kept, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = scrapes(kept.twin, traffic(4, TIMES_S[1], 200, 40, 1), TIMES_S)
    fewer = replace(after, text=after.text.replace('num_gpu_blocks="3000"', 'num_gpu_blocks="2000"'))
    monkeypatch.setattr(KeptTwin, "load", lambda folder: kept)
    monkeypatch.setattr(passive, "sleep", lambda s: None)

    def watched(*pages: Scrape) -> tuple[int, str, str]:
        left = list(pages)
        monkeypatch.setattr(Scrape, "take", lambda url, key: left.pop(0))
        done = tokentwin("watch", "--metrics", URL, "--twin", tmp_path, "--metrics-file", tmp_path / "m.prom")
        assert not left, done.stderr
        kept_look = WatchedServer.read(json.loads((tmp_path / "watched.json").read_text()))
        return done.returncode, done.stdout, kept_look.headline()

    status, said, last = watched(before, after)
    assert status == 0 and "behaves as its twin" in said and "behaves as its twin" in last
    status, said, last = watched(before, fewer, fewer)
    assert status == 3 and "KV blocks -33 %" in said and "KV blocks" in last
    assert 'tokentwin_twin_drift{layer="KV blocks"} 1' in (tmp_path / "m.prom").read_text()
    status, said, last = watched(before, before)
    assert status == 0 and "No verdict: 0 requests" in said and "KV blocks" in last  # the last verdict stays
    status, said, _ = watched(before, fewer, after)
    assert status == 0 and "No verdict" in said  # the second window did not show it
