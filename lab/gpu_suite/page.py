"""The results of the suite, each figure beside its target: a table for the terminal, a page for the docs.

`python -m lab.gpu_suite.page --results DIR --write lab/results/gpu.md` makes the page from the results of a run in DIR.
Without --results, every figure is shown as not yet measured. A dry run's figures never get on the page.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from lab.gpu_suite.results import FILE, SLOW_CLOCK, Progress, ceilings_of, load, phases_of, progress_of, stand_ins
from lab.gpu_suite.vllm_kernels import decode_step_ns, prompt_step_ns
from tokentwin.serving.answers.markdown import markdown_table

UNMEASURED = "not yet measured"
_LARGE, _SMALL = "engine_large", "engine_small"
_ENGINES = (_LARGE, _SMALL, "engine_mixture", "engine_fp8", "engine_int4")
_CHECKING = ("correctness", "end_to_end")
_LINEAR = (
    "Steps were timed by linear prices: these runs were validated before there were corrected surfaces, and not again "
    "with them."
)
_RUN_METRICS = ("ttft_ms", "tpot_ms", "e2e_ms")


class Target(NamedTuple):
    """A figure with a target: `limit` is its minimum, or its maximum if `most`; `find` gets the figure.

    `find` reads the results of a run. `ceiling` names the device's limit of which the figure is a fraction; empty if it
    is no fraction.
    """

    name: str
    limit: float
    unit: str
    find: Callable[[dict[str, Any]], float | None]
    most: bool = False
    ceiling: str = ""

    def met(self, value: float) -> bool:
        return value <= self.limit if self.most else value >= self.limit

    def says(self) -> str:
        return f"{'at most' if self.most else 'at least'} {self.limit:,g}{self.unit}"


class Line(NamedTuple):
    """A target and its result; `met` is None if there is no result."""

    name: str
    target: str
    measured: str
    met: bool | None


def _benchmark(model: str, kind: str, size: str, wanted: int, figure: str, scale: float = 100) -> Callable[..., Any]:
    def find(results: dict[str, Any]) -> float | None:
        rows = (row for row in results.get(model, []) if row["kind"] == kind and row.get(size) == wanted)
        return next((scale * row[figure] for row in rows if row.get(figure) is not None), None)

    return find


def _decode_of_kernels(rows: int) -> Callable[[dict[str, Any]], float | None]:
    def find(results: dict[str, Any]) -> float | None:
        measured = _benchmark(_LARGE, "decode", "rows", rows, "median_step_ns", 1)(results)
        gpu = results.get("environment", {}).get("gpu", "")
        if measured is None:
            return None
        row = next(row for row in results[_LARGE] if row["kind"] == "decode" and row["rows"] == rows)
        kernels = decode_step_ns(gpu, row["model"], rows, row["context"])
        return None if kernels is None else 100 * kernels / measured

    return find


def _prefill_of_kernels(results: dict[str, Any]) -> float | None:
    measured = _benchmark(_LARGE, "prefill", "tokens", 8192, "median_ns", 1)(results)
    if measured is None:
        return None
    row = next(row for row in results[_LARGE] if row["kind"] == "prefill" and row["tokens"] == 8192)
    kernels = prompt_step_ns(results.get("environment", {}).get("gpu", ""), row["model"], row["tokens"])
    return None if kernels is None else 100 * kernels / measured


def decode_shares(rows: Iterable[dict[str, Any]]) -> list[float]:
    """Return the shares of copy bandwidth that decode attention reaches with bf16 KV in large steps.

    Large steps have at least 16 decode rows, all with the same context of at least 4096 tokens.
    """
    return [
        row["roofline_share"]
        for row in rows
        if row["op"] == "attention_decode" and row["rows"] >= 16 and row["longest"] == row["context"] >= 4096
        if row["kv_dtype"] == "bf16" and row["roofline_share"] is not None
    ]


def _attention(results: dict[str, Any]) -> float | None:
    shares = decode_shares(results.get("kernels", []))
    return 100 * min(shares) if shares else None


def _run_error(stat: str) -> Callable[[dict[str, Any]], float | None]:
    def find(results: dict[str, Any]) -> float | None:
        rows = [row for scenario in results.get("validation", []) for row in scenario.get("rows", [])]
        errors = [abs(row["error_pct"]) for row in rows if row["metric"] in _RUN_METRICS and row["stat"] == stat]
        return max(errors, default=None)

    return find


def _decisions(results: dict[str, Any]) -> float | None:
    rows = [row for row in results.get("validation", []) if "decisions" in row]
    total = sum(row["decisions"] for row in rows)
    return 100 * sum(row["decisions_identical"] for row in rows) / total if total else None


_COPY, _GEMM = "copy_bytes_per_s", "gemm_flops_per_s"
_DECODES = [(rows, _benchmark(_LARGE, "decode", "rows", rows, "roofline_share")) for rows in (1, 8, 64)]
_OF_KERNELS = [(rows, _decode_of_kernels(rows)) for rows in (1, 8, 64)]
_PREFILL = _benchmark(_LARGE, "prefill", "tokens", 8192, "gemm_share")
_IDLE = _benchmark(_LARGE, "decode", "rows", 64, "idle_share")
_THROUGHPUT = _benchmark(_SMALL, "throughput", "requests", 256, "output_tokens_per_s", 1)
_ATTENTION = "attention decode, batch >= 16, context >= 4k, of copy bandwidth (worst)"
TARGETS = (
    *(
        Target(f"decode step, batch {n}, context 1k, of the roofline", 80, " %", find, False, _COPY)
        for n, find in _DECODES
    ),
    *(
        Target(f"decode step, batch {n}, context 1k, of the speed of vLLM's kernels alone", 100, " %", find)
        for n, find in _OF_KERNELS
    ),
    Target(_ATTENTION, 80, " %", _attention, False, _COPY),
    Target("prefill of 8k tokens, of the measured GEMM rate", 60, " %", _PREFILL, False, _GEMM),
    Target("prefill of 8k tokens, of the speed of vLLM's kernels alone", 100, " %", _prefill_of_kernels),
    Target("GPU idle in decode, batch 64", 3, " %", _IDLE, most=True),
    Target("Qwen3-0.6B shape, 256 requests, output tokens/s", 25_000, "", _THROUGHPUT),
    Target("engine and simulator decide alike (rung 1)", 100, " %", _decisions),
    Target("mean TTFT, TPOT, E2E of an unseen run (worst error)", 3, " %", _run_error("mean"), most=True),
    Target("p99 TTFT, TPOT, E2E of an unseen run (worst error)", 5, " %", _run_error("p99"), most=True),
)


def lines(results: dict[str, Any]) -> list[Line]:
    """Return every target with its result. A dry run neither meets nor misses a target: its figures mean nothing."""
    dry = results.get("environment", {}).get("dry_run", False)
    made = []
    for target in TARGETS:
        value = target.find(results)
        stood_in = target.ceiling in stand_ins(results)
        text = UNMEASURED if value is None else f"{_figure(value)}{target.unit}"
        if stood_in and value is not None:
            text += " (of a stand-in)"
        made.append(Line(target.name, target.says(), text, None if value is None or dry else target.met(value)))
    return made


def _figure(value: float) -> str:
    return f"{value:,.2f}" if abs(value) < 1000 else f"{value:,.0f}"


def faults(results: dict[str, Any]) -> list[str]:
    """Return faults that must not occur on any machine: a wrong kernel, a differing decision, a process that broke."""
    wrong = [f"{row['kernel']} {row['case']}: {row['error']}" for row in _checks(results) if not row["ok"]]
    wrong += [f"precompile: {row['failed']}" for row in results.get("precompile", []) if "failed" in row]
    wrong += [f"{row['phase']}, unit {row['unit']}: {row['error']}" for row in results.get("failures", [])]
    wrong += [f"{row['scenario']}: {row['failed']}" for row in results.get("validation", []) if row.get("failed")]
    decided = _decisions(results)
    if decided is not None and decided < 100:
        wrong.append(f"decisions: only {decided:.3f} % as recorded")
    return wrong


def _checks(results: dict[str, Any]) -> list[dict[str, Any]]:
    return [row for name in _CHECKING for row in results.get(name, [])]


def undone(results: dict[str, Any]) -> list[str]:
    """Return what was planned and not done, and what was measured at a slow clock, a line for each phase."""
    missing = []
    for phase in phases_of(results):
        progress = progress_of(results, phase)
        if progress.done < progress.planned or not progress.planned:
            missing.append(f"{phase}: {_amount(progress)} done")
        failed = sum(row.get("error") is not None for row in results.get(phase, []) if phase == "kernels")
        if failed:
            missing.append(f"{phase}: {failed} of {len(results[phase])} rows have an error instead of a time")
        if progress.slow:
            slow = f"{progress.slow} of {progress.begun}"
            missing.append(f"{phase}: {slow} measured at a clock below {SLOW_CLOCK:.0%} of the highest")
    for name in _ENGINES:
        rows = results.get(name, [])
        reasons = [str(row["failed"]) for row in rows if row.get("failed")]
        if reasons:
            missing.append(f"{name}: {len(reasons)} of {len(rows)} rows failed ({reasons[0]})")
    return missing


def unchecked(results: dict[str, Any]) -> bool:
    """Return whether a phase that checks ran, and did not make all of its checks."""
    checking = [progress_of(results, phase) for phase in phases_of(results) if phase in (*_CHECKING, "validation")]
    return any(progress.done < progress.planned or not progress.planned for progress in checking)


def _amount(progress: Progress) -> str:
    return f"{progress.done:,} of {progress.planned:,}" if progress.planned else "nothing"


def verdict(results: dict[str, Any]) -> str:
    """Return one line: whether all checks held, which needs that every planned one was made, or what is missing."""
    wrong, missing = faults(results), undone(results)
    if not phases_of(results):
        return "The work that was planned was not counted."
    if not wrong and not missing:
        return "All checks held, and everything that was planned was done."
    said = [f"{len(wrong)} faults"] if wrong else []
    said += [f"not all that was planned was done or measured as it should ({'; '.join(missing)})"] if missing else []
    return f"{' and '.join(said)}.".capitalize()


def table(results: dict[str, Any]) -> str:
    """Return a table of figures and their targets, for a terminal."""
    rows = [("figure", "target", "found", "met"), *((n, t, f, _word(m)) for n, t, f, m in lines(results))]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def page(results: dict[str, Any]) -> str:
    """Return the page lab/results/gpu.md."""
    real = results if results and not results.get("environment", {}).get("dry_run") else {}
    text = [f"# Measured on {real.get('environment', {}).get('gpu', 'a GPU')}", ""]
    text += ["```", "python -m lab.gpu_suite --out DIR"]
    text += ["python -m lab.gpu_suite.page --results DIR --write PAGE", "```"]
    text += ["The first command measures, the second writes this page ([how](gpu-suite.md)).", ""]
    if not real:
        text += ["**No GPU has run the suite yet.** A test runs all of it in miniature on the CPU.", ""]
    else:
        machine = ((name, value) for name, value in real["environment"].items() if name != "dry_run")
        text += ["## Where and with what", "", *_table(("", ""), machine), ""]
        text += ["## Ceilings", "", *_table(("", "value", "spread of the quartiles"), _ceilings(real)), ""]
    text += ["## Targets", ""]
    text += _table(("figure", "target", "found", "met"), ((n, t, f, _word(m)) for n, t, f, m in lines(real)))
    if phases_of(real):
        head = ("phase", "planned", "done", "seconds", "lowest clock")
        text += ["", "## Planned and done", "", verdict(real), "", *_table(head, _phase_rows(real))]
    checks = _checks(real)
    if checks:
        passed = sum(row["ok"] for row in checks)
        text += ["", "## Checks", "", f"{passed} of {len(checks)} checks of kernels and whole engines held.", ""]
        text += _table(
            ("engine", "error", "at most"), ((r["case"], r["error"], r["limit"]) for r in real.get("end_to_end", []))
        )
    for name in _ENGINES:
        for kind in ("decode", "prefill", "mixed", "throughput", "timing"):
            rows = [row for row in real.get(name, []) if row["kind"] == kind]
            if rows:
                hidden = ("kind", "model", "quantization", "flops")
                columns = [name for name in dict.fromkeys(chain.from_iterable(rows)) if name not in hidden]
                cells = ([_in_unit(column, row.get(column)) for column in columns] for row in rows)
                text += ["", f"## {_engine(rows[0])}: {kind}", "", *_table(map(_headed, columns), cells)]
    if compared := real.get("compare", []):
        text += ["", "## One operation in several ways", "", *_compared(compared)]
    verdicts = [(row["scenario"], row.get("verdict") or row.get("failed")) for row in real.get("validation", [])]
    if verdicts:
        text += ["", "## The twin against these runs", ""]
        prices = sorted({row["prices"] for row in real["validation"] if row.get("prices")})
        text += [f"Steps were timed by {' or '.join(prices)}." if prices else _LINEAR, ""]
        text += [*_table(("scenario", "verdict"), verdicts)]
    wrong = faults(real)
    if wrong:
        text += ["", "## Faults", "", *(f"- {fault}" for fault in wrong)]
    return "\n".join(text) + "\n"


def _compared(rows: list[dict[str, Any]]) -> list[str]:
    """Return a table with the time of each operation in each way, relative to the first way, and why some have none."""
    first = {row["what"]: row["median_ns"] for row in reversed(rows)}
    cells = []
    for row in rows:
        ns, base = row["median_ns"], first[row["what"]]
        relative = ns / base if ns is not None and base else "-"
        cells.append((row["what"], row["way"], _in_unit("median_ns", ns), relative, row["why"] or ""))
    return _table(("operation", "way", "median, us", "of the first way's", "no time, because"), cells)


def _engine(row: dict[str, Any]) -> str:
    return f"{row['model']}, {row['quantization']}" if "quantization" in row else str(row["model"])


def _phase_rows(results: dict[str, Any]) -> Iterable[tuple[object, ...]]:
    for phase in phases_of(results):
        progress = progress_of(results, phase)
        clock = "not known" if progress.clock is None else f"{progress.clock:.0%}"
        yield phase, progress.planned, progress.done, results.get(f"{phase}_seconds", "-"), clock


def _ceilings(results: dict[str, Any]) -> Iterable[tuple[object, ...]]:
    spread = {row["ceiling"]: row["spread_pct"] for row in results.get("ceilings", [])}
    for name, value in ceilings_of(results).items():
        if name not in spread:
            known = "a stand-in: another H200"
        elif value is None:
            known = "-"
        else:
            known = f"{spread[name]:.2g} %"
        yield _headed(name), _in_unit(name, value), known


_UNITS = {
    "_bytes_per_s": ("TB/s", 1e-12),
    "flops_per_s": ("TFLOP/s", 1e-12),
    "_per_s": ("1/s", 1.0),
    "_ns": ("us", 1e-3),
    "_share": ("%", 100.0),
}


def _unit(name: str) -> tuple[str, str, float]:
    """Return what the name of a result measures, the unit in which the page shows it, and the factor to that unit."""
    for ending, (unit, factor) in _UNITS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), unit, factor
    return name, "", 1.0


def _headed(name: str) -> str:
    measured, unit, _ = _unit(name)
    words = measured.strip("_").replace("_", " ") or "rate"
    return f"{words}, {unit}" if unit else words


def _in_unit(name: str, value: object) -> object:
    if value is None:
        return "-"
    factor = _unit(name)[2]
    return value * factor if isinstance(value, int | float) and factor != 1 else value


def _word(met: bool | None) -> str:
    return {None: "-", True: "yes", False: "NO"}[met]


def _table(head: Iterable[object], rows: Iterable[Iterable[object]]) -> list[str]:
    return [markdown_table(list(map(str, head)), (list(map(_cell, row)) for row in rows))]


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 10_000 else f"{value:,.0f}"
    return str(value)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m lab.gpu_suite.page", description=__doc__)
    parser.add_argument("--results", type=Path, help=f"directory with {FILE}")
    parser.add_argument("--write", type=Path, help="file to write the page to; by default the page is printed")
    arguments = parser.parse_args()
    try:
        results = load(arguments.results) if arguments.results else {}
    except (OSError, ValueError) as error:
        print(f"error: results {arguments.results}: cannot be read: {error}; run the suite first", file=sys.stderr)
        return 2
    if arguments.write:
        arguments.write.write_text(page(results), encoding="utf-8")
    else:
        print(page(results), end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
