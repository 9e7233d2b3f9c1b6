"""What no measured run covers, and how far step times may then be off.

The width of a band is learnt from measured runs (`evidence`). They say nothing of four things, for which reports of
others show larger errors: releases of an engine before the first on a generation of GPUs or after the last that was
measured, weights of few bits on a generation of GPUs or in such an old release, layers that are divided over several
nodes, and context parallelism. Each widens the band, and the answer says why. The reports are listed, with our
prediction beside each, in lab/results/steps.md ("Beyond the measured runs").
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import expm1, log1p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tokentwin.calibration.steps.calibration_file import Price
from tokentwin.calibration.steps.correction import WEIGHTS
from tokentwin.calibration.steps.evidence import PLACE, Evidence, Origin
from tokentwin.calibration.steps.operation_cost import HostTimes
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.engines import EngineName
from tokentwin.serving.deployments.inter_node import expert_group, tensor_group
from tokentwin.serving.deployments.model_spec import ModelSpec

Floats = NDArray[np.float64]

_WIDE = "16 bit"  # what `Origin` calls weights of 16 bits
# Reach of the error in the logarithm. Layers that every engine has long had became 1.21 times as fast from vLLM 0.8.5
# to 0.10.2, in five months (vllm-project/vllm issue 25915). Experts and latent attention became 3.4 times as fast from
# SGLang 0.4.1 to 0.5.6, in a year (sgl-project/sglang pull request 2643).
_A_YEAR, _A_YEAR_OF_NEW_LAYERS = 0.45, 1.25
_LEAST_YEARS, _MOST_YEARS = 0.2, 1.0
_OLDER_FASTER = 0.1
_RELEASED: dict[str, dict[tuple[int, ...], float]] = {  # engine, release, year
    "vllm": {
        (0, 1): 2023.5, (0, 2): 2023.7, (0, 3): 2024.1, (0, 4): 2024.2, (0, 5): 2024.4, (0, 6): 2024.7, (0, 7): 2025.1,
        (0, 8): 2025.2, (0, 9): 2025.4, (0, 10): 2025.6, (0, 11): 2025.8, (0, 12): 2025.9, (0, 15): 2026.1,
        (0, 20): 2026.3, (0, 27): 2026.6, (0, 33): 2026.9,
    },
    "sglang": {(0, 1): 2024.0, (0, 2): 2024.6, (0, 3): 2024.7, (0, 4): 2024.9, (0, 5): 2025.6, (0, 5, 6): 2025.9},
    "trtllm": {(0, 5): 2023.8, (0, 16): 2025.0, (1, 0): 2025.7},
}  # fmt: skip
# Steps in fp8 took 1.07 to 1.7 times the time of steps in 16 bits, where 0.7 to 0.9 was expected: sgl-project/sglang
# issues 7352, 11045 and 29002, vllm-project/vllm issue 9992
_PRECISION_FASTER, _PRECISION_SLOWER = 0.2, 0.6
# Weights in fp8 that are priced as 16 bits (`priced_wider`): 0.59 to 1.09 times the throughput of 16 bits in
# seven reports (lab/results/steps.md), up to 1.6 times as announced.
_WIDER_FASTER, _WIDER_SLOWER = 0.5, 0.5
# DeepSeek-R1 on two nodes of eight H100: 2.4 times our time (tenstorrent/tt-inference-server issue 356, and vLLM in
# sgl-project/sglang issue 3656)
_NODES_FASTER, _NODES_SLOWER = 0.2, 0.9
_CONTEXT_FASTER, _CONTEXT_SLOWER = 0.3, 0.4  # lab/results/steps.md, "Context parallelism"


class Reach(NamedTuple):
    """The further reach of a 90 % interval in the logarithm, towards longer and towards shorter times."""

    slower: float
    faster: float


class Doubt(NamedTuple):
    """A reason for an error that no measured run shows: a clause, and its reach in decode steps and in prompts."""

    why: str
    of_decode: Reach
    of_prompts: Reach


def doubts(
    evidence: Evidence,
    origin: Origin,
    model: ModelSpec,
    deployment: Deployment,
    shares: Callable[[], Floats],
    measured: Deployment | None = None,
) -> Iterator[Doubt]:
    """Yield what `evidence` does not cover of `deployment`, which has this `origin`.

    `shares` returns the nanoseconds of each number in a decode step and in a prompt step, `[2, numbers]`. `measured` is
    a deployment that the user measured.
    """
    if doubt := _of_release(evidence, deployment.engine_name, origin.generation, model):
        yield doubt
    yield from _of_precision(evidence, origin, deployment.engine_name, shares)
    if divides_over_nodes(model, deployment) and (measured is None or not divides_over_nodes(model, measured)):
        yield _alike("no measured run divides a layer over nodes", _NODES_FASTER, _NODES_SLOWER)
    if _shares_context(deployment) and (measured is None or not _shares_context(measured)):
        yield _alike("no measured run has context parallelism", _CONTEXT_FASTER, _CONTEXT_SLOWER)


def _shares_context(deployment: Deployment) -> bool:
    return deployment.prefill_context_parallel_size > 1 or deployment.decode_context_parallel_size > 1


def divides_over_nodes(model: ModelSpec, deployment: Deployment) -> bool:
    """Return whether every layer of `deployment` exchanges its results between nodes, other than by DeepEP."""
    experts = model.num_experts > 0 and deployment.all2all_backend == "allgather_reducescatter"
    return tensor_group(deployment).nodes > 1 or (experts and expert_group(deployment).nodes > 1)


def _alike(why: str, faster: float, slower: float) -> Doubt:
    return Doubt(why, Reach(slower, faster), Reach(slower, faster))


# The loop of vLLM's V0 engine, which decides, makes inputs and reads the tokens while the GPU waits. Until 0.5 the GPU
# waited 5 to 13 ms for each step (vllm-project/vllm issue 6854; 13 ms at the 256 requests of the default limit). Hiding
# the loop of the last releases behind the step saved 3.3 ms at one request (pull request 16755).
_V0_ROW_NS = (13e6 - 5e6) / 256
_V0_ROW_OF_DEVICE_NS = 45e3  # the loop sends the inputs of every request to every device (fitted to issue 16300)
_V0_LOOPS: tuple[tuple[tuple[int, ...], Price], ...] = (((0, 6), 5e6), ((0, 8), 3.3e6))


def host_of_release(host: HostTimes, deployment: Deployment, evidence: Evidence) -> HostTimes:
    """Return the host times of the engine's release: `host`, unless it is a loop that no measured run has."""
    engine, devices = deployment.engine_name, deployment.tensor_parallel_size
    row_ns = _V0_ROW_NS + (_V0_ROW_OF_DEVICE_NS * devices if devices > 1 else 0.0)
    if engine.name != "vllm" or not _is_older(evidence, engine):
        return host
    for before, step_ns in _V0_LOOPS:
        if engine.numbers is not None and engine.numbers < before:
            return HostTimes(max(host.step_ns, step_ns), max(host.row_ns, row_ns), host.launches)
    return host


