"""Deployments with a planted fault ("illness") for the diagnosis to find: a random healthy one, and one change to it.

The severity does not depend on the diagnosis. The load is a share of what the healthy deployment can serve, and the
fault raises some p99 latency by half or loses a tenth of the requests; otherwise another deployment is drawn.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tokentwin.calibration.steps.observed import observed, pure
from tokentwin.calibration.steps.operation_cost import HostTimes, OperationCost
from tokentwin.planning.diagnose.diagnosis import diagnose
from tokentwin.planning.diagnose.document import DiagnosisDocument
from tokentwin.planning.diagnose.evidence import Evidence
from tokentwin.planning.diagnose.overload import drained_ns
from tokentwin.planning.diagnose.symptoms import symptoms
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor
from tokentwin.serving.workload import Item, Workload, WorkloadRequest
from tokentwin.sim.cluster import Simulated, simulate_to
from tokentwin.traces.metrics.client_view import as_clients_saw
from tokentwin.traces.metrics.run_metrics import RunMetrics
from tokentwin.traces.recording import Recording

S = 1_000_000_000
_LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms", "itl_ms")
_WORSE = 1.5
_LOST = 0.1
_TRIES = 12
Rng = np.random.Generator


@dataclass(frozen=True)
class Illness:
    """A planted fault: its kind, layer, lifts that remove it, symptom, and the deployment without and with it."""

    kind: str
    layer: str
    lifts: tuple[str, ...]
    symptom: str
    healthy: PricedScenario
    ill: PricedScenario


@dataclass(frozen=True)
class Case:
    """A healthy deployment: engine, GPUs, requests (by mean lengths) and load."""

    model: str = "Llama-3.1-8B"
    gpu: str = "H100"
    prompt: int = 700
    output: int = 120
    requests: int = 160
    load: float = 0.5
    replicas: int = 1
    shared: int = 0
    settings: dict[str, Any] | None = None

    def scenario(self, rng: Rng, rate: float | None = None, **changes: Any) -> PricedScenario:
        """Return a scenario at `load` of its capacity, or at `rate` requests a second, with further settings."""
        base: dict[str, Any] = {
            "model": self.model,
            "device": "cuda",
            "gpu_memory_utilization": 0.9,
            "scheduler": {"async_scheduling": True, "max_num_seqs": 256},
        }
        for more in (self.settings or {}, changes):
            scheduler = {**base["scheduler"], **more.get("scheduler", {})}
            base = {**base, **more, "scheduler": scheduler}
        if base["scheduler"].get("num_blocks"):
            base["gpu_memory_utilization"] = None
        deployment = Deployment.model_validate(base)
        fleet = deployment.fleet is not None
        made = price_scenario(self._traffic(rng), None, self.gpu, deployment, None if fleet else self.replicas)
        if rate is None:
            rate = self.load * self.requests / ((drained_ns(made) or S) / S)
        return at_rate(made, rate)

    def _traffic(self, rng: Rng) -> Workload:
        """Return requests a second apart; prefixes of `shared` tokens are of twelve kinds, in turn."""
        prompts = np.clip(rng.lognormal(np.log(self.prompt), 0.4, self.requests), 4, 6000).astype(int).tolist()
        outputs = np.clip(rng.lognormal(np.log(self.output), 0.4, self.requests), 2, 1500).astype(int).tolist()
        gaps = np.cumsum(rng.exponential(S, self.requests)).astype(int).tolist()
        made = [
            WorkloadRequest(i, at, (*([(f"sys{i % 12}", self.shared)] if self.shared else []), ("", p)), o)
            for i, (at, p, o) in enumerate(zip(gaps, prompts, outputs, strict=True))
        ]
        return Workload(made, "made", shares_prefixes=bool(self.shared))


def at_rate(scenario: PricedScenario, rate: float) -> PricedScenario:
    """Return the scenario at `rate` requests a second, given arrivals that are a second apart on average."""
    requests = [replace(r, arrival_ns=int(r.arrival_ns / rate)) for r in scenario.workload.requests]
    return replace(scenario, workload=replace(scenario.workload, requests=requests))


def rate_of(scenario: PricedScenario) -> float:
    requests = list(scenario.workload.requests)
    return len(requests) * S / requests[-1].arrival_ns


def _any(rng: Rng, *of: Any) -> Any:
    return of[int(rng.integers(len(of)))]


def _one_gpu(rng: Rng, **more: Any) -> Case:
    model, gpu = _any(
        rng, ("Llama-3.1-8B", "H100"), ("Qwen3-8B", "A100-80G"), ("Mistral-7B-v0.3", "L40S"), ("Llama-3.1-8B", "H200")
    )
    usual: dict[str, Any] = {"prompt": int(rng.integers(300, 1200)), "output": int(rng.integers(60, 200))}
    return Case(model, gpu, **usual | {"load": float(rng.uniform(0.35, 0.6))} | more)


def _ill(rng: Rng, case: Case, **changes: Any) -> tuple[PricedScenario, PricedScenario]:
    """Return an illness: the healthy deployment, and the same requests at the same rate with other settings."""
    seed = int(rng.integers(1 << 30))
    healthy = case.scenario(np.random.default_rng(seed))
    ill = case.scenario(np.random.default_rng(seed), rate_of(healthy), **changes)
    return healthy, replace(ill, workload=healthy.workload)


def few_places(rng: Rng) -> Any:
    return _ill(rng, _one_gpu(rng), scheduler={"max_num_seqs": int(rng.integers(1, 5))})


def few_slots(rng: Rng) -> Any:
    """Requests with several adapters share one or two slots."""
    count = int(rng.integers(6, 12))
    case = _one_gpu(rng, settings={"lora": {"max_loras": count, "load_ms": 1.0}})
    healthy, ill = _ill(rng, case, lora={"max_loras": int(rng.integers(1, 3)), "max_cpu_loras": count, "load_ms": 1.0})
    made = [replace(r, adapter=f"a{int(rng.integers(count))}") for r in healthy.workload.requests]
    adapted = replace(healthy.workload, requests=made)
    return replace(healthy, workload=adapted), replace(ill, workload=adapted)


def slow_encoder(rng: Rng) -> Any:
    """Every request has an image, and its encoder takes longer than the rest of its prompt."""
    case = _one_gpu(rng, settings={"multimodal": {"encoder_us_per_token": 1.0}}, output=60)
    slow = {"encoder_us_per_token": float(rng.uniform(250, 350))}
    healthy, ill = _ill(rng, case, multimodal=slow)
    made = [replace(r, items=(Item(0, min(r.prompt_len, 400)),)) for r in healthy.workload.requests]
    pictures = replace(healthy.workload, requests=made)
    return replace(healthy, workload=pictures), replace(ill, workload=pictures)


def small_chunks(rng: Rng) -> Any:
    case = _one_gpu(rng, prompt=int(rng.integers(1200, 2500)), output=30)
    return _ill(rng, case, scheduler={"max_num_batched_tokens": int(rng.integers(16, 64)), "max_num_seqs": 16})


def long_chunks(rng: Rng) -> Any:
    """A few prompts are very long, and hold up the decoding of all others."""
    case = _one_gpu(rng, prompt=100, output=100, settings={"scheduler": {"max_num_batched_tokens": 512}})
    healthy, ill = _ill(rng, case, scheduler={"max_num_batched_tokens": 8192})
    every = int(rng.integers(6, 10))

    def long(scenario: PricedScenario) -> PricedScenario:
        offered = scenario.workload.requests
        made = [replace(r, prompt=(("", 4500),), output_len=5) if r.id % every == 0 else r for r in offered]
        return replace(scenario, workload=replace(scenario.workload, requests=made))

    return long(at_rate(healthy, 0.5)), long(at_rate(ill, 0.5))


def uneven_routing(rng: Rng) -> Any:
    """Long and short prompts in turn, so that round robin sends all long ones to the same replica."""
    case = _one_gpu(rng, output=10, replicas=2, requests=240)
    seed = int(rng.integers(1 << 30))
    length = int(rng.integers(3000, 6000))

    def alternating(scenario: PricedScenario) -> PricedScenario:
        offered = scenario.workload.requests
        made = [replace(r, prompt=(("", length if r.id % 2 == 0 else 20),)) for r in offered]
        return replace(scenario, workload=replace(scenario.workload, requests=made))

    even = alternating(case.scenario(np.random.default_rng(seed), 1.0))
    rate = float(rng.uniform(0.6, 0.75)) * case.requests / ((drained_ns(replace(even, router="least-tokens")) or S) / S)
    even = at_rate(even, rate)
    return replace(even, router="least-tokens"), even


def admission(rng: Rng) -> Any:
    """Queues are limited to one or two requests, though the engine would have served more."""
    case = _one_gpu(rng, load=float(rng.uniform(0.5, 0.7)))
    limits = {"max_queued_per_replica": 1, "queue_timeout_s": float(rng.uniform(0.005, 0.02))}
    return _ill(rng, case, fleet={"admission": limits})


def bursts(rng: Rng) -> Any:
    case = _one_gpu(rng, load=float(rng.uniform(0.1, 0.25)), requests=240)
    healthy = case.scenario(rng)
    each = int(rng.integers(40, 80))
    requests = list(healthy.workload.requests)
    made = [replace(r, arrival_ns=requests[r.id // each * each].arrival_ns + 1000 * (r.id % each)) for r in requests]
    return healthy, replace(healthy, workload=replace(healthy.workload, requests=made))


def failures(rng: Rng) -> Any:
    case = _one_gpu(rng, replicas=1, load=0.35)
    pools = {"pools": [{"replicas": 2}], "router": "least-tokens"}
    seed = int(rng.integers(1 << 30))
    healthy = case.scenario(np.random.default_rng(seed), fleet=pools)
    span = list(healthy.workload.requests)[-1].arrival_ns / S
    crash = {"at_s": 0.3 * span, "replica": 0, "recovery_s": float(rng.uniform(0.2, 0.4)) * span}
    failing = {**pools, "failures": {"crashes": [crash, crash]}}
    ill = case.scenario(np.random.default_rng(seed), rate_of(healthy), fleet=failing)
    return healthy, replace(ill, workload=healthy.workload)


def heavy_prompts(rng: Rng) -> Any:
    """Prompts are much longer than in the healthy deployment, and answers short."""
    case = _one_gpu(rng, prompt=200, output=10, requests=200)
    healthy = case.scenario(rng)
    longer = int(rng.integers(8, 16))
    made = [replace(r, prompt=(("", min(longer * r.prompt_len, 7000)),)) for r in healthy.workload.requests]
    long = replace(healthy, workload=replace(healthy.workload, requests=made))
    rate = float(rng.uniform(0.8, 0.95)) * len(made) / ((drained_ns(long) or S) / S)
    return at_rate(at_unit(healthy), rate), at_rate(at_unit(long), rate)


def at_unit(scenario: PricedScenario) -> PricedScenario:
    """Return the requests with arrivals a second apart on average."""
    return at_rate(scenario, 1 / rate_of(scenario))


def heavy_weights(rng: Rng) -> Any:
    """A large model on one device for a handful of requests: each step reads it all for a few tokens."""
    return _heavy(rng, 0.08, 0.15)


def _heavy(rng: Rng, least: float, most: float) -> Any:
    """Return an illness of a large model at a load between these bounds."""
    gpu = _any(rng, "H200", "B200", "MI300X")
    healthy = Case("Llama-3.1-8B", gpu, 60, int(rng.integers(100, 200)), 60, 0.02).scenario(rng)
    heavy = _any(rng, "Qwen3-32B", "Qwen2.5-32B", "Llama-3.1-70B")
    case = Case(heavy, gpu, settings={"quantization": "fp8"} if heavy == "Llama-3.1-70B" else None)
    ill = case.scenario(rng, 1.0)
    rate = float(rng.uniform(least, most)) * case.requests / ((drained_ns(ill) or S) / S)
    return at_rate(at_unit(healthy), rate), replace(ill, workload=at_rate(at_unit(healthy), rate).workload)


def communication(rng: Rng) -> Any:
    """Many devices that talk over PCIe."""
    gpu, tp = _any(rng, ("L40S", 8), ("L40S", 4), ("RTX-4090", 8), ("RTX-4090", 4))
    case = Case(_any(rng, "Qwen3-32B", "Qwen2.5-32B", "CodeLlama-34B"), "H100", int(rng.integers(300, 1500)), 100)
    seed = int(rng.integers(1 << 30))
    healthy = case.scenario(np.random.default_rng(seed), tensor_parallel_size=tp)
    ill = replace(case, gpu=gpu).scenario(np.random.default_rng(seed), 1.0, tensor_parallel_size=tp)
    return healthy, replace(ill, workload=healthy.workload)


def bubbles(rng: Rng) -> Any:
    """Layers on many stages, and requests one after the other."""
    stages = _any(rng, 4, 8)
    case = Case(_any(rng, "Llama-3.1-70B", "Qwen2.5-72B"), "H100", int(rng.integers(400, 1500)), 100, load=0.1)
    return _staged(rng, case, stages)


def _staged(rng: Rng, case: Case, stages: int) -> Any:
    seed = int(rng.integers(1 << 30))
    healthy = case.scenario(np.random.default_rng(seed), tensor_parallel_size=stages)
    plain = {"async_scheduling": False}
    ill = case.scenario(np.random.default_rng(seed), 1.0, pipeline_parallel_size=stages, scheduler=plain)
    return healthy, replace(ill, workload=healthy.workload)


def bubbles_between_tokens(rng: Rng) -> Any:
    """The same deployment has more to do, so that gaps between tokens show the fault."""
    case = Case(_any(rng, "Llama-3.1-70B", "Qwen2.5-72B"), "H100", int(rng.integers(800, 2000)), 200, load=0.25)
    return _staged(rng, case, _any(rng, 4, 8))


def launches(rng: Rng) -> Any:
    """A small model without CUDA graphs."""
    model = _any(rng, "Qwen3-0.6B", "Llama-3.2-1B")
    case = Case(model, _any(rng, "H100", "H200", "A100-80G"), 100, int(rng.integers(80, 200)), load=0.1)
    return _ill(rng, case, enforce_eager=True)


def slow_host(rng: Rng) -> Any:
    """The loop is plain, and the CPU takes longer between steps than the device for them."""
    case = _one_gpu(rng, prompt=100, load=0.15)
    healthy, ill = _ill(rng, case, scheduler={"async_scheduling": False})
    cost = pure(ill.cost)
    assert isinstance(cost, OperationCost)
    host = HostTimes(float(rng.uniform(15e6, 40e6)), 20e3)
    slow = observed(OperationCost(cost.model, cost.deployment, cost.kernels, cost.correction, host))
    return healthy, replace(ill, cost=slow)


def uneven_experts(rng: Rng) -> Any:
    tp = 8
    case = Case(_any(rng, "Qwen3-235B-A22B", "DeepSeek-V3"), "H200", int(rng.integers(800, 2000)), 100, load=0.5)
    case = replace(case, settings={"tensor_parallel_size": tp, "enable_expert_parallel": True, "quantization": "fp8"})
    return _ill(rng, case, expert_imbalance=float(rng.uniform(4.0, 7.0)))


def starved_kv(rng: Rng) -> Any:
    case = _one_gpu(rng)
    each = -(-(2 * case.prompt + 2 * case.output) // 16)
    blocks = max(int(each * rng.uniform(1.5, 3)), 600)
    return _ill(rng, case, scheduler={"num_blocks": blocks, "max_model_len": 7600})


def long_contexts(rng: Rng) -> Any:
    """Conversations of tens of thousands of tokens are decoded at a large batch: KV is most of what a step reads."""
    case = Case("Qwen3-8B", _any(rng, "H200", "B200"), 60, int(rng.integers(300, 500)), 48, 0.05)
    long = {"max_model_len": 40_000, "max_num_batched_tokens": 8192}
    healthy = at_once(case.scenario(rng, scheduler=long))
    past = int(rng.integers(15_000, 25_000))
    made = [replace(r, prompt=(("sys", past), ("", 20))) for r in healthy.workload.requests]
    return healthy, replace(healthy, workload=Workload(made, "long", shares_prefixes=True))


def at_once(scenario: PricedScenario) -> PricedScenario:
    """Let all requests come within a millisecond."""
    requests = [replace(r, arrival_ns=r.id * 1000) for r in scenario.workload.requests]
    return replace(scenario, workload=replace(scenario.workload, requests=requests))


def fragments(rng: Rng) -> Any:
    """Blocks of hundreds of tokens for requests of a hundred, in memory that would do with small ones."""
    case = _one_gpu(rng, prompt=40, output=int(rng.integers(60, 100)), load=0.3)
    size = _any(rng, 512, 1024)
    tokens = int(rng.uniform(8, 14)) * 1024
    small = {"num_blocks": tokens // 16 + 1, "max_model_len": 7000}
    case = replace(case, settings={"scheduler": small})
    return _ill(rng, case, scheduler={"num_blocks": tokens // size + 1, "block_size": size, "max_model_len": 7000})


def missed_prefixes(rng: Rng) -> Any:
    case = _one_gpu(rng, prompt=40, output=20, shared=int(rng.integers(2000, 4000)), requests=240, load=0.3)
    if rng.random() < 0.5:
        return _ill(rng, case, scheduler={"enable_prefix_caching": False})
    return _ill(rng, case, scheduler={"num_blocks": int(rng.integers(560, 700)), "max_model_len": 7600})


def slow_front_door(rng: Rng) -> Any:
    """One API process works as long on each prompt or on each chunk of text as would be too long for many clients."""
    case = _one_gpu(rng, load=float(rng.uniform(0.3, 0.5)))
    healthy = case.scenario(rng)
    requests = list(healthy.workload.requests)
    busy = float(rng.uniform(0.85, 0.97)) * requests[-1].arrival_ns  # of the run, for its one API process
    if rng.random() < 0.5:
        door = FrontDoor(chunk_ns=busy / sum(request.output_len for request in requests))
    else:
        door = FrontDoor(prompt_token_ns=busy / sum(request.prompt_len for request in requests))
    return healthy, replace(healthy, front_door=door)


def overload(rng: Rng) -> Any:
    """The load is 1.5 times what one replica can serve."""
    healthy = _one_gpu(rng, load=0.5).scenario(rng)
    return healthy, at_rate(healthy, float(rng.uniform(2.8, 3.4)))


def giving_up(rng: Rng) -> Any:
    """Few requests run at once, and users who wait for their first token leave."""
    patience = {"mean_s": float(rng.uniform(1, 3)), "until": "first-token"}
    case = _one_gpu(rng, settings={"fleet": {"admission": {"patience": patience}}})
    return _ill(rng, case, scheduler={"max_num_seqs": int(rng.integers(1, 4))})


def rare_bursts(rng: Rng) -> Any:
    """A calm stream of requests has rare bursts of many at once."""
    case = _one_gpu(rng, load=float(rng.uniform(0.1, 0.2)), requests=400, prompt=int(rng.integers(800, 1500)))
    healthy = case.scenario(rng)
    requests, burst = list(healthy.workload.requests), int(rng.integers(25, 35))
    made = [
        replace(r, arrival_ns=requests[r.id // 200 * 200].arrival_ns) if r.id % 200 < burst else r for r in requests
    ]
    return healthy, replace(healthy, workload=replace(healthy.workload, requests=made))


def few_users(rng: Rng) -> Any:
    """The large model has hardly anything to do."""
    return _heavy(rng, 0.005, 0.015)


def needless_gpus(rng: Rng) -> Any:
    """A small model runs on so many devices over PCIe that they mostly wait for one another."""
    model, tp = _any(rng, ("Llama-3.2-1B", 8), ("Qwen3-0.6B", 8), ("Llama-3.2-3B", 8))
    case = Case(model, "L40S", int(rng.integers(200, 600)), 100, load=0.5)
    return _ill(rng, case, tensor_parallel_size=tp)


def reserved_kv(rng: Rng) -> Any:
    """Each request reserves memory for the longest possible one."""
    case = _one_gpu(rng, prompt=int(rng.integers(100, 300)), load=float(rng.uniform(0.4, 0.6)))
    plain = {"num_blocks": int(rng.integers(2000, 3500)), "max_model_len": 7600, "enable_prefix_caching": False}
    return _ill(rng, replace(case, settings={"scheduler": plain}), scheduler={"kv_reservation": "max_model_len"})


def slow_transfers(rng: Rng) -> Any:
    """Prompts are computed on one replica and their KV goes to another, over a link that is too slow for it."""
    case = _one_gpu(rng, prompt=int(rng.integers(1500, 2500)), output=60, load=float(rng.uniform(0.3, 0.5)))
    pools = [{"name": "prefill", "role": "prefill"}, {"name": "decode", "role": "decode"}]
    fleet = {"pools": pools, "links": {"nic_gb_s": 50}}
    slow = {"pools": pools, "links": {"nic_gb_s": float(rng.uniform(0.3, 0.8))}}
    return _ill(rng, replace(case, settings={"fleet": fleet}), fleet=slow)


def slow_tiers(rng: Rng) -> Any:
    """Prefixes that the device has no room for are loaded from memory that is slow to read."""
    case = _one_gpu(rng, prompt=40, output=20, shared=int(rng.integers(2000, 3000)), requests=240, load=0.3)
    blocks = {"num_blocks": int(rng.integers(700, 900)), "max_model_len": 7600}

    def tier(rate: float) -> dict[str, Any]:
        return {"tiers": [{"name": "host", "capacity_gib": 64, "read_gb_s": rate, "write_gb_s": 50}]}

    case = replace(case, settings={"scheduler": blocks, "kv_tiers": tier(50)})
    return _ill(rng, case, kv_tiers=tier(float(rng.uniform(1.5, 3))))


def static_batches(rng: Rng) -> Any:
    """No request joins a batch that has begun."""
    return _ill(rng, _one_gpu(rng), policy="static", scheduler={"max_num_seqs": _any(rng, 32, 64)})


def prompts_first(rng: Rng) -> Any:
    """Prompts are long, and nobody decodes while one is there."""
    case = _one_gpu(rng, prompt=int(rng.integers(2000, 3500)), load=float(rng.uniform(0.5, 0.7)))
    return _ill(rng, case, policy="prefill-first")


def low_threshold(rng: Rng) -> Any:
    """Steps have room for whole prompts, but take only a few tokens of each."""
    case = _one_gpu(rng, prompt=int(rng.integers(1200, 2500)), load=float(rng.uniform(0.3, 0.5)))
    case = replace(case, settings={"scheduler": {"max_num_batched_tokens": 8192}})
    return _ill(rng, case, scheduler={"long_prefill_token_threshold": int(rng.integers(32, 96))})


def rejected_drafts(rng: Rng) -> Any:
    """A large model verifies many tokens of a small one, and keeps hardly any."""
    large, small = _any(rng, ("Llama-3.1-70B", "Llama-3.2-1B"), ("Qwen3-32B", "Qwen3-0.6B"))
    case = Case(large, _any(rng, "H100", "H200"), int(rng.integers(200, 600)), 150, load=float(rng.uniform(0.2, 0.4)))
    drafts = {"model": small, "num_speculative_tokens": int(rng.integers(5, 9))}
    drafts["acceptance_rate"] = float(rng.uniform(0.02, 0.1))
    return _ill(rng, replace(case, settings={"tensor_parallel_size": 4}), scheduler={"speculative": drafts})


def unfused(rng: Rng) -> Any:
    """Kernels are not fused, as in plain PyTorch: attention's scores are in memory, norms and activations op by op."""
    case = _one_gpu(rng, prompt=int(rng.integers(3500, 5500)), output=20, load=float(rng.uniform(0.4, 0.6)))
    return _ill(rng, case, attention="unfused", fusion=False)


