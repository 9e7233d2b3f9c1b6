"""The power and the energy per token of the fleets that a plan shows, in steady operation.

These fleets are simulated once more, because the power of a step depends on its sizes and its duration, which the
search does not keep. Steps from the first to the last arrival count, as for the throughput in steady operation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from tokentwin.planning.energy import energy_factors, energy_note, power_factors
from tokentwin.planning.plan.candidates import Engine
from tokentwin.planning.plan.document import Energy
from tokentwin.planning.plan.frontier import Point
from tokentwin.planning.plan.plan import Plan
from tokentwin.planning.plan.trial import Question, steady
from tokentwin.planning.workers import Workers, mark
from tokentwin.serving.errors import UserError
from tokentwin.sim.cluster import Cluster
from tokentwin.sim.run_log import TableSink
from tokentwin.traces.metrics.step_metrics import BYTES_OF, FLOPS_OF, StepWork
from tokentwin.traces.schema import STEPS

_COLUMNS = list(dict.fromkeys(["start_ns", "end_ns", *FLOPS_OF, *BYTES_OF]))
_TYPES = {column.name: column.type for column in STEPS}


@dataclass(frozen=True)
class Site:
    """The place of the fleet: `pue` multiplies the power of the GPUs, and carbon needs `gco2_per_kwh`."""

    pue: float = 1.0
    gco2_per_kwh: float | None = None


class Used(NamedTuple):
    """The mean power of a fleet beyond its idle power in watts, and its output tokens per second."""

    beyond_idle_w: float
    output_throughput: float


def engine_step_work(engine: Engine) -> StepWork | None:
    """Return the work of a step of one engine; None if the power of its GPU is not known."""
    gpu = engine.gpu_spec
    work = None if gpu is None else StepWork.on(engine.deployment, gpu)
    return work if work and work.power else None


def check_power_known(engines: Sequence[Engine]) -> None:
    """Raise UserError if the power of a candidate is not known."""
    for engine in engines:
        if engine_step_work(engine) is None:
            remedy = "has no known utilisation or power; leave --energy, --pue and --grid-gco2-per-kwh out"
            raise UserError("energy", engine.name, remedy)


def with_energy(workers: Workers[Question], plan: Plan, engines: Sequence[Engine], site: Site) -> Plan:
    """Return `plan` with the power, energy and carbon of the fleets that it shows."""
    offers = [*([plan.recommendation.offer] if plan.recommendation else ()), *plan.runners_up]
    shown = [*(offer.point for offer in offers), *plan.frontier, *plan.by_price]
    named = {engine.name: engine for engine in engines}
    fleets = list(dict.fromkeys((point.engine, point.replicas) for point in shown))
    used = workers.run([partial(_used, engine=named[name], replicas=replicas) for name, replicas in fleets])
    known = dict(zip(fleets, used, strict=True))

    def point(one: Point) -> Point:
        use = known.get((one.engine, one.replicas))
        return one if use is None else one.model_copy(update=_figures(named[one.engine], one.gpus, use, site))

    def points(many: Sequence[Point]) -> tuple[Point, ...]:
        return tuple(map(point, many))

    plan = replace(plan, frontier=points(plan.frontier), by_price=points(plan.by_price), points=points(plan.points))
    offered = tuple(replace(offer, point=point(offer.point)) for offer in offers)
    if plan.recommendation is None:
        return plan
    best = replace(plan.recommendation, offer=offered[0])
    return replace(plan, recommendation=best, runners_up=offered[1:])


def energy_section(point: Point, engine: Engine, site: Site) -> Energy | None:
    """Return the energy of the recommended fleet with its intervals; None without output tokens."""
    gpu = engine.gpu_spec
    if gpu is None or point.power_w is None or point.joules_per_token is None:
        return None
    (least, most), (low, high) = power_factors(gpu), energy_factors(gpu)
    return Energy(
        power_w=point.power_w,
        power_w_interval=(least * point.power_w, most * point.power_w),
        joules_per_token=point.joules_per_token,
        joules_per_token_interval=(low * point.joules_per_token, high * point.joules_per_token),
        co2_g_per_mtok_out=point.co2_g_per_mtok_out,
        pue=site.pue,
        reason=energy_note(gpu),
    )


def _figures(engine: Engine, gpus: int, used: Used, site: Site) -> dict[str, float | None]:
    """Return the figures of a `Point` with `gpus` GPUs, spares included."""
    work = engine_step_work(engine)
    assert work is not None and work.power is not None
    watts = site.pue * (gpus * work.power.idle_w + used.beyond_idle_w)
    joules = watts / used.output_throughput if used.output_throughput else None
    carbon = None if joules is None or site.gco2_per_kwh is None else joules / 3.6 * site.gco2_per_kwh
    return {"power_w": watts, "joules_per_token": joules, "co2_g_per_mtok_out": carbon}


def _used(question: Question, engine: Engine, replicas: int) -> Used:
    """Simulate a fleet and return what it uses in steady operation."""
    work = engine_step_work(engine)
    assert work is not None
    sink = _Energies(work)
    Cluster(
        engine.deployment,
        question.pricing(engine),
        sink,
        fleet=engine.fleet(replicas, question.router),
        shares_prefixes=question.workload.shares_prefixes,
        leaps=True,
        front_door=question.front_door,
    ).run(question.workload)
    requests = sink.requests
    arrivals = requests.column("arrival_ns").to_numpy()
    begin, end = int(arrivals.min()), int(arrivals.max())
    if end <= begin:  # all arrive at once
        end = int(np.nanmax(requests.column("finish_ns").to_numpy()))
    joules = sink.joules(begin, end)
    return Used(joules / ((end - begin) / 1e9), steady(requests).output_throughput)


class _Energies:
    """A sink that keeps requests, and of each step only its start, and its energy without idle power."""

    def __init__(self, work: StepWork) -> None:
        self._requests = TableSink()
        self._work = work
        self._starts_ns: list[Any] = []
        self._joules: list[Any] = []

    def add_requests(self, columns: Mapping[str, Sequence[Any]]) -> None:
        self._requests.add_requests(columns)
        mark(len(next(iter(columns.values()))))

    def add_steps(self, columns: Mapping[str, Sequence[Any]]) -> None:
        rows = len(columns["start_ns"])
        arrays = [
            pa.array(columns[name], _TYPES[name]) if name in columns else pa.nulls(rows, _TYPES[name])
            for name in _COLUMNS
        ]
        steps = pa.table(arrays, names=_COLUMNS)
        starts, ends = (steps.column(name).to_numpy() for name in ("start_ns", "end_ns"))
        self._starts_ns.append(starts)
        self._joules.append(self._work.joules_beyond_idle(steps, (ends - starts) / 1e9))

    @property
    def requests(self) -> pa.Table:
        return self._requests.requests

    def joules(self, begin_ns: int, end_ns: int) -> float:
        """Return the energy beyond idle power of the steps that start from `begin_ns` to `end_ns`."""
        starts, joules = np.concatenate(self._starts_ns), np.concatenate(self._joules)
        return float(np.nansum(joules[(starts >= begin_ns) & (starts <= end_ns)]))
