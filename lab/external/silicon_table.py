"""AIConfigurator's table of measured deployments: one row each, closed loop at a fixed concurrency.

https://github.com/ai-dynamo/aiconfigurator, `silicon_sample.csv`: model, parallel sizes, prompt and output length,
concurrency, TTFT and TPOT in milliseconds. The table does not say how the engine was started, nor how lengths were
drawn; a case file says it by rules, for the rows that it covers. Every row is kept: one that looks wrong gets a
caution.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from pydantic import Field, model_validator

from serving.errors import UserError
from serving.settings import Settings
from serving.workload import PRIVATE, Workload, WorkloadRequest
from traces.formats.rows import Row, csv_rows
from traces.measured.run import MeasuredRun

FIGURES = {"ttft_ms.mean": "silicon_ttft_ms", "tpot_ms.mean": "silicon_tpot_ms"}
_APART = 1.05  # ratio from which rows of one configuration disagree
_SLOWER = 1.1  # ratio by which a row that is slower than one of higher concurrency looks wrong
_STAGGER_NS = 50_000  # time of a client and a server to send and to take in a request
_MOST_REQUESTS, _FEWEST_WAVES = 5120, 5  # more requests take long to simulate, and change little
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")


Share = Annotated[float, Field(gt=0, le=2)]


class Load(Settings):
    """The way in which a closed-loop client made its requests.

    Attributes:
        waves: requests in all, as a multiple of the concurrency; fewer if they would be very many
        lengths: shares of the nominal length between which lengths are drawn evenly
        or_lengths: other possible shares, if nobody says which; queueing, and with it TTFT, is then different
    """

    waves: int = Field(10, ge=1)
    lengths: tuple[Share, Share] = (1.0, 1.0)
    or_lengths: tuple[Share, Share] | None = None

    @model_validator(mode="after")
    def _in_order(self) -> Load:
        for lengths in (self.lengths, self.or_lengths or self.lengths):
            if lengths[0] > lengths[1]:
                raise ValueError("must give the smaller share first")
        return self


class Rule(Settings):
    """Settings for rows whose columns are as in `when`: deployment, load, client, and columns with other values.

    `seqs_as_concurrency` starts the engine with max_num_seqs equal to the concurrency. `skip` says why such rows cannot
    be simulated.
    """

    when: dict[str, str] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)
    columns: dict[str, str] = Field(default_factory=dict)
    load: Load | None = None
    client: str = ""
    seqs_as_concurrency: bool = False
    caution: str = ""
    skip: str = ""

    def matches(self, row: Row) -> bool:
        return all(row.text(key) == value for key, value in self.when.items())


class Apart(Settings):
    """Workers of rows that prefill and decode on separate workers; the table states their sizes but not their counts.

    Attributes:
        attention_dp: whether a worker's attention is data-parallel over its devices, which the table does not say
            either
        tpot_ms: range of such a row's TPOT; for other rows of that concurrency nobody states the drafts
    """

    isl: int
    concurrency: int
    prefill: int = Field(ge=1)
    decode: int = Field(ge=1)
    attention_dp: bool = False
    tpot_ms: tuple[float, float]
    caution: str = ""

    def settings(self, devices: int) -> dict[str, Any]:
        """Return the settings of workers of so many devices, which have whole experts."""
        tp, dp = (1, devices) if self.attention_dp else (devices, 1)
        pools = [
            {"name": role, "role": role, "replicas": count}
            for role, count in (("prefill", self.prefill), ("decode", self.decode))
        ]
        split = {"tensor_parallel_size": tp, "data_parallel_size": dp, "enable_expert_parallel": True}
        return {**split, "fleet": {"pools": pools, "router": "least-requests"}}


class SiliconTable(Settings):
    """One table. Later rules override earlier ones; `systems` names the GPUs of the column `system`.

    With `apart` only rows that prefill and decode on separate workers are read, and only those with known workers, each
    once: they take long to simulate. With `search` all such rows that match a rule are read; they have up to so many
    workers of a kind, and the simulation must determine the number.
    """

    format: str
    file: str
    systems: dict[str, str]
    rules: tuple[Rule, ...] = ()
    apart: tuple[Apart, ...] = ()
    search: int = Field(0, ge=0, le=64)
    seed: int = 0

    def read(self, data: Path) -> list[MeasuredRun]:
        """Read the rows; see `MeasuredFormat`. TTFT is the client's, and taken to be the mean, as is TPOT."""
        path = data / self.file
        rows: list[_Deployed] = []
        runs: list[MeasuredRun] = []
        for line in csv_rows(path):
            if self.apart or self.search:
                split = [_Deployed(line, self.rules, workers) for workers in self._workers(line)]
                rows += [row for row in split if row.is_apart and row.written not in {other.written for other in rows}]
                continue
            why = next((rule.skip for rule in self.rules if rule.skip and rule.matches(line)), "")
            if why:
                runs.append(MeasuredRun(line.text("id"), Workload([]), {}, skipped=why))
            else:
                rows.append(_Deployed(line, self.rules))
        if not rows:
            raise UserError("measured.file", str(path), "holds no rows that can be simulated")
        floors, odd = _floors(rows), _out_of_order(rows)
        for number, row in enumerate(rows):
            cautions = [*row.cautions, *([odd[number]] if number in odd else [])]
            if any(pct > 100 * (_APART - 1) for pct in floors[number].values()):
                cautions.append("rows of the same configuration disagree")
            runs.append(self._run(row, floors[number], "; ".join(cautions)))
        return runs

    def _workers(self, line: Row) -> Sequence[Apart]:
        """Return the possible workers of a row."""
        if line.text("mode") != "disagg":
            return ()
        isl, concurrency = line.integer("isl", 1), _Deployed(line, ()).concurrency
        unknown = Apart(isl=isl, concurrency=concurrency, prefill=1, decode=1, tpot_ms=(0, inf))
        return (unknown,) if self.search else self.apart

    def _run(self, row: _Deployed, floor_pct: Mapping[str, float], caution: str) -> MeasuredRun:
        system = row.text("system")
        if system not in self.systems:
            raise row.row.error("system", system, f"must be one of {', '.join(self.systems)}")
        return MeasuredRun(
            name=row.text("id"),
            workload=row.workload(self.seed, row.load.lengths),
            figures=row.figures,
            settings=row.settings(),
            gpu=self.systems[system],
            client=row.client,
            engine=f"{row.text('backend')} {row.text('backend_version')}".strip(),
            group={
                "engine": f"{row.text('backend')} on {self.systems[system]}",
                "model": row.text("model_path"),
                "concurrency": str(row.concurrency),
            },
            floor_pct=floor_pct,
            caution=caution,
            by_client=True,
            most_workers=self.search,
            or_workload=row.workload(self.seed, row.load.or_lengths) if row.load.or_lengths else None,
            lengths=(row.isl, row.osl),
        )


