"""Rung 7 (choices among measured configurations) as a Markdown page and as plain data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from lab.decisions.own_rows import COUNTS
from lab.decisions.rules import COMMON
from lab.decisions.scoring import BOLD, SHARES, Decisions, Score
from tokentwin.planning.plan.worth import RISK
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.answers.markdown import markdown_table

COMMAND = "python -m lab.decisions --write lab/results/decisions.md"

_PREFACE = f"""# Rung 7: right choices

```
{COMMAND}
```
Users act on a choice, not on an error. This command asks which of several measured configurations gives most
output tokens per second of a GPU within bounds on mean TTFT and TPOT. It compares the choice with what was measured.

- A *group* is one model with the same prompt and output lengths. Its configurations differ in GPUs, parallel sizes,
  precision, engine or concurrency. There is one group for each kind of GPU, and one over all kinds that were measured.
- *Bounds* are five of TPOT, and five of TTFT or none. They divide the measured range of the group evenly in its
  logarithm. A question is asked if some configuration keeps the bounds, and the fastest one of all does not.
- *Throughput* is requests in flight times output tokens, over TTFT and TPOT of the whole output, by Little's law.
- *Utility* is the measured throughput of the choice over the best that keeps the bounds. It is 0 if the choice breaks
  a bound, or if nothing is chosen. The interval is the 90 % interval of a bootstrap over groups.
