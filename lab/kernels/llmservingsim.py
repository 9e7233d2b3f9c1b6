"""LLMServingSim's kernel profiles (casys-kaist/LLMServingSim, MIT) as measurements of our operations.

A folder of one GPU has `<organisation>/<model>/<variant>/tpN/` with `dense.csv` (a layer's microseconds by tokens),
`per_sequence.csv` (by sequences; the LM head is in this file), `attention.csv` (a prompt chunk with its cached tokens,
together with decode rows of equal context; only rows with nothing but prompts or nothing but decode rows are taken)
and, for MoE models, `moe.csv`. vLLM ran one layer, eagerly, on one device; profiles of TP2 have the shapes of one of
two devices. There are few shapes, and no collectives.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import csv

from lab.kernels.aiconfigurator import Measured
from tokentwin.calibration.kernels.shapes import equal_decodes, equal_prompts
from tokentwin.calibration.kernels.structure import structure_of
from tokentwin.calibration.operations import Experts, Gemm, Operation
from tokentwin.calibration.step_operations import heads_per_device
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError

_FILES = {"dense": "tokens", "per_sequence": "sequences"}
Columns = dict[str, NDArray[np.float64]]


def profiled(folder: Path) -> Iterator[Measured]:
    """Yield every 16-bit shape under `folder`; prompts only without cached tokens.

    Raises UserError for a folder without profiles, and for a file that is not one.
    """
    places = sorted(folder.glob("*/*/bf16/tp*"))
    if not places:
        raise UserError("profiles", str(folder), "has no <organisation>/<model>/bf16/tpN")
    seen: set[tuple[str, tuple[float, ...]]] = set()
    for place in places:
        for measured in _of_place(place):
            shape = measured.key, structure_of(measured.operation).shape(measured.operation)
            if shape not in seen:  # models share shapes
                seen.add(shape)
                yield measured


def _of_place(place: Path) -> Iterator[Measured]:
    model = find_model("/".join(place.parts[-4:-2]))
    tp = int(place.name.removeprefix("tp"))
    for name, (n, k) in _layers(model, tp).items():
        rows, ns = _layer(place, name)
        if len(rows):
            yield _measured(Gemm("", rows, n, k), ns)
    attention = _read(place, "attention", ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"))
    heads = (*heads_per_device(model, tp), model.head_dim, 0, "bfloat16")
    chunk, past, rows, context, us = attention.values()
    alone = (rows == 0) & (past == 0) & (chunk > 0)
    yield _measured(equal_prompts(*heads, np.ones(alone.sum()), chunk[alone]), 1e3 * us[alone])
    decodes = (chunk == 0) & (rows > 0)
    yield _measured(equal_decodes(*heads, rows[decodes], context[decodes]), 1e3 * us[decodes])
    if (place / "moe.csv").exists():
        yield _experts(model, tp, _read(place, "moe", ("tokens", "activated_experts", "time_us")))


def _layers(model: ModelSpec, tp: int) -> dict[str, tuple[int, int]]:
    """Return n and k of each GEMM, by the name of its layer."""
    heads, kv_heads = heads_per_device(model, tp)
    layers = {
        "qkv_proj": ((heads + 2 * kv_heads) * model.head_dim, model.hidden_size),
        "o_proj": (model.hidden_size, heads * model.head_dim),
        "lm_head": (-(-model.vocab_size // tp), model.hidden_size),
    }
    if not model.num_experts:
        layers |= {
            "gate_up_proj": (2 * model.intermediate_size // tp, model.hidden_size),
            "down_proj": (model.hidden_size, model.intermediate_size // tp),
        }
    return layers


def _layer(place: Path, name: str) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return rows and nanoseconds of a layer, from the file that has this layer."""
    times: dict[float, float] = {}
    for file, size in _FILES.items():
        table = _table(place, file, ("layer", size, "time_us"))
        for layer, rows, us in zip(*(table[column].to_pylist() for column in ("layer", size, "time_us")), strict=True):
            if layer == name:
                times[float(rows)] = 1e3 * us
    return np.array(sorted(times)), np.array([times[rows] for rows in sorted(times)])


def _experts(model: ModelSpec, tp: int, table: Columns) -> Measured:
    """Return experts' times by tokens, from the row whose number of active experts is nearest to even routing."""
    tokens, active, us = table.values()
    shape = (model.hidden_size, model.moe_intermediate_size, model.experts_per_token, model.num_experts, tp)
    by_tokens: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for n, experts, time in zip(tokens, active, us, strict=True):
        expected = float(Experts("", n, *shape).touched)
        by_tokens[float(n)].append((abs(np.log(experts / expected)), 1e3 * time))
    sizes = np.array(sorted(by_tokens))
    return _measured(Experts("", sizes, *shape), np.array([min(by_tokens[n])[1] for n in sizes.tolist()]))


def _measured(operation: Operation, ns: NDArray[np.float64]) -> Measured:
    return Measured(structure_of(operation).key(operation), operation, ns)


def _read(place: Path, name: str, columns: tuple[str, ...]) -> Columns:
    table = _table(place, name, columns)
    return {column: table[column].to_numpy().astype(np.float64) for column in columns}


def _table(place: Path, name: str, columns: tuple[str, ...]) -> pa.Table:
    path = next((path for path in (place / f"{name}.csv", place / f"{name}.csv.gz") if path.exists()), None)
    if path is None:
        raise UserError("profiles", str(place), f"has no {name}.csv")
    try:
        table = csv.read_csv(path)
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError("profiles", str(path), f"cannot be read: {str(error).splitlines()[0]}") from None
    missing = [column for column in columns if column not in table.column_names]
    if missing:
        raise UserError("profiles", str(path), f"has no column {missing[0]}; is it a kernel profile?")
    return table
