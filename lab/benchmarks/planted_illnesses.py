"""The rates at which a diagnosis shows the symptom of a planted fault, names its layer, and names a remedy.

`python -m lab.benchmarks.planted_illnesses [SEEDS] [FIRST]` prints the table of `lab/results/comparisons.md`, by kind
of fault. Each seed is a random deployment that is given a fault, simulated, and diagnosed as by `tokentwin diagnose`.
With a third argument, `healthy`, the deployments are diagnosed without the fault: a reported problem is a false alarm.
"""

from __future__ import annotations

import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

from tests.planning.planted_illnesses import PLANTED, SEEDS, Illness, diagnosed, kind_of, planted

FIGURES = ("symptom shown", "layer named first", "lift named first")


def main(seeds: int, first: int) -> None:
    drawn, right = Counter[str](), {figure: Counter[str]() for figure in FIGURES}
    instead: dict[str, list[str]] = {}
    for seed in range(first, first + seeds):
        illness = planted(kind_of(seed), seed)
        rights, cause = _diagnosed(illness)
        drawn[illness.kind] += 1
        for figure, one in zip(FIGURES, rights, strict=True):
            right[figure][illness.kind] += one
        if not all(rights):
            instead.setdefault(illness.kind, []).append(cause)
        print(f"{seed - first + 1} of {seeds}: {illness.kind}", file=sys.stderr)
    print(f"| layer | planted | drawn | {' | '.join(FIGURES)} |\n|---|---|--:|--:|--:|--:|")
    for layer in dict.fromkeys(layer for layer, *_ in PLANTED.values()):
        kinds = [kind for kind, (its_layer, *_) in PLANTED.items() if its_layer == layer]
        clean = [kind for kind in kinds if kind not in instead]
        rows = [(", ".join(clean), clean)] if clean else []
        rows += [(f"{kind} (named: {', '.join(instead[kind])})", [kind]) for kind in kinds if kind in instead]
        for text, row_kinds in rows:
            counts = [sum(count[kind] for kind in row_kinds) for count in (drawn, *right.values())]
            print(f"| {layer} | {text} | {' | '.join(map(str, counts))} |")
    whole = drawn.total()
    shares = " | ".join(f"{count.total()} ({100 * count.total() / whole:.0f} %)" for count in right.values())
    print(f"| all | | {whole} | {shares} |")


def false_alarms(seeds: int, first: int) -> None:
    """Count the healthy deployments that are reported as a problem, by their worst symptom."""
    alarms = Counter[str]()
    for seed in range(first, first + seeds):
        illness = planted(kind_of(seed), seed)
        with tempfile.TemporaryDirectory() as folder:
            calm = diagnosed(replace(illness, ill=illness.healthy), Path(folder) / "run")
        alarms["none" if calm.kind is None else calm.symptoms[0].name] += 1
    print(f"{seeds - alarms['none']} of {seeds} healthy deployments are called a problem; worst symptoms: {alarms}")


def _diagnosed(illness: Illness) -> tuple[tuple[bool, bool, bool], str]:
    """Return whether each of the FIGURES is right, and the name of the cause that is named first."""
    with tempfile.TemporaryDirectory() as folder:
        diagnosis = diagnosed(illness, Path(folder) / "run")
    cause = diagnosis.blamed
    shown = illness.symptom in [symptom.name for symptom in diagnosis.symptoms]
    if cause is None:
        return (shown, False, False), "nothing"
    return (shown, cause.lifecycle == illness.layer, cause.name in illness.lifts), cause.name


if __name__ == "__main__":
    given = [int(word) for word in sys.argv[1:3]]
    (false_alarms if sys.argv[3:] == ["healthy"] else main)(*(given + [SEEDS, 0][len(given) :]))
