"""Quantised checkpoints: a model from one answers as the model of its dense float32 weights."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the engine extra is not installed")
pytest.importorskip("transformers", reason="transformers makes the models here; install the dev extra")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.realengine.packed_checkpoints import FORMATS, FP8_FORMATS, write, write_fp8  # noqa: E402
from tests.realengine.tiny_models import save  # noqa: E402
from tokentwin.realengine.attention.kv_cache import FP8, KvCache, read  # noqa: E402
from tokentwin.realengine.attention.kv_cache import write as store  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.layer_ops import LayerOps  # noqa: E402
from tokentwin.realengine.models.linear import (  # noqa: E402
    Fp8Weight,
    PackedWeight,
    pack,
    round_to_integers,
    unpack,
)
from tokentwin.realengine.models.model import Model  # noqa: E402
from tokentwin.realengine.models.weights import RANDOM, load_model_files, random_state  # noqa: E402
from tokentwin.realengine.parallel.tensor_parallel import shard_spec, shard_state  # noqa: E402
from tokentwin.realengine.step_input import Batch, RowInput  # noqa: E402
from tokentwin.realengine.step_input import pack as pack_step  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.deployments.kv_capacity import weight_bytes  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import WorkloadRequest  # noqa: E402

pytestmark = pytest.mark.engine
SCHEDULER = SchedulerConfig(max_model_len=64, max_num_batched_tokens=24, num_blocks=40, block_size=4, max_num_seqs=4)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    save("qwen2", folder)
    return folder


def answers(folder: Path, **settings: Any) -> list[list[int]]:
    """Return greedy tokens of a few prompts at once."""
    engine = engine_of(folder, **settings)
    try:
        sequences = []
        for number, length in enumerate((30, 5, 1)):
            engine.add(WorkloadRequest(number, 0, (("", length),), 8), [(7 * i + number) % 96 for i in range(length)])
            sequences.append(engine.sequences[number])
        while engine.step() is not None:
            pass
        return [sequence.outputs for sequence in sequences]
    finally:
        engine.close()


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return MoE models: with a shared expert and a dense layer; with FP8 blocks that do or do not fit experts."""
    folder = tmp_path_factory.mktemp("mixtures")
    save("mixtral", folder / "mixtral")
    save("qwen2-moe", folder / "qwen2-moe")
    save("qwen3-moe", folder / "whole", {"moe_intermediate_size": 256})
    save("qwen3-moe", folder / "partial", {"moe_intermediate_size": 144})
    return {path.name: path for path in folder.iterdir()}


@pytest.mark.parametrize("name", FORMATS)
def test_a_checkpoint_answers_as_the_weights_that_it_stands_for(name: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "quantised", tmp_path / "dense", name, kept="layers.0.mlp")
    quantised = answers(tmp_path / "quantised")
    assert quantised == answers(tmp_path / "dense")
    assert quantised != answers(plain)


@pytest.mark.parametrize(
    ("model", "name", "kept"),
    [
        ("mixtral", "gptq symmetric", "layers.1.block"),
        ("qwen2-moe", "gptq asymmetric", "layers.1.mlp"),  # the dense layer
        ("qwen2-moe", "awq", "nothing"),
        ("qwen2-moe", "pack-quantized asymmetric", "shared"),
        ("qwen2-moe", "int-quantized", "self_attn"),
        ("whole", "fp8 by tensor", "self_attn"),
        ("whole", "float-quantized by channel", "self_attn"),
        ("whole", "fp8 by block of 128", "self_attn"),
        ("partial", "float-quantized by block", "self_attn"),
        ("partial", "gptq_v2 int8", "nothing"),
    ],
)
def test_a_mixture_answers_as_the_weights_that_it_stands_for(model, name, kept, mixtures, tmp_path):
    """Of experts in FP8 only weights are rounded."""
    folders = mixtures[model], tmp_path / "quantised", tmp_path / "dense"
    if name in FORMATS:
        write(*folders, name, kept)
    else:
        write_fp8(*folders, name, kept, {})
    quantised = answers(tmp_path / "quantised")
    assert quantised == answers(tmp_path / "dense")
    assert quantised != answers(mixtures[model])


