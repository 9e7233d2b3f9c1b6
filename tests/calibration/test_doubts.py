"""What no measured run covers: it widens the band and is said, and a measured run of it ends the doubt."""

from math import log
from typing import Any

import numpy as np
import pytest

from tokentwin.calibration.operations import uniform_step
from tokentwin.calibration.steps.evidence import NUMBERS, PLACE, Origin, Taught, own_origin
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import blind, expected, predicted_cost
from tokentwin.calibration.steps.measured_runs import MeasuredRuns
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.engine_defaults import with_engine_defaults
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model


def deployment(model: str, gpu: str, tp: int = 1, **more: Any) -> Deployment:
    stated = {"model": model, "device": "cuda", "tensor_parallel_size": tp, **more}
    return with_engine_defaults(parse(Deployment, stated, "engine"), find_gpu(gpu))[0]


def reaches(gpu: str, stated: Deployment) -> tuple[float, float]:
    """Return how much further the band of decode steps reaches than without doubts, to both sides."""
    (low, high), (fast, slow) = (made(gpu, stated).step_interval.decode for made in (expected, blind))
    return log(fast / low), log(high / slow)


@pytest.mark.parametrize(
    ("gpu", "stated", "why"),
    [
        ("H100", {"model": "Llama-3.1-8B"}, ""),
        ("H100", {"model": "Llama-3.1-8B", "engine": "vllm 0.11.0"}, ""),
        ("H100", {"model": "Llama-3.1-8B", "engine": "vllm 0.11"}, ""),
        ("H100", {"model": "Llama-3.1-8B", "engine": "vllm 0.10.2"}, "so old a release as vllm 0.10.2"),
        ("H100", {"model": "Llama-3.1-8B", "engine": "vllm 0.33"}, "so new a release as vllm 0.33"),
        ("B200", {"model": "Llama-3.1-8B", "engine": "vllm 0.11.0"}, "so old a release as vllm 0.11.0 on Blackwell"),
        ("H100", {"model": "Llama-3.1-8B", "engine": "vllm 0.10.2", "quantization": "fp8"}, "priced as 16 bits"),
        ("H100", {"model": "Llama-3.1-8B", "prefill_context_parallel_size": 2}, "context parallelism"),
        ("H100", {"model": "Llama-3.1-8B", "engine": "sglang 0.4.1"}, "so old a release as sglang 0.4.1"),
        ("A100-80G", {"model": "Llama-3.1-8B", "quantization": "int4"}, "layers in int4 on Ampere"),
        ("H100", {"model": "Llama-3.1-8B", "quantization": "fp8"}, ""),
        ("H100", {"model": "Llama-3.1-70B", "tp": 16}, "divides a layer over nodes"),
        ("H100", {"model": "Llama-3.1-70B", "tp": 8}, ""),
        ("H100", {"model": "Llama-3.1-70B", "tp": 8, "pipeline_parallel_size": 2}, ""),
    ],
)
def test_what_was_never_measured_widens_the_band_and_is_said(gpu: str, stated: dict[str, Any], why: str) -> None:
    engine = deployment(gpu=gpu, **stated)
    faster, slower = reaches(gpu, engine)
    cost = predicted_cost(gpu, engine)
    assert (slower > 0.02 and faster > 0) if why else (slower == faster == 0)
    assert why in cost.untaught
    low, high = explain(cost, uniform_step(8, 500, 0, 1, 0)).interval
    assert high >= cost.known_interval.decode[1] and low <= cost.known_interval.decode[0]


# time of a token in ms, as reported: (report, GPU, deployment, requests, mean context, measured)
REPORTED = [
    # QwQ-32B in 16 bits, `benchmark_latency.py` with one prompt token and 200 output tokens; vllm-project/vllm 16300
    *(
        ("A100-80G", {"model": "QwQ-32B", "tp": tp, "engine": "vllm 0.7.2"}, rows, 100, measured)
        for tp, rows, measured in (
            (2, 1, 27.5), (4, 1, 19.6), (8, 1, 15.8), (2, 16, 30.4), (4, 16, 23.9), (8, 16, 21.3), (2, 128, 56.7),
            (4, 128, 53.4), (8, 128, 72.9),
        )
    ),
    # tenstorrent/tt-inference-server 356; it does not say which engine
    ("H100", {"model": "DeepSeek-R1", "tp": 16}, 1, 200, 31.2),
    # vLLM and SGLang in sgl-project/sglang 3656, of February 2025
    ("H100", {"model": "DeepSeek-R1", "tp": 16, "engine": "vllm 0.7.2"}, 1, 500, 33.3),
    ("H100", {"model": "DeepSeek-R1", "tp": 16, "engine": "sglang 0.4.3"}, 1, 500, 52.6),
    # Llama-3.1-405B-FP8, 32 requests; vllm-project/vllm 8244
    ("H100", {"model": "Llama-3.1-405B-FP8", "tp": 8, "engine": "vllm 0.6.0"}, 32, 300, 95.5),
    # InferenceX 870: releases that measured runs have
    ("H200", {"model": "DeepSeek-R1", "tp": 8, "engine": "sglang 0.5.7"}, 8, 1500, 12.8),
]  # fmt: skip


