"""The size of a demo that fits into the available time on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokentwin.calibration.steps.design import Pace

LOAD = 0.6  # share of the engine's capacity; at higher loads, latencies would consist mainly of queueing
_PROMPT, _OUTPUT, _SYSTEM = 70, 22, 48  # mean tokens of prompt and output, and tokens of a system prompt
_LEAST_REQUESTS, _MOST_REQUESTS = 30, 200
_SHORTER = (1.0, 0.7, 0.5, 0.35)  # factors for the lengths of requests, if a slow machine would finish too few of them
_CALIBRATION, _RUNS = 0.35, 0.5  # shares of the time; canaries, fit and simulations take the rest


@dataclass(frozen=True)
class DemoSize:
    """The size of a demo.

    Attributes:
        requests: number of requests in each run
        rate: requests per second
        prompt: mean number of prompt tokens
        output: mean number of output tokens
        calibration_s: time for the calibration, in seconds
    """

    requests: int
    rate: float
    prompt: float
    output: float
    calibration_s: float

    @property
    def run_s(self) -> float:
        """Time in seconds in which the requests of one run arrive."""
        return self.requests / self.rate

    def trace(self) -> dict[str, Any]:
        return {
            "name": "demo",
            "seed": 1,
            "requests": self.requests,
            "arrivals": {"kind": "gamma", "rate": self.rate, "cv": 1.3},
            "prompt": {"kind": "lognormal", "mean": self.prompt, "sigma": 0.7, "max": 400},
            "output": {"kind": "lognormal", "mean": self.output, "sigma": 0.6, "max": 96},
            "system_prompts": {"count": 2, "tokens": {"kind": "fixed", "tokens": _SYSTEM}},
        }


def demo_size(pace: Pace, rows: int, seconds: float, runs: int) -> DemoSize:
    """Return the size of a demo with `runs` runs that takes about `seconds` in all.

    `pace` is the speed of the engine, measured with `rows` decode rows.
    """
    run_s = _RUNS * seconds / runs
    for shorter in _SHORTER:
        prompt, output = shorter * _PROMPT, shorter * _OUTPUT
        request_ns = (prompt + _SYSTEM / 2) * pace.prompt_token_ns + output * pace.decode_step_ns / rows
        rate = float(f"{LOAD * 1e9 / request_ns:.2g}")
        requests = round(rate * run_s)
        if requests >= _LEAST_REQUESTS:
            break
    requests = min(max(requests, 10), _MOST_REQUESTS)
    return DemoSize(requests, rate, round(prompt), round(output), _CALIBRATION * seconds)