def test_experts_that_are_not_stored_alike_are_one_line(mixtures: dict[str, Path], tmp_path: Path) -> None:
    write(mixtures["qwen2-moe"], tmp_path / "quantised", tmp_path / "dense", "awq", kept="experts.3.up")
    with pytest.raises(UserError, match=r"experts.3.up_proj.: is not stored as model.layers.0.mlp.experts.0.gate_proj"):
        answers(tmp_path / "quantised")


def test_two_ranks_have_the_blocks_of_one(mixtures: dict[str, Path], tmp_path: Path) -> None:
    write_fp8(mixtures["whole"], tmp_path / "fp8", tmp_path / "dense", "fp8 by block of 128", "nothing", {})
    files = load_model_files(str(tmp_path / "fp8"), Path())
    states = [files.state, *(shard_state(files.state or {}, rank, 2, None) for rank in range(2))]
    for part, along in (("gate", 0), ("up", 0), ("down", 1)):
        name = f"model.layers.1.mlp.experts.5.{part}_proj.weight"
        whole, *parts = (state[name] for state in states if state)
        assert isinstance(whole, Fp8Weight)
        assert len(whole.scale) == (2 if part != "down" else 32)
        assert torch.equal(whole.dense(torch.float32), torch.cat([part.dense(torch.float32) for part in parts], along))
    wide = files.spec.model_copy(update={"moe_intermediate_size": 384})
    with pytest.raises(UserError, match=r"tensor_parallel_size: 2: would split a block of 128 of the 384 outputs"):
        shard_spec(wide, 2)
    assert shard_spec(wide, 2, expert_parallel=True).moe_intermediate_size == 384


@given(data=st.data(), bits=st.sampled_from([4, 8]), rows=st.integers(1, 5), words=st.integers(1, 4))
def test_packing_loses_nothing_and_puts_the_first_integer_lowest(data: Any, bits: int, rows: int, words: int) -> None:
    count = rows * words * 32 // bits
    numbers = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    integers = torch.tensor(numbers, dtype=torch.uint8).view(rows, -1)
    packed = pack(integers, bits)
    assert torch.equal(unpack(packed, bits), integers)
    assert packed[0, 0].item() & (2**bits - 1) == numbers[0]


