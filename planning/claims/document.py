"""Results of tests of claims: every number and its verdict."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import pyarrow as pa

from tokentwin.serving.answers.document import Document, Number, Part, fact
from tokentwin.serving.answers.figures import NOTHING, shown_number, shown_percent
from tokentwin.serving.answers.report import FIGURE, Column, Form, Line, Table
from tokentwin.traces.document_table import table_of

Holds = Literal["yes", "no", "open"]
_MS = Form(lambda ms: NOTHING if ms is None else f"{ms:,.1f}", "%.1f")
WORDS = {"yes": "holds", "no": "does not hold", "open": "cannot be told"}


class Term(Part):
    """A part of the end-to-end latency (E2E) of a request."""

    name: str = fact("name of the part")
    ms: float = fact("time that it takes, mean over the requests", "ms")
    source: str = fact("source of the number", default="")
    level: str = fact("trust in the number: validated, interpolated, extrapolated, unknown", default="")


class Figure(Part):
    """The outcome of a claim in one set of conditions."""

    when: str = fact("conditions of the figure")
    value: Number = fact("the figure; null if it is beyond all numbers")
    low: Number = fact("least value of its 90 % interval; on a real engine, of the pairs of runs")
    high: Number = fact("greatest value of the same interval")
    unit: str = fact("unit of the three; times, where two sides are compared")
    holds: Holds = fact("whether the whole interval lies in the expected range; open: a part of it")

    @property
    def number(self) -> str:
        """The figure with its interval."""
        if self.value is None:
            return "without limit"
        around = "" if self.low == self.high else f" ({_short(self.low)} to {_short(self.high)})"
        return f"{_short(self.value)}{around} {self.unit}"


class CheckedCase(Figure):
    """The simulated figure of a claim in one set of conditions."""

    claim: str = fact("name of the claim")
    level: str = fact("trust in the case: validated, interpolated, extrapolated", default="")
    reason: str = fact("reason of the level", default="")
    terms: tuple[Term, ...] = fact("parts of E2E, where the claim asks for them", default=())


class TriedOnEngine(Figure):
    """The figure on the real engine of a machine. If two sides are compared, it is the median ratio of paired runs."""

    noise: Number = fact("excess of the first side's greatest figure over its least", "fraction")

    @property
    def measured(self) -> str:
        """The number, and the spread between runs of the same side."""
        return self.number if self.noise is None else f"{self.number}, noise {shown_percent(100 * self.noise, 0)}"

    @property
    def sentence(self) -> str:
        """The end of a sentence that begins with the number."""
        return f"on the real engine when {self.when}{self.measured.removeprefix(self.number)}"


class CheckedClaim(Part):
    """One claim, with the figure in every case."""

    name: str = fact("name of the claim")
    claim: str = fact("the claim, in a sentence")
    means: str = fact("the claim as an experiment")
    expected: str = fact("range in which the figure should lie")
    least: Number = fact("least value expected, in the unit of the cases; null if there is none", default=None)
    most: Number = fact("greatest value expected; null if there is none", default=None)
    verdict: str = fact("holds, does not hold, or the conditions in which it holds")
    break_even: str = fact("point where the change begins to pay and the verdict flips, in a sentence", default="")
    learnt: str = fact("lesson for a reader", default="")
    cases: tuple[CheckedCase, ...] = fact("the figure in every case")
    engine: TriedOnEngine | None = fact("the figure on a real engine; null if it was not tried", default=None)
    untried: str = fact("reason why the engine was not tried", default="")

    @property
    def counted(self) -> str:
        """The number of cases in which the claim holds, in words."""
        yes, open_ = (sum(case.holds == kind for case in self.cases) for kind in ("yes", "open"))
        said = f"holds in {yes} of {len(self.cases)}"
        return f"{said}, {open_} cannot be told" if open_ else said

    def shown_cases(self) -> Iterator[Line | Table]:
        """Yield the figure in every case and on the real engine, then the parts of E2E for the cases that have them."""
        figures = [(case.number, WORDS[case.holds], f"when {case.when}") for case in self.cases]
        if self.engine is not None:
            figures.append((self.engine.number, WORDS[self.engine.holds], self.engine.sentence))
        yield Table((Column("figure", FIGURE), Column("the claim"), Column("")), figures)
        if self.untried and self.engine is None:
            yield Line(f"not tried on the real engine: {self.untried}", "note")
        for case in self.cases:
            if case.terms:
                rows = [(term.ms, term.name, f"{term.source}, {term.level}") for term in case.terms]
                yield Table((Column("ms", _MS), Column("part of E2E"), Column("known from")), rows, f"when {case.when}")


def verdict_of(cases: tuple[CheckedCase, ...]) -> str:
    """Return the verdict in words: *holds*, *holds when ...*, or *does not hold*."""
    kinds = {case.holds for case in cases}
    if len(kinds) == 1:
        return WORDS[kinds.pop()]
    parts = [
        f"{WORDS[kind]} when {' or '.join(case.when for case in cases if case.holds == kind)}"
        for kind in ("yes", "open")
        if kind in kinds
    ]
    return "; ".join(parts)


class ClaimsDocument(Document):
    """The answer of `python -m lab.claims`."""

    what: ClassVar[str] = "checked claims"
    where: ClassVar[str] = "claims"

    claims: tuple[CheckedClaim, ...] = fact("the claims, in the order of their names")
    machine: str = fact("machine whose engine was tried", default="")
    date: str = fact("date and time of that trial, UTC", default="")

    @property
    def tables(self) -> tuple[str, ...]:
        return ("cases", "claims")

    def table(self, name: str) -> pa.Table:
        """Return the table `cases` or `claims`."""
        if name == "claims":
            return table_of(CheckedClaim, self.claims)
        return table_of(CheckedCase, [case for claim in self.claims for case in claim.cases])

    def report(self) -> Iterator[Line | Table]:
        for claim in self.claims:
            yield Line(claim.claim, "title")
            yield Line(claim.verdict, "headline")
            yield from claim.shown_cases()
            yield Line(f"expected: {claim.expected}")
            if claim.break_even:
                yield Line(claim.break_even)
        if self.machine:
            yield Line(f"The real engine ran on {self.machine}, {self.date}.", "note")


def _short(value: float | None) -> str:
    return "without limit" if value is None else shown_number(value)
