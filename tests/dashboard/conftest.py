"""Fixtures of the pages' tests."""

import sys

import pytest

from planning.jobs.job import Job


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
