"""Rung 7 as `tokentwin validate decisions -o DIR` writes it: `decisions.json`, read here and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field

from dashboard.bundled import EXTERNAL_SAMPLE
from dashboard.library import find
from dashboard.trust_page.external_results import Result, read_results

DECISIONS = "decisions.json"


class Rule(Result):
    """What the choices of a rule were worth; shares of the questions. The first rule is that of `tokentwin plan`."""

    questions: int
    groups: int
    utility: float
    low: float
    high: float
    broke: float
    rule: str


class Decisions(Result):
    """All rules on the same questions."""

    created: str = ""
    rules: list[Rule] = Field(min_length=1)

    @property
    def ours(self) -> Rule:
        """The rule of `tokentwin plan`."""
        return self.rules[0]


def newest_decisions(runs: Path) -> Decisions:
    """The newest results under `runs`, or the bundled ones. Raises UserError, one line, when they are damaged."""
    directory = next(iter(find(runs, DECISIONS).values()), EXTERNAL_SAMPLE)
    return read_results(Decisions, directory, DECISIONS)


def decision_rows(decisions: Decisions) -> list[dict[str, Any]]:
    """Every rule, in percent."""
    return [
        {
            "choice by": rule.rule,
            "utility (%)": 100 * rule.utility,
            "90 % interval": f"{100 * rule.low:.0f} to {100 * rule.high:.0f}",
            "broken SLOs (%)": 100 * rule.broke,
        }
        for rule in decisions.rules
    ]