def experts_over_nodes(rng: Rng) -> Any:
    """Ranks of one device each send tokens to experts on other nodes, over a link that is too slow for it."""
    node = {"gpus_per_node": 1, "link": "infiniband-ndr"}
    spread = {"data_parallel_size": _any(rng, 2, 4), "enable_expert_parallel": True, "inter_node": node}
    model = _any(rng, "gpt-oss-120b", "Qwen3-30B-A3B")
    case = Case(model, _any(rng, "H100", "H200"), int(rng.integers(300, 900)), 100, settings=spread)
    slow = {"gpus_per_node": 1, "link": _any(rng, "ethernet-25", "ethernet-100"), "latency_us": 50}
    return _ill(rng, case, inter_node=slow)


def cold_starts(rng: Rng) -> Any:
    """Load for several replicas meets one, and the others take longer to start than the run lasts."""

    def scaled(cold_start_s: float) -> dict[str, Any]:
        scaler = {"target": 2, "max_replicas": 4, "interval_s": 0.2, "cold_start_s": cold_start_s}
        return {"pools": [{"replicas": 1}], "router": "least-tokens", "autoscaler": scaler}

    case = _one_gpu(rng, requests=300, load=float(rng.uniform(1.8, 2.4)), settings={"fleet": scaled(0.2)})
    return _ill(rng, case, fleet=scaled(float(rng.uniform(30, 120))))


