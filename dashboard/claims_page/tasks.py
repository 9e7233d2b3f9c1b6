"""The check of a claim under a reader's conditions, as a job."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokentwin.planning.checkout import need_lab
from tokentwin.planning.progress import Tell
from tokentwin.serving.deployments.config import parse

CHECK = "tokentwin.dashboard.claims_page.tasks:check_claim"


def check_claim(settings: dict[str, Any], out: Path, tell: Tell) -> dict[str, Any]:
    """Return the answer about one claim; `settings` hold the `name`, and the `claim` as JSON."""
    need_lab("claims")
    from lab.claims.check import check
    from lab.claims.claim import Claim

    return check({settings["name"]: parse(Claim, settings["claim"], where="claim")}, tell).as_json()
