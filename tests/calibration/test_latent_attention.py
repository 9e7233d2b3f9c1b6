"""Multi-head latent attention in the cost model: closed forms of what a step computes and reads, and whole answers."""

from dataclasses import replace

import pytest
from click.testing import CliRunner

from tests.calibration.step_model_samples import deployment
from tokentwin import api
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.latent_attention import HeadGemm, LatentDecode, LatentPrefill
from tokentwin.calibration.operations import Experts, Gemm, StepSizes, floor_ns, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.trust import TrustLevel
from tokentwin.cli import cli
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity, weight_bytes
from tokentwin.serving.deployments.model_catalogue import find_model

DEEPSEEK = find_model("DeepSeek-V3").model_copy(update={"checkpoint_quantization": "none"})
LITE = find_model("DeepSeek-V2-Lite")
ATTENTION = {"latent down", "queries up", "queries", "attention out", "keys and values up", "queries to latent"}
ATTENTION |= {"latent to values"}


def attention_gemms(model, sizes: StepSizes, **settings: object) -> list[Gemm]:
    return [op for op in step_operations(model, deployment(**settings), sizes) if op.name in ATTENTION]


@pytest.mark.parametrize("model", [DEEPSEEK, LITE])
@pytest.mark.parametrize("sizes", [uniform_step(7, 100, 0, 2, 0), uniform_step(0, 1, 1, 7, 0)])
def test_a_token_meets_each_weight_of_attention_once_expanded_or_absorbed(model, sizes: StepSizes) -> None:
    latent = model.latent
    weights = model.attention_parameters - latent.q_lora_rank - latent.kv_lora_rank  # norms
    gemms = attention_gemms(model, sizes)
    assert sum(gemm.flops for gemm in gemms) == 2 * 7 * weights
    assert {gemm.count for gemm in gemms} == {model.num_layers}
    assert any(isinstance(gemm, HeadGemm) for gemm in gemms) == bool(sizes.decode_rows)


def test_past_tokens_are_expanded_again_with_every_chunk() -> None:
    (expanded,) = [op for op in attention_gemms(LITE, uniform_step(5, 9, 2, 100, 300)) if op.name.startswith("keys")]
    assert (expanded.m, expanded.n, expanded.k) == (2 * 400, 16 * 256, 512)


@pytest.mark.parametrize("tp", [1, 8])
def test_decode_rows_read_the_latent_vectors_once_on_every_device(tp: int) -> None:
    sizes = uniform_step(10, 999, 0, 2, 0)
    (decode,) = [
        op
        for op in step_operations(DEEPSEEK, deployment(tensor_parallel_size=tp), sizes)
        if isinstance(op, LatentDecode)
    ]
    own = 10 * 128 // tp * (576 + 512) * 2
    assert 61 * (decode.bytes - own) == 10 * 1000 * DEEPSEEK.kv_bytes_per_token(2)
    assert decode.flops == 2 * 10 * 1000 * 128 / tp * (576 + 512)


def test_prompts_attend_over_expanded_heads() -> None:
    sizes = uniform_step(0, 1, 1, 100, 50)
    (prefill,) = [op for op in step_operations(LITE, deployment(), sizes) if isinstance(op, LatentPrefill)]
    assert prefill.flops == 2 * (100 * 50 + 100 * 101 / 2) * 16 * (192 + 128)
    assert prefill.bytes == 2 * 16 * (192 + 128) * (150 + 100)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_weights_and_kv_on_a_device(tp: int) -> None:
    """The projections down are on every device, and so is the whole KV; an expansion in fp8 is kept in 16 bits too."""
    gpu, plain, fp8 = find_gpu("B300"), *(Deployment(tensor_parallel_size=tp, quantization=q) for q in ("none", "fp8"))
    assert kv_capacity(LITE, gpu, plain).block == 16 * LITE.kv_bytes_per_token(2)
    shared = 2048 * 576 + 512
    rotary = 2 * 163840 * 64
    per_device = weight_bytes(LITE, plain) - rotary - 2 * 2048 * (2 * 27 + 1) - 2 * 26 * LITE.router_parameters
    norms = 2048 * (2 * 27 + 1)
    split = LITE.parameters - 27 * shared - 26 * LITE.router_parameters - norms
    assert per_device == pytest.approx(2 * (27 * shared + split / tp), rel=1e-6)
    expansion = 27 * 512 * 16 * 256 / tp
    saved = 27 * shared + (split - LITE.embedding_parameters) / tp
    assert weight_bytes(LITE, plain) - weight_bytes(LITE, fp8) == pytest.approx(saved - 2 * expansion, rel=1e-6)


def test_every_operation_has_a_time_no_shorter_than_the_roofline() -> None:
    sizes = uniform_step(64, 4000, 1, 512, 100)
    for name in ("H200", "A100-40G"):
        kernels = load_kernels(find_gpu(name))
        for operation in step_operations(find_model("DeepSeek-V3"), deployment(tensor_parallel_size=8), sizes):
            assert kernels.time(operation).ns >= floor_ns(kernels.gpu, operation)


def test_experts_of_deepseek_are_among_the_public_tables() -> None:
    steps = step_operations(find_model("DeepSeek-V3"), deployment(tensor_parallel_size=8), uniform_step(64, 9, 0, 2, 0))
    (experts,) = [op for op in steps if isinstance(op, Experts)]
    assert load_kernels(find_gpu("H200")).time(experts).level < TrustLevel.EXTRAPOLATED


@pytest.mark.parametrize("name", ["DeepSeek-V3", "DeepSeek-V2-Lite"])
def test_so_is_its_attention_and_other_sizes_are_not(name: str) -> None:
    kernels = load_kernels(find_gpu("H200"))
    steps = step_operations(find_model(name), deployment(), uniform_step(64, 4000, 2, 512, 0))
    operations = [op for op in steps if isinstance(op, HeadGemm | LatentDecode | LatentPrefill)]
    assert len(operations) == 4
    for operation in operations:
        assert kernels.time(operation).level < TrustLevel.EXTRAPOLATED
        other = {"k": 1024} if isinstance(operation, HeadGemm) else {"head_dim": 640}
        assert kernels.time(replace(operation, **other)).level == TrustLevel.EXTRAPOLATED


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model", "inspect", "DeepSeek-V3", "--gpu", "H200", "--tp", "8"], "70,272 KV bytes per token"),
        (
            ["explain", "--model", "DeepSeek-V2-Lite", "--gpu", "H100", "--rows", "8", "--context", "900"],
            "queries to latent",
        ),
    ],
)
def test_commands_answer(arguments: list[str], says: str) -> None:
    shown = CliRunner().invoke(cli, arguments)
    assert shown.exit_code == 0, shown.output
    assert says in shown.output


def test_a_run_is_simulated() -> None:
    run = api.simulate(
        {
            "requests": 20,
            "arrivals": {"kind": "poisson", "rate": 5.0},
            "prompt": {"kind": "fixed", "tokens": 300},
            "output": {"kind": "fixed", "tokens": 20},
        },
        {
            "model": "DeepSeek-V3",
            "tensor_parallel_size": 8,
            "enable_expert_parallel": True,
            "expert_imbalance": "random",
        },
        gpu="H200",
        band=False,
    )
    assert run.metrics.statuses() == {"finished": 20}
