"""The columns of a sweep's dataset: the varied parameters, the metrics, and the origin of the run.

Every field carries a unit and a definition, as in a recording.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa

from tokentwin.planning.sweep.points import Point, canonical
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import METRICS, STATISTICS
from tokentwin.traces.metrics.run_metrics import DISTRIBUTIONS, SERVED_METRICS, RunMetrics
from tokentwin.traces.schema import arrow_schema

_DISTRIBUTIONS = [name for name in DISTRIBUTIONS if name not in SERVED_METRICS]  # a sweep has no API server
STATUSES = ("finished", "rejected", "timed_out", "cancelled", "aborted", "unfinished")
_TEXT, _COUNT, _NUMBER = pa.string(), pa.int64(), pa.float64()
_METRIC_TYPES = {"saturation": _TEXT, "preemptions": _COUNT, "recomputed_tokens": _COUNT, "concurrency_peak": _COUNT}
_BANDED = (
    *(f"{latency}_{stat}" for latency in ("ttft_ms", "tpot_ms", "e2e_ms") for stat in ("p50", "p90", "p99")),
    "output_throughput",
    "slo_attainment",
)
_AUTOMATIC = 2  # number of partition keys chosen by default
_MOST = 32  # maximum number of values of such a key


def _field(name: str, type_: pa.DataType, unit: str, definition: str, **more: str) -> pa.Field:
    return pa.field(name, type_, metadata={"unit": unit, "definition": definition, **more})


_ORIGIN = (
    _field("run_id", _TEXT, "", "hash of the run's configuration"),
    _field("status", _TEXT, "", "`complete`, or `failed`"),
    _field("error", _TEXT, "", "why it failed; null if it did not"),
    _field("config", _TEXT, "", "the run's configuration with all defaults, as JSON"),
    _field("calibration_id", _TEXT, "", "id of the calibration that timed the steps"),
    _field("trust", _TEXT, "", "how far its step times can be trusted: validated, interpolated, extrapolated"),
    _field("trust_reason", _TEXT, "", "why"),
    _field("version", _TEXT, "", "version of tokentwin"),
    _field("gpus", _COUNT, "", "GPUs of the fleet as it starts"),
    _field("kv_blocks", _COUNT, "blocks", "KV blocks of one replica, without the null block; null if they differ"),
    _field("requests_offered", _COUNT, "", "requests offered"),
    *(_field(f"requests_{status}", _COUNT, "", f"requests that ended {status}") for status in STATUSES),
)


def run_schema(runs: Sequence[Point], bands: bool = False) -> pa.Schema:
    """Return the columns of a run's row: parameters, then metrics and their bands, then the origin of the run."""
    rest = [*_metric_fields(), *(_band_fields() if bands else ()), *_ORIGIN]
    names = _short_names(list(runs[0].parameters), taken={field.name for field in rest})
    parameters = [
        _field(name, _type([point.parameters[path] for point in runs]), "", f"varied: {path}", path=path)
        for path, name in names.items()
    ]
    return pa.schema([*parameters, *rest])


def parameter_fields(schema: pa.Schema) -> dict[str, pa.Field]:
    """Return the fields that hold a parameter, by its path."""
    return {field.metadata[b"path"].decode(): field for field in schema if b"path" in field.metadata}


def partition_keys(chosen: Iterable[str] | None, runs: Sequence[Point], schema: pa.Schema) -> list[str]:
    """Return the names of the columns that partition the dataset.

    They are the columns of the `chosen` paths, or by default up to two text or boolean columns with few values. Raises
    UserError for a parameter that is not a single value in some run.
    """
    fields = parameter_fields(schema)
    if chosen is None:
        named = [path for path, field in fields.items() if field.type in (pa.string(), pa.bool_())]
        chosen = [path for path in named if _few([point.parameters[path] for point in runs])][:_AUTOMATIC]
    for path in chosen:
        if any(not isinstance(point.parameters[path], str | int | float) for point in runs):
            raise UserError("partition", path, "must be a single value in every run; partition by another path")
    return [fields[path].name for path in chosen]


def parameter_values(point: Point, schema: pa.Schema) -> dict[str, Any]:
    """Return the parameters of a run by column; lists, mappings and values of mixed types are written as JSON."""
    values = {}
    for path, field in parameter_fields(schema).items():
        value = point.parameters[path]
        as_json = value is not None and field.type == _TEXT and not isinstance(value, str)
        values[field.name] = canonical(value) if as_json else value
    return values


def metric_values(metrics: RunMetrics) -> dict[str, Any]:
    """Return every scalar, and every statistic of every distribution, by column; None for a missing value."""
    values = dict(metrics.scalars())
    for name in _DISTRIBUTIONS:
        summary = metrics.distribution(name).as_dict()
        values |= {f"{name}_{statistic}": value for statistic, value in summary.items()}
    statuses = metrics.statuses()
    values |= {f"requests_{status}": statuses.get(status, 0) for status in STATUSES}
    values["requests_offered"] = sum(statuses.values())
    return {name: None if isinstance(v, float) and not math.isfinite(v) else v for name, v in values.items()}


def band_values(central: RunMetrics, fast: RunMetrics, slow: RunMetrics) -> dict[str, float | None]:
    """Return the ends of the 90 % bands of the main metrics by column; a band spans the three simulations."""
    runs = [metric_values(run) for run in (central, fast, slow)]
    values: dict[str, float | None] = {}
    for name in _BANDED:
        known = [run[name] for run in runs]
        ends = (None, None) if None in known else (min(known), max(known))
        values |= dict(zip(_ends(name), ends, strict=True))
    return values


def _ends(name: str) -> tuple[str, str]:
    return f"{name}_low", f"{name}_high"


def _band_fields() -> list[pa.Field]:
    known = {field.name: field.metadata for field in _metric_fields()}
    return [
        _field(end, _NUMBER, known[name][b"unit"].decode(), f"{which} end of the 90 % band of {name}")
        for name in _BANDED
        for end, which in zip(_ends(name), ("lower", "upper"), strict=True)
    ]


def _metric_fields() -> list[pa.Field]:
    fields = []
    for name in RunMetrics(arrow_schema("requests").empty_table()).scalars():
        known = METRICS[name.removesuffix("_peak")]
        definition = f"largest value of: {known.definition}" if name.endswith("_peak") else known.definition
        fields.append(_field(name, _METRIC_TYPES.get(name, _NUMBER), known.unit, definition))
    for name in _DISTRIBUTIONS:
        known = METRICS[name]
        for statistic, meaning in STATISTICS.items():
            type_, unit = (_COUNT, "") if statistic == "count" else (_NUMBER, known.unit)
            fields.append(_field(f"{name}_{statistic}", type_, unit, f"{meaning}, of: {known.definition}"))
    return fields


def _short_names(paths: list[str], taken: set[str]) -> dict[str, str]:
    """Return a column name for each path, made of as few of its last parts as distinguish it from other names."""
    endings = {path: ["_".join(path.split(".")[at:]) for at in range(path.count("."), -1, -1)] for path in paths}
    uses = Counter(name for names in endings.values() for name in names)
    return {
        path: next((name for name in names if uses[name] == 1 and name not in taken), names[-1])
        for path, names in endings.items()
    }


def _type(values: list[Any]) -> pa.DataType:
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int}:
        return _COUNT
    return _NUMBER if kinds and kinds <= {int, float} else _TEXT


def _few(values: list[Any]) -> bool:
    return all(isinstance(value, str | bool) for value in values) and len(set(values)) <= _MOST
