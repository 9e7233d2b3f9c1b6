"""How often a diagnosis shows the symptom of a planted illness, and names its layer and what lifts it, by kind.

`python -m benchmarks.planted_illnesses [SEEDS]` prints the table of `docs/compare-and-diagnose.md`. Each seed is a
deployment that is drawn at random, made ill, simulated and diagnosed as `tokentwin diagnose` does.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.planning.planted_illnesses import PLANTED, SEEDS, diagnosed, kind_of, planted


def main(seeds: int) -> None:
    drawn, shown, layers, lifts = Counter[str](), Counter[str](), Counter[str](), Counter[str]()
    mistaken: dict[str, list[str]] = {}
    for seed in range(seeds):
        illness = planted(kind_of(seed), seed)
        with tempfile.TemporaryDirectory() as folder:
            found = diagnosed(illness, Path(folder) / "run")
        cause = found.cause
        drawn[illness.kind] += 1
        shown[illness.kind] += illness.symptom in [symptom.name for symptom in found.symptoms]
        layers[illness.kind] += cause is not None and cause.lifecycle == illness.layer
        right = cause is not None and cause.name in illness.lifts
        lifts[illness.kind] += right
        if not right:
            mistaken.setdefault(illness.kind, []).append(cause.name if cause else "nothing")
        print(f"{seed + 1} of {seeds}: {illness.kind}", file=sys.stderr)
    print("| planted | layer | drawn | symptom | shown | layer named first | lift named first | instead |")
    print("|---|---|---|---|---|---|---|---|")
    for kind, (layer, _, symptom, _) in PLANTED.items():
        instead = ", ".join(mistaken.get(kind, []))
        counts = f"{shown[kind]} | {layers[kind]} | {lifts[kind]} | {instead} |"
        print(f"| {kind} | {layer} | {drawn[kind]} | {symptom} | {counts}")
    whole = sum(drawn.values())
    sums = (sum(count.values()) for count in (shown, layers, lifts))
    print(f"| all | | {whole} | | " + " | ".join(f"{one} ({100 * one / whole:.0f} %)" for one in sums) + " | |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else SEEDS)
