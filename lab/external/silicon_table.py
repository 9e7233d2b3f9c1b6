"""AIConfigurator's table of measured deployments; each row is a closed loop at a fixed concurrency.

https://github.com/ai-dynamo/aiconfigurator, `silicon_sample.csv`: model, parallel sizes, prompt and output length,
concurrency, TTFT and TPOT in milliseconds. The table does not say how the engine was started, nor how lengths were
drawn; the rules of a case file state both, for the rows that they cover. Every row is kept: one that looks wrong gets a
caution.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any

from pydantic import Field, model_validator

from tokentwin.serving.errors import UserError
from tokentwin.serving.settings import Settings
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.formats.rows import Row, csv_rows
from tokentwin.traces.measured.run import MeasuredRun

FIGURES = {"ttft_ms.mean": "silicon_ttft_ms", "tpot_ms.mean": "silicon_tpot_ms"}
_APART = 1.05  # ratio above which rows of one configuration disagree
_SLOWER = 1.1  # ratio of its TPOT to that of a row of higher concurrency above which a row looks wrong
_STAGGER_NS = 50_000  # time in which a client sends, and a server takes in, one request
_MOST_REQUESTS, _FEWEST_WAVES = 5120, 5  # more requests take long to simulate, and change little
_DRAFTS = {"method": "mtp", "acceptance_rate": 0.7}  # nobody states how many drafts were accepted
_DAY = re.compile(r"measured=(\d{4}-\d\d-\d\d)")
_CONCURRENCY = re.compile(r"silicon_concurrency=(\d+)")


Share = Annotated[float, Field(gt=0, le=2)]


class Load(Settings):
    """The way in which a closed-loop client made its requests.

    Attributes:
        waves: number of requests divided by the concurrency; lowered if that would be very many requests
        lengths: shares of the nominal length between which lengths are drawn uniformly
        or_lengths: other possible shares, if nobody says which; they change queueing, and with it TTFT
        limited: requests state `max_tokens`, so that SGLang reserves a share of it while they run; before 0.5.22 it did
            so with `ignore_eos`, too
    """

    waves: int = Field(10, ge=1)
    lengths: tuple[Share, Share] = (1.0, 1.0)
    or_lengths: tuple[Share, Share] | None = None
    limited: bool = False

    @model_validator(mode="after")
    def _in_order(self) -> Load:
        for lengths in (self.lengths, self.or_lengths or self.lengths):
            if lengths[0] > lengths[1]:
                raise ValueError("must give the smaller share first")
        return self


class Budget(Settings):
    """A launcher's formula for max_num_batched_tokens: a sum of terms, rounded up to a multiple of 64.

    Attributes:
        isl: weight of the nominal prompt length
        running: weight of the requests in flight on one data-parallel rank
        plus: constant
    """

    isl: int = 1
    running: int = 0
    plus: int = 0

    def of(self, isl: int, running: int) -> int:
        """Return the budget in tokens."""
        return -(-(self.isl * isl + self.running * running + self.plus) // 64) * 64


class Rule(Settings):
    """Settings for the rows whose columns match `when`: deployment, load, client, and replaced columns.

    Attributes:
        before: if given, only rows that were measured before this day (YYYY-MM-DD) match
        or_deployment: settings that the rows may have had instead, such as drafts that nobody states
        budget: a formula for the token budget
        seqs_as_concurrency: the engine was started with max_num_seqs equal to the concurrency
        skip: reason why such rows cannot be simulated
    """

    when: dict[str, str] = Field(default_factory=dict)
    deployment: dict[str, Any] = Field(default_factory=dict)
    or_deployment: dict[str, Any] = Field(default_factory=dict)
    columns: dict[str, str] = Field(default_factory=dict)
    load: Load | None = None
    client: str = ""
    before: str = ""
    budget: Budget | None = None
    seqs_as_concurrency: bool = False
    caution: str = ""
    skip: str = ""

    def matches(self, row: Row) -> bool:
        day = _DAY.search(row.text("silicon_data_source"))
        early = not self.before or (day is not None and day[1] < self.before)
        return early and all(row.text(key) == value for key, value in self.when.items())


class Pool(Settings):
    """The prefill or the decode workers of a published configuration.

    Attributes:
        devices: number of devices of one worker
        attention_dp: True if a worker's attention is data-parallel over its devices
    """

    workers: int = Field(ge=1)
    devices: int = Field(ge=1)
    attention_dp: bool = False

    @property
    def split(self) -> dict[str, Any]:
        """The parallel sizes of a worker."""
        tp, dp = (1, self.devices) if self.attention_dp else (self.devices, 1)
        return {"tensor_parallel_size": tp, "data_parallel_size": dp}


class Apart(Settings):
    """A published configuration with separate prefill and decode workers, which the table states only in part.

    Under SGLang (`when: {backend: sglang}`) decode workers reserve KV blocks before the prefill.

    Attributes:
        when: values of columns of the rows that may have had it, beside `isl` and `concurrency`
        drafts: draft tokens a step (multi-token prediction); 0 without drafts
    """

    when: dict[str, str] = Field(default_factory=dict)
    isl: int
    concurrency: int
    prefill: Pool
    decode: Pool
    expert_parallel: bool = True
    drafts: int = Field(0, ge=0)
    caution: str = ""

    def describes(self, row: Row, concurrency: int) -> bool:
        """Return whether a row may have had this configuration."""
        alike = all(row.text(key) == value for key, value in self.when.items())
        return alike and (self.isl, self.concurrency) == (row.integer("isl", 1), concurrency)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of both pools, without those of the scheduler; workers for decoding return the first token."""
        pools = [
            {"name": role, "role": role, "replicas": pool.workers, "deployment": pool.split}
            for role, pool in (("prefill", self.prefill), ("decode", self.decode))
        ]
        sglang = self.when.get("backend") == "sglang"
        order = {"decode_reserves": "before-prefill"} if sglang else {"first_token_from": "decode"}
        fleet = {"pools": pools, "router": "least-requests", **order}
        return {**self.decode.split, "enable_expert_parallel": self.expert_parallel, "fleet": fleet}


