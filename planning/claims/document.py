"""What became of claims: every number, its verdict, and the page of docs that shows them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import pyarrow as pa
from rich.console import RenderableType
from rich.text import Text

from planning.claims.claim import Holds
from serving.document import Document, Number, Part, fact
from traces.document_table import table_of

_WORDS = {"yes": "holds", "no": "does not hold", "open": "cannot be told"}


class Term(Part):
    """A part of the end-to-end time of a request."""

    name: str = fact("which")
    ms: float = fact("how long, mean over the requests", "ms")


class Figure(Part):
    """What was found in one set of conditions."""

    when: str = fact("the conditions")
    value: Number = fact("the figure; null if it is beyond all numbers")
    low: Number = fact("least value of its 90 % interval; on a real engine, of the pairs of runs")
    high: Number = fact("greatest value of the same")
    unit: str = fact("unit of the three; times, where two sides are compared")
    holds: Holds = fact("whether all of it lies in the expected range; open: a part")

    @property
    def number(self) -> str:
        """The figure with its interval."""
        if self.value is None:
            return "without limit"
        around = "" if self.low == self.high else f" ({_short(self.low)} to {_short(self.high)})"
        return f"{_short(self.value)}{around} {self.unit}"


class CheckedCase(Figure):
    """The figure of a simulation."""

    claim: str = fact("name of the claim")
    mark: str = fact("how far it can be trusted: validated, interpolated, extrapolated", default="")
    reason: str = fact("why", default="")
    terms: tuple[Term, ...] = fact("what E2E is made of, where that is asked for", default=())


class TriedOnEngine(Figure):
    """The figure on the real engine of a machine: of two sides, the median of the ratios of pairs of runs."""

    noise: Number = fact("by how much the first side's greatest figure is above its least", "fraction")

    @property
    def told(self) -> str:
        """What is to be said beside the number."""
        noise = "" if self.noise is None else f"; the same side differs by {100 * self.noise:.0f} %"
        return f"on the real engine when {self.when}{noise}"


class CheckedClaim(Part):
    """One claim, with the figure in every case."""

    name: str = fact("name of the claim")
    claim: str = fact("the sentence")
    means: str = fact("what it means as an experiment")
    expected: str = fact("where the figure should lie")
    verdict: str = fact("holds, does not hold, or when it holds")
    break_even: str = fact("where the change begins to pay and the verdict flips, in a sentence", default="")
    learnt: str = fact("what a reader may take from it", default="")
    cases: tuple[CheckedCase, ...] = fact("the figure in every case")
    engine: TriedOnEngine | None = fact("the figure on a real engine; null if it was not tried", default=None)


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
    machine: str = fact("whose engine was tried", default="")
    date: str = fact("when, UTC", default="")

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
            for case in claim.cases:
                if case.terms:
                    yield Text(f"    when {case.when}:")
                    for term in case.terms:
                        yield Text(f"    {term.ms:10,.2f} ms  {term.name}")
            if claim.engine is not None:
                yield Text(f"    {claim.engine.number:{width}}  {_WORDS[claim.engine.holds]:14}  {claim.engine.told}")
            yield Text(f"    expected: {claim.expected}")
            yield Text(f"    {claim.break_even}\n" if claim.break_even else "")
        if self.machine:
            yield Text(f"The real engine ran on {self.machine}, {self.date}.")

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
            for case in claim.cases:
                if case.terms:
                    lines += ["", f"The terms when {case.when}:", "", "| term | ms |", "| --- | --: |"]
                    lines += [f"| {term.name} | {term.ms:,.2f} |" for term in case.terms]
            if claim.engine is not None:
                said = _WORDS[claim.engine.holds]
                lines += ["", f"{claim.engine.number} {claim.engine.told}: {said}. {self.machine}, {self.date}."]
            lines += [text for text in (claim.break_even, claim.learnt) if text]
        return "\n".join(lines) + "\n"


def _short(value: float | None) -> str:
    if value is None:
        return "without limit"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


_PREFACE = """# What everyone says about inference

```
tokentwin claims --write docs/claims.md
tokentwin claims --only chunked-prefill
tokentwin claims --engine
```
Articles repeat figures. The first command puts each of them to the test and writes this page, in about 3 and a half
minutes of one CPU. All of it is simulated, with step times from kernel tables and measured engines
([cost model](cost-model.md)). The range behind a figure is its 90 % interval. A claim *cannot be told* where the
interval lies across an end of what is expected.

`--engine` also tries, on the real engine of this machine, the claims that state an experiment for it, which takes
4 minutes more: with a small model of random weights, three times each side in turn, on the GPU if there is one. It says
the median, the least and the greatest ratio of the pairs, and by how much the same side differs from run to run. What
it finds is about that machine and that model.

| not tried by the real engine | why |
| --- | --- |
| `cuda-graphs` | a CPU has none; a machine with a GPU tries it |
| `answer-of-200-tokens`, `decoding-a-70b`, `prefill-of-1000-tokens`, `gpus-of-a-70b` | they are about H100s |
| `grouped-query-attention`, `kv-of-a-70b` | they follow from shapes |
| `autoscaling`, `autoscaling-gpu-hours`, `prefill-decode-split` | only simulated fleets can do that |
| `kernel-fusion` | the real engine cannot run without it |
| `kv-offloading-capacity` | it would take a CPU too long |

Each claim is a file of `planning/claims/claims`: the sentence, an experiment, the range it expects, and the cases it is
tried in. `break_even` searches between two values of a condition where the change begins to pay and where the verdict
flips, at the centre of step times, by halving the stretch between them five times. `as_fast_as` lets requests arrive as
fast as another run is served, so that an open and a closed loop are equally loaded at every end of step times. `engine`
is the experiment on the real engine. Put files of your own in a folder, and give it as `--claims`.

| claim | expected | verdict |
| --- | --- | --- |"""
