"""Two twins behind a gateway that lets one prefill and the other decode."""

import http.client
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.apiserver.served_command import served
from tokentwin.traces.recording import Recording

TWIN = ("--twin", "--gpu", "H100", "--model", "Llama-3.1-8B")
PROMPT = list(range(100, 700))
FIRST = {"do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None}


def complete(url: str, **body: Any) -> tuple[int, Any]:
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=60)
    try:
        connection.request(
            "POST", "/v1/completions", json.dumps({"prompt": PROMPT, **body}), {"Content-Type": "application/json"}
        )
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def prefill() -> Iterator[str]:
    with served(*TWIN, "--role", "prefill") as (url,):
        yield url


def test_the_decoder_pulls_what_the_prefiller_hands_on(prefill: str, tmp_path: Path) -> None:
    status, first = complete(prefill, max_tokens=1, kv_transfer_params=FIRST)
    assert status == 200 and first["usage"]["completion_tokens"] == 1
    handed_on = first["kv_transfer_params"]
    assert handed_on["do_remote_prefill"] and not handed_on["do_remote_decode"]
    assert len(handed_on["remote_block_ids"][0]) == 38 and handed_on["remote_num_tokens"] == 600
    assert f"http://{handed_on['remote_host']}:{handed_on['remote_port']}" == prefill
    assert handed_on["remote_request_id"] == first["id"]
    links = json.dumps({"nic_gb_s": 10, "latency_us": 100})
    with served(*TWIN, "--role", "decode", "--kv-links", links, "-o", str(tmp_path / "run")) as (decode,):
        status, answer = complete(decode, max_tokens=5, kv_transfer_params=handed_on)
        assert status == 200 and answer["usage"]["completion_tokens"] == 5 and "kv_transfer_params" not in answer
        other = [7] * 600
        assert complete(decode, prompt=other, max_tokens=1)[0] == 200
        status, refused = complete(decode, max_tokens=1, kv_transfer_params=FIRST)
        assert status == 400 and refused["error"]["param"] == "kv_transfer_params"
    recording = Recording.load(tmp_path / "run")
    pulled, computed = recording.requests.sort_by("request_id").to_pylist()
    assert pulled["transfer_ns"] == 600 * 131_072 / 10e9 * 1e9 // 1 + 1 + 100_000
    assert computed["transfer_ns"] is None
    assert [tokens for tokens in recording.steps["prefill_tokens"].to_pylist() if tokens] == [600]


def test_a_prefiller_does_not_stream_nor_decode_for_others(prefill: str) -> None:
    status, refused = complete(prefill, max_tokens=1, stream=True, kv_transfer_params=FIRST)
    assert status == 400 and refused["error"]["param"] == "stream"
    status, refused = complete(prefill, max_tokens=1, kv_transfer_params={"do_remote_prefill": True})
    assert status == 400 and "--role decode" in refused["error"]["message"]
    assert "kv_transfer_params" not in complete(prefill, max_tokens=1)[1]
