"""What became of claims: every number, its verdict, and the page of docs that shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

import pyarrow as pa
from rich.console import RenderableType
from rich.text import Text

from serving.document import Document, Number, Part, fact
from traces.document_table import table_of

_WORDS = {"yes": "holds", "no": "does not hold", "open": "cannot be told"}


class CheckedCase(Part):
    """The figure in one set of conditions."""

    claim: str = fact("name of the claim")
    when: str = fact("the conditions")
    value: Number = fact("the figure; null if it is beyond all numbers")
    low: Number = fact("least value of its 90 % interval")
    high: Number = fact("greatest value of its 90 % interval")
    mark: str = fact("how far it can be trusted: validated, interpolated, extrapolated", default="")
    reason: str = fact("why", default="")
    unit: str = fact("unit of the three; times, where two sides are compared")
    holds: Literal["yes", "no", "open"] = fact("whether it lies in the expected range; open: perhaps")

    @property
    def number(self) -> str:
        """The figure with its interval."""
        if self.value is None:
            return "without limit"
        around = "" if self.low == self.high else f" ({_short(self.low)} to {_short(self.high)})"
        return f"{_short(self.value)}{around} {self.unit}"


class CheckedClaim(Part):
    """One claim, with the figure in every case."""

    name: str = fact("name of the claim")
    claim: str = fact("the sentence")
    means: str = fact("what it means as an experiment")
    expected: str = fact("where the figure should lie")
    verdict: str = fact("holds, does not hold, or when it holds")
    learnt: str = fact("what a reader may take from it", default="")
    cases: tuple[CheckedCase, ...] = fact("the figure in every case")


def verdict_of(cases: tuple[CheckedCase, ...]) -> str:
    """In a sentence: *holds*, *holds when ...*, *does not hold*."""
    kinds = {case.holds for case in cases}
    if len(kinds) == 1:
        return _WORDS[kinds.pop()]
    parts = [
        f"{_WORDS[kind]} when {' or '.join(case.when for case in cases if case.holds == kind)}"
        for kind in ("yes", "open")
        if kind in kinds
    ]
    return "; ".join(parts)


class ClaimsDocument(Document):
    """The answer of `tokentwin claims`."""

    what: ClassVar[str] = "checked claims"
    where: ClassVar[str] = "claims"

    claims: tuple[CheckedClaim, ...] = fact("in the order of their names")

    @property
    def tables(self) -> tuple[str, ...]:
        return ("cases", "claims")

    def table(self, name: str) -> pa.Table:
        """`cases` or `claims`."""
        if name == "claims":
            return table_of(CheckedClaim, self.claims)
        return table_of(CheckedCase, [case for claim in self.claims for case in claim.cases])

    def report(self) -> Iterator[RenderableType]:
        """As `tokentwin claims` prints it."""
        for claim in self.claims:
            yield Text(claim.claim, style="bold")
            yield Text(f"  {claim.verdict}")
            width = max(len(case.number) for case in claim.cases)
            for case in claim.cases:
                yield Text(f"    {case.number:{width}}  {_WORDS[case.holds]:14}  when {case.when}")
            yield Text(f"    expected: {claim.expected}\n")

    def page(self) -> str:
        """As Markdown."""
        lines = [_PREFACE]
        for claim in self.claims:
            said = claim.claim.replace("|", "\\|")
            lines.append(f"| [{said}](#{claim.name}) | {claim.expected} | {claim.verdict} |")
        for claim in self.claims:
            lines += ["", f"## {claim.name}", f"*{claim.claim}*", "", claim.means, ""]
            lines += ["| when | figure | |", "| --- | --- | --- |"]
            lines += [f"| {case.when} | {case.number} | {_WORDS[case.holds]} |" for case in claim.cases]
            lines += ["", f"Expected: {claim.expected}. **{claim.verdict[0].upper()}{claim.verdict[1:]}.**"]
            lines += [claim.learnt] if claim.learnt else []
        return "\n".join(lines) + "\n"


def _short(value: float | None) -> str:
    if value is None:
        return "without limit"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


_PREFACE = """# What everyone says about inference

```
tokentwin claims --write docs/claims.md
tokentwin claims --only chunked-prefill
```
Articles repeat figures. The first command puts each of them to the test and writes this page. All of it is simulated,
with step times from kernel tables and measured engines ([cost model](cost-model.md)). The range behind a figure is its
90 % interval. A claim *cannot be told* where the interval lies across an end of what is expected.

Each claim is a file of `planning/claims/claims`: the sentence, an experiment, the range it expects, and the cases it is
tried in. Put files of your own in a folder, and give it as `--claims`.

| claim | expected | verdict |
| --- | --- | --- |"""