- *Broken* is the share of the questions for which the choice breaks a bound in truth.
- *Given away* is 1 - utility on average, where the choice keeps the bounds.
- Predictions are blind: what is predicted taught nothing to its own prediction ([rung 4](external.md)).
"""

_RULES = f"""
- *Expected worth* is the rule of [`tokentwin plan`](../../docs/plan.md#appetite-for-risk), with throughput in place of
  a price. It draws errors from the 90 % interval of every prediction, as a lognormal distribution with a side for
  either sign.
  {100 * COMMON:.0f} % of an error's variance is common to all configurations of a model on a GPU. Errors of TTFT and
  TPOT are independent. An option is worth its share of the best throughput of each draw, and 0 if it breaks a bound
  there. The rule takes the option of greatest expected worth among those that keep the bounds in 90 % as many draws as
  the surest option does. Where the surest is sure, that is 90 % of the draws. Where none is, more caution would give
  much away for little.
- *Centre* and *slow end* take the greatest predicted throughput of what keeps the bounds there.
- *Roofline* is the same with every operation as fast as the datasheet says, in the same simulator.
- *Anchored constant* is the roofline times one factor. The factor makes the TPOT of one configuration right: the middle
  one of the group, by GPUs and then by requests in flight. No other rule has seen a measurement of the group.
"""


def as_dict(decisions: Decisions, left_out: Counter[str]) -> dict[str, Any]:
    """Return the report, as `--format json` prints it."""
    return {
        "rules": [{"rule": name, **asdict(score)} for name, score in decisions.rules.items()],
        "appetites": [{"risk": risk, **asdict(score)} for risk, score in decisions.appetites.items()],
        "parts": [{"model": model, "gpu": gpu, **asdict(score)} for (model, gpu), score in decisions.parts.items()],
        "closer": [{"share": share, "risk": risk, **asdict(s)} for (share, risk), s in decisions.closer.items()],
        "own": [{"measured": count, "risk": risk, **asdict(s)} for (count, risk), s in decisions.own.items()],
        "common": decisions.common,
        "between": decisions.between,
        "left_out": dict(_most_first(left_out)),
    }


RULE_HEADER = ("rule", "utility", "90 % interval", "broken", "nothing chosen", "given away")


def rule_rows(decisions: Decisions) -> list[tuple[str, ...]]:
    """Return the table of all rules, under `RULE_HEADER`."""
    return [
        (
            name,
            f"{s.utility:.2f}",
            f"{s.low:.2f} to {s.high:.2f}",
            shown_share(s.broke),
            shown_share(s.none),
            shown_share(s.regret),
        )
        for name, s in decisions.rules.items()
    ]


def markdown(decisions: Decisions, left_out: Counter[str]) -> str:
    """Return the page `lab/results/decisions.md`."""
    some = next(iter(decisions.rules.values()))
    return "\n".join(
        [
            _PREFACE,
            f"## {some.questions:,} questions about {some.groups} groups\n",
            markdown_table(RULE_HEADER, rule_rows(decisions)),
            _RULES,
            *_against_target(decisions),
            f"Measured here: {shown_share(decisions.common)} of the errors' mean square is common to a model on a GPU.",
            f"Errors of TTFT and TPOT correlate by {decisions.between:.2f}.\n",
            _UNSEEN,
            "## Appetite for risk\n",
            "The same rule with other risks. *Promised* is the mean probability that the choice keeps the bounds, as",
            "the rule had it. *Kept* is how many choices did.\n",
            markdown_table(_APPETITE_HEADER, map(_appetite_row, decisions.appetites.items())),
            *_with_own_rows(decisions),
            "\n## What better predictions would be worth\n",
            "The same questions, had every prediction been off by a share of its error, with bands as much narrower.\n",
            markdown_table(_CLOSER_HEADER, _closer_rows(decisions)),
            _target_takes(decisions),
            "\n## By model and GPU\n",
            markdown_table(_PART_HEADER, map(_part_row, decisions.parts.items())),
            "\n## Measured rows that are in no question\n",
            *_left_out(left_out),
        ]
    )


def _against_target(decisions: Decisions) -> Iterator[str]:
    """Yield the first rule's target and result, and the models and GPUs for which it broke bounds most often."""
    ours = next(iter(decisions.rules.values()))
    met = ours.utility >= _UTILITY and ours.broke <= _BROKEN
    yield f"The target is a utility of {_UTILITY:.2f} with at most {shown_share(_BROKEN)} broken. Ours has"
    yield f"{ours.utility:.2f} with {shown_share(ours.broke)} broken: {'met' if met else '**missed**'}."
    worst = sorted(decisions.parts.items(), key=lambda part: -part[1].broke)[:3]
    named = ", ".join(f"{model} on {gpu} ({shown_share(score.broke)})" for (model, gpu), score in worst)
    yield f"Where it keeps the bounds, caution gives away {shown_share(ours.regret)} of the best: bands are as wide"
    yield "as rows needed that [nothing taught](external.md#how-far-off-groups-are-that-taught-nothing). More risk"
    yield f"gives away less and breaks more. It broke most for {named}.\n"


_UTILITY, _BROKEN = 0.7, 0.08
_OWN_UTILITY, _OWN_BROKEN = 0.8, 0.07
_APPETITE_HEADER = ("risk", "utility", "broken", "given away", "promised", "kept")
_CLOSER_HEADER = (
    "of its error",
    *(f"{what}, risk {100 * risk:.0f} %" for risk in (RISK, BOLD) for what in ("utility", "broken")),
)
_OWN_HEADER = ("measured", *_CLOSER_HEADER[1:])
_PART_HEADER = ("model", "GPU", "questions", "utility", "broken", "promised", "kept")


def _appetite_row(pair: tuple[float, Score]) -> tuple[str, ...]:
    risk, s = pair
    return (
        shown_share(risk),
        f"{s.utility:.2f}",
        shown_share(s.broke),
        shown_share(s.regret),
        shown_share(s.promised),
        shown_share(s.kept),
    )


def _closer_rows(decisions: Decisions) -> Iterator[tuple[str, ...]]:
    for share in SHARES:
        scores = [decisions.closer[share, risk] for risk in (RISK, BOLD)]
        yield shown_share(share), *(cell for s in scores for cell in (f"{s.utility:.2f}", shown_share(s.broke)))


_UNSEEN = """A review asked such questions about rows that are kept apart, so nobody can repeat it here. With earlier
predictions (0.64 and 6 % here) the rule had a utility of 0.59 with 10 % broken there, and 29 to 55 % of the errors'
mean square was common to a model on a GPU.
"""


def _with_own_rows(decisions: Decisions) -> Iterator[str]:
    """Yield the section on choices with a few measured configurations; nothing if they were not tried."""
    if not decisions.own:
        return
    rows = []
    for count in COUNTS:
        scores = [decisions.own[count, risk] for risk in (RISK, BOLD)]
        rows.append((str(count), *(cell for s in scores for cell in (f"{s.utility:.2f}", shown_share(s.broke)))))
    met = any(
        score.utility >= _OWN_UTILITY and score.broke <= _OWN_BROKEN
        for (count, _), score in decisions.own.items()
        if count == max(COUNTS)
    )
    yield "\n## With a few measured configurations\n"
    yield "The same questions after some configurations of each group were measured (drawn at random, twice)."
    yield f"The median group has {decisions.options:.0f} configurations. The others are predicted with the measured"
    yield "ones, as [a user's own runs](../../docs/external-cases.md#runs-of-your-own-server) are.\n"
    yield markdown_table(_OWN_HEADER, rows)
    yield f"\nThe target with {max(COUNTS)} is a utility of {_OWN_UTILITY:.2f} with at most {shown_share(_OWN_BROKEN)}"
    yield f"broken: {'met' if met else '**missed**'}."


def _target_takes(decisions: Decisions) -> str:
    met = [at for at, s in decisions.closer.items() if s.utility >= _UTILITY and s.broke <= _BROKEN]
    if not met:
        return f"\nThe target would take less than {shown_share(min(SHARES))} of the errors."
    share, risk = max(met)
    return f"\nThe target is met with {shown_share(share)} of the errors, at a risk of {shown_share(risk)}."


def _part_row(pair: tuple[tuple[str, str], Score]) -> tuple[str, ...]:
    part, s = pair
    return (
        *part,
        f"{s.questions}",
        f"{s.utility:.2f}",
        shown_share(s.broke),
        shown_share(s.promised),
        shown_share(s.kept),
    )


def _left_out(left_out: Counter[str]) -> Iterator[str]:
    rows = [(f"{count:,}", reason) for reason, count in _most_first(left_out)]
    yield markdown_table(("rows", "because"), rows) if rows else "None."
    yield ""


def _most_first(left_out: Counter[str]) -> Sequence[tuple[str, int]]:
    return sorted(((r, n) for r, n in left_out.items() if n), key=lambda entry: (-entry[1], entry[0]))
