"""Simulated runs whose cause of slowness is known by construction, for the tests of diagnosis."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from tokentwin.planning.diagnose.diagnosis import diagnose
from tokentwin.planning.diagnose.document import DiagnosisDocument
from tokentwin.planning.diagnose.evidence import Evidence
from tokentwin.planning.diagnose.symptoms import symptoms
from tokentwin.planning.priced_scenario import PricedScenario
from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.fleet import FleetConfig
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.recording import Recording

MS, S = 1_000_000, 1_000_000_000
ROOMY = {"num_blocks": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 512, "max_model_len": 4096}


def arrivals(count: int, rate: float, seed: int = 1) -> list[int]:
    """Return Poisson arrivals."""
    return np.cumsum(np.random.default_rng(seed).exponential(S / rate, count)).astype(int).tolist()


def requests(at: list[int], prompt: int, output: int, seed: int = 2) -> Workload:
    """Return requests with prompts and outputs uniform within half of their mean."""
    rng = np.random.default_rng(seed)
    sizes = [rng.integers(n - n // 2, n + n // 2 + 1, len(at)).tolist() for n in (prompt, output)]
    made = [WorkloadRequest(i, t, (("", p),), o) for i, (t, p, o) in enumerate(zip(at, *sizes, strict=True))]
    return Workload(made, "made", shares_prefixes=False)


def kv_starved() -> PricedScenario:
    """Memory for about four requests, where 16 run at once."""
    scheduler = SchedulerConfig(**ROOMY | {"num_blocks": 70, "scheduler_reserve_full_isl": False})
    return PricedScenario(
        requests(arrivals(300, 6), 100, 150), Deployment(scheduler=scheduler), TokenCost(15 * MS, 10_000, 0)
    )


def prefill_bound() -> PricedScenario:
    """Long prompts, ten tokens of answer."""
    cost = TokenCost(2 * MS, 200_000, 0)
    return PricedScenario(requests(arrivals(400, 4), 1000, 10), Deployment(scheduler=SchedulerConfig(**ROOMY)), cost)


def cpu_bound() -> PricedScenario:
    """The CPU takes longer for a step than the device."""
    cost = TokenCost(4 * MS, 10_000, 0, plan_ns=12 * MS)
    return PricedScenario(requests(arrivals(300, 5), 60, 80), Deployment(scheduler=SchedulerConfig(**ROOMY)), cost)


def overloaded() -> PricedScenario:
    """The load is 1.5 times what the engine can serve, most of it decoding."""
    scheduler = SchedulerConfig(**ROOMY | {"max_num_seqs": 256})
    cost = TokenCost(1 * MS, 1_000_000, 0)
    return PricedScenario(requests(arrivals(500, 13), 20, 100), Deployment(scheduler=scheduler), cost)


def bursty() -> PricedScenario:
    """Forty requests come at once every ten seconds, at a tenth of what the engine could serve."""
    at = [10 * S * burst + 1000 * i for burst in range(12) for i in range(40)]
    cost = TokenCost(2 * MS, 400_000, 0)
    return PricedScenario(requests(at, 100, 20), Deployment(scheduler=SchedulerConfig(**ROOMY)), cost)


def few_places() -> PricedScenario:
    """Two requests may run, and a step costs the same whatever is in it."""
    scheduler = SchedulerConfig(**ROOMY | {"max_num_seqs": 2})
    return PricedScenario(
        requests(arrivals(300, 2.2), 60, 80), Deployment(scheduler=scheduler), TokenCost(10 * MS, 1000, 0)
    )


def evicted_prefixes() -> PricedScenario:
    """Long system prompts come in turn, more than memory keeps."""
    made = [WorkloadRequest(i, t, ((f"sys{i % 12}", 960), ("", 20)), 10) for i, t in enumerate(arrivals(600, 6.5))]
    scheduler = SchedulerConfig(**ROOMY | {"num_blocks": 400})
    cost = TokenCost(2 * MS, 120_000, 0)
    return PricedScenario(Workload(made, "prefixes"), Deployment(scheduler=scheduler), cost)


def uneven_routing() -> PricedScenario:
    """Every other request is long, and round robin sends all of them to the same one of two replicas."""
    sizes = [(10, 120), (10, 4)]
    made = [WorkloadRequest(i, t, (("", sizes[i % 2][0]),), sizes[i % 2][1]) for i, t in enumerate(arrivals(400, 17))]
    cost = TokenCost(2 * MS, 1_000_000, 0)
    deployment = Deployment(scheduler=SchedulerConfig(**ROOMY))
    return PricedScenario(Workload(made, "uneven", shares_prefixes=False), deployment, cost, replicas=2)


def long_prompts_block() -> PricedScenario:
    """Unchunked prompts of 3,000 tokens hold up everybody's decoding."""
    sizes = [(3000, 5) if i % 6 == 0 else (30, 60) for i in range(300)]
    made = [
        WorkloadRequest(i, t, (("", p),), o) for i, (t, (p, o)) in enumerate(zip(arrivals(300, 5), sizes, strict=True))
    ]
    scheduler = SchedulerConfig(**ROOMY | {"enable_chunked_prefill": False, "max_num_batched_tokens": 4096})
    cost = TokenCost(8 * MS, 200_000, 0)
    return PricedScenario(Workload(made, "long", shares_prefixes=False), Deployment(scheduler=scheduler), cost)


