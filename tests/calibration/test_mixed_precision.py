"""Checkpoints with some layers in 16 bits: read from their lists, sized and priced by one count."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import LLAMA, Roofline, deployment
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.latent_attention import HeadGemm
from tokentwin.calibration.operations import Experts, Gemm, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.pipeline_cost import PipelineCost
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.hf_config import spec_from_hf_config
from tokentwin.serving.deployments.kv_capacity import stage_weight_bytes, weight_bytes
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan

MIXED = find_model("Qwen3-30B-A3B").model_copy(update={"shared_intermediate_size": 1024, "dense_at": (0, 1, 2)})
LATENT = find_model("DeepSeek-V3")
MODELS = {
    "dense": (LLAMA, ["qkv", "attention out", "gate and up", "down"]),
    "mixture": (MIXED, ["qkv", "attention out", "gate and up", "experts", "shared gate and up", "shared down"]),
    "latent": (LATENT, ["qkv", "attention out", "down", "experts", "shared gate and up"]),
}
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
}
KIMI = [
    "lm_head",
    "re:.*self_attn.*",
    "re:.*shared_experts.*",
    r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    "re:.*mlp.gate$",
]


def layers_of(model: ModelSpec, projection: str) -> range:
    first = model.num_layers - model.moe_layers
    if projection in ("gate and up", "down"):
        return range(first)
    return (
        range(first, model.num_layers) if "experts" in projection or "shared" in projection else range(model.num_layers)
    )


def read_bytes(model: ModelSpec, engine: Deployment) -> float:
    """Return the bytes that a step's operations read of a layer's weights, each weight once."""
    total = 0.0
    for op in step_operations(model, engine, uniform_step(1, 10, 1, 16, 0)):
        if isinstance(op, Gemm) and op.width and not isinstance(op, HeadGemm):
            total += op.count * op.width * op.n * op.k
        elif isinstance(op, Experts):
            total += op.count * op.width * 3 * op.hidden * op.inter * op.experts / (op.ep * op.tp)
    return total


@examples(0.3)
@given(st.data(), st.sampled_from(sorted(MODELS)), st.sampled_from(["int4", "fp8", "nvfp4"]), st.sampled_from([1, 2]))
def test_memory_and_steps_count_the_same_layers_in_16_bits(data: Any, kind: str, stored: str, tp: int) -> None:
    model, projections = MODELS[kind]
    kept = tuple(
        (name, tuple(sorted(data.draw(st.sets(st.sampled_from(layers_of(model, name)), max_size=9)))))
        for name in projections
    )
    whole = model.model_copy(update={"checkpoint_quantization": stored, "checkpoint_kept": ()})
    mixed = whole.model_copy(update={"checkpoint_kept": kept})
    engine = deployment(tensor_parallel_size=tp, quantization=data.draw(st.sampled_from(["none", stored])))
    more = weight_bytes(mixed, engine) - weight_bytes(whole, engine)
    read = read_bytes(mixed, engine) - read_bytes(whole, engine)
    expansion = model.latent.expansion_parameters(model.num_heads) / tp if model.latent else 0
    copies = 2 * expansion * len(dict(kept)["qkv"])  # in 16 bits decode multiplies the weights themselves
    assert more == pytest.approx(read - copies, rel=5e-5, abs=8)  # the norms of a latent attention count with it
    stages = deployment(tensor_parallel_size=tp, pipeline_parallel_size=3)
    ends = sum(stage_weight_bytes(mixed, stages)) - sum(stage_weight_bytes(whole, stages))
    assert ends == pytest.approx(more, rel=1e-5, abs=8)
    other = deployment(tensor_parallel_size=tp, quantization="int8" if stored == "int4" else "int4")
    assert read_bytes(mixed, other) == read_bytes(whole, other)  # quantised on loading, all layers are alike


def test_time_lies_between_that_of_all_layers_quantised_and_of_none() -> None:
    h100 = load_kernels(find_gpu("H100"))
    half = tuple(range(16))
    kept = tuple((name, half) for name in ("qkv", "attention out", "gate and up", "down"))
    whole = LLAMA.model_copy(update={"checkpoint_quantization": "int4", "checkpoint_group_size": 128})
    mixed = whole.model_copy(update={"checkpoint_kept": kept})
    plan = StepPlan.from_amounts(decode_rows=8, decode_context=4000, decode_squares=2_000_000, sampled_rows=8)
    least, between, most = (OperationCost(m, deployment(), h100).step_ns(plan) for m in (whole, mixed, LLAMA))
    assert between == pytest.approx((least + most) / 2, rel=0.01)
    stages = PipelineCost(mixed, deployment(pipeline_parallel_size=2), Roofline())
    wide, narrow = stages.stages_ns(plan)  # the first 16 layers are the wide ones
    alone = PipelineCost(whole, deployment(pipeline_parallel_size=2), Roofline()).stages_ns(plan)
    assert wide > 2 * alone[0]
    assert narrow == alone[1]


def spec(listed: Any, key: str = "ignored_layers", **changes: Any) -> ModelSpec:
    stored = {"quant_method": "fp8", key: listed}
    return spec_from_hf_config({**CONFIG, "quantization_config": stored, **changes}, "mine")


ALL = tuple(range(12))
MOE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}


@pytest.mark.parametrize(
    ("listed", "kept"),
    [
        (["lm_head", "model.embed_tokens"], {}),
        (None, {}),
        ("self_attn", {"qkv": ALL, "attention out": ALL}),
        (["model.layers.0.mlp.down_proj", "model.layers.10.mlp"], {"gate and up": (10,), "down": (0, 10)}),
        (["layers.1"], dict.fromkeys(("qkv", "attention out", "gate and up", "down"), (1,))),
        (["re:.*down_proj"], {"down": ALL}),
        ([f"language_model.model.layers.3.self_attn.{n}_proj" for n in "qkv"], {"qkv": (3,)}),
        (["model.layers.12.mlp", "mlp.gate", "visual*"], {}),  # a layer for drafting, a router, another tower
        ([f"model.layers.{layer}.self_attn*" for layer in range(12)], {"qkv": ALL, "attention out": ALL}),
        (["model.layers.1*"], dict.fromkeys(("qkv", "attention out", "gate and up", "down"), (1,))),
    ],
)
def test_names_stand_for_projections_of_layers(listed: Any, kept: dict[str, Any]) -> None:
    assert dict(spec(listed).checkpoint_kept) == kept


def test_a_mixtures_names_are_read() -> None:
    assert dict(spec(["mlp.gate", "mlp.experts"], **MOE).checkpoint_kept) == {"experts": ALL}
    dense_first = {**MOE, "mlp_only_layers": [0, 1]}
    assert dict(spec(["re:.*mlp[.](gate|up|down)_proj"], **dense_first).checkpoint_kept) == {
        "gate and up": (0, 1), "down": (0, 1),
    }  # fmt: skip
    stored = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": KIMI, "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "group_size": 32, "symmetric": True}}}}  # fmt: skip
    sizes = {
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    kimi = spec_from_hf_config(
        {**CONFIG, **sizes, "architectures": ["DeepseekV3ForCausalLM"], "n_routed_experts": 8, "num_experts_per_tok": 2,
         "moe_intermediate_size": 64, "n_shared_experts": 1, "first_k_dense_replace": 1, "quantization_config": stored},
        "kimi",
    )  # fmt: skip
    sparse = tuple(range(1, 12))
    assert dict(kimi.checkpoint_kept) == {
        "qkv": ALL, "attention out": ALL, "gate and up": (0,), "down": (0,),
        "shared gate and up": sparse, "shared down": sparse,
    }  # fmt: skip
    gemms = {
        op.name: op for op in step_operations(kimi, deployment(), uniform_step(1, 10, 0, 0, 0)) if hasattr(op, "dtype")
    }
    assert (gemms["experts"].dtype, gemms["shared down"].dtype) == ("int4", "bfloat16")
    assert (gemms["attention out"].dtype, gemms["attention out"].count) == ("bfloat16", 12)


@pytest.mark.parametrize(
    ("listed", "says"),
    [
        (["model.layers.0.self_attn.q_proj"], r"layers.0.self_attn.q_proj.*not all that must be stored like it"),
        (["mlp.up_proj"], "up_proj"),
        (["re:down_proj"], "names no weights"),  # matched from the beginning of a path, as compressed-tensors does
        (["self_attn.qkv"], "names no weights"),
        (["re:("], "is no regular expression"),
        ([None], "must be a list of names"),
        ([""], "must be a list of names"),
        (7, "must be a list of names"),
    ],
)
def test_what_cannot_be_multiplied_at_once_is_refused(listed: Any, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        spec(listed)
    assert "\n" not in str(caught.value)
