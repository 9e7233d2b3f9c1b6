"""Bucket bounds of vLLM's histograms (`vllm/v1/metrics/buckets.py` of 0.33), in seconds or tokens."""

from __future__ import annotations

# fmt: off
TTFT_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def one_two_five(most: int) -> tuple[float, ...]:
    """Return the bounds 1, 2, 5, 10, 20, ... up to `most`, for histograms of lengths."""
    bounds: list[float] = []
    decade = 1
    while decade <= most:
        bounds += [times * decade for times in (1, 2, 5) if times * decade <= most]
        decade *= 10
    return tuple(bounds)
