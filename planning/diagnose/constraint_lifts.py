"""Counterfactuals: the same run with one constraint lifted at a time.

A lift takes a scenario and returns the scenario without the constraint, or a few words that say why it does not apply.
The gain of a lift is the share of a latency that the constraint causes. The gains of several lifts need not add up to
one, since constraints hide one another. Each lift belongs to a layer and to an area: the model, its kernels, KV, the
scheduler, or capacity.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from tokentwin.planning.diagnose.document import NO_PARTS
from tokentwin.planning.diagnose.fleet_lifts import (
    FASTEST,
    another_split,
    better_routing,
    everyone_admitted,
    instant_transfers,
    more_replicas,
    no_failures,
    no_front_door,
    scaled_at_once,
)
from tokentwin.planning.diagnose.lifted_costs import (
    WEIGHT_PARTS,
    StagesAtOnce,
    repriced,
    with_free_prefill,
    with_half_the_kv,
    with_parts,
    without_cpu_time,
    without_launches,
)
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.planning.traffic import waits_for_answers
from tokentwin.serving.cost_model import CostModel, PipelinedCost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.kv_layout import tables, with_known_states
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.fleet import PricedPool

Layer = Literal["compute", "memory", "request"]
Kind = Literal["capacity", "policy"]

_MOST_BLOCKS = 10_000_000  # maximum number of blocks of a SchedulerConfig
_PLACES = 8  # factor by which more requests may run at once
_CHUNKS = 8  # factor by which chunks become smaller
_BLOCK = 16  # tokens in a block; smaller blocks waste little
_BURSTY = 1.5  # index of dispersion; Poisson arrivals have 1
_WINDOW = 20  # mean number of arrivals in a window of that index


@dataclass(frozen=True)
class Lift:
    """A constraint and how to lift it.

    Attributes:
        name: name of the lift, in the form of words that can follow "with"
        apply: returns the scenario without the constraint, or the reason why the lift does not apply
        usually: kind of problem (`capacity` or `policy`), unless the scenario decides it

    The other fields are those of `lifts.toml`.
    """

    name: str
    apply: Callable[[PricedScenario], PricedScenario | str]
    cause: str
    layer: Layer
    area: str
    usually: Kind = "capacity"
    ideal: bool = False

    def kind(self, scenario: PricedScenario) -> Kind:
        deployment, scheduler = scenario.deployment, scenario.deployment.scheduler
        match self.name:
            case "perfect prefix reuse":  # one engine that caches and still misses lacks memory
                by_setting = not scheduler.enable_prefix_caching or scenario.engines > 1
            case "no CPU time between steps":  # an overlapped loop hides it; the rest needs a faster host
                by_setting = not scheduler.async_scheduling
            case "free launches":
                by_setting = deployment.enforce_eager
            case _:
                return self.usually
        return "policy" if by_setting else "capacity"


def infinite_kv(scenario: PricedScenario) -> PricedScenario:
    """Add KV blocks for all requests of the workload, so that none waits for memory and nothing is evicted."""
    return rescheduled(scenario, num_blocks=_all_blocks(scenario))


def small_blocks(scenario: PricedScenario) -> PricedScenario | str:
    """Divide the same memory into blocks of 16 tokens; the last block of a request is half empty on average."""
    scheduler = scenario.deployment.scheduler
    if scheduler.block_size <= _BLOCK:
        return f"blocks have {scheduler.block_size} tokens, so little memory is wasted"
    blocks = (scheduler.num_blocks - 1) * scheduler.block_size // _BLOCK + 1
    return rescheduled(scenario, block_size=_BLOCK, num_blocks=min(blocks, _MOST_BLOCKS))


def paged(scenario: PricedScenario) -> PricedScenario | str:
    """Allocate KV blocks as they are needed, anywhere in memory."""
    if scenario.deployment.scheduler.kv_reservation == "paged":
        return "KV is paged already"
    return rescheduled(scenario, kv_reservation="paged", kv_reserved_max_tokens=0)


def instant_tiers(scenario: PricedScenario) -> PricedScenario | str:
    """Load and write KV in no time."""
    if all(pool.deployment.kv_tiers is None for pool in scenario.all_pools):
        return "there are no KV tiers"

    def fast(deployment: Deployment) -> Deployment:
        own, rates = deployment.kv_tiers, {"read_gb_s": FASTEST, "write_gb_s": FASTEST, "latency_us": 0.0}
        tiers = own and own.model_copy(update={"tiers": tuple(tier.model_copy(update=rates) for tier in own.tiers)})
        return deployment.model_copy(update={"kv_tiers": tiers})

    return _remade(scenario, fast)


def longer_sequences(scenario: PricedScenario) -> PricedScenario | str:
    """Raise `max_model_len` to the longest request that the model supports."""
    longest, scheduler = longest_request(scenario), scenario.deployment.scheduler
    if longest <= scheduler.max_model_len:
        return "no request is longer than max_model_len"
    budget = scheduler.max_num_batched_tokens
    whole = budget if scheduler.enable_chunked_prefill else max(budget, longest)
    return rescheduled(scenario, max_model_len=longest, max_num_batched_tokens=whole, max_num_scheduled_tokens=None)


def longest_request(scenario: PricedScenario) -> int:
    """Return the number of tokens of the longest request that the model supports: a lower bound for `max_model_len`."""
    try:
        most = find_model(scenario.deployment.model).max_positions
    except UserError:  # the engine's own model
        most = scenario.deployment.scheduler.max_model_len
    lengths = (request.prompt_len + request.output_limit for request in scenario.workload.requests)
    return max((length for length in lengths if length <= most), default=0)


def no_drafts(scenario: PricedScenario) -> PricedScenario | str:
    """Turn drafts off, so that the model generates one token a step for each request."""
    if all(pool.deployment.scheduler.speculative is None for pool in scenario.all_pools):
        return "nothing drafts"
    return rescheduled(scenario, speculative=None)


def fused_kernels(scenario: PricedScenario) -> PricedScenario | str:
    """Keep attention scores on chip, and run norms, rotary embedding and activations as one kernel each."""
    pools = scenario.all_pools
    if all(pool.deployment.fusion and pool.deployment.attention != "unfused" for pool in pools):
        return "kernels are fused already"
    if any(with_parts(pool.cost, 1.0) is None for pool in pools):
        return NO_PARTS
    return _remade(scenario, lambda deployment: deployment.model_copy(update={"attention": "auto", "fusion": True}))


def vllm_policy(scenario: PricedScenario) -> PricedScenario | str:
    """Schedule requests as vLLM does, if the user chose another policy; other engines have a fixed policy."""
    others = {pool.deployment.policy for pool in scenario.all_pools} - {"vllm"}
    engine = scenario.deployment.engine_name.name
    if not others:
        return "vllm is the policy"
    if engine != "vllm":
        return f"{', '.join(sorted(others))} is the policy of {engine} itself"
    return _remade(scenario, lambda deployment: deployment.model_copy(update={"policy": "vllm"}))


def no_communication(scenario: PricedScenario) -> PricedScenario | str:
    """Let communication between devices take no time."""
    if all(pool.deployment.gpus == 1 for pool in scenario.all_pools):
        return "every engine has one device"
    return _recosted(scenario, lambda cost: with_parts(cost, 0.0, "collectives"))


def no_bubbles(scenario: PricedScenario) -> PricedScenario | str:
    """Let all stages of a pipeline work on each step at the same time, one step after the other."""
    if all(pool.deployment.pipeline_parallel_size == 1 for pool in scenario.all_pools):
        return "there is no pipeline"
    lifted = _recosted(scenario, lambda cost: StagesAtOnce(cost) if isinstance(cost, PipelinedCost) else cost)
    return lifted if isinstance(lifted, str) else _redeployed(lifted, pipeline_parallel_size=1)


def even_experts(scenario: PricedScenario) -> PricedScenario | str:
    """Give every device the same number of tokens for its experts."""
    if all(pool.deployment.expert_imbalance == 1.0 for pool in scenario.all_pools):
        return "experts are balanced already, or there are no experts"
    return _remade(scenario, lambda deployment: deployment.model_copy(update={"expert_imbalance": 1.0}))


def perfect_prefix_reuse(scenario: PricedScenario) -> PricedScenario | str:
    """Cache prefixes without eviction, and route each request to the replica with its prefix."""
    if not scenario.workload.shares_prefixes:
        return "no request shares a prefix with another"
    settings = {"enable_prefix_caching": True, "num_blocks": _all_blocks(scenario)}
    try:
        kept = _remade(scenario, lambda deployment: with_known_states(deployment.rescheduled(**settings)))
    except UserError as error:  # the constant states of this model cannot be cached with these settings
        return str(error)
    return replace(kept, router="prefix-affinity") if scenario.engines > 1 else kept


def twice_the_gpus(scenario: PricedScenario) -> PricedScenario | str:
    """Give every engine twice as many devices, and split its layers and its KV over them."""
    scheduler, devices = scenario.deployment.scheduler, scenario.deployment.tensor_parallel_size
    if any(pool.deployment != scenario.all_pools[0].deployment for pool in scenario.all_pools):
        return "the pools differ"
    if with_parts(scenario.all_pools[0].cost, 1.0) is None:
        return "the cost model is for this number of devices only"
    wide = scenario.all_pools[0].deployment.model_copy(update={"tensor_parallel_size": 2 * devices})
    try:
        lifted = _recosted(scenario, lambda cost: repriced(cost, wide))
    except UserError as error:
        return f"{2 * devices} devices cannot share a layer: {error.remedy}"
    blocks = min(2 * (scheduler.num_blocks - 1) + 1, _MOST_BLOCKS)
    more = scheduler.model_copy(update={"num_blocks": blocks})
    return lifted if isinstance(lifted, str) else _redeployed(lifted, tensor_parallel_size=2 * devices, scheduler=more)


def smaller_chunks(scenario: PricedScenario) -> PricedScenario:
    """Cut prompts into chunks of an eighth of a step's maximum tokens, or more to leave room for every decode."""
    scheduler = scenario.deployment.scheduler
    had = scheduler.most_step_tokens
    budget = max(had // _CHUNKS, min(scheduler.most_running, had))
    return rescheduled(scenario, enable_chunked_prefill=True, max_num_batched_tokens=budget)


def whole_prompts(scenario: PricedScenario) -> PricedScenario | str:
    """Process every prompt in one piece."""
    scheduler = scenario.deployment.scheduler
    if not scheduler.enable_chunked_prefill and not scheduler.long_prefill_token_threshold:
        return "no prompt is cut in this run"
    whole = {"enable_chunked_prefill": False, "long_prefill_token_threshold": 0, "max_num_scheduled_tokens": None}
    budget = max(scheduler.max_num_batched_tokens, scheduler.max_model_len)
    return rescheduled(scenario, **whole, max_num_batched_tokens=budget)


def more_places(scenario: PricedScenario) -> PricedScenario:
    """Let eight times as many requests run at once."""
    seqs = _PLACES * scenario.deployment.scheduler.most_running
    return rescheduled(scenario, max_num_seqs=seqs, max_num_active_seqs=None)


def adapter_slots(scenario: PricedScenario) -> PricedScenario | str:
    """Give each adapter of the workload a slot, beside as much KV memory as before."""
    adapters = {request.adapter for request in scenario.workload.requests} - {""}
    loras = [pool.deployment.lora for pool in scenario.all_pools]
    if all(lora is None or lora.max_loras >= len(adapters) for lora in loras):
        return "each adapter has a slot"

    def wide(deployment: Deployment) -> Deployment:
        lora = deployment.lora
        most = {"max_loras": len(adapters), "max_cpu_loras": max(len(adapters), lora.host_loras if lora else 0)}
        return deployment.model_copy(update={"lora": lora and lora.model_copy(update=most)})

    return _remade(scenario, wide)


def free_encoding(scenario: PricedScenario) -> PricedScenario:
    """Let the encoding of images, videos and audio take no time, the most that more encoders can gain."""

    def free(deployment: Deployment) -> Deployment:
        multimodal = deployment.multimodal
        none = multimodal and multimodal.model_copy(update={"encoder_us_per_token": 0.0})
        return deployment.model_copy(update={"multimodal": none})

    return _remade(scenario, free)


def even_arrivals(scenario: PricedScenario) -> PricedScenario | str:
    """Space the same requests in the same order evenly over the same time."""
    requests = list(scenario.workload.requests)
    if waits_for_answers(scenario.workload):
        return "arrivals depend on answers"
    windows = max(len(requests) // _WINDOW, 2)
    if dispersion(requests) < max(_BURSTY, 1 + 2 * math.sqrt(2 / (windows - 1))):  # 2 standard deviations above Poisson
        return "arrivals are not burstier than Poisson arrivals"
    first, last = requests[0].arrival_ns, requests[-1].arrival_ns
    gaps = max(len(requests) - 1, 1)
    spaced = [replace(r, arrival_ns=first + (last - first) * i // gaps) for i, r in enumerate(requests)]
    return replace(scenario, workload=replace(scenario.workload, requests=spaced))


def rescheduled(scenario: PricedScenario, **changes: Any) -> PricedScenario:
    """Return `scenario` with other scheduler settings on every engine."""
    return _remade(scenario, lambda deployment: deployment.rescheduled(**changes))


def _remade(scenario: PricedScenario, change: Callable[[Deployment], Deployment]) -> PricedScenario:
    """Return `scenario` with a changed deployment on every engine, and cost models for it."""

    def remade(pool: PricedPool) -> PricedPool:
        deployment = change(pool.deployment)
        return replace(pool, deployment=deployment, cost=repriced(pool.cost, deployment))

    return replace(scenario, deployment=change(scenario.deployment), pools=tuple(map(remade, scenario.all_pools)))


def _recosted(scenario: PricedScenario, lifted: Callable[[CostModel], CostModel | None]) -> PricedScenario | str:
    """Return `scenario` with `lifted` applied to each cost model, or a reason if it does not apply to one of them."""
    pools = scenario.all_pools
    made = {id(pool.cost): lifted(pool.cost) for pool in {id(pool.cost): pool for pool in pools}.values()}
    recosted = [replace(pool, cost=cost) for pool in pools if (cost := made[id(pool.cost)]) is not None]
    return replace(scenario, pools=tuple(recosted)) if len(recosted) == len(pools) else NO_PARTS


def _redeployed(scenario: PricedScenario, **changes: Any) -> PricedScenario:
    """Return `scenario` with other fields of the deployment on every engine; its cost models already allow for them."""
    pools = tuple(replace(pool, deployment=pool.deployment.model_copy(update=changes)) for pool in scenario.all_pools)
    return replace(scenario, deployment=scenario.deployment.model_copy(update=changes), pools=pools)


def _of_costs(lifted: Callable[[CostModel], CostModel | None]) -> Callable[[PricedScenario], PricedScenario | str]:
    return partial(_recosted, lifted=lifted)


FREE_PREFILL, REPLICA, ADMISSION = "free prefill", "one more replica", "no admission limits"
_SLOTS, _ENCODING = "a slot for each adapter", "free encoding"
_APPLY: dict[str, Callable[[PricedScenario], PricedScenario | str]] = {
    "even arrivals": even_arrivals,
    "no failures": no_failures,
    "instant KV tiers": instant_tiers,  # first among lifts with the same gain, because some also remove the tiers' work
    "perfect prefix reuse": perfect_prefix_reuse,
    "longer sequences": longer_sequences,
    "no drafts": no_drafts,
    "fused kernels": fused_kernels,
    "new replicas at once": scaled_at_once,
    "more prefill replicas": partial(another_split, more="prefill"),
    "more decode replicas": partial(another_split, more="decode"),
    "small KV blocks": small_blocks,
    "paged KV memory": paged,
    "more running requests": more_places,
    _SLOTS: adapter_slots,
    _ENCODING: free_encoding,
    "smaller chunks": smaller_chunks,
    "prompts in one piece": whole_prompts,
    "policy vllm": vllm_policy,
    "routing by load": better_routing,
    ADMISSION: everyone_admitted,
    "infinite KV memory": infinite_kv,
    "instant KV transfers": instant_transfers,
    "free communication": no_communication,
    "no pipeline bubbles": no_bubbles,
    "even experts": even_experts,
    "no front door": no_front_door,
    "no CPU time between steps": _of_costs(without_cpu_time),
    "free launches": _of_costs(without_launches),
    "half the KV to read": _of_costs(with_half_the_kv),
    "half the weights to read": _of_costs(lambda cost: with_parts(cost, 0.5, *WEIGHT_PARTS)),
    FREE_PREFILL: _of_costs(with_free_prefill),
    REPLICA: more_replicas,
    "twice the GPUs an engine": twice_the_gpus,
}
_TOLD = tomllib.loads(Path(__file__).with_name("lifts.toml").read_text(encoding="utf-8"))
LIFTS = {name: Lift(name, apply, **_TOLD[name]) for name, apply in _APPLY.items()}
WORK = ("half the KV to read", "half the weights to read", FREE_PREFILL)  # less work: it needs other traffic
MORE = (REPLICA, "twice the GPUs an engine")  # more GPUs


def dispersion(requests: list[WorkloadRequest]) -> float:
    """Return the index of dispersion of arrivals.

    It is the variance of the number of arrivals in a window, divided by the mean of this number. The windows are of
    equal length, and have 20 arrivals on average.
    """
    windows = len(requests) // _WINDOW
    first, last = requests[0].arrival_ns, requests[-1].arrival_ns
    if windows < 2 or last <= first:
        return 1.0
    window = [min((request.arrival_ns - first) * windows // (last - first), windows - 1) for request in requests]
    counts = np.bincount(window, minlength=windows)
    return float(counts.var(ddof=1) / counts.mean())


def _all_blocks(scenario: PricedScenario) -> int:
    """Return the number of blocks for all tokens of the workload, with the null block, up to `_MOST_BLOCKS`."""
    config, had = scenario.deployment.scheduler, scenario.deployment.scheduler.num_blocks
    size = config.block_size
    needed = tables(config) * sum(-(-(r.prompt_len + r.output_len) // size) for r in scenario.workload.requests)
    return max(min(needed + 1, _MOST_BLOCKS), had)


def offered(workload: Workload) -> Workload:
    """Return `workload` with its requests in a list, because every counterfactual iterates over them again."""
    return replace(workload, requests=list(workload.requests))


def lifts_for(scenario: PricedScenario) -> list[Lift]:
    """Return the lifts to try. Those of adapters and of the encoder are left out if no engine has any."""
    deployments = [pool.deployment for pool in scenario.all_pools]
    there = {
        _SLOTS: any(deployment.lora is not None for deployment in deployments),
        _ENCODING: any(deployment.multimodal is not None for deployment in deployments),
    }
    return [lift for lift in LIFTS.values() if there.get(lift.name, True)]