def shed() -> PricedScenario:
    """Two requests may run, as in `few_places`; most users are turned away or give up."""
    admission = {"max_queued_per_replica": 5, "queue_timeout_s": 2, "patience": {"mean_s": 2, "until": "first-token"}}
    crowd = replace(few_places(), workload=requests(arrivals(300, 6), 60, 80))
    return _with_fleet(crowd, {"admission": admission})


def failing() -> PricedScenario:
    """Three replicas with room to spare, all of which are down from the 20th to the 40th of about 50 seconds."""
    crashes = [{"at_s": 20, "replica": 0, "recovery_s": 20}] * 3
    fleet = {"pools": [{"replicas": 3}], "router": "least-tokens", "failures": {"crashes": crashes}}
    cost = TokenCost(5 * MS, 10_000, 0)
    made = PricedScenario(requests(arrivals(500, 10), 100, 20), Deployment(scheduler=SchedulerConfig(**ROOMY)), cost)
    return _with_fleet(made, fleet)


def _with_fleet(scenario: PricedScenario, fleet: dict[str, Any]) -> PricedScenario:
    made = scenario.deployment.model_copy(update={"fleet": FleetConfig.model_validate(fleet)})
    return replace(scenario, deployment=made)


def calm() -> PricedScenario:
    """Nothing is wrong."""
    cost = TokenCost(5 * MS, 10_000, 0)
    return PricedScenario(requests(arrivals(200, 0.5), 100, 20), Deployment(scheduler=SchedulerConfig(**ROOMY)), cost)


def recorded(scenario: PricedScenario, out: Path) -> Recording:
    simulate_to(out, scenario.workload, scenario.deployment, scenario.cost, replicas=scenario.replicas, tokens=True)
    return Recording.load(out)


def diagnosed(
    scenario: PricedScenario, out: Path, explain: bool = True, judged: str | None = None
) -> DiagnosisDocument:
    evidence = Evidence(recorded(scenario, out))
    return diagnose(symptoms(evidence), evidence.metrics, scenario if explain else None, judged)


@cache
def diagnosis_of(made: Callable[[], PricedScenario], judged: str | None = None) -> DiagnosisDocument:
    """Return the diagnosis of the run that `made` describes, which is simulated once for all tests."""
    with TemporaryDirectory() as folder:
        return diagnosed(made(), Path(folder) / "run", judged=judged)
