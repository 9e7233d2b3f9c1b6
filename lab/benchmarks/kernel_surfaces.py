"""The accuracy of fitted kernel times: held-out errors, gaps in a grid of sizes, left-out GPUs, and pricing speed.

`python -m lab.benchmarks.kernel_surfaces` prints the errors that the bundled fits state, and the time of pricing. With
`--tables package` (needs `aiconfigurator-core`) or a folder of systems (`h100_sxm`, `h200_sxm`, ...) it also measures
two harder cases. In the first, sizes in a gap of two octaves are left out; the gap is as wide as the widest one in the
tables. In the second, a whole GPU is left out. These errors are the source of the standard errors for GPUs without
tables.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from lab.kernels.aiconfigurator import PACKAGE, SYSTEMS, Measured, measurements
from lab.kernels.surface_fit import fit_kernel
from tokentwin.calibration.kernels.catalogue import TransferredKernels
from tokentwin.calibration.kernels.collectives import COLLECTIVES, Collectives, over_nvlink, read_forms, transferred
from tokentwin.calibration.kernels.surfaces import KernelSurfaces, about_surfaces, bundled, bundled_names, read_surfaces
from tokentwin.calibration.operations import Collective, Gemm, StepSizes, floor_ns
from tokentwin.calibration.step_operations import step_operations
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError

# Sizes that are left out of the fit, so that nothing is known from 10240 to 51200. The tables have no wider gap than
# from 16384 to 51200.
_GAP = {12288, 16384}
_ALIKE = ({"H100", "H200"}, {"B200", "B300", "GB200"})  # GPUs with the same chip are left out together
_TOKENS = 10_000
_REPEATS = 5


def held_out() -> None:
    print("Errors at points that the fit did not see, median / 9 of 10, per cent: shapes | sizes")
    for name in bundled_names():
        about = about_surfaces(bundled(name))
        print(f"{name} ({about['tables']})")
        for key, e in about["held_out"].items():
            print(
                f"  {key:<22}{100 * e['shapes_median']:6.1f} /{100 * e['shapes_p90']:6.1f}"
                f"  |{100 * e['sizes_median']:6.1f} /{100 * e['sizes_p90']:6.1f}"
            )


def gaps(tables: str, names: Iterable[str]) -> None:
    print(f"\nGEMMs with n or k in {sorted(_GAP)}, which nothing between 10240 and 51200 was fitted to")
    for name in names:
        by_key = defaultdict(list)
        for m in _measurements(tables, name):
            if m.key in ("gemm/bfloat16", "gemm/fp8"):
                by_key[m.key].append(m)
        for key, measured in by_key.items():
            seen = [m for m in measured if not _in_gap(m)]
            kernels = KernelSurfaces(find_gpu(name), {key: fit_kernel(find_gpu(name), seen)[0]})
            print(f"  {name:<14}{key:<16}{_errors(kernels, [m for m in measured if _in_gap(m)])}")


def gpus_left_out(tables: str, names: Iterable[str]) -> None:
    print("\nGPUs left out, from the others' kernels on their datasheet: median / 9 of 10, per cent; sigma that fits")
    pooled: dict[str, list[np.ndarray]] = defaultdict(list)
    for name in names:
        alike: set[str] = next((group for group in _ALIKE if name in group), {name})
        gpu = find_gpu(name)
        kernels = TransferredKernels.to(gpu, without=sorted(alike))
        by_kind: dict[str, list[Measured]] = defaultdict(list)
        for i, m in enumerate(_measurements(tables, name)):
            timed_with_host = m.key == "gemm/fp8_block"
            if i % 4 == 0 and not timed_with_host and not isinstance(m.operation, Collective):
                by_kind[m.key.split("/")[0]].append(m)
        for kind, measured in by_kind.items():
            missed = _logs(kernels, measured)
            pooled[kind].append(missed)
            print(f"  {name:<14}{kind:<10}{_errors(kernels, measured)}")
    for kind, parts in pooled.items():
        print(f"  sigma {kind:<10}{np.quantile(np.abs(np.concatenate(parts)), 0.9) / 1.645:.2f}")


def collectives_left_out() -> None:
    """Print errors for left-out GPUs whose closed forms come from GPUs with the same kind of link."""
    print("\nCollectives of GPUs left out: sigma that fits")
    known = read_forms(json.loads(COLLECTIVES.read_text(encoding="utf-8")))
    pooled: dict[bool, list[np.ndarray]] = defaultdict(list)
    for name, forms in known.items():
        alike: set[str] = next((group for group in _ALIKE if name in group), {name})
        gpu = find_gpu(name)
        others = transferred(gpu, {other: f for other, f in known.items() if other not in alike})
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all"):
            for gpus in (2, 4, 8):
                operation = Collective("", kind, gpus, 2.0 ** np.arange(10, 26))
                own = Collectives(gpu, [forms], True).time(operation).ns
                pooled[over_nvlink(gpu)].append(np.log(others.time(operation).ns / own))
    for nvlink, parts in pooled.items():
        print(f"  {'NVLink' if nvlink else 'PCIe':<10}{np.quantile(np.abs(np.concatenate(parts)), 0.9) / 1.645:.2f}")


def speed() -> None:
    """Print the CPU time to predict the time of every operation of a model at ten thousand numbers of tokens."""
    model = find_model("Llama-3.1-8B")
    sizes = StepSizes(prefill_tokens=np.arange(1.0, _TOKENS + 1.0))
    operations = step_operations(model, Deployment(model="Llama-3.1-8B"), sizes)
    priced = [operation for operation in operations if np.any(operation.size)]
    started = time.process_time()
    kernels = read_surfaces(bundled("H100"), find_gpu("H100"))
    loaded = time.process_time()
    took = []
    for _ in range(_REPEATS):
        begun = time.process_time()
        for operation in priced:
            kernels.time(operation)
        took.append(time.process_time() - begun)
    print(f"\nreading a fit: {1e3 * (loaded - started):.0f} ms")
    print(
        f"{len(priced)} operations at {_TOKENS} numbers of tokens:"
        f" {1e3 * took[0]:.0f} ms at first, {1e3 * min(took):.0f} ms again"
    )


def _measurements(tables: str, name: str) -> Iterable[Measured]:
    return measurements(tables if tables == PACKAGE else str(Path(tables) / SYSTEMS[name]), name)


def _in_gap(m: Measured) -> bool:
    return isinstance(m.operation, Gemm) and not _GAP.isdisjoint({m.operation.n, m.operation.k})


def _logs(kernels: KernelSurfaces | TransferredKernels, measured: list[Measured]) -> np.ndarray:
    """Return the logs of predicted / measured time; measured times below the roofline are raised to the roofline."""
    return np.concatenate(
        [np.log(kernels.time(m.operation).ns / np.maximum(m.ns, floor_ns(kernels.gpu, m.operation))) for m in measured]
    )


def _errors(kernels: KernelSurfaces | TransferredKernels, measured: list[Measured]) -> str:
    missed = np.abs(np.expm1(_logs(kernels, measured)))
    return f"{100 * np.median(missed):6.1f} /{100 * np.quantile(missed, 0.9):6.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", help="`package`, or a folder with a subfolder for each system")
    given = parser.parse_args()
    held_out()
    collectives_left_out()
    speed()
    if given.tables:
        names = [name for name in SYSTEMS if given.tables == PACKAGE or _present(given.tables, name)]
        gaps(given.tables, names)
        gpus_left_out(given.tables, names)


def _present(tables: str, name: str) -> bool:
    return (Path(tables) / SYSTEMS[name]).is_dir()


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        raise SystemExit(f"error: {error}") from None
