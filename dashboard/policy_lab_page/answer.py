"""The answer of a comparison, on the page and in a report."""

from __future__ import annotations

from collections.abc import Sequence

from tokentwin.dashboard.policy_lab_page import charts as lab_charts
from tokentwin.dashboard.policy_lab_page import words
from tokentwin.dashboard.policy_lab_page.charts import Sides, side_colours
from tokentwin.dashboard.policy_lab_page.words import side_names
from tokentwin.dashboard.sheet import Sheet, show
from tokentwin.dashboard.shown import sentence
from tokentwin.dashboard.trust_page.words import CANARY
from tokentwin.planning.compare.document import ComparisonDocument, ranking_verdict
from tokentwin.serving.answers.report import FIGURE, Column, Line, Table
from tokentwin.serving.metrics import metric


def show_comparison(to: Sheet, answer: ComparisonDocument) -> None:
    """Show the basis of the verdict, its figures, the simulator's errors against real runs, and every number."""
    sides = (answer.a, answer.b)
    colours, names = side_colours(*(side.deployment.policy for side in sides)), Sides(*side_names(*sides))
    rated = words.trust(answer)
    to.table(words.beside(answer))
    to.text(sentence(answer.basis), soft=True)
    show(to, answer.cautions())
    to.text(CANARY if answer.disturbed else "", soft=True)
    to.table(answer.shown_tallies())
    drawn = lab_charts.cdfs(answer.cdfs, names, colours, tuple((answer.inputs.get("bounds") or {}).items()))
    to.figure(drawn, "cdfs", "Latency of all requests", rated, _HELP["cdfs"])
    left, right = to.beside(2)
    with left:
        claims = lab_charts.differences(answer.rows, colours)
        to.figure(claims, "differences", "Differences", rated, _HELP["differences"])
    with right:
        tallies = lab_charts.winners(answer.tallies, colours)
        to.figure(tallies, "winners", "Winners and losers", rated, _HELP["winners"])
        if answer.tenants:
            served = lab_charts.shares(answer.tenants, names, colours)
            to.figure(served, "shares", "Share of each tenant", rated, metric("jain_fairness").help)
            to.text(words.fairness(answer))
    if answer.simulated is not None and answer.ranking is not None:
        drawn, simulated = lab_charts.ranking(answer.ranking), words.trust(answer.simulated)
        to.figure(drawn, "ranking", "Does the simulator show the same differences?", simulated, _HELP["ranking"])
        outcome, verdict = ranking_verdict(answer.ranking)
        show(to, [Line(verdict, "warning" if outcome == "reversed" else "headline")])
        to.text(f"Simulated: {answer.simulated.verdict}.")
        show(to, filter(None, [answer.largest_error]))
        with to.fold("Simulated against real"):
            to.table(answer.shown_errors())
    with to.fold("The numbers"):
        to.table(answer.shown_rows())
    with to.fold("The two deployments"):
        for place, key, name, side in zip(to.beside(2), "AB", names, sides, strict=True):
            with place:
                to.text(f"**{key}: {f'{side.replicas} × ' if (side.replicas or 1) > 1 else ''}{name}**")
                to.settings(side.deployment.as_json())


def show_engines(to: Sheet, answers: Sequence[ComparisonDocument]) -> None:
    """Show the same change as simulated and as each engine ran it, in columns."""
    to.text("**B - A on each engine**")
    columns = [Column("metric"), *(Column(name, FIGURE, _ON_ENGINE) for name in words.engines(answers))]
    to.table(Table(columns, words.engine_rows(answers)))
    to.text(words.agreement(answers))


_ON_ENGINE = "B - A in percent of A, with a 95 % interval. The 95 % hold for all rows together."
_HELP = {
    "cdfs": "\n\n".join(metric(name).help for name in lab_charts.LATENCIES) + "\n\nDashed red lines are the SLOs.",
    "differences": "B compared with A on the same requests. A difference is coloured if its interval does not contain "
    "0; a grey difference may be chance. A diamond means that there is no interval.",
    "winners": "A request counts as better or worse if its latency changes by at least the threshold. An unfinished "
    "request counts as infinitely slow.",
    "ranking": "The recorded workload is simulated with the recorded deployments. The figure shows every metric in "
    "which the real runs or the simulation show a difference.",
}
