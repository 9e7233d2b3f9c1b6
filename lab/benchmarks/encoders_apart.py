"""Encoders on GPUs of their own, against published measurements.

`python -m lab.benchmarks.encoders_apart` prints the tables of `lab/results/encoders-apart.md`. What a publication does
not state was guessed: sizes of 1080p images by the model's processor, the settings of the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from tokentwin.calibration.steps.observed import pure
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.planning.costs import priced
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.workload import PRIVATE, Item, Workload, WorkloadRequest

_1080P, _1080P_OF_QWEN2_5 = 2040, 2691  # placeholder tokens of an image: 1920 x 1080 in blocks of 32, and of 28, pixels
_SGLANG: dict[str, Any] = {"engine": "sglang", "policy": "sglang", "multimodal": {}}
_GOODPUT_MS = {"ttft": 20_000, "tpot": 100}  # bounds of the p99 in the blog of vLLM
_RATES = (8, 16, 24, 32)


def _requests(
    count: int, text: int, output: int, tokens: int, images: tuple[int, int], rate: float | None = None
) -> list[WorkloadRequest]:
    """Return requests with the least to the most of `images`; Poisson arrivals at `rate`, or all at once."""
    draw, at, made = Random(1), 0, []
    for id in range(count):
        own = draw.randint(*images)
        items = [Item(10 + number * tokens, tokens) for number in range(own)]
        prompt = ((PRIVATE, text + own * tokens),)
        made.append(WorkloadRequest(id, at, prompt, output, items=tuple(items)))
        at += round(draw.expovariate(rate) * 1e9) if rate else 0
    return made


def _scenario(workload: Workload, gpu: str, settings: Mapping[str, Any], replicas: int | None = None) -> PricedScenario:
    return price_scenario(workload, None, gpu, parse(Deployment, dict(settings), "deployment"), replicas)


def _apart(encoders: int, engines: int, settings: Mapping[str, Any]) -> dict[str, Any]:
    pools = [
        {"name": "encode", "role": "encode", "replicas": encoders, "deployment": {"tensor_parallel_size": 1}},
        {"name": "serve", "replicas": engines},
    ]
    return {"fleet": {"pools": pools}, **settings}


def _of_sglang() -> None:
    print("sgl-project/sglang#30398: Qwen3-VL-8B, 1 encoder and 1 engine on H20, 4 images of 1080p a request")
    scheduler: dict[str, Any] = {"max_num_batched_tokens": 8192, "max_model_len": 16384, "enable_prefix_caching": False}
    settings = _apart(1, 1, {"model": "Qwen3-VL-8B", "gpu_memory_utilization": 0.6, "scheduler": scheduler, **_SGLANG})
    for concurrency, count, measured in ((1, 8, (0.403, 2047, 6.78)), (4, 16, (0.566, 5352, 19.4))):
        workload = Workload(_requests(count, 1024, 64, _1080P, (4, 4)), concurrency=concurrency)
        scenario = _scenario(workload, "H20", settings)
        _, metrics = scenario.measured({})
        ends = [end.measured({})[1].distribution("ttft_ms").p50 for end in scenario.ends()]
        ttft, tpot = metrics.distribution("ttft_ms").p50, metrics.distribution("tpot_ms").p50
        rate = metrics.scalars()["request_throughput"]
        print(
            f"  {concurrency} in flight: {rate:.3f} req/s, TTFT p50 {ttft:.0f} ms {[round(x) for x in ends]}, ", end=""
        )
        print(f"TPOT p50 {tpot:.2f} ms; measured {measured}")


def _of_a_large_model() -> None:
    print("sgl-project/sglang#12263: Qwen3-VL-235B in FP8, TP4 on H20, 1 to 8 images of 1080p, 0.5 requests/s")
    model: dict[str, Any] = {"model": "Qwen3-VL-235B-A22B", "quantization": "fp8", "tensor_parallel_size": 4, **_SGLANG}
    model |= {"gpu_memory_utilization": 0.9, "scheduler": {"max_model_len": 32768}}
    workload = Workload(_requests(64, 1087, 300, _1080P, (1, 8), 0.5))
    for name, settings in (("no encoder", model), ("1 encoder", _apart(1, 1, model)), ("2", _apart(2, 1, model))):
        _, metrics = _scenario(workload, "H20", settings).measured({})
        rate = metrics.scalars()["request_throughput"]
        print(f"  {name}: TTFT mean {metrics.distribution('ttft_ms').mean:.0f} ms, {rate:.2f} req/s", end="")
        print("; measured 80213 ms, 0.26 req/s" if name == "no encoder" else "")


def _goodput(settings: Mapping[str, Any], images: int, text: int, replicas: int | None = None) -> int:
    """Return the highest of the rates, in requests per second, at which the p99 of TTFT and TPOT keep the bounds."""
    kept = 0
    for rate in _RATES:
        workload = Workload(_requests(600, text, 150, 400, (images, images), rate))
        _, metrics = _scenario(workload, "A100-80G", settings, replicas).measured({})
        if any(metrics.distribution(f"{name}_ms").p99 > bound for name, bound in _GOODPUT_MS.items()):
            break
        kept = rate
    return kept


def _of_vllm() -> None:
    print("blog.vllm.ai/2025/12/15: Qwen3-VL-4B on 4 A100, goodput of 4 engines and of 1 encoder with 3 engines")
    base: dict[str, Any] = {"model": "Qwen3-VL-4B", "gpu_memory_utilization": 0.9, "multimodal": {}}
    measured = {(400, 1): (23, 24), (400, 4): (6, 12), (2000, 1): (8, 18), (2000, 4): (4, 8)}
    for (text, images), known in measured.items():
        rates = _goodput(base, images, text, 4), _goodput(_apart(1, 3, base), images, text)
        ours = tuple(f">= {rate}" if rate == _RATES[-1] else str(rate) for rate in rates)
        print(f"  {text} text tokens, {images} images: {ours}; measured {known}")


def _of_tensor_parallel() -> None:
    print("lmsys.org/blog/2026-01-12-epd: encoder of Qwen2.5-VL-72B on H20, 4 images")
    items = [Item(0, _1080P_OF_QWEN2_5)] * 4
    for size, measured in ((2, 492), (4, 466), (8, 524)):
        stated = {"model": "Qwen2.5-VL-72B", "tensor_parallel_size": size, **_SGLANG}
        cost = pure(priced(None, "H20", parse(Deployment, stated, "deployment"), encodes=True).cost)
        assert isinstance(cost, OperationCost) and cost.encoder is not None
        print(f"  TP{size}: {cost.encoder.encode_ns(items) / 1e6:.0f} ms; measured {measured} ms")


def main() -> None:
    _of_sglang()
    _of_a_large_model()
    _of_tensor_parallel()
    _of_vllm()


if __name__ == "__main__":
    main()
