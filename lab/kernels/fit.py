"""The fit of a GPU's surfaces to kernel tables: `python -m lab.kernels.fit --tables package --gpu H100`.

For a GPU without tables from NVIDIA: `--profiles DIR/RTX4090 --gpu RTX-4090`. `--forms` fits collectives or exchanges
instead; `--own` compares a fit with the measurements of our own GPU suite.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lab.kernels import collective_fit, exchange_fit
from lab.kernels.aiconfigurator import PACKAGE, Measured, measurements, provenance
from lab.kernels.llmservingsim import profiled
from lab.kernels.surface_fit import fit_kernel
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.kernels.own_kernels import own_measurements
from tokentwin.calibration.kernels.surfaces import KernelFit, KernelSurfaces, bundled, write_surfaces
from tokentwin.calibration.operations import Collective
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.serving.errors import UserError


def agreement(path: Path, gpu: GpuSpec) -> dict[str, NDArray[np.float64]]:
    """Return the ratios of predicted to measured times for our own measurements, by kind of operation."""
    kernels = load_kernels(gpu)
    ratios: dict[str, list[float]] = {}
    for kind, operation, ns in own_measurements(path):
        ratios.setdefault(kind, []).append(float(np.asarray(kernels.time(operation).ns)) / ns)
    return {kind: np.array(ratios[kind]) for kind in sorted(ratios)}


# the table of fp8_block was timed with the host: no time is under 55 us (H100) or 280 us (L40S)
_TIMED_WITH_HOST = {"gemm/fp8_block": "gemm/fp8"}
_FEWEST_SHAPES = 20
# on these GPUs vLLM uses another latent attention kernel than the one in the tables
_TRITON_MLA = ("A100-80G", "L40S", "RTX-PRO-6000")
_FEWEST_HEADS = 6  # minimum number of shapes of latent attention, which differ only by the number of heads
# This FlashInfer kernel looks untuned: it takes 2 to 2.6 times as long as in 16 bits, and 3 to 5 times as long as
# fp8_block.
_UNTUNED = {("H100", "experts/fp8"), ("H200", "experts/fp8")}


def fit_kernels(tables: str, gpu: GpuSpec) -> tuple[KernelSurfaces, dict[str, Any]]:
    """Return the surfaces of every kernel of `gpu` in `tables` (a folder, or `package`), with notes on them.

    Raises UserError for tables that cannot be read.
    """

    def left_out(key: str, measured: list[Measured]) -> bool:
        latent = key.startswith("mla_")
        few = len(measured) < (_FEWEST_HEADS if latent else _FEWEST_SHAPES)
        return (gpu.name, key) in _UNTUNED or few or (latent and gpu.name in _TRITON_MLA)

    # `collective_fit` has closed forms for collectives
    others = (m for m in measurements(tables, gpu.name) if not isinstance(m.operation, Collective))
    about = {
        "source": "NVIDIA aiconfigurator kernel tables (ai-dynamo/aiconfigurator)",
        "licence": "Apache-2.0, Copyright (c) NVIDIA CORPORATION & AFFILIATES",
        "tables": ", ".join(t for t in provenance(tables, gpu.name).split(", ") if not t.startswith("comm/")),
    }
    return _fitted(gpu, others, about, left_out)


def fit_profiles(folder: Path, gpu: GpuSpec) -> tuple[KernelSurfaces, dict[str, Any]]:
    """Return the surfaces of LLMServingSim's profiles of `gpu`, with notes on them.

    The profiles have few shapes; times of other kernels come from other GPUs' fits. Raises UserError for unreadable
    profiles.
    """
    about = {
        "source": "LLMServingSim kernel profiles (casys-kaist/LLMServingSim), vLLM 0.19.0",
        "licence": "MIT",
        "tables": f"profiler/perf/{folder.name}",
    }
    return _fitted(gpu, profiled(folder), about, lambda key, measured: False)


def _fitted(
    gpu: GpuSpec,
    every: Iterable[Measured],
    about: dict[str, Any],
    left_out: Callable[[str, list[Measured]], bool],
) -> tuple[KernelSurfaces, dict[str, Any]]:
    by_key: dict[str, list[Measured]] = defaultdict(list)
    for measured in every:
        by_key[measured.key].append(measured)
    fits: dict[str, KernelFit] = {}
    errors = {}
    for key, of_key in sorted(by_key.items()):  # sorted, because the fit of `gemm/fp8_block` needs that of `gemm/fp8`
        if not left_out(key, of_key):
            fits[key], held_out = fit_kernel(gpu, of_key, fits.get(_TIMED_WITH_HOST.get(key, "")))
            errors[key] = {name: round(error, 4) for name, error in asdict(held_out).items()}
    return KernelSurfaces(gpu, fits), about | {"held_out": errors}


def _fit_forms(what: str, tables: str, names: Sequence[str], out: Path) -> None:
    """Write closed forms into a JSON file, and keep the forms of other GPUs in it."""
    made = {"collectives": collective_fit.fit_all, "exchanges": exchange_fit.fit_all}[what]
    known = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    for name, about in made(tables, names):
        known[name] = about
        for key, form in about["forms"].items():
            errors = form.get("off_by") or {kind: form[kind] for kind in ("error", "error_apart")}
            print(f"{name:<14}{key:<26}" + ", ".join(f"{kind} {100 * error:.1f} %" for kind, error in errors.items()))
    out.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def _fit_surfaces(given: argparse.Namespace) -> None:
    gpu = find_gpu(given.gpu)
    out = given.out or bundled(gpu.name)
    kernels, about = fit_profiles(given.profiles, gpu) if given.profiles else fit_kernels(given.tables, gpu)
    write_surfaces(out, kernels, about)
    print(f"{gpu.name}: absolute error at points held out, median and 9 of 10, in per cent")
    print(f"{'kernel':<22}{'shapes':>16}{'sizes':>16}")
    for key, held_out in about["held_out"].items():
        shapes, sizes = (
            f"{100 * held_out[f'{kind}_median']:.1f} {100 * held_out[f'{kind}_p90']:5.1f}"
            for kind in ("shapes", "sizes")
        )
        print(f"{key:<22}{shapes:>16}{sizes:>16}")
    print(f"wrote {out}: {out.stat().st_size / 1024:.0f} KiB")


def _agree(path: Path, gpu: str) -> None:
    print(f"{'kernel':<20}{'points':>8}{'median off':>12}{'9 of 10':>10}{'surface / ours':>16}")
    for kind, ratios in agreement(path, find_gpu(gpu)).items():
        median, p90 = np.quantile(100 * np.abs(ratios - 1), [0.5, 0.9])
        print(f"{kind:<20}{len(ratios):>8}{median:>10.1f} %{p90:>8.1f} %{np.median(ratios):>16.2f}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.kernels.fit", description=__doc__)
    parser.add_argument(
        "--tables",
        default=PACKAGE,
        help="folder with one system's tables, or `package` for those of aiconfigurator-core",
    )
    parser.add_argument(
        "--profiles", type=Path, help="fit LLMServingSim's profiles of the GPU in this folder, instead of --tables"
    )
    parser.add_argument(
        "--forms",
        choices=["collectives", "exchanges"],
        help="fit closed forms of collectives or exchanges instead, and write them to --out",
    )
    parser.add_argument(
        "--own",
        type=Path,
        help="compare the bundled fit with this kernels.parquet of the GPU suite, instead of fitting",
    )
    parser.add_argument("--gpu", help="GPU's name in the catalogue; without --gpu, --forms fits all GPUs with tables")
    parser.add_argument("--out", type=Path, help="file to write; default: the GPU's bundled Parquet file")
    given = parser.parse_args(arguments)
    if not (given.out if given.forms else given.gpu):
        parser.error("give --out FILE with --forms, and --gpu NAME without")
    try:
        if given.forms:
            _fit_forms(given.forms, given.tables, [given.gpu] if given.gpu else [], given.out)
        elif given.own:
            _agree(given.own, given.gpu)
        else:
            _fit_surfaces(given)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
