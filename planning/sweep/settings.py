"""A sweep's file: one run in full, and the settings that vary.

Every entry of `list` is combined with every combination of `grid`, every point of `sobol` and every seed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from tokentwin.planning.request import Request
from tokentwin.serving.data_file import read_mapping
from tokentwin.serving.deployments.config import check_text, parse
from tokentwin.serving.errors import UserError

Overrides = dict[str, Any]  # values by dotted path
_PAGE = "docs/sweeps.md"
MOST_RUNS = 50_000  # maximum number of runs; each takes 50 kB of memory before it is made
_SAMPLES = 60
_Seed = Annotated[int, Field(ge=0, lt=2**63)]


class SobolRange(Request):
    """A range that a Sobol sequence fills evenly; if `integer` is set, both ends are included."""

    low: float = Field(description="lower end")
    high: float = Field(description="upper end")
    scale: Literal["linear", "log"] = Field(
        "linear", description="spread points evenly in the value, or in its logarithm"
    )
    integer: bool = Field(False, description="whole numbers only")

    @model_validator(mode="after")
    def _a_range(self) -> SobolRange:
        if not self.low < self.high:
            raise ValueError("low must be below high")
        if self.scale == "log" and self.low <= 0:
            raise ValueError("low must be above 0 on a log scale")
        if self.integer and not (self.low.is_integer() and self.high.is_integer()):
            raise ValueError("low and high must be whole numbers")
        return self

    def value_at(self, share: float) -> float | int:
        """Return the value `share` of the way from `low` to `high`, 0 <= share < 1."""
        high = self.high + 1 if self.integer else self.high
        if self.scale == "log":
            value = self.low * math.exp(share * math.log(high / self.low))
        else:
            value = self.low + share * (high - self.low)
        return min(math.floor(value), int(self.high)) if self.integer else value


class Sobol(Request):
    """A scrambled Sobol sequence (Owen 1995). A longer sequence begins with the points of a shorter sequence."""

    points: int = Field(
        ge=1, le=2**20, description="number of points; must be a power of two, so that the points are balanced"
    )
    seed: int = Field(0, ge=0, description="seed of the scrambling")
    ranges: dict[str, SobolRange] = Field(min_length=1, max_length=64, description="range of each dotted path")

    @field_validator("points")
    @classmethod
    def _balanced(cls, points: int) -> int:
        if points & (points - 1):
            raise ValueError("must be a power of two, so that the points are balanced")
        return points

    def draw(self) -> Iterator[Overrides]:
        """Yield the points; a point has a value for every path."""
        from scipy.stats.qmc import Sobol as Sequence

        shares = Sequence(len(self.ranges), scramble=True, seed=self.seed).random(self.points)
        for row in shares.tolist():
            yield {path: span.value_at(share) for (path, span), share in zip(self.ranges.items(), row, strict=True)}


class SweepSettings(Request):
    """The content of a sweep's file.

    Paths are dotted and start at `base`: `deployment.scheduler.max_num_seqs`, `replicas`.
    """

    base: dict[str, Any] = Field(description="the run whose settings the sweep varies")
    grid: dict[str, Annotated[tuple[Any, ...], Field(min_length=1)]] = Field(
        {}, description="values of settings by dotted path; every combination is a run"
    )
    list: tuple[Overrides, ...] = Field(
        (), description="mappings from dotted path to value; each mapping is one variation"
    )
    sobol: Sobol | None = Field(None, description="ranges of settings that a low-discrepancy sequence fills")
    seeds: Annotated[int, Field(ge=1)] | tuple[_Seed, ...] | None = Field(
        None, description="a list of seeds, or a number of seeds, counted from 0; null: the seeds of base"
    )
    partition: tuple[str, ...] | None = Field(
        None, description="dotted paths by which the dataset is partitioned; null: automatic"
    )
    per_request: bool = Field(False, description="also write a row for each request of each run")
    bands: bool = Field(
        False, description="also compute 90 % bands of the main metrics; each run then takes three simulations"
    )
    full_metrics: bool = Field(False, description="also compute ITL and step metrics, which need every token and step")
    run_limit_s: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="maximum time of a run in seconds, with the start of its process; null: no limit",
    )

    @model_validator(mode="after")
    def _one_value_a_path(self) -> SweepSettings:
        axes = [list(self.grid), list(self.sobol.ranges if self.sobol else ())]
        axes.append(list(dict.fromkeys(path for entry in self.list for path in entry)))
        paths = [path for axis in axes for path in axis]
        for number, path in enumerate(paths):
            for other in paths[:number]:
                if f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}."):
                    raise ValueError(f"{path} is set twice, also by {other}; leave one of them out")
        if self.seeds is not None and (drawn := [path for path in paths if is_seed(path.rpartition(".")[2])]):
            raise ValueError(f"seeds and {drawn[0]} set the same value; leave one of them out")
        unknown = set(self.partition or ()) - {*paths, "seed"}
        if unknown:
            raise ValueError(f"partition {min(unknown)} must be a path that the sweep varies")
        return self

    @model_validator(mode="after")
    def _not_too_many(self) -> SweepSettings:
        if self.seeds == ():
            raise UserError("seeds", "[]", "is empty; give at least one seed")
        if self.runs > MOST_RUNS:
            raise UserError("runs", f"{self.runs:,}", f"must be at most {MOST_RUNS:,}; split the sweep")
        return self

    @property
    def runs(self) -> int:
        """The number of runs."""
        drawn = self.sobol.points if self.sobol else 1
        seeds = self.seeds if isinstance(self.seeds, int) else len(self.seeds or (None,))
        return max(len(self.list), 1) * math.prod(map(len, self.grid.values())) * drawn * seeds

    def samples(self) -> Iterator[Overrides]:
        """Yield few changes to `base` that together have every value of `grid` and `list`, and both ends of ranges."""
        entries, ranges = self.list or ({},), self.sobol.ranges if self.sobol else {}
        lengths = [len(entries), *map(len, self.grid.values()), *([2] if ranges else [])]
        for number in range(max(*lengths, min(math.lcm(*lengths), _SAMPLES))):
            cell = {path: values[number % len(values)] for path, values in self.grid.items()}
            drawn = {path: span.value_at(number % 2 * (1 - 2**-30)) for path, span in ranges.items()}
            yield {**entries[number % len(entries)], **cell, **drawn}

    @property
    def seed_values(self) -> tuple[int | None, ...]:
        """The seeds; a single None if the sweep does not vary them."""
        if self.seeds is None:
            return (None,)
        return tuple(range(self.seeds)) if isinstance(self.seeds, int) else self.seeds

    def variations(self) -> Iterator[tuple[Overrides, int | None]]:
        """Yield the changes to `base` and the seed of each run."""
        grid = [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]
        sobol = self.sobol.draw() if self.sobol else ({},)
        for entry, cell, drawn, seed in product(self.list or ({},), grid, sobol, self.seed_values):
            yield {**entry, **cell, **drawn}, seed


def is_seed(name: str) -> bool:
    """Return True if a setting with this name is a seed."""
    return name == "seed" or name.endswith("_seed")


def load_sweep(path: str | Path) -> SweepSettings:
    """Read the sweep in a YAML file; if its deployment is the name of a file, read that, too. Raises UserError."""
    return read_sweep(read_mapping(path, "sweep", _PAGE), str(path))


def read_sweep(data: Mapping[str, Any], where: str = "sweep") -> SweepSettings:
    """Read the sweep in a mapping as `load_sweep` does; `where` begins the name of a wrong field. Raises UserError."""
    settings = parse(SweepSettings, _plain(data, where), where=where, typed=True)
    deployment = settings.base.get("deployment")
    if isinstance(deployment, str):
        named = _plain(read_mapping(deployment, "deployment", _PAGE), deployment)
        inlined = {**settings.base, "deployment": named}
        settings = settings.model_copy(update={"base": inlined})
    return settings


def _plain(data: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return `data` as plain JSON values. Raises UserError for values that JSON or the dataset cannot hold."""
    check_text(data, where)
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(data)))
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(where, None, f"may only hold text, finite numbers, lists and mappings: {error}") from None
    _check_numbers(plain, where)
    return plain


def _check_numbers(node: Any, where: str) -> None:
    """Raise UserError for a number that a column of the dataset cannot hold."""
    if isinstance(node, dict):
        for name, value in node.items():
            _check_numbers(value, f"{where}.{name}")
    elif isinstance(node, list):
        for at, value in enumerate(node):
            _check_numbers(value, f"{where}.{at}")
    elif isinstance(node, float) and not math.isfinite(node):
        raise UserError(where, node, "must be a finite number")
    elif isinstance(node, int) and not -(2**63) <= node < 2**63:
        raise UserError(where, node, "must be a number of at most 64 bits")
