"""The answer of a plan, on its page and in a report: the recommended fleet, the others, and the traffic."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from tokentwin.calibration.trust import ASSUMED, Trust
from tokentwin.dashboard.plan_page import charts as plan_charts
from tokentwin.dashboard.plan_page import words
from tokentwin.dashboard.sheet import Fact, Sheet, show
from tokentwin.dashboard.shown import sentence
from tokentwin.planning.plan.document import FleetPoint, PlanDocument, Recommendation
from tokentwin.serving.answers.report import Line
from tokentwin.serving.metrics import METRICS, metric


def figures(answer: PlanDocument) -> dict[str, go.Figure]:
    """Return the figures of an answer by name."""
    drawn = {**plan_charts.latencies(answer), "lengths": plan_charts.lengths(answer.lengths)}
    drawn |= plan_charts.over_time(answer.over_time)
    if best := answer.recommendation:
        if around := _around(answer, best):
            drawn["attainment"] = plan_charts.attainment(around, best.replicas)
        drawn["prices"] = plan_charts.prices([best, *answer.runners_up], answer.spares)
    return drawn


def show_winning_mix(to: Sheet, answer: PlanDocument, best: Recommendation) -> None:
    """If a mixed fleet is the answer, show its figures, and a heading above those of the best single kind."""
    if (mix := answer.winning_mix) is not None:
        to.facts(Fact(name, value) for name, value in words.mixed_headline(mix).items())
        to.text(
            "These figures are as predicted; the mixed fleet's band was not simulated, nor its headroom.",
            soft=True,
        )
        to.heading(f"The best single kind: {words.fleet_name(best, answer.spares)}", None)


def show_recommended(to: Sheet, answer: PlanDocument, best: Recommendation, drawn: Mapping[str, go.Figure]) -> None:
    """Show the fleet's main figures, the effect of fewer replicas and of more traffic, and the command to serve it."""
    bands = words.headline_bands(answer)
    helps = {"GPUs": _plausible(best), "tok/s per user": metric("tok_s_user").help, **_MEANS}
    to.facts(Fact(name, value, bands.get(name), helps.get(name)) for name, value in words.headline(best).items())
    if bands:
        to.text(
            "The ranges are 90 % bands of this fleet, from the uncertainty of step times. Between fast and slow steps, "
            f"fleets of {best.plausible} GPUs would be enough.",
            soft=True,
        )
    if best.energy:
        to.text(sentence(best.energy.sentence), soft=True)
    show(to, (Line(f"almost as good: {tie}") for tie in answer.near_ties))
    left, right = to.beside(2)
    with left:
        if around := _around(answer, best):
            rated = words.trust_in(around, "simulated fleets")
            to.figure(drawn["attainment"], "attainment", "How many replicas", rated, _HELP["replicas"])
    with right:
        to.heading(words.why_not_fewer(best, answer.spares), None)
        to.text(sentence(answer.why_not_fewer or ""))
        if best.breaks_first:
            to.text(sentence(best.beyond_headroom))
        rated = words.trust_in([best, *answer.runners_up], "fleets")
        to.figure(drawn["prices"], "prices", "What each fleet costs", rated, small=True)
    names = [name for name in drawn if name in METRICS]
    rated = words.trust_in(answer.by_rate, "rates")
    for place, name in zip(to.beside(2) if names else (), names, strict=True):
        with place:
            to.figure(drawn[name], f"rate_{name}", f"{metric(name).label} against traffic", rated, _HELP["latency"])
    if best.vllm_serve:
        to.heading("Serve it with vLLM", None, _HELP["serve"])
        # Text, because Streamlit's highlighter of code is nearly as large as Plotly, and would delay the first figure.
        to.text(f"`{best.vllm_serve}`")
    if best.next_measurement:
        to.heading("Measure next", None, _HELP["next"])
        to.text(sentence(best.next_measurement.effect))
        to.text(f"`{best.next_measurement.command}`")


def show_others(to: Sheet, answer: PlanDocument) -> None:
    """Show the other candidates, and why they are not the answer."""
    others = list(answer.shown_others())
    if answer.mixed:
        to.heading("Mixed fleets", None)
        to.text(sentence(answer.mixed))
        if answer.mixes:
            to.table(answer.shown_mixes())
    if not answer.runners_up and not others:
        return
    to.heading("Other candidates", None)
    if answer.runners_up:
        to.table(answer.shown_offers())
    show(to, others)


def show_traffic(to: Sheet, about: str, drawn: Mapping[str, go.Figure]) -> None:
    """Show the figures of the traffic that are among `drawn`; `about` is a clause below them."""
    asked = Trust(ASSUMED, "it is your input")
    to.figure(drawn["lengths"], "lengths", "The traffic", asked)
    for name, (title, help) in _TRAFFIC.items():
        if name in drawn:
            to.figure(drawn[name], name, title, asked, help, small=True)
    to.text(sentence(about), soft=True)


_TRAFFIC = {
    "over_time": (
        "Requests and tokens over time",
        "Means of equal periods. Requests that wait for an earlier answer are drawn as if answers took no time.",
    ),
    "turns": ("Prompts of sessions", "Mean length of the prompt of each turn of a session."),
    "clients": (
        "What the clients send",
        "Clients who wait send more if answers are quick: clients / (time of an answer + think time) requests per "
        "second. The line is the longest answer that the SLOs allow; the mean must be well below it.",
    ),
}


def _around(answer: PlanDocument, best: Recommendation) -> Sequence[FleetPoint]:
    """Return the points of more and fewer replicas; until they are simulated, those of the choices."""
    choices = {choice.replicas: choice for choice in (best.choices.existing if best.choices else ())}
    return answer.by_replicas or [choices[number] for number in sorted(choices)]


def _plausible(best: Recommendation) -> str:
    drawn = f"For random traffic with other seeds, the SLOs hold in {best.elsewhere}."
    elsewhere = drawn if best.elsewhere else "Random traffic with other seeds was not simulated."
    return f"At the two ends of the 90 % interval of step times, the fleet needs {best.plausible} GPUs. {elsewhere}"


_MEANS = {
    "attainment": "The share of all requests that meet every SLO. An unfinished request meets none.",
    "headroom": "The traffic can grow by this much until an SLO breaks with a higher probability than you accept.",
    "$ per Mtok output": "Dollars per million output tokens in steady operation. The Run page shows a higher cost, "
    "because a complete run includes the time in which the fleet fills and empties.",
}
_HELP = {
    "replicas": "The share of requests that meet every SLO, with its 90 % interval, by the number of replicas.",
    "next": "Of closed loops at several concurrencies, this one narrows the predicted latencies of the recommended "
    "deployment most. `tokentwin plan --measured next.json` uses its result.",
    "serve": "The command starts one replica. All other settings are vLLM's defaults on this GPU.",
    "latency": "The recommended fleet with the same requests at lower and higher rates. The knee is the highest rate "
    "at which every SLO holds.",
}