@pytest.mark.parametrize(("quantization", "half_a_step"), [("int4", 0.5 / 7), ("int8", 0.5 / 127)])
def test_rounding_is_to_the_nearest_and_keeps_the_largest_of_a_group(quantization: str, half_a_step: float) -> None:
    weight = torch.randn(6, 200, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    packed = round_to_integers(weight, quantization)
    assert packed.scale.shape == (6, 2 if quantization == "int4" else 1)
    for part, whole in zip(
        packed.dense(torch.float32).split(packed.group, 1), weight.split(packed.group, 1), strict=True
    ):
        largest = whole.abs().amax(1)
        torch.testing.assert_close(part.abs().amax(1), largest, rtol=1e-6, atol=0)
        assert ((part - whole).abs().amax(1) <= half_a_step * largest * 1.001).all()


@pytest.mark.parametrize(("setting", "limit"), [("int8", 0.04), ("int4", 0.3), ("fp8", 0.15)])
def test_weights_in_16_bits_can_be_rounded_on_loading(setting: str, limit: float, plain: Path) -> None:
    """Logits are near, by as much as the numbers are coarse, and far enough to show that they were rounded."""
    exact, rounded = logits(plain), logits(plain, quantization=setting)
    assert limit / 50 < float((rounded - exact).norm() / exact.norm()) < limit


@pytest.mark.parametrize(("setting", "limit"), [("int8", 0.01), ("int4", 0.15), ("fp8", 0.05)])
def test_experts_are_rounded_on_loading_and_routers_are_not(setting, limit, mixtures):
    """An engine's logits would say little: another expert may be chosen."""
    exact, rounded = (
        engine_of(mixtures["qwen2-moe"], quantization=name).runner.model._layers[0].mlp for name in ("none", setting)
    )
    assert torch.equal(rounded._route._weight, exact._route._weight)
    for ours, wanted in ((rounded._gate_up, exact._gate_up), (rounded._down, exact._down)):
        for output, weight in zip(ours, wanted, strict=True):
            assert limit / 10 < float((output - weight).norm() / weight.norm()) < limit


@pytest.mark.parametrize("quantization", ["none", "fp8", "int8", "int4"])
def test_a_mixture_on_kernels_takes_the_memory_that_is_estimated(quantization: str) -> None:
    """But for FP8's scales, of which the estimate leaves 4 bytes an output out."""
    pytest.importorskip("triton")
    from tokentwin.realengine.models.triton_ops import TritonOps

    sizes = {"hidden_size": 256, "head_dim": 32, "moe_intermediate_size": 128, "vocab_size": 64, "max_positions": 16}
    spec = RANDOM["qwen2-moe"].model_copy(update=sizes)
    state, unused = random_state(spec, torch.bfloat16), cast(Any, None)
    where = torch.device("cpu")
    model = Model(spec, state, torch.bfloat16, where, TritonOps(spec), unused, quantization=quantization)
    estimate = weight_bytes(spec, Deployment(quantization=quantization))
    assert sum(tensors_of(model).values()) == pytest.approx(estimate, rel=0.03)


def tensors_of(thing: Any) -> dict[int, int]:
    """Return the bytes of every tensor reachable from `thing`, by its place."""
    if isinstance(thing, torch.Tensor):
        return {thing.data_ptr(): thing.untyped_storage().nbytes()}
    parts = thing if isinstance(thing, (tuple, list)) else getattr(thing, "__dict__", {}).values()
    return {at: size for part in parts for at, size in tensors_of(part).items()}


def engine_of(folder: Path, **settings: Any) -> Engine:
    deployment = Deployment(model=str(folder), dtype="float32", scheduler=SCHEDULER, **settings)
    return Engine(deployment, load_model_files(str(folder), Path()))


def logits(folder: Path, **settings: Any) -> Any:
    engine = engine_of(folder, **settings)
    try:
        row = RowInput([3, 14, 15, 92, 65], 0, np.arange(1, 3, dtype=np.int32), 0)
        step = pack_step([row], 4, 4, engine.runner.attention.tiles).step
        batch = Batch.from_buffer(torch.from_numpy(step.packed), step.layout)
        with torch.inference_mode():
            model = engine.runner.model
            return model.compute_logits(model.forward(batch.tokens, batch, engine.runner.kv))
    finally:
        engine.close()


@pytest.mark.parametrize("name", FP8_FORMATS)
def test_fp8_weights_are_those_of_the_checkpoint(name: str, plain: Path, tmp_path: Path) -> None:
    """Exactly, but for blocks, which are rounded anew by channel; activations are rounded in any case."""
    write_fp8(plain, tmp_path / "quantised", tmp_path / "dense", name, "layers.0.mlp", {})
    files, dense = (load_model_files(str(tmp_path / which), Path()) for which in ("quantised", "dense"))
    assert files.state is not None and dense.state is not None
    for key, wanted in dense.state.items():
        stored = files.state[key]
        values, scale = stored if isinstance(stored, Fp8Weight) else (stored, None)
        values = values.float()
        assert (scale is None) == ("_proj" not in key or key.endswith("bias") or "layers.0.mlp" in key), key
        if scale is not None:
            values = values * scale
        off = (values - wanted).abs()
        if name == "fp8 by block" and scale is not None:
            assert (off <= torch.maximum(wanted.abs() / 16, scale / 1024) * 1.001).all()
        else:
            assert (off <= wanted.abs() * 1e-6).all(), key
    exact, rounded = logits(tmp_path / "dense"), logits(tmp_path / "quantised")
    assert 0.003 < float((rounded - exact).norm() / exact.norm()) < 0.3


def test_rows_are_made_in_fp8_where_a_projection_in_fp8_follows(plain, tmp_path, monkeypatch):
    """In the pass that makes them, and not where the layer stays in 16 bits: here the MLP of the first of two."""
    write_fp8(plain, tmp_path / "quantised", tmp_path / "dense", "fbgemm_fp8", "layers.0.mlp", {})
    made = []
    for name in ("add_norm", "silu_mul"):
        kept = getattr(LayerOps, name)

        def noted(*a: Any, name: str = name, kept: Any = kept) -> Any:
            made.extend([name] * (a[-1] is True))  # fp8
            return kept(*a)

        monkeypatch.setattr(LayerOps, name, noted)
    logits(tmp_path / "quantised")
    assert made == ["add_norm"] * 3 + ["silu_mul"]


@pytest.mark.parametrize(
    ("kv", "expected"),
    [
        ({"k_scale": 0.5, "v_scale": 0.25, "q_scale": 3.0}, (0.5, 0.25)),
        ({"k_proj.k_scale": 0.5, "v_proj.v_scale": 0.25}, (0.5, 0.25)),
        ({"k_proj.output_scale": 0.5, "v_proj.output_scale": 2.0, "q_proj.output_scale": 1.0}, (0.5, 2.0)),
        ({"kv_scale": 0.125}, (0.125, 0.125)),
    ],
)
def test_scales_of_kv_are_read_by_all_their_names(kv: Any, expected: Any, plain: Path, tmp_path: Path) -> None:
    """And count only where KV is in FP8."""
    write_fp8(plain, tmp_path / "quantised", tmp_path / "dense", "fbgemm_fp8", "nothing", kv)
    for kept, scales in (("fp8", expected), ("auto", (1.0, 1.0))):
        deployment = Deployment(dtype="float32", kv_cache_dtype=kept, scheduler=SCHEDULER)
        engine = Engine(deployment, load_model_files(str(tmp_path / "quantised"), Path()))
        assert {engine.runner.kv.layer(index)[2:] for index in range(2)} == {scales}
        engine.close()


def test_kv_beyond_the_range_of_fp8_is_kept_by_scales(plain: Path) -> None:
    spec = load_model_files(str(plain), Path()).spec
    cache = KvCache(spec, 3, 4, FP8, torch.device("cpu"), [(1.0, 1.0), (16.0, 4.0)])
    keys, values = torch.randn(2, 5, spec.num_kv_heads, spec.head_dim, generator=torch.Generator().manual_seed(0))
    keys, values = 2000 * keys.clamp(-3, 3), 500 * values.clamp(-3, 3)
    blocks = torch.tensor([2, 1])
    for index, close in ((1, True), (0, False)):
        store(cache.layer(index), torch.tensor([8, 9, 10, 11, 4]), keys, values)
        for wanted, kept in zip((keys, values), read(cache.layer(index), blocks, 0, 5, torch.float32), strict=True):
            off = (kept.transpose(0, 1) - wanted).abs()
            assert bool((off <= wanted.abs() / 16 + 0.1).all()) == close


@pytest.mark.parametrize("name", ["gptq asymmetric", "awq"])
def test_two_ranks_have_the_weights_of_one(name: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "quantised", tmp_path / "dense", name, kept="down_proj")
    files = load_model_files(str(tmp_path / "quantised"), Path())
    whole = shard_state(files.weights(torch.float32, torch.device("cpu")), 0, 1, None)
    parts = [shard_state(whole, rank, 2, None) for rank in range(2)]
    for module, along in (("self_attn.o_proj", 1), ("self_attn.q_proj", 0), ("mlp.up_proj", 0)):
        dense = [_dense(state, f"model.layers.1.{module}") for state in (whole, *parts)]
        assert torch.equal(dense[0], torch.cat(dense[1:], along))
    wide = files.spec.model_copy(update={"intermediate_size": 64})
    assert shard_spec(wide, 2).intermediate_size == 32
    with pytest.raises(UserError, match="tensor_parallel_size: 2: would split a group of 16 of the 48 inputs"):
        shard_spec(files.spec, 2)


def _dense(state: dict[str, Any], module: str) -> Any:
    weight = state[f"{module}.weight"]
    assert isinstance(weight, PackedWeight)
    return weight.dense(torch.float32)


@pytest.mark.parametrize(
    ("name", "change", "fault"),
    [
        (
            "gptq asymmetric",
            {"g_idx": lambda t: t.flip(0)},
            "down_proj.g_idx puts inputs into groups by their activations",
        ),
        ("gptq asymmetric", {"scales": None}, "has no weight model.layers.0.*.scales; is the folder complete"),
        ("gptq symmetric", {"qzeros": lambda t: t + 1}, "qzeros are not in the middle"),
        ("awq", {"qweight": lambda t: t.long()}, "qweight is torch.int64, but must be torch.int32"),
        (
            "awq",
            {"qweight": lambda t: t[:, :-1].contiguous()},
            "has scales or zero points of shape .*, but its groups are",
        ),
        (
            "pack-quantized asymmetric",
            {"weight_scale": lambda t: t[:, :0].contiguous()},
            "has scales or zero points of",
        ),
        ("int-quantized", {"weight": lambda t: t.float()}, "weight is torch.float32, but must be torch.int8"),
    ],
)
def test_what_would_be_read_wrongly_is_refused(name: str, change: Any, fault: str, plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "quantised", tmp_path / "dense", name)
    path = tmp_path / "quantised" / "model.safetensors"
    state = load_file(path)
    for key in [key for key in state if key.rpartition(".")[2] in change and "_proj" in key]:
        made = change[key.rpartition(".")[2]]
        state[key] = state[key] if made is None else made(state[key])
        if made is None:
            del state[key]
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=fault) as caught:
        load_model_files(str(path.parent), Path())
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"lm_head.weight_scale": torch.ones(96, 1)}, "lm_head is quantised, which only layers may be"),
        ({"model.layers.1.self_attn.k_scale": torch.ones(2)}, "self_attn.k_scale has 2 scales; only one a layer"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor(-1.0)}, "self_attn.v_scale is -1, but must be positive"),
        ({"model.layers.1.mlp.up_proj.weight_scale": torch.ones(7)}, "has shape .*, which fits no way to scale"),
    ],
)
def test_scales_that_would_be_passed_over_are_refused(changed: Any, fault: str, plain: Path, tmp_path: Path) -> None:
    write_fp8(plain, tmp_path / "quantised", tmp_path / "dense", "fbgemm_fp8", "nothing", {})
    path = tmp_path / "quantised" / "model.safetensors"
    state = {**load_file(path), **changed}
    if "lm_head.weight_scale" in changed:
        state["lm_head.weight"] = state["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(state, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=fault) as caught:
        load_model_files(str(path.parent), Path())
    assert "\n" not in str(caught.value)


def test_layers_that_are_multiplied_at_once_must_be_stored_alike(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "quantised", tmp_path / "dense", "awq", kept="k_proj")
    with pytest.raises(
        UserError, match=r"layers.0.self_attn.k_proj.: is not stored as model.layers.0.self_attn.q_proj"
    ):
        answers(tmp_path / "quantised")


def test_a_stored_quantisation_cannot_be_made_another(plain: Path, tmp_path: Path) -> None:
    write(plain, tmp_path / "quantised", tmp_path / "dense", "awq")
    with pytest.raises(UserError, match=r"quantization: .fp8.: cannot be made of quantised, which is stored in int4"):
        answers(tmp_path / "quantised", quantization="fp8")
    assert answers(tmp_path / "quantised", quantization="int4") == answers(tmp_path / "dense")
