"""Our API server and vLLM's answer the same requests alike: the same model, greedy, in float32.

vLLM is the norm. What differs on purpose has a name in `door_cases.py` and a row in docs/serving-api.md.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.apiserver.served import serving
from tests.apiserver.served_command import free_ports
from tests.vllm.door_answers import answer, differences, families
from tests.vllm.door_cases import CASES, Case
from tests.vllm.environment import PYTHON, environment, needs_vllm

pytestmark = [pytest.mark.deep, pytest.mark.engine, pytest.mark.vllm, needs_vllm]

_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


class Doors(NamedTuple):
    """Where vLLM and our server listen."""

    vllm: tuple[str, int]
    ours: tuple[str, int]


@contextmanager
def vllm_serving(folder: Path, model: Path, *options: str) -> Iterator[tuple[str, int]]:
    """vLLM's API server until the context is left."""
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
    for _ in range(600):
        assert process.poll() is None, log.read_text()[-4000:]
        connection = HTTPConnection(*address, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            time.sleep(1)
        finally:
            connection.close()
    raise AssertionError("vLLM does not answer")


@pytest.fixture(scope="module")
def doors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Doors]:
    from planning.home import home
    from realengine.smollm2 import fetch

    folder, model = tmp_path_factory.mktemp("doors"), fetch(home())
    alike = ["--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "16", "--max-num-batched-tokens", "512"]
    named = ("--served-model-name", "m", "--device", "cpu", "--num-blocks", "400")
    with (
        vllm_serving(folder, model, *alike, "--enforce-eager", "--block-size", "32") as vllm,
        serving(folder, "--model", model, *named, *alike) as ours,
    ):
        yield Doors(vllm, ours.address)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_we_answer_as_vllm_does(case: Case, doors: Doors) -> None:
    norm, ours = answer(doors.vllm, case), answer(doors.ours, case)
    found = list(differences(norm, ours))
    assert bool(found) == bool(case.differs), "\n".join([json.dumps(norm), json.dumps(ours), *found])


def test_metrics_have_vllms_names_types_and_labels(doors: Doors) -> None:
    scrape = Case("metrics", "/metrics", None, method="GET")
    norm, ours = (families(str(answer(address, scrape)["document"])) for address in doors)
    missing = norm.keys() - ours.keys()
    assert missing and all(name.startswith("vllm:estimated_") for name in missing)  # of FLOPs and bytes
    cache = "vllm:cache_config_info"
    assert set(ours[cache][1]) < set(norm[cache][1])
    assert {name: norm[name] for name in ours if name != cache} == {n: ours[n] for n in ours if n != cache}
