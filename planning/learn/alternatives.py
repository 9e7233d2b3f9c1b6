"""Settings that the answers do not tell apart: what difference they make, and which question would tell."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from tokentwin.planning.learn.committee import Member
from tokentwin.planning.learn.document import Alternative
from tokentwin.planning.learn.findings import Findings
from tokentwin.planning.learn.questions import Question
from tokentwin.planning.learn.twin import Twin


def alternatives(
    twin: Twin, findings: Findings, questions: Sequence[Question], traffic: Sequence[Question]
) -> list[Alternative]:
    """Return the other values of settings that explain the answers as well as the twin's.

    Each comes with the question whose answer depends most on it, and with how much the `traffic` depends on it.
    """
    own = Member(twin)
    return [
        _alternative(own, name, value, questions, traffic)
        for name, tried in findings.tried.items()
        if name not in findings.at_least and name not in findings.assumed
        for value in tried.alike_but(getattr(twin.setting, name))
    ]


def _alternative(
    own: Member, name: str, value: Any, questions: Sequence[Question], traffic: Iterable[Question]
) -> Alternative:
    twin = own.twin
    other = Member(twin.having_blocks_of(value) if name == "block_size" else twin.having(**{name: value}))
    question = max(questions, key=lambda one: _difference_pct(own, other, one))
    return Alternative(
        name=name,
        value=value,
        question=question.name,
        question_pct=_difference_pct(own, other, question),
        traffic_pct=max(_difference_pct(own, other, one) for one in traffic),
    )


def _difference_pct(one: Member, other: Member, question: Question) -> float:
    """Return the largest difference of a mean or median latency, in percent."""
    logs = one.foreseen(question)[0] - other.foreseen(question)[0]
    return 100 * float(np.expm1(np.abs(logs).max()))
