"""`tokentwin compare`: two deployments, policies or recorded runs on the same requests."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tokentwin.finite import Finite

if TYPE_CHECKING:
    from calibration.comparison import Comparison, Ranked
    from calibration.disturbance import Disturbance
    from calibration.paired_runs import PairedRuns
    from calibration.scenario import Scenario
    from tokentwin.sides import Overrides

NO_DIFFERENCE = 3
REVERSED = 4


@click.command()
@click.argument("sides", nargs=-1, type=click.Path(), metavar="[A B]")
@click.option("--trace", type=click.Path(), help="What both sides are offered: a trace, or a YAML specification.")
@click.option("--deployment", "-d", type=click.Path(), help="The deployment of both sides, in YAML.")
@click.option("--calibration", "-c", type=click.Path(), help="Directory made by `tokentwin calibrate`.")
@click.option("--gpu", help="Time steps by the kernel tables of this GPU.")
@click.option("--a", "own_a", multiple=True, metavar="NAME=VALUE", help="What A has of its own, e.g. policy=vllm.")
@click.option("--b", "own_b", multiple=True, metavar="NAME=VALUE", help="What B has of its own, e.g. policy=fair.")
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(min=1), help="Seeds of a specification.")
@click.option("--limit", type=click.IntRange(min=1), help="Only the first N requests.")
@click.option("--rate-scale", type=Finite(min=0, min_open=True), help="Multiply the arrival rate.")
@click.option("--slo", help="Bounds in ms whose attainment is compared, e.g. 'ttft:200 tpot:50'.")
@click.option("--threshold", default=5.0, show_default=True, type=Finite(min=0), help="Percent that make a winner.")
@click.option("--engine", is_flag=True, help="Run both sides on the real engine, too.")
@click.option("--repeats", default=1, show_default=True, type=click.IntRange(min=1), help="Real runs of each side.")
@click.option("--out", "-o", type=click.Path(path_type=Path), help="Directory of the real recordings.")
@click.option("--save", type=click.Path(path_type=Path), help="File to keep the whole answer in, as JSON.")
@click.option("--force", is_flag=True, help="Replace recordings in OUT, or the file of --save.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
def compare(
    sides: tuple[str, ...],
    trace: str | None,
    deployment: str | None,
    calibration: str | None,
    gpu: str | None,
    own_a: tuple[str, ...],
    own_b: tuple[str, ...],
    seeds: int,
    limit: int | None,
    rate_scale: float | None,
    slo: str | None,
    threshold: float,
    engine: bool,
    repeats: int,
    out: Path | None,
    save: Path | None,
    force: bool,
    style: str,
) -> None:
    """Compare B with A, request by request.

    A and B are deployments in YAML, simulated on --trace; or directories, each a recording or several of them, of the
    same workload. Without them both are --deployment, or the calibrated one, and differ in --a and --b: NAME is a
    setting (policy, scheduler.max_num_seqs, fleet.router), or replicas, router, gpu, calibration.

    Exit status: 0 a difference can be claimed, 3 none can, 4 the real engine (--engine) reverses what was claimed.
    """
    from serving.errors import UserError
    from tokentwin.exports.file import check_free
    from tokentwin.sides import Overrides, is_recording
    from traces.run_metrics import parse_slo

    if save is not None:
        check_free(save, force)
    bounds = parse_slo(slo) if slo else {}
    if len(sides) not in (0, 2):
        raise UserError("A B", list(sides), "give both, or neither and --a, --b")
    for name, side in zip("AB", sides, strict=False):
        if not Path(side).exists():
            raise UserError(name, side, "does not exist; give a deployment in YAML or a directory of recordings")
    recorded = [is_recording(side) for side in sides]
    if any(recorded):
        simulation_only = (trace, deployment, calibration, gpu, own_a, own_b, limit, rate_scale, engine, out)
        if not all(recorded) or any(simulation_only) or seeds > 1:
            raise UserError("A B", list(sides), "a recording is compared with a recording, with nothing to simulate")
        told = _of_recordings(sides, bounds, threshold / 100)
        _finish(told, None, {"a": sides[0], "b": sides[1]}, style, save, force)
        return
    if trace is None:
        raise UserError("trace", "none", "give --trace, which both sides are offered")
    if engine and out is None:
        raise UserError("out", "none", "give --out, where --engine records its runs")
    if not engine and (out is not None or repeats > 1):
        raise UserError("out/repeats", str(out or repeats), "goes with --engine")
    if sides and deployment:
        raise UserError("deployment", deployment, "goes with --a and --b; A and B are deployments already")
    files = sides or (deployment, deployment)
    own = [Overrides.read(f"--{s}", file, pairs) for s, file, pairs in zip("ab", files, (own_a, own_b), strict=True)]
    scenarios, calibrations = _scenarios(own, trace, seeds, limit, rate_scale, calibration, gpu)
    if not (sides or engine) and sorted(own_a) == sorted(own_b):
        raise UserError("a/b", list(own_a) or "none", "A and B are the same; say what differs, e.g. --b policy=fair")
    told = _of_scenarios(scenarios, calibrations, bounds, threshold / 100)
    real = None
    if engine and out is not None:
        real = _on_engine([side[0] for side in scenarios], out, repeats, force, bounds, threshold / 100)
    _finish(told, real, {"a": str(own[0]), "b": str(own[1])}, style, save, force)


class Told(NamedTuple):
    """A comparison, what it is of, and what ran on both sides as `tokentwin.comparison_document` has it.

    disturbance     of runs on the real engine, else None
    """

    pairs: PairedRuns
    comparison: Comparison
    sides: list[dict[str, Any]]
    disturbance: Disturbance | None = None


def _of_recordings(
    paths: Sequence[str], bounds: dict[str, float], threshold: float, scenarios: Sequence[Scenario] = ()
) -> Told:
    """`scenarios` are what the recordings were simulated as, if they were."""
    from calibration.comparison import compare
    from tokentwin.comparing import calm, recorded_pairs
    from tokentwin.comparison_document import recorded_side
    from tokentwin.sides import recordings

    a, b = (recordings(name, path) for name, path in zip("AB", paths, strict=True))
    pairs = recorded_pairs(a, b, bounds)
    found = calm((a, b), scenarios)
    return Told(pairs, compare(pairs, threshold), [recorded_side(side, found) for side in (a, b)], found)


def _scenarios(
    own: Sequence[Overrides],
    trace: str,
    seeds: int,
    limit: int | None,
    rate_scale: float | None,
    calibration: str | None,
    gpu: str | None,
) -> tuple[list[list[Scenario]], list[str]]:
    """The scenarios of each side, one a seed; and the id of what times its steps."""
    from tokentwin.comparing import side_scenarios
    from tokentwin.scenarios import offered_workloads

    workloads = offered_workloads(trace, seeds, limit, rate_scale)
    sides, ids = [], []
    for side in own:
        timed = {"calibration": calibration, "gpu": gpu}
        if "gpu" in side.run or "calibration" in side.run:
            timed |= {key: side.run.get(key, timed[key]) for key in timed}
        fleet = side.run.get("replicas"), side.run.get("router", "")
        scenarios, price = side_scenarios(workloads, timed["calibration"], timed["gpu"], side.settle, *fleet)
        sides.append(scenarios)
        ids.append(price.calibration)
    return sides, ids


def _of_scenarios(
    sides: Sequence[Sequence[Scenario]], calibrations: Sequence[str], bounds: dict[str, float], threshold: float
) -> Told:
    from calibration.comparison import compare
    from tokentwin.comparing import simulated_pairs
    from tokentwin.comparison_document import simulated_side
    from tokentwin.progress import counting

    with counting("simulating", sum(map(len, sides))) as advance:
        pairs = simulated_pairs(sides, bounds, advance)
    ran = [simulated_side(made[0], id) for made, id in zip(sides, calibrations, strict=True)]
    return Told(pairs, compare(pairs, threshold), ran)


def _on_engine(
    sides: Sequence[Scenario], out: Path, repeats: int, force: bool, bounds: dict[str, float], threshold: float
) -> Told:
    """Both sides on the real engine, in turns (A B, B A, ...), so that a drift of the machine hits both."""
    from serving.errors import UserError
    from tokentwin.engines import load_engine
    from tokentwin.whole_run import record_whole

    for scenario in sides:
        if scenario.engines != 1 or scenario.deployment.fleet is not None:
            raise UserError("engine", scenario.engines, "is one engine; compare fleets without --engine")
    for number in range(1, repeats + 1):
        for name, scenario in sorted(zip("ab", sides, strict=True), reverse=number % 2 == 0, key=lambda pair: pair[0]):
            click.echo(f"real run {number} of {repeats} of {name.upper()}", err=True)
            with closing(load_engine(scenario.deployment)) as engine:
                record_whole(scenario.workload, engine, out / name / f"run-{number}", overwrite=force)
    return _of_recordings([str(out / name) for name in "ab"], bounds, threshold, sides)


def _finish(told: Told, real: Told | None, about: dict[str, str], style: str, out: Path | None, force: bool) -> None:
    """Print it, save it, and leave with its exit status."""
    from calibration.comparison import ranking
    from tokentwin.comparison_document import simulated_errors
    from tokentwin.exports.file import write_whole

    ranked = ranking(told.comparison, real.comparison) if real else []
    whole = _document(told, real, ranked, about)
    document = json.dumps(whole, allow_nan=False)
    if out is not None:
        write_whole(out, lambda file: file.write(document.encode()), force)
    if style == "json":
        click.echo(document)
    else:
        click.echo(f"A: {about['a']}\nB: {about['b']}")
        print_comparison(told.comparison)
        print_disturbance(told.disturbance)
        if real:
            click.echo("\non the real engine")
            print_comparison(real.comparison)
            print_disturbance(real.disturbance)
            print_errors(simulated_errors(whole))
            print_ranking(ranked)
    if any(row.outcome == "reversed" for row in ranked):
        raise SystemExit(REVERSED)
    if not told.comparison.claims:
        raise SystemExit(NO_DIFFERENCE)


def _document(told: Told, real: Told | None, ranked: Sequence[Ranked], about: dict[str, str]) -> dict[str, Any]:
    """Of the simulated runs or, where there are real ones, of those, with the simulated ones beside them."""
    from tokentwin import __version__
    from tokentwin.commands.command_line import command_line
    from tokentwin.comparison_document import beside, calmness, comparison_document

    asked = command_line(click.get_current_context(), leave_out=("style", "save", "force"))
    first, *simulated = [real, told] if real is not None else [told]
    whole = comparison_document(first.pairs, first.comparison, first.sides) | calmness(first.disturbance)
    for other in simulated:
        whole |= beside(comparison_document(other.pairs, other.comparison, other.sides), ranked)
    for side in "ab":
        whole[side]["name"] = about[side]
    return {**whole, "version": __version__, "asked": {"command": asked}}


def print_comparison(comparison: Comparison) -> None:
    """The differences, winners and losers, and the verdict last."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from serving.metrics import axis_of

    console = Console()
    rows = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    rows.add_column("metric", min_width=10)
    rows.add_column("stat", no_wrap=True)
    for heading in ("A", "B", "B - A", "%"):
        rows.add_column(heading, justify="right", no_wrap=True)
    rows.add_column("95 % interval", justify="right", min_width=9)
    rows.add_column("better", no_wrap=True)
    for row in comparison.rows:
        interval = "-" if math.isnan(row.low) else f"{_shown(row.low)} to {_shown(row.high)}"
        numbers = (_shown(row.a), _shown(row.b), _shown(row.b - row.a), _change(row.metric, row.percent))
        rows.add_row(axis_of(row.metric), row.stat, *numbers, interval, row.better)
    console.print(rows)
    tallies = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    tallies.add_column("metric", no_wrap=True)
    tallies.add_column("of", min_width=6, overflow="fold")
    for heading in ("B gains", "B loses", "same", "mean A", "mean B"):
        tallies.add_column(heading, justify="right", no_wrap=True)
    for tally in comparison.tallies:
        of = tally.group if tally.by == "all" else f"{tally.by} {tally.group or '(none)'}"
        counts = (str(n) for n in (tally.gain, tally.lose, tally.same))
        tallies.add_row(tally.metric, of, *counts, _shown(tally.mean_a), _shown(tally.mean_b))
    console.print()
    console.print(tallies)
    console.print()
    unit = _counted(comparison.units, comparison.unit_is) + (" of arrivals" if comparison.unit_is == "blocks" else "")
    lost = any(row.metric == "finished" for row in comparison.rows)
    means = " Means A and B are of the requests that finish on both sides." if lost else ""
    console.print(
        f"[dim]{_counted(comparison.requests, 'requests')}, resampled by {unit}; the intervals hold for all rows "
        f"together. A request gains or loses from {100 * comparison.threshold:g} % on.{means}[/]",
        soft_wrap=True,
    )
    if comparison.carry_over:
        console.print(
            "[yellow]queues outlast blocks: intervals may be too narrow; compare longer runs, or several seeds[/]",
            soft_wrap=True,
        )
    console.print(f"[bold]{comparison.verdict()}[/]", soft_wrap=True)


