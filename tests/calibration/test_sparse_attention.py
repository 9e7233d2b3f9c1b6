"""Latent attention behind an indexer (DeepSeek-V3.2, GLM-5): weights, the cache, and what is computed."""

from typing import Any

import numpy as np
import pytest

from tests.calibration.step_model_samples import Roofline
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.operations import Operation, StepSizes, floor_ns, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import AGGREGATES, StepPlan

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "intermediate_size": 40,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 10,
    "index_n_heads": 3,
    "index_head_dim": 8,
    "index_topk": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 512,
}
SPEC = find_model("GLM-5")


def operations(sizes: StepSizes, name: str = "GLM-5") -> dict[str, Operation]:
    return {o.name: o for o in step_operations(find_model(name), Deployment(tensor_parallel_size=8), sizes)}


@pytest.mark.parametrize("architecture", ["GlmMoeDsaForCausalLM", "DeepseekV32ForCausalLM"])
def test_parameters_are_those_that_transformers_makes(architecture: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    if not hasattr(transformers, architecture):
        pytest.skip("this transformers does not know it")
    model_class = getattr(transformers, architecture)
    with torch.device("meta"):
        made = model_class(model_class.config_class(**SMALL))
    spec = spec_from_hf_config({"architectures": [architecture], **SMALL})
    assert spec.parameters == sum(weights.numel() for weights in made.parameters())


def test_the_cache_has_keys_for_the_indexer() -> None:
    dense, sparse = find_model("DeepSeek-V3"), find_model("DeepSeek-V3.2")
    assert sparse.kv_bytes_per_token(2) - dense.kv_bytes_per_token(2) == 61 * (128 + 4)


def test_a_row_attends_to_so_many_tokens_and_scores_all() -> None:
    near, far = (operations(uniform_step(16, context, 0, 0, 0)) for context in (4_000, 40_000))
    assert near["decode attention"].flops == far["decode attention"].flops == 2 * 16 * 2048 * 8 * (576 + 512)
    assert far["decode index"].flops == 2 * 16 * 40_001 * 32 * 128
    short, dense = (operations(uniform_step(16, 1000, 0, 0, 0), name) for name in ("DeepSeek-V3.2", "DeepSeek-V3"))
    assert short["decode attention"] == dense["decode attention"]


def test_prompts_attend_over_latent_vectors_to_so_many_tokens_each() -> None:
    long = operations(uniform_step(0, 0, 1, 1000, 30_000))
    assert long["prefill attention"].flops == 2 * 1000 * 2048 * 8 * (576 + 512)
    assert long["prefill index"].flops == 2 * (1000 * 30_000 + 1000 * 1001 / 2) * 32 * 128
    assert "keys and values up" not in long
    assert long["queries to latent"].size == 1000


@pytest.mark.parametrize("gpu", ["H200", "B200", "L4"])
def test_no_operation_is_faster_than_the_roofline(gpu: str) -> None:
    device = find_gpu(gpu)
    kernels = load_kernels(device)
    for operation in operations(uniform_step(16, 9000, 2, 500, 5000)).values():
        assert np.all(np.asarray(kernels.time(operation).ns) >= floor_ns(device, operation) * (1 - 1e-9))


@pytest.mark.parametrize("name", ["GLM-5-FP8", "DeepSeek-V4-Flash", "Qwen3.5-397B-A17B-FP8"])
@pytest.mark.parametrize("past", [0, 3000])
def test_the_simulator_takes_what_a_step_is_explained_to_take(name: str, past: int) -> None:
    config = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=512, max_model_len=8192)
    deployment = Deployment(model=name, tensor_parallel_size=8, scheduler=config)
    cost = OperationCost(find_model(name), deployment, Roofline())
    sizes = uniform_step(8, 2000, 1, 500, past)
    given = {name: int(getattr(sizes, name)) for name in AGGREGATES}
    plan = StepPlan.from_amounts(decode_squares=8 * 2000**2, **given)
    explained = sum(float(np.asarray(ns)) for ns in cost.parts(sizes).values())
    assert cost.step_ns(plan) == pytest.approx(explained, rel=0.03)


@pytest.mark.parametrize(
    ("changes", "says"),
    [({"index_topk": None}, "index_topk.*is missing"), ({"q_lora_rank": None}, "an indexer needs q_lora_rank")],
)
def test_half_an_indexer_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        spec_from_hf_config({"architectures": ["GlmMoeDsaForCausalLM"], **SMALL, **changes})
