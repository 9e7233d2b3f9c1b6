"""How often a diagnosis names the layer of an illness that was planted, and the illness itself, by kind.

`python -m benchmarks.planted_illnesses [SEEDS]` prints the table of `docs/compare-and-diagnose.md`. Each seed is a
deployment that is drawn at random, made ill, simulated and diagnosed as `tokentwin diagnose` does.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.planning.planted_illnesses import PLANTED, diagnosed, kind_of, planted


def main(seeds: int) -> None:
    drawn, layers, lifts = Counter[str](), Counter[str](), Counter[str]()
    mistaken: dict[str, list[str]] = {}
    for seed in range(seeds):
        illness = planted(kind_of(seed), seed)
        with tempfile.TemporaryDirectory() as folder:
            cause = diagnosed(illness, Path(folder) / "run").cause
        drawn[illness.kind] += 1
        layers[illness.kind] += cause is not None and cause.lifecycle == illness.layer
        right = cause is not None and cause.name in illness.lifts
        lifts[illness.kind] += right
        if not right:
            mistaken.setdefault(illness.kind, []).append(cause.name if cause else "nothing")
        print(f"{seed + 1} of {seeds}: {illness.kind}", file=sys.stderr)
    print("| planted | layer | drawn | layer named first | lift named first | instead |")
    print("|---|---|---|---|---|---|")
    for kind, (layer, _, _) in PLANTED.items():
        instead = ", ".join(mistaken.get(kind, []))
        print(f"| {kind} | {layer} | {drawn[kind]} | {layers[kind]} | {lifts[kind]} | {instead} |")
    whole = sum(drawn.values())
    print(f"| all | | {whole} | {sum(layers.values())} ({100 * sum(layers.values()) / whole:.0f} %) ", end="")
    print(f"| {sum(lifts.values())} ({100 * sum(lifts.values()) / whole:.0f} %) | |")


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 3 * len(PLANTED))