def print_disturbance(found: Disturbance | None) -> None:
    """Whether the machine was calm, where that is known."""
    from rich.console import Console

    if found is None or not found.told:
        return
    told = f"[bold yellow]DISTURBED[/]: {found.told}" if found.disturbed else f"undisturbed: {found.told}"
    Console().print(f"{told}; take real times with care" if found.disturbed else told, soft_wrap=True)


def print_errors(errors: Sequence[Mapping[str, Any]]) -> None:
    """Both sides as simulated and as they were, and what is furthest off."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from serving.metrics import axis_of, label_of
    from tokentwin.comparison_document import furthest_off

    console = Console()
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False, pad_edge=False)
    table.add_column("metric", min_width=10)
    for heading in ("stat", "side"):
        table.add_column(heading, no_wrap=True)
    for heading in ("simulated", "real", "error %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in errors:
        numbers = [math.nan if row[key] is None else row[key] for key in ("simulated", "real", "error")]
        shown = (*map(_shown, numbers[:2]), _change(row["metric"], numbers[2]))
        table.add_row(axis_of(row["metric"]), row["stat"], row["side"], *shown)
    console.print("\nsimulated against real")
    console.print(table)
    worst = furthest_off(errors)
    if worst is not None:
        stat = "" if worst["stat"] == "value" else f" {worst['stat']}"
        console.print(
            f"[bold]furthest off[/]: {label_of(worst['metric'])}{stat} of {worst['side']}, {worst['error']:+.1f} %"
        )


def print_ranking(ranked: Sequence[Ranked]) -> None:
    """Row by row, whether the engine agrees; then in a sentence."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not ranked:
        console.print("[bold]neither the simulator nor the engine claims a difference[/]")
        return
    table = Table("metric", "stat", "simulated", "real", "outcome")
    for row in ranked:
        table.add_row(
            row.metric,
            row.stat,
            *(_change(row.metric, change) for change in (row.simulated_percent, row.real_percent)),
            row.outcome,
        )
    console.print(table)
    counts = {name: sum(row.outcome == name for row in ranked) for name in ("holds", "open", "reversed", "missed")}
    told = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    verdict = "the ranking DOES NOT HOLD on the engine" if counts["reversed"] else "the engine does not contradict it"
    console.print(f"[bold]{verdict}[/]: {told}")


def _counted(count: int, things: str) -> str:
    """`things` is a plural in s."""
    return f"{count} {things if count != 1 else things.removesuffix('s')}"


def _shown(value: float) -> str:
    """Four digits, and all of those before the point."""
    return "-" if not math.isfinite(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _change(name: str, value: float) -> str:
    """In percent of A; of a share in points, and said so."""
    from calibration.comparison import SHARES

    if not math.isfinite(value):
        return "-"
    return f"{value:+.1f}{' points' if name in SHARES else ''}"
