"""A run that leaves memory of its GPU unused: taking it is offered alone, and no other change takes it, too."""

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.planning.diagnosed_runs import MS, recorded
from tokentwin.planning.diagnose.changes import changed, changes, share_of_memory
from tokentwin.planning.diagnose.command import compare_command, named
from tokentwin.planning.diagnose.diagnosis import diagnose
from tokentwin.planning.diagnose.evidence import Evidence
from tokentwin.planning.diagnose.symptoms import symptoms
from tokentwin.planning.priced_scenario import PricedScenario, price_scenario
from tokentwin.planning.repricing import Source
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.workload import Workload, WorkloadRequest

MEMORY = "gpu_memory_utilization"
H100 = Source(None, "H100")
SCHEDULER = {"max_model_len": 2048, "max_num_seqs": 256, "max_num_batched_tokens": 2048}


def served(share: float, requests: int = 0, **settings: Any) -> PricedScenario:
    """Llama 8B on this share of an H100, with a request of 900 tokens every 80 ms."""
    stated = {"model": "Llama-3.1-8B", "device": "cuda", MEMORY: share, "scheduler": SCHEDULER, **settings}
    made = [WorkloadRequest(i, i * 80 * MS, (("", 700),), 200) for i in range(requests)]
    return price_scenario(
        Workload(made, shares_prefixes=False), None, "H100", parse(Deployment, stated, where="deployment")
    )


@pytest.mark.parametrize("settings", [{}, {"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}], ids=str)
@pytest.mark.parametrize("share", [0.3, 0.47, 0.9, 0.912345])
def test_the_share_of_a_run_gives_its_blocks(share: float, settings: Mapping[str, Any]) -> None:
    made = served(share, **settings)
    known = share_of_memory(made)
    assert known is not None and len(str(known)) <= len(str(share))
    assert served(known, **settings).num_blocks == made.num_blocks


def test_no_share_is_more_than_all_memory() -> None:
    deployment = served(0.9).deployment
    assert kv_capacity(find_model(deployment.model), find_gpu("H100"), deployment).share_for(10**9) == 1.0


@pytest.mark.parametrize(("share", "offers"), [(0.3, True), (0.87, True), (0.89, False), (0.95, False)])
def test_unused_memory_is_offered_alone_and_nothing_else_takes_it(share: float, offers: bool) -> None:
    scenario = served(share)
    for cause in ("infinite KV memory", "perfect prefix reuse", "half the weights to read", "free launches"):
        found = changes(scenario, cause)
        alone = [settings for settings in found if settings == {MEMORY: 0.9}]
        assert bool(alone) == (offers and cause in ("infinite KV memory", "perfect prefix reuse"))
        kept = [settings for settings in found if MEMORY in settings and settings not in alone]
        assert kept or cause == "free launches"
        for settings in kept:
            assert changed(scenario, H100, {MEMORY: settings[MEMORY]}).num_blocks == scenario.num_blocks


def test_the_command_gives_both_sides_the_share_that_the_run_had() -> None:
    def words(settings: Mapping[str, Any]) -> list[str]:
        return shlex.split(compare_command("run", None, "H100", {}, settings))[8:]

    assert words({MEMORY: 0.9}) == ["--b", f"{MEMORY}=0.9"]
    kept = f"{MEMORY}=0.3"
    changes_one = ["--a", kept, "--b", kept, "--b", "kv_cache_dtype=fp8"]
    assert words({"kv_cache_dtype": "fp8", MEMORY: 0.3}) == changes_one
    assert named({"kv_cache_dtype": "fp8", MEMORY: 0.3}) == "kv_cache_dtype=fp8"
    assert named({MEMORY: 0.9}) == f"{MEMORY}=0.9"


def test_where_memory_alone_mends_a_run_it_is_recommended(tmp_path: Path) -> None:
    """On the same GPU, and before KV in fewer bits, which mends it, too."""
    starved = served(0.226, requests=120)
    evidence = Evidence(recorded(starved, tmp_path / "run"))
    found = diagnose(symptoms(evidence), evidence.metrics, starved, source=H100)
    assert found.best is not None, found.verdict
    assert found.best.settings == {MEMORY: 0.9} and found.best.gpus == 1
    assert any("kv_cache_dtype" in change.settings for change in found.changes)
