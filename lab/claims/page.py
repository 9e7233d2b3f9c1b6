"""The page `lab/results/claims.md`: every claim, with the figure in each case."""

from __future__ import annotations

from tokentwin.planning.claims.document import WORDS, CheckedClaim, ClaimsDocument
from tokentwin.serving.answers.markdown import markdown_table

_PREFACE = """# What everyone says about inference

```
python -m lab.claims --write lab/results/claims.md
python -m lab.claims --only chunked-prefill
python -m lab.claims --engine
```
Articles repeat figures. The first command puts each to the test and writes this page, in 2.5 minutes of
one CPU. All of it is simulated, with step times from kernel tables and measured engines ([cost
model](../../docs/cost-model.md)), and with 90 % intervals. A claim *cannot be told* where its interval lies across an
end of what is expected.

`--engine` adds runs of this machine's real engine, with a small model of random weights, three times each side in
turn, in 2 minutes more: the median ratio of the pairs, the least and the greatest, and as noise by how much the same
side differs from run to run.

Each claim is a file of `lab/claims/claims`: a sentence, an experiment, the range it expects, and cases. Give a
folder of your own as `--claims`. `break_even` halves a stretch of a condition five times, at the centre of step
times. `as_fast_as` lets requests arrive as fast as another run is served. `engine` is the experiment on the real
engine.
"""


def page(answer: ClaimsDocument) -> str:
    """Return the page as Markdown."""
    tried = f"\nThe real engine ran on {answer.machine}, {answer.date}.\n" if answer.machine else ""
    lines = [_PREFACE + tried, *(f"- [{claim.name}](#{claim.name}): {claim.counted}" for claim in answer.claims)]
    for claim in answer.claims:
        lines += ["", f"## {claim.name}", f"*{claim.claim}* {claim.means} Expected: {claim.expected}.", ""]
        lines += [f"- {WORDS[case.holds]} when {case.when}: {case.number}" for case in claim.cases]
        if claim.engine is not None:
            figure = claim.engine
            lines.append(f"- real engine: {WORDS[figure.holds]} when {figure.when}: {figure.measured}")
        elif claim.untried:
            lines.append(f"- real engine: not tried, because {claim.untried}")
        lines += _terms(claim)
        if said := " ".join(text for text in (claim.break_even, claim.learnt) if text):
            lines += ["", said]
    return "\n".join(lines) + "\n"


def _terms(claim: CheckedClaim) -> list[str]:
    """Return a table of the parts of E2E, with a column for each case."""
    cases = [case for case in claim.cases if case.terms]
    if not cases:
        return []
    of_case = [{term.name: term for term in case.terms} for case in cases]
    rows = []
    for name in dict.fromkeys(term.name for case in cases for term in case.terms):
        there = [terms.get(name) for terms in of_case]
        known = next(f"{term.source}, {term.level}" for term in there if term)
        rows.append([name, *(f"{term.ms:,.1f}" if term else "-" for term in there), known])
    header = ["term, ms when", *(case.when for case in cases), "known from"]
    return ["", markdown_table(header, rows, [False, *(True for _ in cases)])]