def hot_spot(rng: Rng) -> Any:
    """Most prompts begin alike, and all of those go to one of several replicas."""
    pools = {"pools": [{"replicas": int(rng.integers(3, 5))}], "router": "prefix-affinity"}
    usual = {"prompt": int(rng.integers(1200, 2500)), "output": 20, "load": float(rng.uniform(0.5, 0.7))}
    case = _one_gpu(rng, requests=240, settings={"fleet": pools}, **usual)
    healthy, ill = _ill(
        rng, case, fleet={**pools, "router": {"name": "prefix-affinity", "settings": {"load_bound": 100}}}
    )
    made = [
        replace(r, prompt=((f"sys{0 if r.id % 10 < 8 else r.id % 10}", 64), *r.prompt))
        for r in healthy.workload.requests
    ]
    alike = replace(healthy.workload, requests=made, shares_prefixes=True)
    return replace(healthy, workload=alike), replace(ill, workload=alike)


def short_limit(rng: Rng) -> Any:
    """Requests are longer than the limit that was set."""
    case = _one_gpu(rng)
    return _ill(rng, case, scheduler={"max_model_len": int((case.prompt + case.output) * rng.uniform(1.0, 1.4))})


def wrong_split(rng: Rng) -> Any:
    """Long prompts and short answers, and most of the replicas decode."""
    case = _one_gpu(
        rng, prompt=int(rng.integers(1500, 2500)), output=40, load=float(rng.uniform(0.6, 0.8)), requests=240
    )

    def split(prefill: int) -> dict[str, Any]:
        of = (("prefill", prefill), ("decode", 4 - prefill))
        return {"pools": [{"name": role, "role": role, "replicas": count} for role, count in of]}

    return _ill(rng, replace(case, settings={"fleet": split(2)}), fleet=split(1))


