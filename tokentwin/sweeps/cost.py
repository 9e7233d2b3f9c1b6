"""What a run costs: the GPU hours of each pool as it was, cold starts and drains included, times its price."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from traces.replica_lives import Lives

USD = "usd"
RATES = {  # of tokens, by what a million of them costs
    "usd_per_mtok_out": "output_throughput",
    "usd_per_mtok_in": "input_throughput",
    "usd_per_mtok_total": "total_throughput",
}


def cost_values(
    lives: Lives,
    duration_ns: int,
    usd_per_gpu_hour: Mapping[str, float | None],
    rates: Mapping[str, float | None],
) -> dict[str, float | None]:
    """Dollars of a run, and dollars per million tokens of each kind at the utilisation of the run.

    `usd_per_gpu_hour` is by pool; None of one that had a replica makes all costs None. `rates` are tokens per second
    of finished requests, by the metric's name.
    """
    from traces.replica_lives import gpu_hours

    usd = 0.0
    for pool, price in usd_per_gpu_hour.items():
        hours = gpu_hours([life for life in lives if life["pool"] == pool], duration_ns)
        if hours and price is None:
            return dict.fromkeys((USD, *RATES))
        usd += hours * (price or 0.0)
    usd_per_s = usd / (duration_ns / 1e9) if duration_ns else 0.0
    per_mtok = {name: usd_per_s / rate * 1e6 if (rate := rates[of]) else None for name, of in RATES.items()}
    return {USD: usd, **per_mtok}