def measured_types(evidence: Evidence, origin: Origin) -> bool:
    """Return whether runs of this engine on this generation of GPUs had weights of all types that `origin` has."""
    alike = [
        taught.origin
        for taught in evidence.taught
        if (taught.origin.engine, taught.origin.generation) == (origin.engine, origin.generation)
    ]
    return all(
        getattr(origin, family) in ("", _WIDE) or any(getattr(one, family) == getattr(origin, family) for one in alike)
        for family in ("gemm", "experts")
    )


def _releases(evidence: Evidence, engine: str, generation: str = "") -> list[tuple[int, ...]]:
    """Return the measured releases of an engine, on one `generation` of GPUs if any was measured on it."""
    origins = [taught.origin for taught in evidence.taught if taught.origin.engine == engine]
    here = [origin for origin in origins if origin.generation == generation]
    names = {EngineName.read(origin.version) for origin in here or origins}
    return sorted(name.numbers for name in names if name.numbers is not None)


def _is_older(evidence: Evidence, engine: EngineName, generation: str = "") -> bool:
    known = _releases(evidence, engine.name, generation)
    return engine.numbers is not None and bool(known) and engine.numbers < known[0][: len(engine.numbers)]


def _of_release(evidence: Evidence, engine: EngineName, generation: str, model: ModelSpec) -> Doubt | None:
    """Return the doubt about a release that is older or newer than those that were measured.

    An engine's first releases for a generation of GPUs run it little faster than the generation before: B200 was as
    fast as H200 or slower (vllm-project/vllm issues 18725 and 31272, NVIDIA/TensorRT-LLM issue 4043), and 1.2 times as
    fast as H100 (vllm-project/vllm issue 23609). So the first release counts that was measured on this generation.
    """
    known = _releases(evidence, engine.name)
    if engine.numbers is None or not known:
        return None
    if _is_older(evidence, engine, generation):
        first = _releases(evidence, engine.name, generation)[0]
        new_layers = model.num_experts > 0 or model.latent is not None
        slower = _years(engine, first) * (_A_YEAR_OF_NEW_LAYERS if new_layers else _A_YEAR)
        where = "" if first == known[0] else f" on {generation} GPUs"
        why = f"no measured run has so old a release as {engine}{where} (the first is {_shown(engine, first)})"
        return _alike(why, _OLDER_FASTER, slower)
    if engine.numbers > known[-1]:
        reach = _years(engine, known[-1]) * _A_YEAR
        why = f"no measured run has so new a release as {engine} (the last is {_shown(engine, known[-1])})"
        return _alike(why, reach, reach)
    return None


