"""PEFT folders of random LoRA adapters for tiny models, and the models into which they are merged by hand."""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def save_adapter(
    folder: Path, model: Any, seed: int, rank: int, alpha: float, targets: Sequence[str] = ALL, **config: Any
) -> Any:
    """Write an adapter as PEFT does, and return transformers' `model` in float64 with W + scale * B A merged in."""
    generator = torch.Generator().manual_seed(seed)
    scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
    merged, tensors = copy.deepcopy(model).double(), {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] not in targets:
            continue
        a = torch.randn((rank, module.in_features), generator=generator) / module.in_features**0.5
        b = torch.randn((module.out_features, rank), generator=generator) / rank**0.5
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        with torch.no_grad():
            module.weight += scale * (b.double() @ a.double())
    folder.mkdir(parents=True)
    whole = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "bias": "none", "target_modules": list(targets)}
    whole |= {"rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None, "use_dora": False, **config}
    (folder / "adapter_config.json").write_text(json.dumps(whole), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors")
    return merged
