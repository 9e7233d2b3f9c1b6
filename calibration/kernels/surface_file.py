"""A Parquet file with the fitted kernels of one GPU: each row is a shape, and its values are bytes.

Log ratios are rounded to 1/127 of their kernel's largest, which is well below their error. The schema's metadata has
the source of the measurements, their licence, and the errors at points held out of the fit. Reading refuses, with its
name, a file that is not ours, is damaged or is for another GPU.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from calibration.kernels.structure import Efficiency
from calibration.kernels.surface import Surface
from calibration.kernels.surfaces import KernelFit, KernelSurfaces
from serving.deployments.gpu_spec import GpuSpec
from serving.errors import UserError

FORMAT = "tokentwin kernel surfaces 1"
_STEPS = 127
_METADATA = b"tokentwin"


def write_surfaces(path: Path, kernels: KernelSurfaces, about: dict[str, Any]) -> None:
    """Write the fits of a GPU; the same input gives the same bytes.

    `about` is kept as it is: source, versions, licence, date, held-out errors.
    """
    table, described = _packed(kernels)
    metadata = {"format": FORMAT, "gpu": kernels.gpu.name, "kernels": described, "about": about}
    metadata["sha256"] = _digest(table, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    described_table = table.replace_schema_metadata({_METADATA: json.dumps(metadata, sort_keys=True).encode()})
    pq.write_table(described_table, path, compression="zstd", compression_level=19)


def _packed(kernels: KernelSurfaces) -> tuple[pa.Table, dict[str, Any]]:
    """Return the rows of the file, and the metadata of each kernel."""
    rows: dict[str, list[Any]] = {"kernel": [], "shape": [], "log_ratio": []}
    described: dict[str, Any] = {}
    for key, fit in kernels.fits.items():
        surface = fit.surface
        step = float(np.abs(surface.values).max()) / _STEPS or 1.0
        rounded = np.round(surface.values / step).astype(np.int8)
        for shape, values in zip(surface.shapes, rounded, strict=True):
            rows["kernel"].append(key)
            rows["shape"].append(np.exp2(shape).round(3).astype(np.float32))
            rows["log_ratio"].append(values.ravel())
        described[key] = {
            "efficiency": asdict(fit.efficiency),
            "knots": [np.exp2(axis).round(3).tolist() for axis in surface.knots],
            "support": np.round(surface.support, 2).ravel().tolist(),
            "scales": surface.scales.tolist(),
            "nugget": surface.nugget,
            "error": surface.error,
            "spread": surface.spread,
            "step": step,
        }
    table = pa.table(
        {
            "kernel": pa.array(rows["kernel"]).dictionary_encode(),
            "shape": pa.array(rows["shape"], pa.list_(pa.float32())),
            "log_ratio": pa.array(rows["log_ratio"], pa.list_(pa.int8())),
        }
    )
    return table, described


def read_surfaces(path: Path, gpu: GpuSpec) -> KernelSurfaces:
    """Read the fits of `gpu`; raise UserError for a file that is not of this kind, is damaged or is for another GPU."""
    table, metadata = _read(path)
    if metadata["gpu"] != gpu.name:
        raise UserError("kernel surfaces", str(path), f"is for {metadata['gpu']}, not for {gpu.name}")
    keys = table["kernel"].to_numpy()
    shapes, ratios = table["shape"].combine_chunks(), table["log_ratio"].combine_chunks()
    fits = {}
    for key, known in metadata["kernels"].items():
        rows = pa.array(np.flatnonzero(keys == key))
        grid = tuple(len(axis) for axis in known["knots"])
        features = shapes.take(rows).flatten().to_numpy().reshape(len(rows), -1).astype(np.float64)
        values = ratios.take(rows).flatten().to_numpy().reshape(len(rows), *grid) * known["step"]
        fits[key] = KernelFit(
            Efficiency(**known["efficiency"]),
            Surface(
                np.log2(features),
                tuple(np.log2(axis) for axis in known["knots"]),
                values,
                np.array(known["support"]).reshape(grid),
                np.array(known["scales"]),
                known["nugget"],
                known["error"],
                known["spread"],
            ),
        )
    return KernelSurfaces(gpu, fits)


def about_surfaces(path: Path) -> dict[str, Any]:
    """Return the source of a file's fits and their held-out errors."""
    return _read(path)[1]["about"]


def _read(path: Path) -> tuple[pa.Table, dict[str, Any]]:
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowException) as error:
        raise UserError("kernel surfaces", str(path), f"is not a readable Parquet file: {error}") from None
    try:
        metadata: dict[str, Any] = json.loads((table.schema.metadata or {})[_METADATA])
        kind = metadata["format"]
    except (KeyError, ValueError, TypeError):
        kind = "some other Parquet file"
    if kind != FORMAT:
        remedy = f"is {kind}, not {FORMAT!r}; make it with lab.kernels.fit"
        raise UserError("kernel surfaces", str(path), remedy)
    if metadata.pop("sha256", "") != _digest(table, metadata):
        remedy = "is damaged: the contents do not match the checksum; make it again"
        raise UserError("kernel surfaces", str(path), remedy)
    return table, metadata


def _digest(table: pa.Table, metadata: dict[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(metadata, sort_keys=True).encode())
    for name in ("shape", "log_ratio"):
        digest.update(table[name].combine_chunks().flatten().to_numpy().tobytes())
    return digest.hexdigest()
