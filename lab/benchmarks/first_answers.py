"""How often the final answer of a plan lies outside the range that is shown first, and how wide that range is.

    python -m lab.benchmarks.first_answers [QUESTIONS] [FIRST]

The command asks QUESTIONS (default 20) random questions, the first with the seed FIRST (default 5000), and prints each
answer that lies outside its range.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from pathlib import Path
from random import Random
from typing import Any

import yaml

from tokentwin.planning.plan import planner
from tokentwin.planning.plan.request import PlanRequest


def question(seed: int, traffic: Path) -> PlanRequest:
    """Return a random question, and write the description of its traffic to the file `traffic`."""
    chance = Random(seed)
    arrivals: dict[str, Any] = {"kind": chance.choice(["poisson", "poisson", "gamma"])}
    arrivals["rate"] = chance.choice([0.5, 2, 5, 10, 20, 40])
    if arrivals["kind"] == "gamma":
        arrivals["cv"] = chance.choice([2.0, 4.0])
    described = {"requests": chance.choice([300, 1000, 2400]), "seed": chance.randint(0, 99), "arrivals": arrivals}
    prompt, sigma = chance.choice([200, 1000, 3000]), chance.choice([0.5, 1.0, 1.4])
    described["prompt"] = {"kind": "lognormal", "mean": prompt, "sigma": sigma, "max": 8000}
    described["output"] = {"kind": "lognormal", "mean": chance.choice([50, 250, 600]), "sigma": 0.8, "max": 2000}
    traffic.write_text(yaml.safe_dump(described))
    model = chance.choice(["Llama-3.1-8B", "Llama-3.1-70B", "Llama-3.1-8B"])
    gpus = chance.sample(["H100", "H200", "A100-80G", "L40S"], chance.choice([1, 2]))
    ttft = f"ttft_ms p{chance.choice([50, 90, 95, 99])}<={chance.choice([300, 1000, 3000])}"
    tpot = f"tpot_ms p{chance.choice([50, 95, 99])}<={chance.choice([20, 40, 80])}"
    sizes = [1, 2] if model == "Llama-3.1-8B" else [4, 8]
    asked = {"traffic": str(traffic), "model": model, "gpus": gpus, "tensor_parallel_sizes": sizes}
    return PlanRequest.model_validate(asked | {"slos": [ttft, tpot], "risk": chance.choice([0.1, 0.1, 0.05, 0.3])})


def main(questions: int, first: int) -> None:
    widths, missed = [], 0
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(first, first + questions):
            said: list[str] = []
            request = question(seed, Path(folder, "traffic.yaml"))
            answer = planner.plan(request, jobs=1, surroundings=False, say=said.append)
            if answer.recommendation is None:
                continue
            ends = re.search(r"([\d,]+ to )?([\d,]+) GPU", said[-1])
            low, high = (0, 0) if ends is None else (_number(ends[1] or ends[2]), _number(ends[2]))
            gpus = answer.recommendation.gpus
            if low <= gpus <= high:
                widths.append(high / low)
            else:
                missed += 1
                print(f"{seed}: {said[-1]}; the answer: {answer.answer}", flush=True)
    print(f"{missed} of {missed + len(widths)} feasible questions missed")
    if widths:
        print(f"high end over low end: median {statistics.median(widths):.2g}, greatest {max(widths):.2g}")


def _number(text: str) -> int:
    return int(text.removesuffix(" to ").replace(",", ""))


if __name__ == "__main__":
    asked = [int(given) for given in sys.argv[1:]]
    main(*(asked + [20, 5000][len(asked) :]))
