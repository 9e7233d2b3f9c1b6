"""Sliding windows on the engine: tokens must be those of transformers, and blocks that windows have passed are free."""

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers is the oracle here; install the dev extra")

from tests.realengine.tiny_models import greedy, save  # noqa: E402
from tokentwin.calibration.validation.decision_replay import replay_decisions  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.weights import load_model_files  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.deployments.kv_layout import most_held  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import Workload, WorkloadRequest  # noqa: E402
from tokentwin.traces.recording import Recording  # noqa: E402

pytestmark = pytest.mark.engine
WINDOW, OUTPUTS = 9, 14
FULL, SLIDES = "full_attention", "sliding_attention"
MODELS: dict[str, tuple[str, list[str], tuple[int, ...]]] = {  # family, layers, groups that follow
    "mistral": ("mistral", [], (9,)),
    "qwen3": ("qwen3", [SLIDES, SLIDES, FULL, SLIDES], (9, 9, 9, 0)),
    "qwen2": ("qwen2", [FULL, SLIDES, SLIDES, FULL], (0, 9)),
}


def saved(name: str, folder: Path) -> Any:
    family, layers, _ = MODELS[name]
    shape: dict[str, Any] = {"sliding_window": WINDOW}
    if layers:
        shape |= {"use_sliding_window": True, "layer_types": layers, "num_hidden_layers": len(layers)}
    return save(family, folder, shape)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Any]]:
    folder = tmp_path_factory.mktemp(request.param)
    judge = saved(request.param, folder)
    return request.param, folder, greedy(judge, PROMPTS, OUTPUTS)


def tokens(seed: int, count: int) -> list[int]:
    return [(31 * seed + 7 * at * at + at) % 96 for at in range(count)]


FIRST = [tokens(row, length) for row, length in enumerate((3, 41, 9, 1, 26))]
AGAIN = [FIRST[1], FIRST[1][:30] + tokens(9, 8), FIRST[4] + tokens(7, 20)]  # prefixes that the cache may have
PROMPTS = FIRST + AGAIN


def engine_for(folder: Path, **scheduler: Any) -> Engine:
    settings = {"max_model_len": 100, "max_num_batched_tokens": 24, "num_blocks": 200, "block_size": 4}
    deployment = Deployment(model=str(folder), dtype="float32", scheduler=SchedulerConfig(**{**settings, **scheduler}))
    return Engine(deployment, load_model_files(str(folder), Path()))


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"tight": 1.05, "scheduler_reserve_full_isl": False, "block_size": 4},
        {"async_scheduling": True, "tight": 1.05, "scheduler_reserve_full_isl": False, "block_size": 4},
        {"prefix_cache_retention_interval": None, "async_scheduling": True},
        {"speculative": {"method": "ngram", "num_speculative_tokens": 3}, "async_scheduling": True},
        {"graphs": True, "async_scheduling": True},
    ],
    ids=["plain", "tight", "overlapped", "dense cache", "drafts", "mixed graphs"],
)
def test_greedy_output_is_that_of_transformers_whatever_is_freed(model, setting):
    name, folder, wanted = model
    groups = MODELS[name][2]
    graphs = (setting := dict(setting)).pop("graphs", False)
    if tight := setting.pop("tight", 0):
        config = SchedulerConfig(kv_groups=groups, max_model_len=100, max_num_batched_tokens=24, **setting)
        setting["num_blocks"] = int(tight * most_held(config, 60)) + 1
    engine = engine_for(folder, **setting)
    engine.runner.graph_mixed_steps(graphs)
    assert engine.deployment.scheduler.kv_groups == groups
    answers, preempted = {}, 0
    for first, prompts in ((0, FIRST), (len(FIRST), AGAIN)):
        for number, prompt in enumerate(prompts, first):
            engine.add(WorkloadRequest(number, 0, (("", len(prompt)),), OUTPUTS), prompt)
            answers[number] = engine.sequences[number]
        while (step := engine.step()) is not None:
            preempted += len(step.plan.preempted)
    assert bool(preempted) == bool(tight)
    assert [sequence.outputs for sequence in answers.values()] == wanted
    assert tight or any(sequence.request.first_hit for sequence in answers.values())
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
    engine.close()


def test_kv_is_bounded_by_the_window(tmp_path: Path) -> None:
    saved("mistral", tmp_path)
    engine = engine_for(tmp_path, max_num_batched_tokens=8, num_blocks=8)
    prompt = tokens(1, 80)
    request = engine.add(WorkloadRequest(0, 0, (("", 80),), 20), prompt)
    used = []
    while (step := engine.step()) is not None:
        used.append(step.load.used_blocks)
    assert request.outputs == 20
    assert max(used) <= most_held(engine.deployment.scheduler, 99) == 5
    engine.close()


@pytest.mark.parametrize("drafts", [False, True])
def test_a_recorded_run_is_decided_again(tmp_path: Path, drafts: bool) -> None:
    saved("qwen3", tmp_path)
    speculative = {"method": "ngram", "num_speculative_tokens": 3} if drafts else None
    engine = engine_for(tmp_path, num_blocks=60, async_scheduling=True, speculative=speculative)
    requests = [WorkloadRequest(id, 0, (("shared", 12), ("", 5 + id)), 20) for id in range(8)]
    record(Workload(requests), engine, tmp_path / "run")
    replayed = replay_decisions(Recording.load(tmp_path / "run"))
    assert replayed.exact and replayed.steps > 20 and replayed.identical_requests == 8, replayed.first_difference
    engine.close()


def test_what_does_not_go_with_windows_is_one_line(tmp_path: Path) -> None:
    saved("mistral", tmp_path)
    with pytest.raises(UserError, match=r"scheduler.kv_groups: \[4, 0\]: is \[9\] for "):
        engine_for(tmp_path, kv_groups=(4, 0))