@pytest.mark.parametrize(("gpu", "stated", "rows", "context", "measured"), REPORTED)
def test_reported_times_lie_in_the_band(gpu: str, stated: dict[str, Any], rows: int, context: int, measured: float):
    engine = deployment(gpu=gpu, **stated)
    step = explain(predicted_cost(gpu, engine), uniform_step(rows, context, 0, 1, 0))
    host_ns = 0.0 if engine.scheduler.async_scheduling else step.host_ns
    low, high = ((step.step_ns + host_ns) * factor / 1e6 for factor in step.interval)
    assert low <= measured <= high


def test_fp8_gains_nothing_in_a_release_older_than_the_first_measured() -> None:
    def ms(engine: str, model: str) -> float:
        stated = deployment(model, "H200", 4, engine=engine)
        return explain(predicted_cost("H200", stated), uniform_step(4, 11_000, 0, 1, 0)).step_ns / 1e6

    wide, narrow = "Qwen3-235B-A22B", "Qwen3-235B-A22B-FP8"  # vllm-project/vllm issue 25540
    assert ms("vllm 0.10.2", narrow) >= ms("vllm 0.10.2", wide)
    assert ms("vllm 0.18.0", narrow) < ms("vllm 0.18.0", wide)


def own_runs(gpu: str, part: str, *runs: tuple[Deployment, float]) -> MeasuredRuns:
    """Return runs of a user's own server: for each deployment the factor on what is assumed of a `part` of a step."""
    taught, at = [], PLACE[part]
    for stated, factor in runs:
        origin = own_origin(Origin.from_deployment(find_model(stated.model), find_gpu(gpu), stated))
        information, logs = np.zeros((len(NUMBERS), len(NUMBERS))), np.zeros(len(NUMBERS))
        information[at, at], logs[at] = 1e7, log(factor)
        taught.append(Taught(origin, information, information @ logs, 20).as_dict())
    return MeasuredRuns(gpu, runs[0][0].model_dump_json(), tuple(taught), (), "own", "2026-11-27")


def test_measured_runs_override_that_fewer_bits_are_never_slower() -> None:
    """Layers in 4 bits that took six times the kernels' time in a user's runs are slower than layers in 16 bits."""
    narrow, wide = (deployment("Llama-3.1-8B", "A100-80G", quantization=dtype) for dtype in ("int4", "none"))
    learnt = own_runs("A100-80G", "weights", (narrow, 6.0), (wide, 1.0))

    def ms(stated: Deployment, measured: MeasuredRuns | None) -> float:
        return explain(predicted_cost("A100-80G", stated, measured), uniform_step(8, 500, 0, 1, 0)).step_ns / 1e6

    assert ms(narrow, None) < ms(wide, None)
    assert ms(narrow, learnt) > 1.2 * ms(wide, learnt)
    known, before = predicted_cost("A100-80G", narrow, learnt), predicted_cost("A100-80G", narrow)
    assert "int4" in before.untaught and "int4" not in known.untaught
    assert known.known_interval.decode[1] < before.known_interval.decode[1]


def test_a_release_that_a_user_measured_is_known() -> None:
    """Neither its release widens the band, nor is its loop assumed."""
    stated = deployment("Llama-3.1-8B", "H100", engine="vllm 0.7.2")
    learnt = own_runs("H100", "host step", (stated, 1.0))
    before, after = predicted_cost("H100", stated), predicted_cost("H100", stated, learnt)
    assert before.host.step_ns == 3.3e6 != after.host.step_ns
    assert "so old" in before.untaught and "so old" not in after.untaught
