"""Layers with a constant state as operations: FLOPs against a count, closed forms, and what times must keep to."""

import numpy as np
import pytest

from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.linear_attention import LinearDecode, LinearPrefill
from tokentwin.calibration.operations import StepSizes, floor_ns, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model

SPEC = find_model("Qwen3.5-397B-A17B")
SHAPE = (16, 64, 128, 128, 4)  # key heads, value heads, their sizes, the convolution's tokens


def test_a_decoded_token_costs_what_the_recurrence_multiplies() -> None:
    rng = np.random.default_rng(0)
    heads, dim, width = 3, 5, 4
    state, flops = rng.normal(size=(heads, dim, width)), 0
    for _ in range(7):
        key, query, value = (
            rng.normal(size=(heads, dim)),
            rng.normal(size=(heads, dim)),
            rng.normal(size=(heads, width)),
        )
        seen = np.einsum("hd,hdw->hw", key, state)
        state = 0.9 * state + np.einsum("hd,hw->hdw", key, value - 0.9 * seen)
        np.einsum("hd,hdw->hw", query, state)
        flops += 3 * 2 * heads * dim * width  # of the three products; decays are left out
    operation = LinearDecode("", 7, 7, 1, heads, dim, width, 1)
    assert operation.flops == flops + 7 * 2 * operation.channels


def test_bytes_of_a_decode_are_its_states_in_and_out() -> None:
    decode = LinearDecode("", 10, 10, *SHAPE)
    state = 4 * 64 * 128 * 128 + 2 * 3 * 12288
    assert decode.state_bytes == state
    assert decode.bytes == pytest.approx(10 * 2 * state, rel=0.02)
    drafted = LinearDecode("", 10, 40, *SHAPE)
    assert drafted.bytes == pytest.approx(10 * 5 * state, rel=0.02)


def test_a_long_prompt_costs_in_proportion_to_its_tokens() -> None:
    one, ten = LinearPrefill("", 1, 1000, *SHAPE), LinearPrefill("", 1, 10_000, *SHAPE)
    assert ten.flops == 10 * one.flops
    assert one.bytes < ten.bytes < 10 * one.bytes


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_devices_share_what_the_layers_compute(tp: int) -> None:
    sizes = uniform_step(16, 3000, 2, 500, 0)
    alone = {o.name: o for o in step_operations(SPEC, Deployment(), sizes)}
    shared = {o.name: o for o in step_operations(SPEC, Deployment(tensor_parallel_size=tp), sizes)}
    names = [name for name in alone if "linear" in name]
    assert len(names) == 5
    for name in names:
        assert shared[name].count == alone[name].count == 45
        assert shared[name].flops * tp == alone[name].flops
    assert alone["qkv"].count == alone["decode attention"].count == 15


@pytest.mark.parametrize("gpu", ["H100", "B200", "L4"])
def test_times_do_not_grow_with_context_and_are_never_below_the_roofline(gpu: str) -> None:
    kernels, device = load_kernels(find_gpu(gpu)), find_gpu(gpu)

    def time_ns(sizes: StepSizes, name: str) -> float:
        named = next(o for o in step_operations(SPEC, Deployment(), sizes) if o.name == name)
        ns = float(np.asarray(kernels.time(named).ns))
        assert ns >= float(np.asarray(floor_ns(device, named)))
        return ns

    near, far = (time_ns(uniform_step(64, context, 0, 0, 0), "decode linear attention") for context in (10, 100_000))
    assert near == far
    first, later = (time_ns(uniform_step(0, 0, 1, 512, past), "prefill linear attention") for past in (0, 50_000))
    assert first == later < time_ns(uniform_step(0, 0, 1, 4096, 0), "prefill linear attention")
