"""How far to trust figures of power and energy, by the errors of the same predictions for published runs."""

from __future__ import annotations

from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.traces.metrics.power import FITTED
from tokentwin.traces.metrics.run_metrics import RunMetrics

# Factors of the predicted figure between which 90 % of the published figures lie, of power and of all other figures: on
# GPUs of a generation to which the power model was fitted, and on others. See `lab/results/energy.md`.
_POWER = {True: (0.55, 1.45), False: (0.5, 1.8)}
_ENERGY = {True: (0.85, 1.65), False: (0.6, 2.0)}
_MORE = ("energy_kwh", "joules_per_token", "co2_g", "co2_g_per_mtok_out")

Factors = tuple[float, float]


def power_factors(gpu: GpuSpec) -> Factors:
    """Return the factors of a predicted power between which it lies in 90 % of the cases."""
    return _POWER[_fitted(gpu)]


def energy_factors(gpu: GpuSpec) -> Factors:
    """Return the factors of a predicted energy per token between which it lies in 90 % of the cases."""
    return _ENERGY[_fitted(gpu)]


def energy_bands(metrics: RunMetrics, gpu: GpuSpec) -> dict[str, dict[str, Factors]]:
    """Return the 90 % bands of the metrics of power, energy and carbon that have a value, under the name `value`."""
    figures, bands = metrics.scalars(), {}
    (low, high), (less, more) = power_factors(gpu), energy_factors(gpu)
    factors = {"power_w": (low, high), **dict.fromkeys(_MORE, (less, more)), "tokens_per_joule": (1 / more, 1 / less)}
    for name, ends in factors.items():
        if (figure := figures[name]) is not None:
            bands[name] = {"value": (figure * ends[0], figure * ends[1])}
    return bands


def energy_note(gpu: GpuSpec) -> str:
    """Return a sentence about the trust in figures of power and energy on a GPU."""
    about = "power is estimated from the FLOPs and bytes of steps"
    if _fitted(gpu):
        return f"{about}, by a fit to published power of {gpu.generation} GPUs"
    return f"{about}, extrapolated from published power of {', '.join(FITTED)} GPUs"


def _fitted(gpu: GpuSpec) -> bool:
    return gpu.generation in FITTED