def _years(engine: EngineName, measured: tuple[int, ...]) -> float:
    """Return the years between the engine's release and a measured one, within limits."""
    released = _RELEASED[engine.name]
    stated, known = (
        max((year for first, year in released.items() if first <= release), default=min(released.values()))
        for release in (engine.numbers or (), measured)
    )
    return min(max(abs(stated - known), _LEAST_YEARS), _MOST_YEARS)


def _shown(engine: EngineName, numbers: tuple[int, ...]) -> str:
    return f"{engine.name} {'.'.join(map(str, numbers))}"


_FAMILIES = {"gemm": ("layers", WEIGHTS[:2]), "experts": ("experts", WEIGHTS[2:])}  # name, parts of a step


def untaught_types(evidence: Evidence, origin: Origin) -> dict[str, str]:
    """Return the types of fewer than 16 bits, by family of `Origin`, that no run on this generation of GPUs had."""
    alike = [taught.origin for taught in evidence.taught if taught.origin.generation == origin.generation]
    types = {family: getattr(origin, family) for family in _FAMILIES}
    return {
        family: dtype
        for family, dtype in types.items()
        if dtype not in ("", _WIDE) and all(getattr(one, family) != dtype for one in alike)
    }


_NO_GAIN = ("vllm", "sglang")  # engines whose old releases were reported to gain nothing from fp8


def priced_wider(evidence: Evidence, origin: Origin, engine: EngineName) -> dict[str, str]:
    """Return the types in fp8, by family of `Origin`, that are priced as 16 bits.

    Reports of releases that are older than those measured show no gain of fp8 over 16 bits (lab/results/steps.md).
    """
    if engine.name not in _NO_GAIN or not _is_older(evidence, engine):
        return {}
    types = {family: getattr(origin, family) for family in _FAMILIES}
    return {family: dtype for family, dtype in types.items() if dtype.startswith("fp8")}


def _of_precision(
    evidence: Evidence, origin: Origin, engine: EngineName, shares: Callable[[], Floats]
) -> Iterator[Doubt]:
    """Yield a doubt for each of `untaught_types` and `priced_wider`.

    It reaches as far as the share of a step that such weights take.
    """
    old = priced_wider(evidence, origin, engine)
    doubted = {family: dtype for family, dtype in untaught_types(evidence, origin).items() if family not in old}
    for family, dtype in (doubted | old).items():
        what, parts = _FAMILIES[family]
        times = shares()
        of_weights = times[:, [PLACE[part] for part in parts]].sum(axis=1) / times.sum(axis=1)
        reaches = (_WIDER_SLOWER, _WIDER_FASTER) if family in old else (_PRECISION_SLOWER, _PRECISION_FASTER)
        decode, prompts = (Reach(*(log1p(share * expm1(reach)) for reach in reaches)) for share in of_weights.tolist())
        why = f"no measured run has {what} in {dtype} on {origin.generation} GPUs"
        if family in old:
            why = f"{what} in {dtype} are priced as 16 bits, because reports of old releases show no gain"
        yield Doubt(why, decode, prompts)
