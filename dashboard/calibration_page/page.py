"""Calibration: the basis of predictions. Kernel tables of GPUs against their fits, and calibrations of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.kernels.shapes import NO_WINDOW, KernelKind, kind_of
from tokentwin.calibration.kernels.surfaces import KernelFit, KernelSurfaces, about_surfaces, bundled, bundled_names
from tokentwin.calibration.trust import EXTRAPOLATED, INTERPOLATED, VALIDATED, Trust, TrustLevel, weakest
from tokentwin.dashboard.blocks import facts, figure, heading, mistake, titled
from tokentwin.dashboard.calibration_page import charts, step_calibration
from tokentwin.dashboard.palette import SERIES
from tokentwin.dashboard.sheet import Fact
from tokentwin.dashboard.url import choose, choose_many, in_url, pick, usual_first
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError

_KERNELS, _ENGINES = "Kernel tables", "Engines"
_TYPICAL = {"gemm": (4096, 4096), "prefill": (8, 4, 128), "decode": (8, 4, 128), "experts": (4096, 14336)}
_SERIES = 4
_HELD_OUT = "kernels that were left out of the fit were predicted and compared with their measured times"
_FIT = (
    "Orange dots are measured times, interpolated to common sizes. The fitted time is a model of the kernel (launch, "
    "waves of tiles, bytes) times a smooth correction that was fitted to all shapes. The roofline is the shortest time "
    "that the GPU's datasheet allows."
)
_GPUS = "The roofline's time divided by the kernel's time, on each GPU. Dotted lines are extrapolated."
_KNOWN = (
    "90 % of the predictions have a smaller error than this. Grey cells are extrapolated, because they lie outside the "
    "measured shapes or near too few of them. Orange dots are measured shapes."
)


@in_url
def show(runs: Path) -> None:
    """Draw the page: bundled kernel tables, and the calibrations under `runs`."""
    with titled("What predictions are based on"):
        what = pick("Measurements of", [_KERNELS, _ENGINES], "of")
    if what == _ENGINES:
        step_calibration.show(runs)
        return
    try:
        _kernels()
    except UserError as error:
        mistake(error)


def _kernels() -> None:
    st.caption(
        "Measured times of single kernels on real GPUs, and the model that was fitted to them. The predicted time of "
        "a step is the sum of the times of its kernels."
    )
    left, right = st.columns([2, 5], gap="medium")
    with left:
        names = usual_first("H100", bundled_names())
        name = choose("GPU", names, "gpu")
        kernels = _load(name)
        key = choose("Kernel", usual_first("gemm/bfloat16", sorted(kernels.fits)), "kernel", show=_titled)
        fit = kernels.fits[key]
        number, at = _shape(key, fit)
        others = [other for other in names if other != name and key in _load(other).fits]
        beside = choose_many("Compare with", others, "beside", _beside(others))[: len(SERIES) - 1]
    about = about_surfaces(bundled(name))
    shape = np.exp2(fit.surface.shapes[number]).tolist()
    with right:
        _held_out(about["held_out"].get(key))
        curve = charts.times(kernels.gpu, key, fit, number, at)
        _, measured = charts.measured_along(kernels.gpu, key, fit, number, at)
        figure(curve, "times", "Measured and fitted", _of_dots(measured), _FIT, marked=True)
    one, other = st.columns(2, gap="large")
    with one:
        of_gpus = {gpu: _load(gpu) for gpu in (name, *beside)}
        fits = {gpu: (surfaces.gpu, surfaces.fits[key]) for gpu, surfaces in of_gpus.items()}
        levels = charts.worst_levels(fits, key, shape, at)
        trust = weakest((_of_gpu(gpu, level) for gpu, level in levels.items()), "GPUs")
        figure(charts.utilisations(fits, key, shape, at), "gpus", "Comparison of GPUs", trust, _GPUS)
    with other:
        known = _known(name, key, number, at)
        figure(charts.domain(known), "domain", "Uncertainty by shape", _of_map(known), _KNOWN)
    _provenance(about)


@st.cache_resource(max_entries=16, show_spinner=False)
def _load(name: str) -> KernelSurfaces:
    surfaces = load_kernels(find_gpu(name))
    assert isinstance(surfaces, KernelSurfaces)  # because it is bundled
    return surfaces


@st.cache_resource(max_entries=64, show_spinner=False)
def _known(name: str, key: str, number: int, at: int) -> charts.Known:
    kernels = _load(name)
    return charts.known(kernels.gpu, key, kernels.fits[key], number, at)


def _of_dots(measured: NDArray[np.float64]) -> Trust:
    """Return the trust in a curve from its dots: measured ns at tabled sizes, NaN if there are too few measurements."""
    count = int(np.isfinite(measured).sum())
    if count < measured.size:
        return Trust(EXTRAPOLATED, f"this shape was measured at only {count} of {measured.size} sizes (the dots)")
    return Trust(VALIDATED, f"this shape was measured at {count} sizes (the dots); times between them are interpolated")


def _of_gpu(name: str, level: TrustLevel) -> Trust:
    """Return the trust in a GPU's curve at the sizes that were measured on it."""
    lies = {TrustLevel.VALIDATED: "was measured", TrustLevel.INTERPOLATED: "lies between measured shapes"}
    return Trust(level.word, f"on {name} this shape {lies.get(level, 'lies outside the measured shapes')}")


