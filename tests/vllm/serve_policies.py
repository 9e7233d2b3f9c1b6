"""vLLM as its users start it, with a policy of ours: `python serve_policies.py FOLDER POLICY [SPECULATIVE]`.

A program for vLLM's own environment. It writes what came of it to `answered.json` in the folder.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

from vllm import LLM, SamplingParams

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "vocab_size": 512,
    **SHAPE,
}
PROMPTS = [[*range(5, 45)], [*range(5, 75)], [9, 8, 7]]


def served(folder: str, policy: Any, **more: Any) -> LLM:
    return LLM(
        folder, skip_tokenizer_init=True, load_format="dummy", dtype="float32", max_model_len=512, block_size=32,
        enforce_eager=True, scheduler_cls="tokentwin.vllmside.policy_scheduler.PolicyScheduler",
        additional_config={"tokentwin": policy}, **more,
    )  # fmt: skip


def main() -> None:
    folder, policy, *drafts = sys.argv[1:]
    Path(folder, "config.json").write_text(json.dumps(MODEL | {"max_position_embeddings": 1024}))
    more = {"speculative_config": json.loads(drafts[0])} if drafts else {}
    engine = served(folder, {"policy": policy}, **more)
    found: dict[str, Any] = {}
    plain = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
    answers = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], plain)
    found["answered"] = [len(answer.outputs[0].token_ids) for answer in answers]
    found["cached"] = [answer.num_cached_tokens for answer in answers]
    again = engine.generate([{"prompt_token_ids": PROMPTS[1]}], plain)
    found["again"] = [again[0].num_cached_tokens, again[0].outputs[0].token_ids == answers[1].outputs[0].token_ids]
    found["reset"] = engine.reset_prefix_cache()
    found["after"] = engine.generate([{"prompt_token_ids": PROMPTS[1]}], plain)[0].num_cached_tokens
    Path(folder, "answered.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
