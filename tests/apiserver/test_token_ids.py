"""`return_token_ids`: every token of an answer by its id, in the chunk that brought it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apiserver.served import TWIN, Server, serving


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory):
    with serving(tmp_path_factory.mktemp("twin"), *TWIN, "--speed", 100) as server:
        yield server


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_a_stream_tells_every_token(server: Server, ask: str) -> None:
    whole = getattr(server, ask)(max_tokens=9, seed=1, return_token_ids=True).choice["token_ids"]
    events = getattr(server, ask)(max_tokens=9, seed=1, return_token_ids=True, stream=True).events
    chunks = [choice["token_ids"] for event in events for choice in event["choices"] if "token_ids" in choice]
    assert len(whole) == 9 and [len(ids) > 0 for ids in chunks] == [True] * len(chunks)
    assert len([token for ids in chunks for token in ids]) == 9


@pytest.mark.parametrize("ask", ["complete", "chat"])
def test_nobody_gets_them_unasked(server: Server, ask: str) -> None:
    assert "token_ids" not in getattr(server, ask)().choice
    assert all(
        "token_ids" not in choice for event in getattr(server, ask)(stream=True).events for choice in event["choices"]
    )


def test_what_its_client_calls_a_request_is_recorded(tmp_path: Path) -> None:
    from traces.recording import Recording

    with serving(tmp_path, *TWIN, "--speed", 100, "-o", tmp_path / "served") as server:
        server.ask("POST", "/v1/completions", {"prompt": "Hello"}, X_Request_Id="mine-7")
        server.ask("POST", "/v1/completions", {"prompt": "Hello"}, X_Request_Id="n" * 200)
    called = Recording.load(tmp_path / "served").requests.column("client_id").to_pylist()
    assert sorted(called) == ["", "mine-7"]
