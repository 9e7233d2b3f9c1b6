"""What a plan says of its fleets beside the figures: names, headline figures, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from calibration.standing import Standing, noted, together

_UNSAID = "the plan does not say how far its step times can be trusted"
FORMATS = {  # of `costs`
    "$/h": "$%.2f",
    "tok/s per user": "%.0f",
    "tok/s per GPU": "%.0f",
    "$/Mtok output": "$%.2f",
}


def fleet_name(point: Mapping[str, Any], spares: int = 0) -> str:
    """`4 × TP4 H100 = 16 GPUs`, spares among them."""
    gpus = f"{point['gpus']} GPU{'' if point['gpus'] == 1 else 's'}"
    return f"{carriers(point, spares)} = {gpus}"


def carriers(point: Mapping[str, Any], spares: int = 0) -> str:
    """`4 × TP4 H100`: the replicas that carry the traffic, and `spares`."""
    return f"{point['replicas'] + spares} × {point['engine']}"


def plausible_gpus(best: Mapping[str, Any]) -> str:
    """How many GPUs it may take at the ends of the 90 % interval of step times."""
    low, high = best["plausible_gpus"]
    return f"{low} or more" if high is None else f"{low}" if low == high else f"{low}–{high}"


def headroom(best: Mapping[str, Any]) -> str:
    """How much more traffic the recommended fleet takes; `>` where none that was tried broke it."""
    return f"{'' if best['breaks_first'] else '> '}{best['headroom_percent']} %"


def why_not_fewer(best: Mapping[str, Any]) -> str:
    """The question that what breaks with one replica fewer answers."""
    return f"Why not {best['replicas'] - 1}?" if best["replicas"] > 1 else "Why not fewer?"


def costs(point: Mapping[str, Any]) -> dict[str, Any]:
    """The columns that every table of fleets has: what a fleet costs, and what it gives."""
    return {
        "GPUs": point["gpus"],
        "$/h": point["usd_per_hour"],
        "tok/s per user": point["tok_s_user"],
        "tok/s per GPU": point["tok_s_gpu"],
        "$/Mtok output": point["usd_per_mtok_out"],
    }


def standing(point: Mapping[str, Any]) -> Standing:
    """Of one point of a plan."""
    return noted(point, _UNSAID)


def standing_of(points: Sequence[Mapping[str, Any]], things: str) -> Standing:
    """Of a figure of several points, which are `things` (a plural)."""
    return together(map(standing, points), things)
