"""The fit of closed forms to tables of collectives: `python -m lab.kernels.fit --forms collectives`.

Each form is fitted to log times by robust least squares, at all sizes and numbers of devices at once. A form is the
fastest of several algorithms. The engines' own all-reduces have a one-shot algorithm and two rings (for their two-shot
algorithms). NCCL's collectives have two rings (for its protocols for small and for large messages). NCCL's all-reduce
also has an algorithm in which the switch adds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from lab.kernels.aiconfigurator import PACKAGE, SYSTEMS, Measured, measurements, provenance
from tokentwin.calibration.kernels.collectives import Algorithm, ClosedForm, Line, taken_up_to
from tokentwin.calibration.operations import Collective
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu

Floats = NDArray[np.float64]

_OWN: tuple[Algorithm, ...] = ("one_shot", "ring", "ring")
_ALGORITHMS: dict[str, tuple[Algorithm, ...]] = {
    "custom/all_reduce": _OWN,
    "fused/all_reduce": _OWN,
    "nccl/all_reduce": ("ring", "ring", "switch"),
}
_RINGS: tuple[Algorithm, ...] = ("ring", "ring")
_LOW, _HIGH = (6.0, 0.0, -6.0, 0.0), (13.0, 12.0, 0.0, 3.0)  # bounds: log ns, log ns, log share, crowding
_STARTS = 6
_OUTLIER = 0.1
_BEYOND = 2.0  # larger messages are left out; a factor on the size up to which an engine uses its own all-reduce
_NORMAL_90 = 1.645


def fit_form(gpu: GpuSpec, measured: list[Measured]) -> tuple[ClosedForm, dict[str, float]]:
    """Return the closed form of one kernel, and quantiles of its absolute errors at the points of the fit."""
    algorithms = _ALGORITHMS.get(measured[0].key, _RINGS)
    log_ns = np.log(np.concatenate([m.ns for m in measured]))

    def lines(x: Floats) -> tuple[Line, ...]:
        rows = x.reshape(-1, 4)
        return tuple(
            Line(float(np.exp(a)), float(np.exp(b)), float(np.exp(c)), float(d), algorithm)
            for (a, b, c, d), algorithm in zip(rows, algorithms, strict=True)
        )

    def off(x: Floats) -> Floats:
        form = ClosedForm(lines(x), 0.0)
        return np.concatenate([np.log(form.ns(_collective(m), gpu.link_bytes_per_s)) for m in measured]) - log_ns

    least = log_ns.min()
    start = np.array([(least + at, 6.0 + at, -2.0 + at / 2, 0.05) for at in range(len(algorithms))]).ravel()
    low, high = np.tile(_LOW, len(algorithms)), np.tile(_HIGH, len(algorithms))
    rng = np.random.default_rng(0)
    fits = []
    for attempt in range(_STARTS):
        at = np.clip(start + (rng.normal(0.0, 0.5, len(start)) if attempt else 0.0), low + 1e-3, high - 1e-3)
        fits.append(least_squares(off, at, bounds=(low, high), loss="soft_l1", f_scale=_OUTLIER))
    best = min(fits, key=lambda fit: fit.cost).x
    errors = np.abs(np.expm1(off(best)))
    stated = {"median": float(np.median(errors)), "p90": float(np.quantile(errors, 0.9))}
    most_bytes = max(2.0 * float(np.max(_collective(m).elements)) for m in measured)
    most_gpus = max(_collective(m).gpus for m in measured)
    return ClosedForm(lines(best), stated["p90"] / _NORMAL_90, most_bytes, most_gpus), stated


def fit_collectives(tables: str, gpu: GpuSpec) -> dict[str, Any]:
    """Return the entry of one GPU in `gpus/collectives.json`; raise UserError for unreadable tables."""
    by_key: dict[str, list[Measured]] = defaultdict(list)
    for measured in measurements(tables, gpu.name, "comm/"):
        kernel, all_reduce = measured.key.partition("/")[0], _collective(measured)
        near = np.ones(len(measured.ns), dtype=np.bool_)
        if kernel != "nccl":
            near = 2.0 * np.asarray(all_reduce.elements) <= _BEYOND * taken_up_to(kernel, gpu, all_reduce.gpus)
        if near.any():
            taken = replace(all_reduce, elements=np.asarray(all_reduce.elements)[near])
            by_key[measured.key].append(Measured(measured.key, taken, measured.ns[near]))
    forms = {}
    for key, measured_of_key in sorted(by_key.items()):
        form, errors = fit_form(gpu, measured_of_key)
        forms[key] = {
            "lines": [_rounded(line) for line in form.lines],
            "error": round(form.error, 3),
            "most_bytes": form.most_bytes,
            "most_gpus": form.most_gpus,
            "off_by": {name: round(value, 3) for name, value in errors.items()},
        }
    said = "NVIDIA aiconfigurator kernel tables (ai-dynamo/aiconfigurator), Apache-2.0; "
    return {"source": said + provenance(tables, gpu.name, "comm/"), "forms": forms}


def _collective(measured: Measured) -> Collective:
    assert isinstance(measured.operation, Collective)
    return measured.operation


def _rounded(line: Line) -> dict[str, Any]:
    return {
        "start_ns": round(line.start_ns),
        "rank_ns": round(line.rank_ns),
        "share": round(line.share, 4),
        "crowding": round(line.crowding, 3),
        "algorithm": line.algorithm,
    }


def fit_all(tables: str, names: Sequence[str] = ()) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the entries of `gpus/collectives.json` for the GPUs `names`, or for all that have tables."""
    for name in names or SYSTEMS:
        gpu = find_gpu(name)
        yield gpu.name, fit_collectives(tables if tables == PACKAGE else f"{tables}/{SYSTEMS.get(gpu.name, name)}", gpu)
