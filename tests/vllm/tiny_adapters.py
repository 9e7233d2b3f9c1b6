"""PEFT folders of random LoRA adapters for the tiny Llama model, without torch."""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tests.vllm.tiny_model import TINY


def save_adapters(folder: Path, count: int) -> None:
    """Write adapters `adapter0`, `adapter1`, ... of ranks 4 and 8 in turn."""
    hidden, inter, head = TINY["hidden_size"], TINY["intermediate_size"], TINY["head_dim"]
    queries, keys = head * TINY["num_attention_heads"], head * TINY["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (hidden, queries), "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, inter), "mlp.down_proj": (inter, hidden),
    }  # fmt: skip
    for number in range(count):
        drawn, rank, tensors = np.random.default_rng(number), 4 * (1 + number % 2), {}
        for layer in range(TINY["num_hidden_layers"]):
            for name, (inputs, outputs) in shapes.items():
                key = f"base_model.model.model.layers.{layer}.{name}"
                tensors[f"{key}.lora_A.weight"] = drawn.normal(size=(rank, inputs)).astype("float32") / inputs**0.5
                tensors[f"{key}.lora_B.weight"] = drawn.normal(size=(outputs, rank)).astype("float32") / rank**0.5
        (folder / f"adapter{number}").mkdir(parents=True)
        targets = sorted(name.rpartition(".")[2] for name in shapes)
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "bias": "none", "target_modules": targets}
        (folder / f"adapter{number}" / "adapter_config.json").write_text(json.dumps(config))
        save_file(tensors, folder / f"adapter{number}" / "adapter_model.safetensors")
