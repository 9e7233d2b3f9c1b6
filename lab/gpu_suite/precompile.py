"""Compilation ahead of time, on every core, of all kernels that the suite's phases launch, into the JIT's disk cache.

The C modules with which Triton launches kernels are built, too.

The launches themselves define what is compiled. Correctness cases, points of the grid and the engines' models run on
torch's meta device, where a tensor has a shape and a dtype but no content. Triton's JIT compiles these launches and
does not run them. So a kernel is cached under the key that its real launch will look up. No GPU is needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import islice
from multiprocessing import get_context
from signal import SIGKILL
from subprocess import CalledProcessError
from time import perf_counter, sleep
from types import SimpleNamespace
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np
import torch

from lab.gpu_suite.correctness import cases
from lab.gpu_suite.end_to_end import checked
from lab.gpu_suite.kernel_grid import points
from lab.gpu_suite.operations import Operation
from lab.gpu_suite.ragged_batch import backend_for
from lab.gpu_suite.sizes import Sizes
from lab.gpu_suite.units import Counted
from tokentwin.realengine.attention.kv_cache import FP8, KvCache
from tokentwin.realengine.models.linear import StoredWeight
from tokentwin.realengine.models.model import Model
from tokentwin.realengine.models.weights import random_spec, shapes
from tokentwin.realengine.step_graphs import mixed_layout, pad
from tokentwin.realengine.step_input import Batch, RowInput, pack
from tokentwin.serving.cost_model import DECODE_BUCKETS, padded
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_spec import ModelSpec

_META = torch.device("meta")
_DRY_KERNELS = 2  # maximum number of kernels in a dry run: each takes a second or two
_MOST_KERNELS = 4096
_LAUNCHERS = 1 << 16  # places for claims of launchers, by a hash of their signatures
_POLL_S = 0.05


def precompile(sizes: Sizes, left: Callable[[], float]) -> Iterator[dict[str, Any] | Counted]:
    """Fill the cache, and yield a row for each kernel when its compilation has ended, and counts of the launches.

    A row has the kernel's name, `seconds`, and `cached` if it was there before. The launcher of a new signature, which
    Triton builds with the C compiler, has a row with `launcher` instead of `kernel`. A launch that could not be
    prepared has a row with `failed`. There are no rows if Triton is not installed, or runs in its interpreter.
    """
    try:
        from tokentwin.realengine.kernels.launches import INTERPRETING
    except ImportError:
        return
    if INTERPRETING:
        return
    most = _DRY_KERNELS if sizes.dry_run else _MOST_KERNELS
    context = get_context("fork")
    done = context.SimpleQueue()
    wanted = list(islice(launches(sizes), most))
    count = min(os.cpu_count() or 1, most)
    shared = Shared(context.Array("b", most), context.Array("b", _LAUNCHERS), context.Array("i", count))
    workers = [
        context.Process(target=compile_launches, args=(wanted, shared, done.put, number)) for number in range(count)
    ]
    for worker in workers:
        worker.start()
    while any(worker.is_alive() for worker in workers) or not done.empty():
        if left() < 0:  # time is up; the first launch will compile the missing kernels
            break
        if done.empty():
            sleep(_POLL_S)
        else:
            yield done.get()
    for worker in workers:
        worker.kill()
        worker.join()
        if worker.exitcode not in (0, -SIGKILL):
            yield {"failed": f"a compiling process ended with {worker.exitcode}"}
    # what a worker has passed is compiled, or is being compiled by another that has not passed it
    yield Counted(len(wanted), min(shared.passed))


class Shared(NamedTuple):
    """What the workers share: the kernels and the launchers that one of them has claimed, and how far each has come."""

    kernels: Any
    launchers: Any
    passed: Any


def compile_launches(
    launches: Iterable[Callable[[], None]], shared: Shared, tell: Callable[[dict[str, Any]], None], worker: int = 0
) -> None:
    """Compile the kernels of `launches` that no other worker has claimed, for an H100 or H200, and their launchers.

    After this call the JIT of this process cannot launch kernels, so run the call in a process of its own. A launch
    that fails here fails in every worker, so only worker 0 tells failures.
    """
    import triton

    from lab.gpu_suite.aot import compile_only

    compile_only()
    numbers: dict[str, int] = {}

    def claimed_before(claims: Any, number: int) -> bool:
        if number >= len(claims):
            return True
        with claims.get_lock():
            before = bool(claims[number])
            claims[number] = 1
        return before

    def is_claimed(*, key: Any, fn: Any, **_: Any) -> bool:
        return claimed_before(shared.kernels, numbers.setdefault(f"{fn.name} {key}", len(numbers)))

    def compiled(*, src: Any, metadata: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        seconds = 0.0 if cache_hit else times.total / 1e6
        tell({"kernel": src.name.lstrip("_"), "seconds": round(seconds, 2), "cached": cache_hit})
        signature = ", ".join(map(str, src.signature.values()))
        if not claimed_before(shared.launchers, crc32(signature.encode()) % _LAUNCHERS):
            try:
                built = build_launcher(src, metadata)
            except Exception as error:  # other kernels can be compiled all the same
                tell({"failed": f"launcher of {signature}: {type(error).__name__}: {str(error)[:300]}"})
            else:
                if built is not None:
                    tell({"launcher": signature, "seconds": round(built, 2)})

    triton.knobs.runtime.jit_cache_hook = is_claimed
    triton.knobs.compilation.listener = compiled
    for launch in launches:
        try:
            launch()
        except Exception as error:
            if worker == 0:
                tell({"failed": f"{type(error).__name__}: {str(error)[:300]}"})
        shared.passed[worker] += 1


def build_launcher(src: Any, metadata: Any) -> float | None:
    """Build the C module that launches a compiled kernel, into Triton's cache, and return the seconds it took.

    Triton 3.6 has a module for each signature, Triton 3.7 one for all. They link with the driver's libcuda; without
    it, as on a machine without a GPU, nothing is built and the result is None.
    """
    import triton
    from triton.backends.nvidia import driver

    try:
        driver.library_dirs()
    except (AssertionError, OSError, CalledProcessError):
        return None
    began = perf_counter()
    triton.runtime.driver.active.utils = driver.CudaUtils()
    driver.CudaLauncher(src, SimpleNamespace(**metadata))
    return perf_counter() - began


# The launches


def launches(sizes: Sizes) -> Iterator[Callable[[], None]]:
    """Yield calls that launch every kernel as the phases launch it, in the order of the phases."""
    for case in cases(_META, sizes.dry_run):
        yield partial(run_once, case)
    for checked_engine in checked("cuda", sizes.dry_run):
        yield from _steps(checked_engine.deployment, checked_engine.spec)
    for deployment in sizes.deployments.values():
        yield from _steps(deployment.model_copy(update={"attention": "triton"}), random_spec(deployment.model))
    for point in points(_META, sizes.dry_run):
        if point.operation.kernel != "gemm":
            yield partial(run_once, point.operation)


def run_once(operation: Operation) -> None:
    make, call, _ = operation.prepare()
    call(*make(0))


def _steps(deployment: Deployment, spec: ModelSpec) -> Iterator[Callable[[], None]]:
    """Yield steps of the engine: every number of decode rows, prompts, and greedy and random sampling."""
    config, dtype = deployment.scheduler, getattr(torch, deployment.dtype)
    # two layers suffice: the first one has no residual, and all others launch the same kernels
    spec = spec.model_copy(update={"num_layers": 2})
    attention, ops = backend_for(
        deployment.attention, spec, config.block_size, _META, config.max_model_len, deployment.batch_invariant
    )

    def step(lengths: list[int], how: tuple[float, int, float, float] | None, graph: bool = False) -> None:
        state: dict[str, StoredWeight] = {
            name: torch.empty(shape, dtype=dtype, device=_META) for name, shape in shapes(spec)
        }
        model = Model(spec, state, dtype, _META, ops, attention, quantization=deployment.quantization)
        cached = FP8 if deployment.kv_cache_dtype == "fp8" else dtype
        kv = KvCache(spec, 2, config.block_size, cached, _META)
        blocks = np.zeros(-(-max(lengths) // config.block_size), dtype=np.int32)
        rows = [RowInput([0] * length, 0, blocks, 0, (how,)) for length in lengths]
        packed = pack(rows, config.block_size, 0, attention.tiles).step
        samples = packed.layout.samples
        if graph:
            packed = pad(packed, mixed_layout(packed.layout))
        batch = Batch.from_buffer(torch.from_numpy(packed.packed).to(_META), packed.layout, packed.packed)
        logits = model.compute_logits(model.forward(batch.tokens, batch, kv)[:samples])
        ops.sample(logits, batch.first(samples), packed.greedy)

    buckets = [rows for rows in DECODE_BUCKETS if rows <= padded(config.max_num_seqs)]
    for rows in buckets:
        yield lambda rows=rows: step([1] * rows, None)  # type: ignore[misc]
    yield lambda: step([1], (1.0, 50, 0.9, 0.5))
    yield lambda: step([1, min(config.max_num_batched_tokens, config.max_model_len) - 1], None)
    if attention.capturable == "always":
        yield lambda: step([1, 99], None, graph=True)