def _of_map(known: charts.Known) -> Trust:
    beyond = float((known.level >= TrustLevel.EXTRAPOLATED).mean())
    if beyond:
        return Trust(EXTRAPOLATED, f"{shown_share(beyond)} of the map (in grey) lies outside the measured shapes")
    return Trust(INTERPOLATED, "the complete map lies between measured shapes")


def _titled(key: str) -> str:
    return f"{kind_of(key).title}, {key.partition('/')[2]}"


def _shape(key: str, fit: KernelFit) -> tuple[int, int]:
    """Draw the choice of a shape and of a first size, and return the shape's number and the size's knot."""
    kind, surface = kind_of(key), fit.surface
    labels = {_labelled(kind, np.exp2(shape).tolist()): at for at, shape in enumerate(surface.shapes)}
    typical = np.log2(_TYPICAL.get(key.partition("/")[0], (8,)))
    nearest = np.argsort(np.abs(surface.shapes[:, : len(typical)] - typical).sum(axis=1), kind="stable")
    ordered = usual_first(list(labels)[nearest[0]], labels)
    number = labels[choose("Shape", ordered, "shape", help=" × ".join(kind.shape))]
    st.caption(" × ".join(kind.shape))
    if len(kind.sizes) == 1 and len(kind.shape) == 1:
        return number, 0
    knots = {_plain(value): at for at, value in enumerate(np.exp2(surface.knots[0]))}
    label = kind.sizes[0].capitalize() if len(kind.sizes) == 2 else f"Map at {kind.sizes[0]}"
    where = choose(label, usual_first(list(knots)[len(knots) // 2], knots), "size")
    return number, knots[where]


def _beside(others: list[str]) -> list[str]:
    """Return the GPUs that are shown for comparison by default: one of each generation."""
    generations: tuple[str, ...] = ("A100-80G", "H200", "B200")
    return [name for name in generations if name in others][: _SERIES - 1]


def _held_out(errors: dict[str, float] | None) -> None:
    if errors is None:
        return
    heading("Error on held-out kernels", Trust(VALIDATED, _HELD_OUT))
    help = "The error for shapes (or sizes) that were left out of the fit."
    names = ("shapes_median", "shapes_p90", "sizes_median", "sizes_p90")
    labels = {name: name.replace("_", " ").replace("median", "p50") for name in names}
    facts(Fact(label, f"± {shown_share(errors[name], 1)}", None, help) for name, label in labels.items())


def _provenance(about: dict[str, Any]) -> None:
    with st.expander("Where these kernels were measured"):
        st.table({name: str(about[name]) for name in ("source", "tables", "licence", "date") if about.get(name)})


def _labelled(kind: KernelKind, shape: list[float]) -> str:
    windowed = kind.shape[-1].startswith("window") and shape[-1] < NO_WINDOW
    sizes = shape if windowed or not kind.shape[-1].startswith("window") else shape[:-1]
    return " × ".join(map(_plain, sizes))


def _plain(value: float) -> str:
    return f"{value:.6g}"