PLANTED: dict[str, tuple[str, tuple[str, ...], str, Callable[[Rng], Any]]] = {
    "overload": ("request", ("one more replica",), "overload", overload),
    "users give up": ("request", ("more running requests",), "unfinished requests", giving_up),
    "few places": ("request", ("more running requests",), "max_num_seqs reached", few_places),
    "few adapter slots": ("request", ("a slot for each adapter",), "adapter slots taken", few_slots),
    "prompts cut small": ("request", ("prompts in one piece",), "high TTFT", small_chunks),
    "long chunks": ("request", ("smaller chunks",), "high ITL", long_chunks),
    "static batches": ("request", ("policy vllm",), "high TTFT", static_batches),
    "prompts first": ("request", ("policy vllm",), "high ITL", prompts_first),
    "low threshold": ("request", ("prompts in one piece",), "prompts cut small", low_threshold),
    "short limit": ("request", ("longer sequences",), "unfinished requests", short_limit),
    "cold starts": ("request", ("new replicas at once",), "high TTFT", cold_starts),
    "wrong split": ("request", ("more prefill replicas",), "high TTFT", wrong_split),
    "hot spot": ("request", ("routing by load",), "uneven replicas", hot_spot),
    "uneven routing": ("request", ("routing by load",), "high TTFT", uneven_routing),
    "admission limits": ("request", ("no admission limits",), "admission limits", admission),
    "bursts": ("request", ("even arrivals",), "bursty arrivals", bursts),
    "rare bursts": ("request", ("even arrivals",), "tail spikes", rare_bursts),
    "failures": ("request", ("no failures",), "replicas fail", failures),
    "slow front door": ("request", ("no front door",), "slow front door", slow_front_door),
    "slow encoder": ("compute", ("free encoding",), "images take the device", slow_encoder),
    "long prompts": ("compute", ("free prefill",), "prompts take the device", heavy_prompts),
    "small batches": ("compute", ("half the weights to read",), "small batches", heavy_weights),
    "few users": ("compute", ("half the weights to read",), "low utilisation", few_users),
    "communication": ("compute", ("free communication",), "communication", communication),
    "experts over nodes": ("compute", ("free communication",), "communication", experts_over_nodes),
    "rejected drafts": ("compute", ("no drafts",), "rejected drafts", rejected_drafts),
    "unfused kernels": ("compute", ("fused kernels",), "prompts take the device", unfused),
    "needless GPUs": ("compute", ("free communication",), "communication", needless_gpus),
    "pipeline bubbles": ("compute", ("no pipeline bubbles",), "pipeline bubbles", bubbles),
    "bubbles between tokens": ("compute", ("no pipeline bubbles",), "pipeline bubbles", bubbles_between_tokens),
    "launches": ("compute", ("free launches",), "launch-bound steps", launches),
    "slow host": ("compute", ("no CPU time between steps",), "time between steps", slow_host),
    "uneven experts": ("compute", ("even experts",), "expert imbalance", uneven_experts),
    "KV memory": ("memory", ("infinite KV memory",), "full KV memory", starved_kv),
    "KV reads": ("memory", ("half the KV to read",), "KV reads", long_contexts),
    "fragmentation": ("memory", ("small KV blocks",), "KV fragmentation", fragments),
    "reserved KV": ("memory", ("paged KV memory",), "KV fragmentation", reserved_kv),
    "missed prefixes": ("memory", ("perfect prefix reuse",), "missed prefixes", missed_prefixes),
    "KV transfers": ("memory", ("instant KV transfers",), "slow KV transfers", slow_transfers),
    "KV tiers": ("memory", ("instant KV tiers",), "slow KV tiers", slow_tiers),
}


