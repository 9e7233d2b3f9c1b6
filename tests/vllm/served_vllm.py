"""vLLM's API server, in its own environment."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path

from tests.apiserver.served_command import free_ports
from tests.vllm.environment import PYTHON, environment

_START_S = 1200  # on two busy cores vLLM took more than 10 minutes to start
_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@contextmanager
def vllm_serving(folder: Path, model: Path, *options: str) -> Iterator[tuple[str, int]]:
    """Run vLLM's API server until the context is left."""
    port = free_ports(1)
    command = [str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--port", str(port), "--host", "127.0.0.1", *options]
    with (folder / "vllm.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment() | _QUIET)
    try:
        _wait_for(("127.0.0.1", port), process, folder / "vllm.txt")
        yield "127.0.0.1", port
    finally:
        process.terminate()
        process.wait(60)


def _wait_for(address: tuple[str, int], process: subprocess.Popen[bytes], log: Path) -> None:
    until_s = time.monotonic() + _START_S
    while time.monotonic() < until_s:
        assert process.poll() is None, f"vLLM ended with status {process.returncode}:\n{log.read_text()[-4000:]}"
        connection = HTTPConnection(*address, timeout=5)
        with closing(connection), suppress(OSError):
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        time.sleep(1)
    raise AssertionError(
        f"vLLM does not answer after {_START_S} s, the most that a test waits:\n{log.read_text()[-4000:]}"
    )
