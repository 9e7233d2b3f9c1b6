"""Quantised checkpoints written straight from the formats' definitions, integer by integer, with their dense weights.

Nothing here uses the engine: random integers, scales and zero points come first; files and dense weights follow.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

Ints = NDArray[np.int64]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
LINEAR = ("_proj", "w1", "w2", "w3")  # ends of the names of linear layers


def words(numbers: Ints, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Pack numbers along the last axis into words of 32 bits: number `order[p]` of a word is at bit `p * bits`."""
    per = 32 // bits
    rows, count = numbers.shape
    out = np.zeros((rows, -(-count // per)), dtype=np.uint32)
    for row in range(rows):
        for word in range(out.shape[1]):
            for place in range(per):
                at = word * per + (order or tuple(range(per)))[place]
                if at < count:
                    out[row, word] |= np.uint32(int(numbers[row, at]) << (bits * place))
    return torch.from_numpy(out.view(np.int32).copy())


class Quantised:
    """Random integers `[out, in]`, scales and zero points `[out, groups]`, and the dense weight that they stand for."""

    def __init__(self, draw: np.random.Generator, outputs: int, inputs: int, bits: int, group: int, zeros: bool):
        self.bits, self.group = bits, group or inputs
        groups = -(-inputs // self.group)
        self.integers = draw.integers(0, 2**bits, (outputs, inputs))
        middle = 2 ** (bits - 1)
        self.zeros = draw.integers(1, 2**bits, (outputs, groups)) if zeros else np.full((outputs, groups), middle)
        size = 0.4 / 2**bits
        self.scales = torch.from_numpy(draw.uniform(0.5 * size, 1.5 * size, (outputs, groups))).half()
        group_of = np.arange(inputs) // self.group
        self.dense = ((self.integers - self.zeros[:, group_of]) * self.scales.double().numpy()[:, group_of]).astype(
            np.float32
        )
        self.group_of = group_of

    def gptq(self, version: int) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(self.integers, self.bits).t().contiguous(),
            "qzeros": words(self.zeros.T - (1 if version == 1 else 0), self.bits),
            "scales": self.scales.t().contiguous(),
            "g_idx": torch.from_numpy(self.group_of.astype(np.int32)),
        }

    def awq(self) -> dict[str, torch.Tensor]:
        return {
            "qweight": words(self.integers.T, 4, AWQ_ORDER),
            "qzeros": words(self.zeros.T, 4, AWQ_ORDER),
            "scales": self.scales.t().contiguous(),
        }

    def pack_quantized(self, zeros: bool) -> dict[str, torch.Tensor]:
        parts = {
            "weight_packed": words(self.integers, self.bits),
            "weight_scale": self.scales,
            "weight_shape": torch.tensor(self.integers.shape),
        }
        return {**parts, "weight_zero_point": words(self.zeros.T, self.bits).t().contiguous()} if zeros else parts

    def int_quantized(self) -> dict[str, torch.Tensor]:
        return {"weight": torch.from_numpy((self.integers - 128).astype(np.int8)), "weight_scale": self.scales}


GROUPED = {"bits": 4, "group_size": 16}
CT = {"quant_method": "compressed-tensors"}


def ct(layout: str, **weights: Any) -> dict[str, Any]:
    return {**CT, "format": layout, "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}


FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "gptq symmetric": ({"quant_method": "gptq", **GROUPED, "sym": True}, lambda q: q.gptq(1)),
    "gptq asymmetric": ({"quant_method": "gptq", **GROUPED, "sym": False, "desc_act": True}, lambda q: q.gptq(1)),
    "gptq_v2 int8": (
        {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": False, "checkpoint_format": "gptq_v2"},
        lambda q: q.gptq(2),
    ),
    "awq": ({"quant_method": "awq", **GROUPED, "zero_point": True, "version": "gemm"}, lambda q: q.awq()),
    "pack-quantized symmetric": (
        ct("pack-quantized", num_bits=4, group_size=16, symmetric=True),
        lambda q: q.pack_quantized(False),
    ),
    "pack-quantized asymmetric": (
        ct("pack-quantized", num_bits=4, group_size=32, symmetric=False),
        lambda q: q.pack_quantized(True),
    ),
    "int-quantized": (ct("int-quantized", num_bits=8, strategy="channel", symmetric=True), lambda q: q.int_quantized()),
}


def scheme(config: dict[str, Any]) -> dict[str, Any]:
    """Return the bits, group and zero points of a `quantization_config`, as arguments of `Quantised`."""
    if config["quant_method"] == "compressed-tensors":
        weights = config["config_groups"]["group_0"]["weights"]
        return {"bits": weights["num_bits"], "group": weights.get("group_size", 0), "zeros": not weights["symmetric"]}
    zeros = config["zero_point"] if config["quant_method"] == "awq" else not config["sym"]
    return {"bits": config["bits"], "group": max(config["group_size"], 0), "zeros": zeros}


class Rounded:
    """Weights near `weight` `[out, in]` in e4m3, with scales by tensor, channel or block, and their dense values."""

    def __init__(self, weight: torch.Tensor, rows: int, columns: int) -> None:
        outputs, inputs = weight.shape
        blocks = (-(-outputs // rows), -(-inputs // columns))
        self.scale = torch.empty(blocks)
        wide = torch.empty(outputs, inputs)
        for row in range(blocks[0]):
            for column in range(blocks[1]):
                part = (slice(row * rows, (row + 1) * rows), slice(column * columns, (column + 1) * columns))
                self.scale[row, column] = wide[part] = weight[part].abs().max() / 300
        self.weight = (weight / wide).to(torch.float8_e4m3fn)
        self.dense = self.weight.float() * wide


FP8_FORMATS: dict[str, tuple[dict[str, Any], tuple[int, int], Any]] = {  # config, rows and columns of a scale, tensors
    "fp8 by tensor": (
        {"quant_method": "fp8", "activation_scheme": "static"},
        (10**6, 10**6),
        lambda r: {"weight": r.weight, "weight_scale": r.scale[0, 0], "input_scale": torch.ones(())},
    ),
    "fp8 by block": (
        {"quant_method": "fp8", "weight_block_size": [16, 24]},
        (16, 24),
        lambda r: {"weight": r.weight, "weight_scale_inv": r.scale},
    ),
    "fp8 by block of 128": (
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        (128, 128),
        lambda r: {"weight": r.weight, "weight_scale_inv": r.scale},
    ),
    "fbgemm_fp8": (
        {"quant_method": "fbgemm_fp8"},
        (1, 10**6),
        lambda r: {"weight": r.weight, "weight_scale": r.scale, "input_scale_ub": torch.ones(1)},
    ),
    "float-quantized by block": (
        ct("float-quantized", num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
        (128, 128),
        lambda r: {"weight": r.weight, "weight_scale": r.scale},
    ),
    "float-quantized by channel": (
        ct("float-quantized", num_bits=8, type="float", strategy="channel"),
        (1, 10**6),
        lambda r: {"weight": r.weight, "weight_scale": r.scale},
    ),
}


def write_fp8(plain: Path, quantised: Path, dense: Path, name: str, kept: str, kv: dict[str, float]) -> None:
    """Write checkpoints as `write` does, for an FP8 format; `kv` are further scalars of each layer's attention."""
    config, block, parts = FP8_FORMATS[name]
    stored: dict[str, torch.Tensor] = {}
    stood_for = {}
    for key, weight in load_file(plain / "model.safetensors").items():
        module = key.removesuffix(".weight")
        if module.endswith(LINEAR) and kept not in module:
            made = Rounded(weight, *block)
            stood_for[key] = made.dense
            stored |= {f"{module}.{part}": tensor.contiguous() for part, tensor in parts(made).items()}
        else:
            stored[key], stood_for[key] = weight, weight
        if module.endswith("self_attn.o_proj"):
            at = module.removesuffix("o_proj")
            stored |= {f"{at}{part}": torch.tensor(scale) for part, scale in kv.items()}
    save_both(plain, quantised, dense, stored, stood_for, config)


def write(plain: Path, quantised: Path, dense: Path, name: str, kept: str = "nothing", seed: int = 0) -> None:
    """Write two checkpoints from the 16-bit or float32 folder `plain`: one quantised, and one with its dense weights.

    The first stores linear layers in the format `name`, but for modules with `kept` in their names. The second has the
    weights that these stand for, in float32.
    """
    config, pack = FORMATS[name]
    draw = np.random.default_rng(seed)
    state, stood_for = load_file(plain / "model.safetensors"), {}
    stored: dict[str, torch.Tensor] = {}
    for key, weight in sorted(state.items()):
        module = key.removesuffix(".weight")
        if module.endswith(LINEAR) and kept not in module:
            made = Quantised(draw, *weight.shape, **scheme(config))
            stood_for[key] = torch.from_numpy(made.dense)
            stored |= {f"{module}.{part}": tensor for part, tensor in pack(made).items()}
        else:
            stored[key], stood_for[key] = weight, weight
    save_both(plain, quantised, dense, stored, stood_for, config)


def save_both(
    plain: Path,
    quantised: Path,
    dense: Path,
    stored: dict[str, torch.Tensor],
    stood_for: dict[str, torch.Tensor],
    config: dict[str, Any],
) -> None:
    for folder, tensors in ((quantised, stored), (dense, stood_for)):
        shutil.copytree(plain, folder)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = quantised / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": config}))