class _Deployed:
    """A row, read by the rules that match it, with the known settings of its workers."""

    def __init__(self, row: Row, rules: Sequence[Rule], apart: Apart | None = None) -> None:
        self.apart = apart
        self.rules = [rule for rule in rules if rule.matches(row)]
        columns = {key: value for rule in self.rules for key, value in rule.columns.items()}
        self.row = Row(row.path, row.line, {**row.fields, **columns})
        self.cautions = [rule.caution for rule in self.rules if rule.caution]
        self.figures = {figure: self._positive(column) for figure, column in FIGURES.items()}
        concurrency = _CONCURRENCY.search(self.text("silicon_data_source"))
        self.concurrency = int(concurrency[1]) if concurrency else self.row.integer("batch_size", 1)
        self.isl, self.osl = self.row.integer("isl", 1), self.row.integer("osl", 1)
        # One rank of a data-parallel group is simulated, with its share of the requests.
        self.ranks = self.row.integer("attention_dp_size", 0, 1) or 1
        if apart is not None:
            self.cautions += [apart.caution] if apart.caution else []

    @property
    def is_apart(self) -> bool:
        """True if `apart` describes the row."""
        known = self.apart
        assert known is not None
        low, high = known.tpot_ms
        at = (known.isl, known.concurrency) == (self.isl, self.concurrency)
        return at and bool(self.rules) and low <= self.figures["tpot_ms.mean"] <= high

    def text(self, column: str) -> str:
        return self.row.text(column)

    def _positive(self, column: str) -> float:
        value = self.row.time_ns(column, 10**6) / 1e6
        if not value:
            raise self.row.error(column, self.row.fields[column], "must be above 0")
        return value

    @property
    def configuration(self) -> tuple[Any, ...]:
        """The properties that two rows share when they measured the same; the concurrency is the last."""
        columns = ("model_path", "system", "precision", "backend_version", "tp_size", "pp_size", "moe_ep_size")
        shape = *(self.text(column) for column in columns), self.ranks, self.isl, self.osl
        return (*shape, self.apart and (self.apart.prefill, self.apart.decode), self.concurrency)

    @property
    def written(self) -> tuple[Any, ...]:
        """The properties that two rows share when they are one measurement, written twice."""
        return (*self.configuration, *self.figures.values())

    def settings(self) -> dict[str, Any]:
        """Return the deployment: the rules' settings, then the row's."""
        scheduler: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for rule in self.rules:
            scheduler |= rule.deployment.get("scheduler", {})
            settings |= rule.deployment
            if rule.seqs_as_concurrency:
                scheduler["max_num_seqs"] = self.concurrency
        if self.apart is not None:
            settings |= self.apart.settings(self.row.integer("decode_tp_size", 1))
            return {**settings, **({"scheduler": scheduler} if scheduler else {})}
        settings["tensor_parallel_size"] = self.row.integer("tp_size", 1)
        if self.ranks > 1:
            settings["data_parallel_size"] = self.ranks
        if self.row.integer("moe_ep_size", 0, 1) > 1:
            settings["enable_expert_parallel"] = True
        return {**settings, **({"scheduler": scheduler} if scheduler else {})}

    @property
    def load(self) -> Load:
        """The client's load by the last rule that has one."""
        return next((rule.load for rule in reversed(self.rules) if rule.load), Load())

    @property
    def client(self) -> str:
        """The client that sent the requests, by the last rule that names one."""
        return next((rule.client for rule in reversed(self.rules) if rule.client), "")

    def workload(self, seed: int, lengths: tuple[float, float]) -> Workload:
        """Return a closed loop of requests with lengths drawn between these shares of the nominal."""
        slots = -(-self.concurrency // self.ranks)
        draw = random.Random(f"{seed}/{self.isl}/{self.osl}/{slots}")
        waves = self.load.waves
        if self.apart is None:  # a prefill pool takes the first wave at once, which fewer waves would let weigh more
            waves = min(waves, max(_MOST_REQUESTS // slots, _FEWEST_WAVES))
        requests = [
            WorkloadRequest(id_, 0, ((PRIVATE, _length(draw, self.isl, lengths)),), _length(draw, self.osl, lengths))
            for id_ in range(slots * waves)
        ]
        return Workload(
            requests, name=self.text("id"), concurrency=slots, shares_prefixes=False, stagger_ns=_STAGGER_NS
        )


def _length(draw: random.Random, nominal: int, lengths: tuple[float, float]) -> int:
    least, most = (max(int(nominal * share), 1) for share in lengths)
    return draw.randint(least, most)


def _floors(rows: Sequence[_Deployed]) -> list[dict[str, float]]:
    """Return, for each row, the distance of the rows of its configuration in each figure; empty for a single row.

    Rows that agree to the last digit are one measurement written twice, not two.
    """
    kinds: dict[tuple[Any, ...], list[_Deployed]] = {}
    for row in rows:
        kinds.setdefault(row.configuration, []).append(row)
    floors = []
    for row in rows:
        twins = kinds[row.configuration]
        values = {figure: sorted({twin.figures[figure] for twin in twins}) for figure in FIGURES}
        floors.append({f: 100 * (v[-1] - v[0]) / mean(v) for f, v in values.items() if len(v) > 1})
    return floors


def _out_of_order(rows: Sequence[_Deployed]) -> dict[int, str]:
    """Return rows whose TPOT does not fit those of the same deployment at other concurrencies, with the reason.

    The row at odds with most others is set aside, and again until the remaining rows are in order. Of two that disagree
    only with each other it is the slower one, since disturbances slow a measurement.
    """
    ladders: dict[tuple[Any, ...], set[_Rung]] = {}
    for row in rows:
        ladders.setdefault(_ladder(row), set()).add(_rung(row))
    odd = {key: _set_aside(rungs) for key, rungs in ladders.items()}
    return {number: odd[_ladder(row)][_rung(row)] for number, row in enumerate(rows) if _rung(row) in odd[_ladder(row)]}


_Rung = tuple[int, float]  # concurrency and TPOT in ms


def _rung(row: _Deployed) -> _Rung:
    return row.concurrency, row.figures["tpot_ms.mean"]


def _ladder(row: _Deployed) -> tuple[Any, ...]:
    """Return a configuration without its concurrency and the version of the engine."""
    return tuple(value for i, value in enumerate(row.configuration[:-1]) if i != 3)


def _set_aside(rungs: set[_Rung]) -> dict[_Rung, str]:
    left = sorted(rungs)
    aside: dict[_Rung, str] = {}
    while True:
        against = {rung: [other for other in left if _at_odds(rung, other)] for rung in left}
        worst = max(left, key=lambda rung: (len(against[rung]), rung[1]))
        if not against[worst]:
            return aside
        other = against[worst][-1]
        aside[worst] = f"TPOT does not fit that of the same deployment at concurrency {other[0]} ({other[1]:.2f} ms)"
        left.remove(worst)


def _at_odds(one: _Rung, other: _Rung) -> bool:
    """Return whether the less busy of two is the slower."""
    calm, busy = sorted((one, other))
    return calm[0] < busy[0] and calm[1] > _SLOWER * busy[1]
