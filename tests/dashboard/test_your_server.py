"""The page Your server shows what was learnt, the newest first, and an example that says that it is one."""

import json
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tests.dashboard.pages import charts, opened, shown
from tokentwin.dashboard.your_server_page.page import SAMPLE
from tokentwin.planning.learn.document import LearntServer
from tokentwin.planning.learn.watched import Layer, WatchedServer


def test_the_example_says_so_and_how_to_learn_a_server(tmp_path: Path) -> None:
    app = opened("your_server", tmp_path)
    words = shown(app)
    assert "This is an example" in words and "tokentwin learn --url" in words
    answer = LearntServer.read(json.loads(SAMPLE.read_text()))
    assert answer.headline().replace("%", "") in words.replace("%", "")
    assert len(charts(app)) == 2


def test_a_learnt_server_comes_first_with_the_last_look(tmp_path: Path) -> None:
    answer = json.loads(SAMPLE.read_text()) | {"url": "http://10.0.0.7:8000"}
    twin = tmp_path / "my-twin"
    twin.mkdir()
    (twin / "learnt.json").write_text(json.dumps(answer))
    assert "10.0.0.7" in shown(opened("your_server", tmp_path))
    slow = Layer(layer="decode steps", seen=12.0, twin=9.0, unit="ms", allowed_pct=6.0)
    look = WatchedServer(url="http://10.0.0.7:8000", at="2026-11-27 00:00:00 UTC", layers=(slow,))
    (twin / "watched.json").write_text(look.dumps())
    words = shown(opened("your_server", tmp_path))
    assert "The server has changed" in words and "decode steps +33" in words
    assert "This is an example" not in words


def test_a_damaged_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "learnt.json").write_text("{")
    assert "learn again" in shown(opened("your_server", tmp_path))
