"""NVIDIA's public kernel tables (aiconfigurator, Apache-2.0) as measurements of our operations.

The Parquet files are read from a folder or from the installed package `aiconfigurator-core`, whose code is not
imported. Some facts are not in the columns. Latencies are milliseconds. Message sizes are numbers of elements; for
all-gather and reduce-scatter, elements of the whole gathered message. `step` is the number of KV tokens before a decode
row's own token. Attention includes writing the KV cache, and prompts have no cached tokens. Experts are taken under the
mildly uneven routing `power_law_1.01`. If several kernels were timed at one point, the fastest counts, because engines
select it. Latent attention has tables of vLLM's modules and of TensorRT-LLM's kernels. The tables of the kernels are
read: their times grow with the context as much as those of vLLM's modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from tokentwin.calibration.kernels.shapes import equal_decodes, equal_prompts, latent_decodes, latent_prompts
from tokentwin.calibration.kernels.structure import structure_of
from tokentwin.calibration.latent_attention import HeadGemm
from tokentwin.calibration.operations import Collective, Experts, Gemm, Operation
from tokentwin.serving.errors import UserError

PACKAGE = "package"  # name of the installed package in place of a folder
SYSTEMS = {
    "A100-80G": "a100_sxm",
    "L40S": "l40s",
    "RTX-PRO-6000": "rtx_pro_6000_server",
    "H100": "h100_sxm",
    "H200": "h200_sxm",
    "B200": "b200_sxm",
    "B300": "b300_sxm",
    "GB200": "gb200",
}
_ROUTING = "power_law_1.01"
_KV_TYPES = ("bfloat16", "fp8")
_GEMM_TYPES = ("bfloat16", "fp8", "fp8_block", "nvfp4")
_EXPERT_TYPES = {**{name: name for name in _GEMM_TYPES}, "w4a16_mxfp4": "mxfp4"}
_COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
}

# Sizes of DeepSeek-V3, the model of the tables of latent attention: key and value of a head, latent vector with and
# without rotated key, n and k of the GEMMs before and after decode attention.
_DEEPSEEK_PROMPT = (192, 128)
_DEEPSEEK_LATENT = (576, 512)
_DEEPSEEK_GEMMS = {"mla_gen_pre": (512, 128), "mla_gen_post": (128, 512)}

Column = NDArray[Any]


class Measured(NamedTuple):
    """One shape of the kernel `key` at all measured sizes: `operation` has arrays of sizes, and `ns` has the times."""

    key: str
    operation: Operation
    ns: NDArray[np.float64]


@dataclass(frozen=True)
class _Table:
    """One kind of file: its place, the columns that group its rows, and the operation of a group.

    Attributes:
        filters: columns that `keep` needs besides shape and sizes
        keep: function that returns which rows count
        operation: makes the operation of a group from its shape and its sizes
        key: kernel of the operation, if it is not the usual one
        everywhere: True if every GPU has the table
    """

    folder: str
    name: str
    shape: tuple[str, ...]
    sizes: tuple[str, ...]
    filters: tuple[str, ...]
    keep: Callable[[dict[str, Column]], NDArray[np.bool_]]
    operation: Callable[..., Operation]
    key: str = ""
    everywhere: bool = True


def measurements(source: str, gpu: str, folder: str = "") -> Iterator[Measured]:
    """Yield every shape of every table of `gpu` under `source`: a folder of one system's tables, or `package`.

    Only tables in folders whose names begin with `folder` are read. Raises UserError for a GPU without tables, and for
    a file that is missing, unreadable or of another kind.
    """
    root = tables_root(source, gpu)
    for table, path in _files(root, folder):
        columns = _columns(path, table)
        if len(columns["latency"]):
            yield from _grouped(table, columns)


def provenance(source: str, gpu: str, folder: str = "") -> str:
    """Return the sources that `measurements` reads: `aiconfigurator-core 0.12.0: gemm/vllm/0.24.0, ...`."""
    root = tables_root(source, gpu)
    whose = f"aiconfigurator-core {version('aiconfigurator-core')}: " if source == PACKAGE else ""
    folders = dict.fromkeys(path.parent.relative_to(root).as_posix() for _, path in _files(root, folder))
    return whose + ", ".join(folders)


def tables_root(source: str, gpu: str) -> Path:
    """Return the folder of one GPU's tables; raise UserError for a GPU without tables, or if the package is missing."""
    if gpu not in SYSTEMS:
        raise UserError("gpu", gpu, f"has no kernel tables; choose one of {', '.join(SYSTEMS)}")
    if source != PACKAGE:
        return Path(source)
    package = find_spec("aiconfigurator_core")
    if package is None or not package.submodule_search_locations:
        remedy = "is not installed; pip install aiconfigurator-core, or name a folder of tables"
        raise UserError("tables", source, remedy)
    return Path(package.submodule_search_locations[0]) / "systems" / "data" / SYSTEMS[gpu]


def _files(root: Path, folder: str) -> Iterator[tuple[_Table, Path]]:
    for table in (table for table in _TABLES if table.folder.startswith(folder)):
        if table.everywhere or any(root.glob(f"{table.folder}/*/{table.name}_perf.parquet")):
            yield table, _newest(root, table)


def _newest(root: Path, table: _Table) -> Path:
    def release(path: Path) -> tuple[int, ...]:
        return tuple(int(part) if part.isdigit() else -1 for part in path.parent.name.split("."))

    paths = sorted((root / table.folder).glob(f"*/{table.name}_perf.parquet"), key=release)
    if not paths:
        raise UserError("tables", str(root), f"has no {table.folder}/*/{table.name}_perf.parquet")
    return paths[-1]


