"""Comparisons as jobs: what `planning.jobs` runs for the Policy lab, each a `ComparisonDocument`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dashboard.policy_lab_page.traffic import check_few_enough
from planning.compare import comparer
from planning.compare.request import CompareRecordingsRequest, CompareRequest
from planning.progress import Tell
from serving.deployments.config import parse

SIMULATED = "dashboard.policy_lab_page.tasks:simulated"
RECORDED = "dashboard.policy_lab_page.tasks:recorded"


def simulated(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Both sides of a `CompareRequest` on the same arrivals."""
    request = parse(CompareRequest, settings, where="lab")
    check_few_enough(request)
    return comparer.compare(request, tell=tell).as_json()


def recorded(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Recordings of both sides; with a timing also `simulated`, the same runs simulated, and `ranking`."""
    request = parse(CompareRecordingsRequest, settings, where="lab")
    return comparer.compare_recordings(request, tell=tell).as_json()
