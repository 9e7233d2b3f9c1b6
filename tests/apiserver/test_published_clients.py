"""GuideLLM and AIPerf, each in its own environment: their reports agree with what was recorded."""

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from tests.apiserver.served import TWIN, Server, serving
from tests.realengine.tiny_chat_model import save_chat_model, save_tokenizer
from tokentwin.traces.measured.formats import measured_format
from tokentwin.traces.measured.run import MeasuredRun
from tokentwin.traces.recording import Recording

REQUESTS, STREAMS, TOKENS = 24, 4, 20
TEXTS = [f"Hello number {at} " * 12 for at in range(REQUESTS)]
PACKAGES = {"guidellm": "guidellm==0.8.0", "aiperf": "aiperf==0.13.0"}
MODEL = "served"
TIMES = {"ttft_ms": "first", "e2e_ms": "last"}  # what ends them in our recording

pytestmark = pytest.mark.deep


def installed(command: str) -> Path:
    """Return the command from an environment that is made once and kept; it borrows packages that we have."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "tokentwin" / f"{PACKAGES[command]}-py{sys.version_info.major}.{sys.version_info.minor}"
    if not home.exists():
        venv.create(home, with_pip=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(home)})
    (Path(packages) / "ours.pth").write_text(sysconfig.get_path("purelib"))  # of this run: clones come and go
    if not (home / "bin" / command).exists():
        done = subprocess.run(
            [home / "bin" / "pip", "install", "-q", PACKAGES[command]], capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"{PACKAGES[command]} cannot be installed here: {done.stderr.splitlines()[-1]}")
    return home / "bin" / command


@contextmanager
def recorded(engine: str, folder: Path) -> Iterator[Server]:
    """Run a server that records what it serves, with a twin or a tiny real model behind the same API process."""
    options = ("-o", folder / "out", "--served-model-name", MODEL)
    if engine == "real":
        save_chat_model(folder / "model")
        options += ("--model", folder / "model", "--device", "cpu", "--dtype", "float32")
    with serving(folder, *(TWIN if engine == "twin" else ()), *options) as server:
        yield server


def run(command: Path, *options: object, folder: Path, **environment: str) -> None:
    """Run the client as its users run it, without the network."""
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    asked = [str(command), *map(str, options)]
    done = subprocess.run(asked, env={**given, **offline, **environment}, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def write_lines(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def server_times(folder: Path) -> list[dict[str, Any]]:
    """Return recorded TTFT and E2E in ms of each request, until the text existed and until it was sent."""
    rows = [row for row in Recording.load(folder / "out").requests.to_pylist() if row["output_tokens"] == TOKENS]
    assert len(rows) == REQUESTS
    return [
        {
            "id": row["client_id"],
            "prompt_tokens": row["prompt_tokens"],
            **{
                (name, end): (row[f"{which}_{end}_ns"] - row["received_ns"]) / 1e6
                for name, which in TIMES.items()
                for end in ("text", "sent")
            },
        }
        for row in rows
    ]


def assert_seen_later(client: str, name: str, seen: Sequence[float], served: Sequence[dict[str, Any]]) -> None:
    """Assert that no client sees a token before it is text; `seen` and `served` are in the same order of requests."""
    text, sent = (np.array([row[name, end] for row in served]) for end in ("text", "sent"))
    assert (np.array(seen) >= text).all()
    print(f"{client}'s median {name} is {np.median(seen):.2f}, of which its own {np.median(seen - sent):.2f}")


def assert_imported(run: MeasuredRun, served: Sequence[dict[str, Any]], seen: Sequence[dict[str, float]]) -> None:
    """Assert that the importer has the served requests, and the latencies that the client reported."""
    assert run.by_client and not run.caution and run.workload.concurrency == STREAMS
    assert [request.output_len for request in run.workload.requests] == [TOKENS] * REQUESTS
    assert sorted(request.prompt_len for request in run.workload.requests) == sorted(
        row["prompt_tokens"] for row in served
    )
    for name in TIMES:
        assert run.figures[f"{name}.mean"] == pytest.approx(np.mean([row[name] for row in seen]))


def test_guidellm_sees_what_was_recorded_of_a_twin(tmp_path: Path) -> None:
    command = installed("guidellm")
    asked = write_lines(tmp_path / "asked.jsonl", [{"prompt": text, "output_tokens_count": TOKENS} for text in TEXTS])
    with recorded("twin", tmp_path) as server:
        options = {
            "--backend": f"kind=openai_http,target={server.url.removesuffix('/v1')},request_format=/v1/completions",
            "--profile": f"kind=concurrent,streams={STREAMS}",
            "--constraint": f"kind=max_requests,count={REQUESTS}",
            "--data": f"kind=json_file,path={asked}",
            "--output": f"kind=json,path={tmp_path / 'report.json'}",
        }
        given = [part for option in options.items() for part in option]
        run(command, "run", *given, "--disable-console", folder=tmp_path)
    (benchmark,) = json.loads((tmp_path / "report.json").read_text())["benchmarks"]
    answered = benchmark["requests"]["successful"]
    assert len(answered) == REQUESTS and not benchmark["requests"]["errored"]
    seen = [{"ttft_ms": part["time_to_first_token_ms"], "e2e_ms": part["request_latency"] * 1e3} for part in answered]
    served = server_times(tmp_path)
    (imported,) = measured_format({"format": "guidellm", "file": "report.json"}, "measured").read(tmp_path)
    assert_imported(imported, served, seen)
    # It names no request: where each is seen later than it was served, so is each in the order of their times.
    for name in TIMES:
        ordered = sorted(served, key=lambda row, name=name: row[name, "text"])
        assert_seen_later("GuideLLM", name, sorted(row[name] for row in seen), ordered)


def test_aiperf_sees_what_was_recorded_of_the_real_engine(tmp_path: Path) -> None:
    command = installed("aiperf")
    asked = write_lines(tmp_path / "asked.jsonl", [{"text": text, "output_length": TOKENS} for text in TEXTS])
    # Without the network it takes a tokenizer from Hugging Face's cache only, by a repository's name.
    repository = tmp_path / "hf" / "hub" / "models--tests--bytes"
    save_tokenizer(repository / "snapshots" / "0")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0")
    with recorded("real", tmp_path) as server:
        options = {
            "--url": server.url.removesuffix("/v1"),
            "--model": MODEL,
            "--tokenizer": "tests/bytes",
            "--endpoint-type": "completions",
            "--input-file": asked,
            "--custom-dataset-type": "single-turn",
            "--request-count": REQUESTS,
            "--concurrency": STREAMS,
            "--extra-inputs": '{"ignore_eos": true, "temperature": 0}',  # every token is text, up to which it counts
            "--output-artifact-dir": tmp_path / "report",
            "--workers-max": 1,
            "--record-processor-service-count": 1,
            "--ui": "none",
        }
        flags = ("--streaming", "--use-legacy-max-tokens", "--use-server-token-count", "--no-gpu-telemetry")
        given = [part for option in options.items() for part in option]
        run(command, "profile", *given, *flags, "--no-server-metrics", folder=tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "report" / "profile_export.jsonl").read_text().splitlines()]
    seen = {
        line["metadata"]["x_request_id"]: {
            "ttft_ms": line["metrics"]["time_to_first_token"]["value"],
            "e2e_ms": line["metrics"]["request_latency"]["value"],
        }
        for line in lines
    }
    served = server_times(tmp_path)
    assert {row["id"] for row in served} == set(seen) and len(lines) == REQUESTS
    (imported,) = measured_format({"format": "aiperf", "folder": "report"}, "measured").read(tmp_path)
    assert_imported(imported, served, list(seen.values()))
    for name in TIMES:
        assert_seen_later("AIPerf", name, [seen[row["id"]][name] for row in served], served)
