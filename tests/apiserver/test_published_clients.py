"""GuideLLM against the twin, in an environment of its own: what it reports is what was recorded, and its own time."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import numpy as np
import pytest

from tests.apiserver.served import TWIN, serving
from traces.measured.guidellm_spans import GuideLlmSpans
from traces.recording import Recording

GUIDELLM = "guidellm==0.8.0"
REQUESTS, STREAMS, TOKENS = 40, 4, 20

pytestmark = pytest.mark.deep


@pytest.fixture(scope="module")
def guidellm():
    """The command, from an environment that is made once and kept; of torch, which it imports, ours will do."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    home = cache / "tokentwin" / f"{GUIDELLM}-py{sys.version_info.major}.{sys.version_info.minor}"
    command = home / "bin" / "guidellm"
    if not home.exists():
        venv.create(home, with_pip=True)
    packages = sysconfig.get_path("purelib", vars={"base": str(home)})
    (Path(packages) / "ours.pth").write_text(sysconfig.get_path("purelib"))  # of this run: clones come and go
    if not command.exists():
        done = subprocess.run([home / "bin" / "pip", "install", "-q", GUIDELLM], capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"{GUIDELLM} cannot be installed here: {done.stderr.splitlines()[-1]}")
    return command


def test_guidellm_sees_what_was_recorded(guidellm, tmp_path):
    asked = [{"prompt": f"Hello number {at} " * 20, "output_tokens_count": TOKENS} for at in range(REQUESTS)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(each) + "\n" for each in asked))
    with serving(tmp_path, *TWIN, "-o", tmp_path / "out") as server:
        options = (
            ("--backend", f"kind=openai_http,target={server.url.removesuffix('/v1')},request_format=/v1/completions"),
            ("--profile", f"kind=concurrent,streams={STREAMS}"),
            ("--constraint", f"kind=max_requests,count={REQUESTS}"),
            ("--data", f"kind=json_file,path={tmp_path / 'asked.jsonl'}"),
            ("--output", f"kind=json,path={tmp_path / 'report.json'}"),
        )
        command = [guidellm, "run", *(each for option in options for each in option), "--disable-console"]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
    requests = json.loads((tmp_path / "report.json").read_text())["benchmarks"][0]["requests"]
    assert len(requests["successful"]) == REQUESTS and not requests["errored"]
    theirs = imported(requests["successful"], tmp_path)
    rows = [row for row in Recording.load(tmp_path / "out").requests.to_pylist() if row["output_tokens"] == TOKENS]
    ours = {
        "ttft_ms": [(row["first_sent_ns"] - row["received_ns"]) / 1e6 for row in rows],
        "e2e_ms": [(row["last_sent_ns"] - row["received_ns"]) / 1e6 for row in rows],
    }
    assert len(rows) == REQUESTS
    assert sum(row["prompt_tokens"] for row in rows) == sum(request.prompt_len for request in theirs.workload.requests)
    for name, measured in ours.items():
        seen = [request[name] for request in client_times(requests["successful"])]
        added = np.median(seen) - np.median(measured)
        print(f"GuideLLM's median {name} is {np.median(seen):.2f}, of which its own {added:.2f}")
        assert added >= 0


def client_times(requests):
    """TTFT and E2E of each request in ms, as the client has them."""
    return [{"ttft_ms": each["time_to_first_token_ms"], "e2e_ms": each["request_latency"] * 1e3} for each in requests]


def imported(requests, folder):
    """The report as our importer reads it."""
    names = ("phase", "phase_kind", "arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s")
    with (folder / "report.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        begun = min(each["request_start_time"] for each in requests)
        for each, times in zip(requests, client_times(requests), strict=True):
            arrival_s, seconds = each["request_start_time"] - begun, (times["ttft_ms"] / 1e3, times["e2e_ms"] / 1e3)
            tokens = each["prompt_tokens"], each["output_tokens"]
            writer.writerow(["1", f"concurrent@{STREAMS}", arrival_s, *tokens, *seconds])
    (run,) = GuideLlmSpans(file="report.csv").read(folder)
    assert run.workload.concurrency == STREAMS
    assert [request.output_len for request in run.workload.requests] == [TOKENS] * REQUESTS
    return run
