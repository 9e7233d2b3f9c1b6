"""Service-level objectives: bounds on the latencies of a request."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from serving.errors import UserError

SLO_METRICS = ("ttft_ms", "tpot_ms", "tpot_inclusive_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms")


def check_slo(slo: Mapping[str, float]) -> dict[str, float]:
    """Return the bounds on request metrics, checked.

    Raises UserError for a metric that can have no bound, and for a bound that is not above 0.
    """
    for name, bound in slo.items():
        if name not in SLO_METRICS:
            raise UserError("slo", name, f"is not a known latency; choose one of {', '.join(SLO_METRICS)}")
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
            raise UserError(f"slo {name}", bound, "must be a number of milliseconds above 0")
    return {name: float(bound) for name, bound in slo.items()}


def parse_slo(text: str) -> dict[str, float]:
    """Parse SLOs in the form of vLLM's `--goodput`: `ttft:200 tpot:50`, in milliseconds; our own names work too."""
    slo: dict[str, float] = {}
    for pair in re.split(r"[\s,]+", text.strip()):
        name, colon, bound = pair.partition(":")
        if not colon:
            raise UserError("slo", pair or text, "must be METRIC:MILLISECONDS, e.g. ttft:200 tpot:50")
        name = {"e2el": "e2e_ms"}.get(name, f"{name.removesuffix('_ms')}_ms")
        if name in slo:
            raise UserError("slo", text, f"bounds {name} twice; give each latency one bound")
        try:
            slo[name] = float(bound)
        except ValueError:
            raise UserError(f"slo {name}", bound, "must be a number of milliseconds above 0") from None
    return check_slo(slo)