class SiliconTable(Settings):
    """One table. Later rules override earlier ones; `systems` maps values of the column `system` to GPUs.

    With `apart`, only rows with separate prefill and decode workers are read, if their numbers of workers are known.
    Each is read once, as they take long to simulate. With `search`, all such rows that match a rule are read. They have
    up to `search` workers of a kind, and the simulation must determine the number.
    """

    format: str
    file: str
    systems: dict[str, str]
    rules: tuple[Rule, ...] = ()
    apart: tuple[Apart, ...] = ()
    search: int = Field(0, ge=0, le=64)
    seed: int = 0

    def read(self, data: Path) -> list[MeasuredRun]:
        """Read the rows; see `MeasuredFormat`. TTFT and TPOT are taken to be means, with TTFT as the client saw it."""
        path = data / self.file
        rows: list[_Deployed] = []
        runs: list[MeasuredRun] = []
        for line in csv_rows(path):
            if self.apart or self.search:
                row = _Deployed(line, self.rules, self._apart(line))
                if row.apart and row.rules and row.written not in {other.written for other in rows}:
                    rows.append(row)
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

    def _apart(self, line: Row) -> Sequence[Apart]:
        """Return the configurations with separate workers that a row may have had."""
        if line.text("mode") != "disagg":
            return ()
        concurrency = _Deployed(line, ()).concurrency
        if not self.search:
            return [apart for apart in self.apart if apart.describes(line, concurrency)]
        one = Pool(workers=1, devices=line.integer("decode_tp_size", 1))
        return [Apart(isl=line.integer("isl", 1), concurrency=concurrency, prefill=one, decode=one)]

    def _run(self, row: _Deployed, floor_pct: Mapping[str, float], caution: str) -> MeasuredRun:
        settings, *others = row.hypotheses()
        system = row.text("system")
        if system not in self.systems:
            raise row.row.error("system", system, f"must be one of {', '.join(self.systems)}")
        return MeasuredRun(
            name=row.text("id"),
            workload=row.workload(self.seed, row.load.lengths),
            figures=row.figures,
            settings=settings,
            or_settings=others,
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
    """A row with the rules that match it, and the known settings of its workers."""

    def __init__(self, row: Row, rules: Sequence[Rule], apart: Sequence[Apart] = ()) -> None:
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
        self.cautions += [known.caution for known in apart if known.caution]

    def text(self, column: str) -> str:
        return self.row.text(column)

    def _positive(self, column: str) -> float:
        value = self.row.time_ns(column, 10**6) / 1e6
        if not value:
            raise self.row.error(column, self.row.fields[column], "must be above 0")
        return value

    @property
    def configuration(self) -> tuple[Any, ...]:
        """The values that rows of one configuration have in common; the concurrency is the last."""
        columns = ("model_path", "system", "precision", "backend_version", "tp_size", "pp_size", "moe_ep_size")
        shape = *(self.text(column) for column in columns), self.ranks, self.isl, self.osl
        return (*shape, self.concurrency)

    @property
    def written(self) -> tuple[Any, ...]:
        """The values that rows have in common if they are one measurement that was written twice."""
        return (*self.configuration, *self.figures.values())

    def hypotheses(self) -> list[dict[str, Any]]:
        """Return the deployments that the row may have had: usually one."""
        if self.apart:
            return [self._settings([], apart) for apart in self.apart]
        others = [rule.or_deployment for rule in self.rules if rule.or_deployment]
        return [self._settings([]), *([self._settings(others)] if others else [])]

    def _settings(self, instead: Sequence[Mapping[str, Any]], apart: Apart | None = None) -> dict[str, Any]:
        """Return the deployment: the rules' settings, those that stand `instead` of them, then the row's."""
        scheduler: dict[str, Any] = {}
        settings: dict[str, Any] = {}
        for stated in (*(rule.deployment for rule in self.rules), *instead):
            scheduler |= stated.get("scheduler", {})
            settings |= stated
        for rule in self.rules:
            if rule.seqs_as_concurrency:
                scheduler["max_num_seqs"] = self.concurrency
            if rule.budget is not None:
                scheduler["max_num_batched_tokens"] = rule.budget.of(self.isl, -(-self.concurrency // self.ranks))
        if apart is not None:
            if apart.drafts:
                scheduler["speculative"] = _DRAFTS | {"num_speculative_tokens": apart.drafts}
            return {**settings, **apart.settings, **({"scheduler": scheduler} if scheduler else {})}
        settings["tensor_parallel_size"] = self.row.integer("tp_size", 1)
        if self.ranks > 1:
            settings["data_parallel_size"] = self.ranks
        if self.row.integer("moe_ep_size", 0, 1) > 1:
            settings["enable_expert_parallel"] = True
        return {**settings, **({"scheduler": scheduler} if scheduler else {})}

    @property
    def load(self) -> Load:
        """The client's load, from the last rule that has one."""
        return next((rule.load for rule in reversed(self.rules) if rule.load), Load())

    @property
    def client(self) -> str:
        """The client that sent the requests, from the last rule that names one."""
        return next((rule.client for rule in reversed(self.rules) if rule.client), "")

    def workload(self, seed: int, lengths: tuple[float, float]) -> Workload:
        """Return a closed loop of requests; `lengths` are the lower and upper share of the nominal length."""
        slots = -(-self.concurrency // self.ranks)
        draw = random.Random(f"{seed}/{self.isl}/{self.osl}/{slots}")
        waves = self.load.waves
        # Where prefill and decode are apart, the first wave arrives at the prefill pool all at once. Among fewer
        # waves it would weigh too much.
        if not self.apart:
            waves = min(waves, max(_MOST_REQUESTS // slots, _FEWEST_WAVES))
        requests = []
        for id_ in range(slots * waves):
            prompt, output = _length(draw, self.isl, lengths), _length(draw, self.osl, lengths)
            limit = output if self.load.limited else None
            requests.append(WorkloadRequest(id_, 0, ((PRIVATE, prompt),), output, max_tokens=limit))
        return Workload(
            requests, name=self.text("id"), concurrency=slots, shares_prefixes=False, stagger_ns=_STAGGER_NS
        )


def _length(draw: random.Random, nominal: int, lengths: tuple[float, float]) -> int:
    least, most = (max(int(nominal * share), 1) for share in lengths)
    return draw.randint(least, most)


def _floors(rows: Sequence[_Deployed]) -> list[dict[str, float]]:
    """Return, for each row, the range of each figure over the rows of its configuration, in % of the mean.

    Rows that agree to the last digit are one measurement, written twice. A figure measured once has no range.
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
    """Return the rows, by index, whose TPOT does not fit the same deployment at other concurrencies, with the reason.

    The row that contradicts most others is set aside, again and again until the remaining rows are in order. Of two
    that contradict only each other, the slower one is set aside, since disturbances slow a measurement.
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
    """Return the configuration without its concurrency and its engine version."""
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
    """Return whether the row of lower concurrency has a clearly longer TPOT."""
    calm, busy = sorted((one, other))
    return calm[0] < busy[0] and calm[1] > _SLOWER * busy[1]
