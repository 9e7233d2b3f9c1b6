"""The phases of the suite, most valuable first, each with its share of the time.

A phase that fails is a line in the results, and the next one runs. What is measured is on disk at once; recordings go
into archives, so that a run leaves no more than eight files.
"""

from __future__ import annotations

import gc
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import monotonic
from typing import Any

import torch

from realengine.engine import Engine
from realengine.gpu_suite.ceilings import measure_ceilings
from realengine.gpu_suite.correctness import check_kernels
from realengine.gpu_suite.engine_benchmark import benchmark
from realengine.gpu_suite.kernel_grid import decode_shares, kernel_grid, write_grid
from realengine.gpu_suite.peer import peer_throughput
from realengine.gpu_suite.recorded_runs import record_runs
from realengine.gpu_suite.results import Results
from realengine.gpu_suite.sizes import Sizes
from realengine.gpu_suite.timing import find_bench
from realengine.gpu_suite.validation import calibrate_all, validate_runs
from realengine.hardware import describe
from realengine.weights import load_model_files
from serving.config import Deployment

_ARCHIVE_BYTES = 15_000_000


class Suite:
    """One run. Everything it writes is in `out`: results.json, kernels.parquet, recordings-N.tar, calibration.json."""

    def __init__(self, out: Path, minutes: float, sizes: Sizes, commit: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.out = out
        self.sizes = sizes
        self.results = Results(out / "results.json")
        self._commit = commit
        self._seconds = 60 * minutes
        self._began = monotonic()
        self._about: dict[str, Any] = {}
        self._ceilings: dict[str, Any] = {}
        self._engine: Engine | None = None

    def run(self) -> None:
        """Every phase; `share` is the part of the time that is over when it should be done."""
        phases: list[tuple[str, float, Callable[[Callable[[], float]], None]]] = [
            ("environment", 0.05, self._environment),
            ("correctness", 0.15, self._correctness),
            ("kernels", 0.35, self._kernels),
            ("runs", 0.68, self._runs),
            ("benchmark", 0.80, self._benchmark),
            ("benchmark_small", 0.86, self._benchmark_small),
            ("peer", 0.92, self._peer),
            ("validation", 0.98, self._validation),
        ]
        with tempfile.TemporaryDirectory(prefix="tokentwin-suite-") as folder:
            self._folder = Path(folder)
            for name, share, phase in phases:
                end = self._began + share * self._seconds
                started = monotonic()
                try:
                    phase(lambda end=end: end - monotonic())  # type: ignore[misc]
                except Exception as error:
                    last = traceback.extract_tb(error.__traceback__)[-1]
                    where = f"{Path(last.filename).name}:{last.lineno}"
                    self.results.add(f"{name}_failed", f"{type(error).__name__}: {str(error)[:500]} ({where})")
                self.results.add(f"{name}_seconds", round(monotonic() - started, 1))
                print(f"{name}: {monotonic() - started:.0f} s", file=sys.stderr, flush=True)
            self._close()
        self.results.add("seconds", round(monotonic() - self._began, 1))

    # Phases

    def _environment(self, left: Callable[[], float]) -> None:
        found: dict[str, Any] = dict(describe(self.sizes.device))
        found |= {
            "date": datetime.now(UTC).date().isoformat(),
            "commit": self._commit,
            "platform": platform.platform(),
            "dry_run": self.sizes.dry_run,
        }
        if self.sizes.device == "cuda":
            asked = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.limit", "--format=csv,noheader"]
            with suppress(OSError):  # an image without it
                found["clocks"] = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
        self._about = found
        self.results.add("environment", found)
        self._ceilings = measure_ceilings(find_bench(self.sizes.device), self.sizes.dry_run)
        self.results.add("ceilings", self._ceilings)

    def _correctness(self, left: Callable[[], float]) -> None:
        rows: list[dict[str, Any]] = []
        for row in check_kernels(torch.device(self.sizes.device), self.sizes.dry_run):
            rows.append(row)
            if left() < 0:
                break
        self.results.add("correctness", rows)

    def _kernels(self, left: Callable[[], float]) -> None:
        rows: list[dict[str, Any]] = []
        grid = kernel_grid(
            find_bench(self.sizes.device), torch.device(self.sizes.device), self._ceilings, self.sizes.dry_run
        )
        try:
            for row in grid:
                rows.append(row)
                if left() < 0:
                    break
        finally:
            write_grid(rows, self.out / "kernels.parquet", self._about)
            self.results.add("kernels", len(rows))
            self.results.add("attention_decode_shares", decode_shares(rows))

    def _runs(self, left: Callable[[], float]) -> None:
        engine = self._make(self.sizes.large)
        self.results.add("memory", engine.memory_report)
        rows = []
        recordings = self._folder / "runs"
        for row in record_runs(engine, recordings, self.sizes.run_seconds, self.sizes.run_longest, left):
            rows.append(row)
            self.results.add("runs", rows)
            self._archive(recordings)

    def _benchmark(self, left: Callable[[], float]) -> None:
        engine = self._engine or self._make(self.sizes.large)
        self._rows_of("large", self.sizes.large.model, engine, left)

    def _benchmark_small(self, left: Callable[[], float]) -> None:
        engine = self._make(self.sizes.small)
        self._rows_of("small", self.sizes.small.model, engine, left)

    def _rows_of(self, which: str, model: str, engine: Engine, left: Callable[[], float]) -> None:
        rows = []
        for row in benchmark(engine, self._ceilings, self.sizes.benchmark, left):
            rows.append({"model": model.removeprefix("random:"), **row})
            self.results.add(f"engine_{which}", rows)

    def _peer(self, left: Callable[[], float]) -> None:
        self._close()
        model = self.sizes.small.model.removeprefix("random:")
        workload = (self.sizes.benchmark["requests"], self.sizes.benchmark["longest"], self.sizes.peer_requests)
        found = peer_throughput(
            model, self.sizes.small.dtype, self.sizes.device, *workload, self.sizes.dry_run, seconds=left()
        )
        self.results.add("transformers", {"model": model, **found})

    def _validation(self, left: Callable[[], float]) -> None:
        self._close()
        rows = []
        for row in validate_runs(self._folder / "runs", self._folder / "validation", left):
            rows.append(row)
            self.results.add("validation", rows)
        failed = calibrate_all(self._folder / "runs", self._folder / "calibration")
        if failed:
            self.results.add("calibration_failed", failed)
        else:
            shutil.copy(self._folder / "calibration" / "calibration.json", self.out / "calibration.json")

    # What the phases share

    def _make(self, deployment: Deployment) -> Engine:
        self._close()
        self._engine = Engine(deployment, load_model_files(deployment.model, Path()))
        self._engine.warm_up()
        return self._engine

    def _close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        gc.collect()
        if self.sizes.device == "cuda":
            torch.cuda.empty_cache()

    def _archive(self, recordings: Path) -> None:
        """All recordings so far in few archives, each small enough to be carried."""
        for old in self.out.glob("recordings-*.tar"):
            old.unlink()
        number, size = 1, 0
        for run in sorted(recordings.iterdir()):
            bytes = sum(file.stat().st_size for file in run.iterdir())
            if size and size + bytes > _ARCHIVE_BYTES:
                number, size = number + 1, 0
            size += bytes
            with tarfile.open(self.out / f"recordings-{number}.tar", "a") as archive:
                archive.add(run, arcname=run.name)
