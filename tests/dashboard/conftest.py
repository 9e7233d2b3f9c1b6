"""Fixtures of the pages' tests."""

import io
import json
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dashboard import upload_process, uploads
from planning.jobs.job import Job


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy runs and a report, which the tests of a file share."""
    from tests.dashboard.samples import write_samples

    return write_samples(tmp_path_factory.mktemp("samples") / "runs")


@pytest.fixture(autouse=True, scope="session")
def one_scan_for_components():
    """Streamlit looks through all installed packages for every AppTest, which is most of its time; here once."""
    if "streamlit" in sys.modules:
        from streamlit.components.v2 import manifest_scanner

        manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)


@pytest.fixture(autouse=True)
def main_module():
    """AppTest leaves its script as `__main__`, which processes that a later test spawns would run."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Jobs that the pages start, which then are not."""
    jobs: list[Job] = []
    monkeypatch.setattr(Job, "start", lambda job: jobs.append(job))
    return jobs


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uploads are read without a process of their own, most of which is imports, and without its limits."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        upload, requests, limits = command[-3:]
        with redirect_stdout(io.StringIO()) as said:
            status = upload_process.main(Path(upload), Path(requests), upload_process.Limits(**json.loads(limits)))
        return subprocess.CompletedProcess(command, status, said.getvalue().encode())

    monkeypatch.setattr(upload_process, "_confine", lambda limits: None)
    monkeypatch.setattr(uploads, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
