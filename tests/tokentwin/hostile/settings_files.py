"""Specifications of traffic, deployments, GPUs, sweeps and models, with one field wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import yaml

from tests.tokentwin.hostile.case import SIMULATE, Case
from tests.tokentwin.hostile.wrong import Wrong, wrong_documents
from tokentwin.serving.deployments.config import Deployment

FIXED = {"kind": "fixed", "tokens": 9}
SPECIFICATIONS: tuple[dict[str, Any], ...] = (
    {
        "name": "mine", "seed": 1, "requests": 5, "priority": 0, "tenant": "a", "slo_class": "b", "structured": 0.5,
        "arrivals": {"kind": "gamma", "rate": 5.0, "cv": 2.0},
        "prompt": {"kind": "lognormal", "mean": 30.0, "sigma": 1.0, "min": 1, "max": 99},
        "output": {"kind": "uniform", "low": 1, "high": 9},
    },
    {
        "duration_s": 5.0, "arrivals": {"kind": "ramp", "start_rate": 1.0, "end_rate": 5.0, "over_s": 3.0},
        "prompt": {"kind": "exponential", "mean": 30.0}, "output": FIXED,
        "system_prompts": {"count": 3, "tokens": FIXED, "choice": "zipf", "exponent": 1.0, "share": 0.5},
    },
    {
        "requests": 5, "arrivals": {"kind": "constant", "rate": 5.0}, "prompt": FIXED, "output": FIXED,
        "sessions": {"turns": FIXED, "think_ms": FIXED, "think_from": "answer", "max_prompt_tokens": 500},
    },
    {"requests": 5, "arrivals": {"kind": "closed", "concurrency": 2}, "prompt": FIXED, "output": FIXED},
)  # fmt: skip
DEPLOYMENT: dict[str, Any] = {
    **{
        name: value
        for name, value in Deployment(model="Llama-3.1-8B", device="cuda").model_dump(mode="json").items()
        if value is not None
    },
    "fleet": {
        "pools": [{"name": "a", "role": "serve", "replicas": 1, "speed": 1.0, "slo_classes": ["gold"]}],
        "router": {"name": "round-robin", "settings": {}},
        "first_token_from": "prefill",
        "decode_reserves": "after-prefill",
        "admission": {
            "max_queued_per_replica": 5, "queue_timeout_s": 3.0,
            "retry": {
                "max_attempts": 2, "backoff_s": 1.0, "factor": 2.0, "max_backoff_s": 60.0, "jitter": 0.5, "seed": 0,
            },
        },
        "failures": {
            "crashes": [{"pool": "a", "replica": 0, "at_s": 1.0, "recovery_s": 1.0}],
            "slowdowns": [{"pool": "a", "replica": 0, "at_s": 1.0, "for_s": 1.0, "factor": 2.0}],
            "mtbf_s": 1e6, "recovery_s": 60.0, "seed": 0,
        },
    },
}  # fmt: skip
GPU = {
    "ours": {
        "generation": "Hopper", "memory_bytes": 85018542080, "memory_bytes_per_s": 3.35e12,
        "bf16_flop_per_s": 9.894e14, "fp8_flop_per_s": 1.9789e15, "sm_count": 132,
    }
}  # fmt: skip
MODEL = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "vocab_size": 100, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 96,
    "max_position_embeddings": 512, "rope_theta": 1e4, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "attention_bias": False, "mlp_bias": False, "sliding_window": None,
}  # fmt: skip


def cases() -> Iterator[Case]:
    for specification in SPECIFICATIONS:
        for wrong in wrong_documents(specification):
            yield _of_yaml("trace synth o.parquet --spec s.yaml", "s.yaml", wrong)
    for wrong in wrong_documents(DEPLOYMENT, skipped=("settings", "edf_ttft_ms")):
        yield _of_yaml(f"{SIMULATE} -d d.yaml", "d.yaml", wrong)
    for wrong in wrong_documents(GPU):
        yield _of_yaml("model inspect Llama-3.1-8B --gpu g.yaml", "g.yaml", wrong, "gpu")
    for wrong in wrong_documents(_sweep(), skipped=("workload",)):
        yield _of_yaml("sweep s.yaml -o out", "s.yaml", wrong)
    for wrong in wrong_documents(MODEL, unknown=False):
        text = json.dumps(wrong.document)
        yield Case("model inspect config.json", {"config.json": text}, (wrong.names,), str(wrong))


def _sweep() -> dict[str, Any]:
    base = {
        "deployment": {"model": "Llama-3.1-8B", "device": "cuda", "scheduler": {"max_num_seqs": 8}},
        "gpu": "H100", "workload": SPECIFICATIONS[3], "router": "round-robin",
    }  # fmt: skip
    return {"base": base, "grid": {"replicas": [2]}, "partition": ["replicas"], "per_request": True, "run_limit_s": 9.0}


def _of_yaml(command: str, name: str, wrong: Wrong, also: str = "") -> Case:
    names = "|".join(filter(None, [wrong.names, also]))
    return Case(command, {name: lambda path: path.write_text(yaml.safe_dump(wrong.document))}, (names,), str(wrong))
