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

from tokentwin.dashboard import upload_process, uploads
from tokentwin.planning.jobs.job import Job


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Toy runs and a report, which the tests of a file share."""
    from tests.dashboard.samples import write_samples

    return write_samples(tmp_path_factory.mktemp("samples") / "runs")


@pytest.fixture(autouse=True, scope="session")
def one_scan_for_components():
    """Scan the installed packages for components once, which Streamlit does for every AppTest, at most of its cost."""
    if "streamlit" in sys.modules:
        from streamlit.components.v2 import manifest_scanner

        manifest_scanner.scan_component_manifests = cache(manifest_scanner.scan_component_manifests)


@pytest.fixture(autouse=True)
def main_module():
    """Restore `__main__`, which AppTest sets to its script, and which processes of later tests would run."""
    before = sys.modules["__main__"]
    yield
    sys.modules["__main__"] = before


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Job]:
    """Collect the jobs that pages would start, without starting them."""
    jobs: list[Job] = []
    monkeypatch.setattr(Job, "start", lambda job: jobs.append(job))
    return jobs


@pytest.fixture
def read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Read uploads in this process and without its limits: a process of its own would mostly spend time on imports."""

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[bytes]:
        upload, requests, *said = command[-4:]
        limits, columns = map(json.loads, said)
        with redirect_stdout(io.StringIO()) as said:
            status = upload_process.main(Path(upload), Path(requests), upload_process.Limits(**limits), columns)
        return subprocess.CompletedProcess(command, status, said.getvalue().encode())

    monkeypatch.setattr(upload_process, "_confine", lambda limits: None)
    monkeypatch.setattr(uploads, "subprocess", SimpleNamespace(run=run, DEVNULL=subprocess.DEVNULL))
