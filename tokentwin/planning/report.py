"""A plan on a terminal: the answer, what stands behind it, what else there is, and the command to serve it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokentwin.planning.answer import answer, count, span_s, too_short, why_not_fewer
from tokentwin.planning.curves import mean_rate
from tokentwin.planning.frontier import Point
from tokentwin.planning.plan import RUNNERS_UP, Plan
from tokentwin.planning.vllm_command import vllm_command_of

if TYPE_CHECKING:
    from rich.table import Table

_SETTING = re.compile(r" (?=\w+=)")  # before a setting in the name of an engine
_COLUMNS = ("GPUs", "$/h", "tok/s\na user", "tok/s\na GPU", "$/Mtok\noutput", "attain-\nment")


def print_plan(plan: Plan) -> None:
    """The whole report, on stdout."""
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=True)
    console.print(answer(plan), markup=False, style="bold")
    for line in _details(plan):
        console.print(line, markup=False)
    if plan.runners_up:
        console.print("")
        console.print(_table("Runners-up", [(o.point, "") for o in plan.runners_up[:RUNNERS_UP]], plan.limits.spares))
    if plan.frontier:
        console.print("")
        title = "Frontier: of the fleets that meet the SLOs none beats these for users and per GPU, or per dollar"
        console.print(_table(title, _frontiers(plan), plan.limits.spares))
    if plan.recommendation is not None and (command := vllm_command_of(plan.recommendation.offer.engine)):
        console.print("")
        console.print(command, markup=False)


def _details(plan: Plan) -> Iterator[str]:
    best = plan.recommendation
    if short := too_short(plan):
        yield short
    yield f"traffic: {_traffic(plan)}"
    for objective in plan.question.objectives.each:
        if not objective.allowed(plan.question.requests):
            yield f"{objective.text}: of so few requests, not one may break it"
    if best is not None:
        figures = best.offer.trial.figures
        assert figures is not None
        objectives = plan.question.objectives
        seen = zip(objectives.each, figures.observed, strict=True)
        yield "observed: " + ", ".join(f"{o.text} ({objectives.seen(o, value, figures.broken)})" for o, value in seen)
        yield f"why not one fewer: {why_not_fewer(plan, best)}"
        if best.knee.breaks:
            yield f"beyond {best.knee.headroom_percent} % more rate, {best.knee.breaks} breaks first"
        yield f"step times: {best.fast.standing}: {best.fast.reason}"
    for name, usd in plan.dearer:
        yield f"dearer: {name}, at least ${usd:,.2f}/h"
    for failure in plan.failures if best is not None else plan.failures[1:]:
        yield f"will not do: {failure.name}: {failure.reason}"


def _traffic(plan: Plan) -> str:
    requests = list(plan.question.workload.requests)
    seconds = span_s(plan)
    rate = f"{mean_rate(plan.question):,.3g} a second" if seconds else "all at once"
    prompt = sum(request.prompt_len for request in requests) / len(requests)
    output = sum(request.output_len for request in requests) / len(requests)
    return (
        f"{count(len(requests), 'request')} in {seconds:,.4g} s, {rate}; "
        f"{prompt:,.4g} prompt and {output:,.4g} output tokens on average"
    )


def _frontiers(plan: Plan) -> list[tuple[Point, str]]:
    """The points of both frontiers, the fastest for users first, and which of them each is on."""
    points = dict.fromkeys(sorted((*plan.frontier, *plan.by_price), key=lambda p: -p.tok_s_user))
    on = (("GPU", plan.frontier), ("$", plan.by_price))
    return [(point, " ".join(name for name, frontier in on if point in frontier)) for point in points]


def _table(title: str, rows: Sequence[tuple[Point, str]], spares: int) -> Table:
    """Fleets, and on which frontier each is."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE, padding=(0, 0, 0, 1), show_edge=False, pad_edge=False)
    table.add_column("fleet", overflow="fold")  # each setting on a line of its own
    for heading in _COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    if any(on for _, on in rows):
        table.add_column("best\nper", no_wrap=True)
    for p, on in rows:
        figures = (p.usd_per_hour, p.tok_s_user, p.tok_s_gpu, p.usd_per_mtok_out)
        shown = [f"{value:,.2f}" if value < 100 else f"{value:,.0f}" for value in figures]
        replicas = f"{p.replicas}+{spares}" if spares else str(p.replicas)
        fleet = _SETTING.sub("\n ", f"{replicas} x {p.engine}")
        cells = (fleet, str(p.gpus), *shown, f"{100 * p.attainment:.1f} %", on)
        table.add_row(*cells[: len(table.columns)])
    return table
