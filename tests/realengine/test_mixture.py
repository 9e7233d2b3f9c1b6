"""Mixture-of-experts models on the engine: tokens and the load of each expert must be those of transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers is the oracle here; install the dev extra")

from tests.realengine.tiny_models import greedy, save  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.weights import ModelFiles, load_model_files  # noqa: E402
from tokentwin.realengine.run_recorder import expert_imbalance, experts_hit  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine
PROMPTS = [[(31 * row + 7 * at * at + at) % 96 for at in range(length)] for row, length in enumerate((3, 41, 9, 1, 26))]
OUTPUTS = 12


@pytest.fixture(scope="module", params=["mixtral", "qwen2-moe", "qwen3-moe", "dots1"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, save(request.param, folder)


@pytest.fixture(scope="module")
def wanted(model: tuple[Path, Any]) -> list[list[int]]:
    return greedy(model[1], PROMPTS, OUTPUTS)


def engine_for(folder: Path, **scheduler: Any) -> Engine:
    settings = {"max_model_len": 100, "max_num_batched_tokens": 32, "num_blocks": 60, "block_size": 4}
    deployment = Deployment(model=str(folder), dtype="float32", scheduler=SchedulerConfig(**{**settings, **scheduler}))
    return Engine(deployment, load_model_files(str(folder), Path()))


@pytest.mark.parametrize("setting", [{}, {"num_blocks": 20, "scheduler_reserve_full_isl": False}])
def test_greedy_output_is_that_of_transformers_in_any_batch(model, wanted, setting):
    engine = engine_for(model[0], **setting)
    sequences, preempted = [], 0
    for number, prompt in enumerate(PROMPTS):
        engine.add(WorkloadRequest(number, 0, (("", len(prompt)),), OUTPUTS), prompt)
        sequences.append(engine.sequences[number])
    while (step := engine.step()) is not None:
        preempted += len(step.plan.preempted)
    assert bool(preempted) == ("num_blocks" in setting)
    assert [sequence.outputs for sequence in sequences] == wanted


def test_tokens_of_each_expert_are_counted_and_padding_is_not(model: tuple[Path, Any]) -> None:
    """Three prompts, then a decode step of three rows padded to four."""
    folder, judge = model
    chosen: list[Any] = []
    for module in judge.modules():
        if type(module).__name__.lower().endswith("topkrouter"):
            module.register_forward_hook(lambda _, args, outputs: chosen.append(outputs[2]))
    engine = engine_for(folder, max_num_batched_tokens=64)
    for number in (0, 2, 4):
        engine.add(WorkloadRequest(number, 0, (("", len(PROMPTS[number])),), OUTPUTS), PROMPTS[number])
    sequences = dict(engine.sequences)
    for first, last in ((0, 0), (0, 1)):
        engine.step()
        wanted = torch.zeros_like(engine.runner.model.expert_tokens)
        for number, sequence in sequences.items():
            prompt = PROMPTS[number]
            tokens = prompt + sequence.outputs[:last]
            new = slice(len(prompt) * last + first, len(tokens))
            with torch.no_grad():
                judge(torch.tensor([tokens]))
            for layer, experts in enumerate(chosen):
                wanted[layer] += experts[new].flatten().bincount(minlength=engine.spec.num_experts).int()
            chosen.clear()
        assert torch.equal(engine.runner.model.expert_tokens, wanted)


def test_a_bias_that_chooses_experts_keeps_its_type(tmp_path: Path) -> None:
    """Balance is in its last bits: bfloat16 would choose other experts."""
    save("dots1", tmp_path)
    files = load_model_files(str(tmp_path), Path())
    bias = {**files.weights(torch.float32, torch.device("cpu"))}["model.layers.1.mlp.gate.e_score_correction_bias"]
    model = Engine(Deployment(dtype="bfloat16", scheduler=SchedulerConfig(max_model_len=64)), files).runner.model
    assert torch.equal(model._layers[1].mlp._route._bias, bias) and not torch.equal(bias, bias.bfloat16().float())


@pytest.mark.parametrize(
    ("model_name", "settings", "says"),
    [
        ("llama", {"enable_expert_parallel": True}, "enable_expert_parallel: True: needs a mixture"),
        (
            "mixtral",
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "expert_imbalance": 1.5},
            "expert_imbalance: 1.5: works only in the simulator",
        ),
    ],
)
def test_what_the_engine_does_not_do_with_mixtures_is_one_line(model_name, settings, says):
    files = load_model_files(f"random:{model_name}", Path())
    with pytest.raises(UserError, match=says):
        Engine(Deployment(model=files.source, dtype="bfloat16", **settings), files)


def test_experts_that_ranks_cannot_share_are_one_line() -> None:
    files = load_model_files("random:mixtral", Path())
    spec = files.spec.model_copy(update={"num_experts": 7})
    deployment = Deployment(model=files.source, tensor_parallel_size=2, enable_expert_parallel=True)
    with pytest.raises(
        UserError, match="tensor_parallel_size: 2: must divide random:mixtral's num_experts, which is 7"
    ):
        Engine(deployment, ModelFiles(spec, None, "tiny"))


@given(st.integers(1, 4), st.sampled_from([8, 12, 15]), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_load_statistics_are_what_counting_finds(layers: int, experts: int, tokens: int, seed: int) -> None:
    chosen = np.random.default_rng(seed).integers(0, experts, (layers, tokens))
    counts = np.array([np.bincount(layer, minlength=experts) for layer in chosen], dtype=np.int32)
    assert experts_hit(counts) == pytest.approx(np.mean([len(set(layer)) for layer in chosen.tolist()]))
    imbalance = expert_imbalance(counts)
    assert list(imbalance) == {8: [2, 4, 8], 12: [2, 3, 4, 6, 12], 15: [3, 5, 15]}[experts]
    for devices, ratio in imbalance.items():
        busiest = [max((layer // (experts // devices) == d).sum() for d in range(devices)) for layer in chosen]
        assert ratio == pytest.approx(np.mean(busiest) * devices / tokens)
        assert 1 <= ratio <= devices
