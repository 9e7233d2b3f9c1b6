"""Figures of the Step page: the time of one step by part, and its kernels under the roofline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from tokentwin.calibration.steps.explanation import ExplainedOperation
from tokentwin.dashboard.palette import ALARM, NEUTRAL, SIMULATED, bars, dots, finish, line, pale, symbols
from tokentwin.serving.answers.figures import shown_share
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.deployments.weight_types import DTYPE_BYTES

BOUND_COLOUR = {"compute": SIMULATED, "memory": pale(SIMULATED), "link": ALARM}


def parts_bar(parts_ns: Mapping[str, float]) -> go.Figure:
    """Return milliseconds by part, the longest first."""
    ordered = sorted(parts_ns.items(), key=lambda item: item[1])
    figure = go.Figure()
    names, times = [name for name, _ in ordered], [ns / 1e6 for _, ns in ordered]
    bars(figure, times, names, "", SIMULATED, "%{y}: %{x:.3f} ms<extra></extra>", orientation="h")
    figure.update_xaxes(title_text="time (ms)")
    return finish(figure, 60 + 34 * max(len(ordered), 3), legend=False)


def roofline(operations: Sequence[ExplainedOperation], gpu: GpuSpec, weights: str = "bfloat16") -> go.Figure:
    """Return a point for every operation, by arithmetic intensity and rate, under the roofline of the device.

    The size of a point is the operation's share of the time. Hollow points are extrapolated. `weights` is the dtype of
    the weights; if it is narrower than 16 bits, GEMMs have a separate roof.
    """
    figure = go.Figure()
    bandwidth = float(gpu.memory_bytes_per_s)
    intensity = [10 ** (i / 10) for i in range(-10, 46)]
    for dtype, dash in (("bfloat16", "solid"), (weights, "dot")):
        rate = gpu.flop_per_s(dtype)
        if dash == "solid" or rate != gpu.flop_per_s("bfloat16"):
            roof = [min(rate, bandwidth * x) / 1e12 for x in intensity]
            line(figure, intensity, roof, f"{8 * DTYPE_BYTES[dtype]:.0f}-bit roof", NEUTRAL, None, 1.5, dash)
    longest = max((o.ns for o in operations), default=1.0)
    for bound, colour in BOUND_COLOUR.items():
        mine = [o for o in operations if o.bound == bound and o.flops > 0]
        if mine:
            x, y = [o.flops / o.bytes for o in mine], [o.flops / o.ns / 1e3 for o in mine]
            size = [8 + 26 * (o.ns / longest) ** 0.5 for o in mine]
            look = {"opacity": 0.85, "symbol": symbols(o.level.word for o in mine)}
            text = [f"{o.name}: {o.ns / 1e3:,.0f} µs, {shown_share(o.utilisation)} of its roofline" for o in mine]
            dots(figure, x, y, f"bound by {bound}", colour, "%{text}<extra></extra>", size, look, text=text)
    figure.update_xaxes(type="log", dtick=1, title_text="FLOP per byte")
    figure.update_yaxes(type="log", dtick=1, title_text="TFLOP/s")
    return finish(figure, 380)
