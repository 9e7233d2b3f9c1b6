"""`tokentwin plan`: the cheapest fleet that meets the objectives on given traffic."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tokentwin.finite import Finite
from tokentwin.planning.traffic import BUSIEST_S

if TYPE_CHECKING:
    from serving.config import Deployment
    from serving.workload import Workload
    from tokentwin.planning.engines import Engine, RuledOut, Split
    from tokentwin.planning.trial import Pricing

INFEASIBLE = 4  # exit status
_OPTIONS = {"model": "--model", "tensor_parallel_size": "--tp", "policy": "--policy"}


@click.command()
@click.argument("traffic", type=click.Path())
@click.option("--slo", "slos", multiple=True, required=True, help="'ttft_ms p99<=500', 'attainment>=0.99'; repeat it.")
@click.option("--model", help="Model to serve; by default the deployment's, else Llama-3.1-8B.")
@click.option("--gpu", "gpus", multiple=True, help="A candidate GPU; repeat it, or separate names by commas.")
@click.option("--tp", "tensor_parallel_sizes", multiple=True, help="Candidate tensor-parallel sizes, likewise.")
@click.option("--policy", "policies", multiple=True, help="Candidate scheduling policies, likewise.")
@click.option(
    "--vary", "varied", multiple=True, metavar="NAME=V,V", help="Candidate values of any other setting; repeat it."
)
@click.option("--split", "splits", multiple=True, help="Prefill to decode engines, 1:1,1:2; none is undivided.")
@click.option("--price", "prices", multiple=True, help="Dollars per GPU-hour, H100=2.9; by default the catalogue's.")
@click.option("--spares", default=0, show_default=True, type=click.IntRange(0, 10_000), help="Replicas that may fail.")
@click.option("--rate-scale", type=Finite(min=0, min_open=True), help="Multiply the arrival rate.")
@click.option("--limit", type=click.IntRange(min=2), help="Only the first N requests.")
@click.option(
    "--window-s",
    default=BUSIEST_S,
    show_default=True,
    type=Finite(min=0, min_open=True, max=1e9),
    help="Plan for the busiest stretch of so many seconds.",
)
@click.option("--router", default="least-requests", show_default=True, help="A router, or module:Class.")
@click.option("--max-replicas", default=1024, show_default=True, type=click.IntRange(1, 100_000), help="Most to try.")
@click.option("--calibration", "-c", type=click.Path(), help="Directory made by `tokentwin calibrate`.")
@click.option("--deployment", "-d", "deployment_file", type=click.Path(), help="All other settings, in YAML.")
@click.option("--jobs", "-j", type=click.IntRange(min=1), help="Simulations at once; by default one for each CPU.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.option("--save", type=click.Path(path_type=Path), help="File to keep the whole answer in, as JSON.")
@click.option("--force", is_flag=True, help="Overwrite the file.")
def plan(
    traffic: str,
    slos: tuple[str, ...],
    model: str | None,
    gpus: tuple[str, ...],
    tensor_parallel_sizes: tuple[str, ...],
    policies: tuple[str, ...],
    varied: tuple[str, ...],
    splits: tuple[str, ...],
    prices: tuple[str, ...],
    spares: int,
    rate_scale: float | None,
    limit: int | None,
    window_s: float,
    router: str,
    max_replicas: int,
    calibration: str | None,
    deployment_file: str | None,
    jobs: int | None,
    style: str,
    save: Path | None,
    force: bool,
) -> None:
    """The cheapest fleet that meets every SLO on TRAFFIC: a trace, or a YAML specification for `trace synth`.

    --save and --format json also say what more and less traffic, and more and fewer replicas, would do; `tokentwin
    export` makes a report of it.

    Every fleet gets the same arrivals. The exit status is 4 if no fleet meets the SLOs.
    """
    from sim.router import find_router
    from tokentwin.commands.command_line import command_line
    from tokentwin.costs import named_prices
    from tokentwin.exports.file import check_free, write_whole
    from tokentwin.planning.document import plan_document
    from tokentwin.planning.draws import drawn_again
    from tokentwin.planning.objectives import parse_objectives
    from tokentwin.planning.plan import Limits, make_plan
    from tokentwin.planning.report import print_plan
    from tokentwin.planning.traffic import planned_traffic
    from tokentwin.planning.trial import Question
    from tokentwin.planning.workers import Workers
    from tokentwin.progress import counting

    if save is not None:
        check_free(save, force)
    objectives = parse_objectives(slos)
    find_router(router)
    workload = planned_traffic(_read(traffic, limit), window_s, rate_scale)
    draws = drawn_again(workload, _draw(workload, traffic, limit, window_s, rate_scale))
    requests = sum(1 for _ in workload.requests)
    engines, ruled_out, pricing = _candidates(
        workload,
        calibration,
        deployment_file,
        model,
        _listed(gpus),
        [_size(text) for text in _listed(tensor_parallel_sizes)],
        _listed(policies),
        _variations(varied),
        [_split(text) for text in _listed(splits)],
        named_prices(prices),
    )
    question = Question(workload, requests, objectives, pricing, router)
    document = ""
    with Workers(question, jobs) as workers:
        with counting("candidates", len(engines)) as progress:
            limits = Limits(max_replicas, spares)
            found = make_plan(workers, engines, ruled_out, limits, lambda so_far: progress(so_far.settled), draws)
        if style == "json" or save is not None:
            asked = command_line(click.get_current_context(), leave_out=("style", "save", "force", "jobs"))
            document = json.dumps(plan_document(workers, found, engines, {"command": asked}), allow_nan=False)
    if save is not None:
        write_whole(save, lambda file: file.write(document.encode()), force)
    if style == "json":
        click.echo(document)
    else:
        print_plan(found)
    if found.recommendation is None:
        sys.exit(INFEASIBLE)


def _read(traffic: str, limit: int | None) -> Workload:
    """A trace, or the workload that a YAML file specifies."""
    from tokentwin.planning.traffic import specified_traffic
    from traces.reader import read_workload
    from traces.reshape import reshaped
    from traces.synth import read_spec

    if _specified(traffic):
        return specified_traffic(read_spec(traffic), limit)
    return reshaped(read_workload(traffic), limit=limit)


def _draw(
    planned: Workload, traffic: str, limit: int | None, window_s: float, rate_scale: float | None
) -> Callable[[int], Workload]:
    """Draws the traffic that is `planned` for again: a specification from the seeds after its own."""
    from tokentwin.planning.draws import reordered
    from tokentwin.planning.traffic import planned_traffic, specified_traffic
    from traces.synth import read_spec

    if not _specified(traffic):
        return reordered(planned)
    spec = read_spec(traffic)

    def draw(number: int) -> Workload:
        again = specified_traffic(spec.model_copy(update={"seed": spec.seed + number}), limit)
        return planned_traffic(again, window_s, rate_scale)

    return draw


def _specified(traffic: str) -> bool:
    return Path(traffic).suffix in (".yaml", ".yml")


def _candidates(
    workload: Workload,
    calibration: str | None,
    deployment_file: str | None,
    model: str | None,
    gpus: list[str],
    sizes: list[int],
    policies: list[str],
    variations: list[dict[str, Any]],
    splits: list[Split | None],
    prices: dict[str, float],
) -> tuple[list[Engine], list[RuledOut], Pricing]:
    """What may serve, what cannot, and what times the steps."""
    from calibration.engine_calibration import FILE, EngineCalibration
    from serving.config import Deployment, parse
    from serving.errors import UserError
    from serving.gpu_spec import find_gpu
    from serving.scheduler import find_policy
    from tokentwin.deployments import completed
    from tokentwin.planning.engines import candidate_engines, long_enough
    from tokentwin.planning.pricing import KernelPricing

    for policy in policies:
        find_policy(policy)
    learnt = None
    if calibration is not None:
        if not (Path(calibration) / FILE).exists():
            if gpus or sizes or model or splits:
                remedy = "is of our own engine, which fixes the model, the GPU, its size and split; leave those out"
                raise UserError("calibration", calibration, remedy)
            return _of_our_engine(calibration, deployment_file, policies, variations, prices)
        learnt = EngineCalibration.load(Path(calibration) / FILE)
    base = Deployment(model="Llama-3.1-8B", device="cuda", gpu_memory_utilization=0.9)
    if learnt is not None:
        base = parse(Deployment, json.loads(learnt.deployment), where="calibration.deployment")
    if deployment_file:
        base = completed(deployment_file, base)
    if model:
        base = base.model_copy(update={"model": model})
    if base.fleet is not None:
        raise UserError("deployment", deployment_file or "", "has a fleet; a plan finds one, leave the section out")
    if not deployment_file:
        base = long_enough(base, workload)
    named = gpus or ([learnt.gpu] if learnt is not None else [])
    if not named:
        raise UserError("gpu", "none", "give at least one candidate, e.g. --gpu H100,H200")
    engines, ruled_out = candidate_engines(
        base,
        {name: find_gpu(name) for name in named},
        sizes or [base.tensor_parallel_size],
        policies or [base.policy],
        prices,
        variations,
        splits or [None],
    )
    return engines, ruled_out, KernelPricing(learnt)


def _of_our_engine(
    calibration: str,
    deployment_file: str | None,
    policies: list[str],
    variations: list[dict[str, Any]],
    prices: dict[str, float],
) -> tuple[list[Engine], list[RuledOut], Pricing]:
    """The one that was calibrated, under each policy and setting; its device is priced by the name `cpu` or `cuda`."""
    from calibration.step_cost import Calibration
    from serving.errors import UserError
    from tokentwin.costs import priced
    from tokentwin.deployments import read_deployment
    from tokentwin.planning.engines import Engine, shown_settings
    from tokentwin.planning.pricing import MeasuredPricing
    from tokentwin.settings import with_settings

    def settled(base: Deployment, settings: dict[str, Any]) -> Deployment:
        return with_settings(read_deployment(deployment_file, {}, base), settings)

    engines = []
    for settings in variations:
        deployment = priced(calibration, None, partial(settled, settings=settings)).deployment
        device = deployment.device
        if prices.keys() != {device}:
            raise UserError("price", ", ".join(prices) or "none", f"give --price {device}=DOLLARS, and no other")
        for policy in policies or [deployment.policy]:
            ours = deployment.model_copy(update={"policy": policy})
            engines.append(Engine(device, prices[device], ours, shown_settings(settings)))
    return engines, [], MeasuredPricing(Calibration.load(calibration))


def _variations(pairs: tuple[str, ...]) -> list[dict[str, Any]]:
    """Every combination of the values of each setting."""
    from serving.errors import UserError
    from tokentwin.settings import named_value

    values: dict[str, list[Any]] = {}
    for pair in pairs:
        name, listed = named_value("vary", pair, many=True)
        if name in _OPTIONS:
            raise UserError("vary", pair, f"has an option of its own: {_OPTIONS[name]}")
        if not listed or name in values or any(value in listed[:at] for at, value in enumerate(listed)):
            raise UserError("vary", pair, "should name each setting, and each value of it, once")
        values[name] = listed
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def _listed(texts: tuple[str, ...]) -> list[str]:
    """Names given one by one or separated by commas, each once."""
    return list(dict.fromkeys(name for text in texts for name in text.replace(",", " ").split()))


def _split(text: str) -> Split | None:
    from serving.errors import UserError
    from tokentwin.planning.engines import Split

    prefill, _, decode = text.partition(":")
    if text == "none":
        return None
    if not all(part.isdecimal() and 1 <= int(part) <= 64 for part in (prefill, decode)):
        raise UserError("split", text, "should be PREFILL:DECODE engines, e.g. 1:2, or none")
    return Split(int(prefill), int(decode))


def _size(text: str) -> int:
    from serving.errors import UserError

    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise UserError("tp", text, "must be a number of GPUs from 1 to 64")
    return int(text)
