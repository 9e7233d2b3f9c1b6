"""The same workload through `transformers`' continuous batching, on the same weights' shape, in the same run.

It has a process of its own, which is ended when its time is up, for nothing else can end a library's loop. A
handicapped peer: without flash-attn it attends through torch, and it samples and schedules in Python between steps. It
is here because it can be had wherever transformers is installed, not because it is fast.
"""

from __future__ import annotations

import json
import subprocess
import sys
from time import perf_counter
from typing import Any

import torch

from realengine.gpu_suite.engine_benchmark import usual_workload
from realengine.weights import RANDOM
from serving.deployments.model_spec import ModelSpec
from serving.python_process import module_command, module_environment

HANDICAP = (
    "no flash-attn kernels: attention through torch, one step at a time, scheduled in Python; a quarter of the "
    "requests, all asked for the longest answer"
)


def peer_throughput(
    model: str, dtype: str, device: str, requests: int, longest: int, part: int, small: bool, seconds: float
) -> dict[str, Any]:
    """`transformers_throughput` of the first `part` of the usual workload, in at most `seconds`."""
    settings = json.dumps([model, dtype, device, requests, longest, part, small])
    command, where = module_command("realengine.gpu_suite.peer", settings), module_environment()
    try:
        done = subprocess.run(
            command, env=where, capture_output=True, text=True, check=False, timeout=max(seconds, 1.0)
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done in the {seconds:.0f} s that were left", "handicap": HANDICAP}
    if done.returncode:
        return {"failed": f"exit {done.returncode}: {done.stderr.strip()[-300:]}", "handicap": HANDICAP}
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    model, dtype, device, requests, longest, part, small = json.loads(sys.argv[1])
    workload = usual_workload(requests, longest)[:part]
    found = transformers_throughput(RANDOM[model], getattr(torch, dtype), torch.device(device), workload, small)
    print(json.dumps(found))


def transformers_throughput(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, workload: list[tuple[list[int], int]], small: bool
) -> dict[str, Any]:
    """Output tokens per second; `failed` says why not, where this version of transformers cannot.

    `small` gives it a small cache, for a dry run; else it takes the memory it wants.
    """
    try:
        import transformers

        model = _model(spec, dtype, device)
        prompts = [[token % spec.vocab_size for token in prompt] for prompt, _ in workload]
        longest = max(output for _, output in workload)
        how = {}
        if small:
            how["continuous_batching_config"] = transformers.ContinuousBatchingConfig(num_blocks=64, page_size=16)

        def answers(prompts: list[list[int]], tokens: int) -> Any:
            config = transformers.GenerationConfig(
                max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            return model.generate_batch(inputs=prompts, generation_config=config, **how)

        answers(prompts[:2], 2)
        began = perf_counter()
        outputs = answers(prompts, longest)
        seconds = perf_counter() - began
        tokens = sum(len(output.generated_tokens) for output in outputs.values())
    except Exception as error:  # a peer that does not run must not end the suite
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}", "handicap": HANDICAP}
    return {
        "version": transformers.__version__,
        "requests": len(workload),
        "output_tokens": tokens,
        "seconds": seconds,
        "output_tokens_per_s": tokens / seconds,
        "handicap": HANDICAP,
    }


def _model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate_size,
        max_position_embeddings=spec.max_positions,
        tie_word_embeddings=spec.tied_embeddings,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    with torch.device(device):
        return Qwen3ForCausalLM(config).to(dtype).eval()


if __name__ == "__main__":
    main()