def _columns(path: Path, table: _Table) -> dict[str, Column]:
    try:
        read = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise UserError("tables", str(path), f"is not a readable Parquet file: {error}") from None
    missing = {*table.shape, *table.sizes, *table.filters, "latency"} - {*read.column_names, "window_size"}
    if missing:
        raise UserError("tables", str(path), f"is another kind of table: it has no column {', '.join(sorted(missing))}")
    columns = {name: read[name].to_numpy() for name in read.column_names}
    columns.setdefault("window_size", np.zeros(len(read), dtype=np.int64))  # older tables have no column for the window
    kept = table.keep(columns) & (columns["latency"] > 0)
    return {name: column[kept] for name, column in columns.items()}


def _grouped(table: _Table, columns: dict[str, Column]) -> Iterator[Measured]:
    """Yield one `Measured` for each shape; its points are in the order of their sizes, each with its fastest time."""
    codes = [np.unique(columns[name], return_inverse=True)[1] for name in (*table.shape, *table.sizes)]
    order = np.lexsort([columns["latency"], *codes[::-1]])
    points = np.stack([code[order] for code in codes])
    new = np.r_[True, (points[:, 1:] != points[:, :-1]).any(axis=0)]
    order, points = order[new], points[: len(table.shape), new]
    starts = np.flatnonzero(np.r_[True, (points[:, 1:] != points[:, :-1]).any(axis=0)])
    for rows in np.split(order, starts[1:]):
        shape = [columns[name][rows[:1]].tolist()[0] for name in table.shape]
        sizes = [columns[name][rows].astype(np.float64) for name in table.sizes]
        operation = table.operation(*shape, *sizes)
        key = f"nccl/{operation.kind}" if isinstance(operation, Collective) else structure_of(operation).key(operation)
        yield Measured(table.key or key, operation, 1e6 * columns["latency"][rows])


_ATTENTION = ("num_heads", "num_key_value_heads", "head_dim", "window_size", "kv_cache_dtype")
_TABLES = (
    _Table(
        "gemm/vllm", "gemm", ("n", "k", "gemm_dtype"), ("m",), (),
        lambda c: np.isin(c["gemm_dtype"], _GEMM_TYPES),
        lambda n, k, dtype, m: Gemm("", m, n, k, dtype),
    ),
    _Table(
        "attention/vllm", "context_attention", _ATTENTION, ("batch_size", "isl"), ("step",),
        lambda c: np.isin(c["kv_cache_dtype"], _KV_TYPES) & (c["step"] == 0),
        equal_prompts,
    ),
    _Table(
        "attention/vllm", "generation_attention", _ATTENTION, ("batch_size", "step"), (),
        lambda c: np.isin(c["kv_cache_dtype"], _KV_TYPES),
        lambda heads, kv, dim, window, kv_type, rows, step: equal_decodes(
            heads, kv, dim, window, kv_type, rows, step + 1
        ),
    ),
    _Table(
        "moe/vllm", "moe",
        ("hidden_size", "inter_size", "topk", "num_experts", "moe_tp_size", "moe_ep_size", "moe_dtype"),
        ("num_tokens",), ("distribution",),
        lambda c: np.isin(c["moe_dtype"], list(_EXPERT_TYPES)) & (c["distribution"] == _ROUTING),
        lambda hidden, inter, topk, experts, tp, ep, dtype, tokens: Experts(
            "", tokens, hidden, inter, topk, experts, tp, ep, _EXPERT_TYPES[dtype]
        ),
    ),
    _Table(
        "comm/nccl", "nccl", ("op_name", "num_gpus"), ("message_size",), ("nccl_dtype",),
        lambda c: (c["nccl_dtype"] == "half") & np.isin(c["op_name"], list(_COLLECTIVES)),
        lambda kind, gpus, elements: Collective("", _COLLECTIVES[kind], gpus, elements),
    ),
    _Table(
        "comm/vllm", "custom_allreduce", ("num_gpus",), ("message_size",), ("kernel_source",),
        lambda c: c["kernel_source"] == "vLLM_custom_graph",
        lambda gpus, elements: Collective("", "all_reduce", gpus, elements), "custom/all_reduce",
    ),
    _Table(
        "comm/trtllm", "custom_allreduce", ("num_gpus",), ("message_size",), ("allreduce_dtype",),
        lambda c: np.isin(c["allreduce_dtype"], ("half", "float16", "bfloat16")),
        lambda gpus, elements: Collective("", "all_reduce", gpus, elements), "fused/all_reduce", everywhere=False,
    ),
    _Table(
        "mla/trtllm", "context_mla", ("num_heads", "kv_cache_dtype"), ("batch_size", "isl"), ("step",),
        lambda c: np.isin(c["kv_cache_dtype"], _KV_TYPES) & (c["step"] == 0),
        lambda heads, kv_type, rows, length: latent_prompts(heads, *_DEEPSEEK_PROMPT, kv_type, rows, length),
        everywhere=False,
    ),
    _Table(
        "mla/trtllm", "generation_mla", ("num_heads", "kv_cache_dtype"), ("batch_size", "step"), (),
        lambda c: np.isin(c["kv_cache_dtype"], _KV_TYPES),
        lambda heads, kv_type, rows, step: latent_decodes(heads, *_DEEPSEEK_LATENT, kv_type, rows, step + 1),
        everywhere=False,
    ),
    _Table(
        "mla_bmm/vllm", "mla_bmm", ("op_name", "num_heads", "bmm_dtype"), ("num_tokens",), (),
        lambda c: c["bmm_dtype"] == "bfloat16",
        lambda which, heads, dtype, tokens: HeadGemm("", tokens, *_DEEPSEEK_GEMMS[which], dtype, heads=heads),
        everywhere=False,
    ),
)  # fmt: skip