SEEDS = 2 * len(PLANTED)  # number of seeds for the table of lab/results/comparisons.md


def planted(kind: str, seed: int) -> Illness:
    """Return an illness of a kind, drawn until it makes the deployment clearly worse."""
    layer, lifts, symptom, make = PLANTED[kind]
    for attempt in range(_TRIES):
        rng = np.random.default_rng([seed, attempt, *kind.encode()])
        try:
            healthy, ill = make(rng)
        except UserError:
            continue  # this model does not fit on that GPU
        if worse(healthy, ill):
            return Illness(kind, layer, lifts, symptom, healthy, ill)
    raise AssertionError(f"{kind} with seed {seed} makes nothing worse")


def worse(healthy: PricedScenario, ill: PricedScenario) -> bool:
    """Return whether some p99 is 1.5 times as high, or a tenth of the requests is lost."""
    before, after = (RunMetrics(as_clients_saw(scenario.requests(tokens=True))) for scenario in (healthy, ill))
    if before.finished.mean() - after.finished.mean() > _LOST:
        return True
    return any(after.distribution(of).p99 > _WORSE * before.distribution(of).p99 for of in _LATENCIES)


def diagnosed(illness: Illness, out: Path) -> DiagnosisDocument:
    """Return the diagnosis of a recording of the ill deployment, as `tokentwin diagnose` makes it."""
    made = illness.ill
    fleet = made.routed_fleet if made.deployment.fleet or made.router else made.fleet
    known: dict[str, Any] = {"fleet": fleet, "pools": made.pools, "tokens": True, "front_door": made.front_door}

    def noted(done: Simulated, recording: Recording) -> dict[str, Any]:
        return {"encoder": done.encoder._asdict()} if done.encoder else {}

    simulate_to(out, made.workload, made.deployment, made.cost, note=noted, **known)
    evidence = Evidence(Recording.load(out), peak=find_gpu(made.gpu or ""))
    evidence.explain_by(made)
    return diagnose(symptoms(evidence), evidence.seen, made)


def kind_of(seed: int) -> str:
    """Return the kinds in turn, so that each is drawn equally often."""
    return list(PLANTED)[seed % len(PLANTED)]
