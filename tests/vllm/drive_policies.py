"""Scenarios on a real engine of vLLM's, step by step: `python drive_policies.py ASKED.json ANSWERED.json`.

A program for vLLM's own environment, with this repository on its path. One engine with a small random model runs every
scenario under each scheduler that it names: "own" is vLLM's, any other name is a policy of ours. Requests come, and
leave, before a numbered step; what was decided and sampled is written down.
"""

import copy
import json
import os
import sys
import tempfile
from concurrent.futures import Future
from pathlib import Path
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams, StructuredOutputsParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor import Executor
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

from tokentwin.vllmside.policy_scheduler import PolicyScheduler

_BLOCK = 32


def engine(folder: Path, overlapped: bool) -> EngineCore:
    torch.manual_seed(0)
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=512, num_hidden_layers=2, max_position_embeddings=1024, **shape)
    config.initializer_range = 0.2  # such that tokens depend on the whole context
    LlamaForCausalLM(config).save_pretrained(folder)
    arguments = EngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=1024,
        block_size=_BLOCK,
        max_num_seqs=16,
        max_num_batched_tokens=1024,
        enforce_eager=True,
        async_scheduling=overlapped,
    )
    made = arguments.create_engine_config()
    made.scheduler_config.async_scheduling = overlapped  # which vLLM turns off on CPUs
    return EngineCore(made, Executor.get_class(made), log_stats=True)


def scheduler(core: EngineCore, kv: Any, config: dict[str, Any], name: str) -> Scheduler:
    whole = copy.copy(core.vllm_config)
    whole.scheduler_config = copy.copy(whole.scheduler_config)
    whole.cache_config = copy.copy(whole.cache_config)
    whole.cache_config.enable_prefix_caching = config["enable_prefix_caching"]
    for setting, value in config["scheduler"].items():
        setattr(whole.scheduler_config, setting, value)
    whole.additional_config = {"tokentwin": {"policy": name, "scheduler": config.get("ours", {})}}
    blocks = copy.copy(kv)
    blocks.num_blocks = config["num_blocks"]
    kind = AsyncScheduler if whole.scheduler_config.async_scheduling else Scheduler
    return (kind if name == "own" else PolicyScheduler)(
        vllm_config=whole,
        kv_cache_config=blocks,
        structured_output_manager=core.structured_output_manager,
        block_size=_BLOCK,
        hash_block_size=_BLOCK,
        log_stats=True,
    )


def run(core: EngineCore, kv: Any, scenario: dict[str, Any], name: str, v2: bool) -> dict[str, Any]:
    core.scheduler = made = scheduler(core, kv, scenario["config"], name)
    made.use_v2_model_runner = v2
    decide, steps, told = made.schedule, [], []

    def schedule(*arguments: Any) -> Any:
        plan = decide(*arguments)
        preempted = sorted(plan.preempted_req_ids or ())
        if plan.num_scheduled_tokens or preempted:
            steps.append([dict(plan.num_scheduled_tokens), preempted])
            told.append(what_workers_are_told(plan))
        return plan

    made.schedule = schedule
    hasher = get_request_block_hasher(_BLOCK, sha256) if scenario["config"]["enable_prefix_caching"] else None
    to_come = sorted(scenario["requests"], key=lambda given: given["step"])
    to_leave = [(given["leaves"], str(given["id"])) for given in to_come if given.get("leaves")]
    masks = StructuredOutputsParams(regex="[ab]+")
    tokens: dict[str, list[int]] = {}
    ends: dict[str, str] = {}
    cached: dict[str, int] = {}
    step = 0
    while to_come or made.has_requests() or core.batch_queue:
        while to_come and to_come[0]["step"] <= step:
            given = to_come.pop(0)
            prompt = [token for piece in given["prompt"] for token in piece_tokens(piece, tokens)]
            id = str(given["id"])
            tokens[id] = []
            core.add_request(
                Request(
                    request_id=id,
                    prompt_token_ids=prompt,
                    sampling_params=SamplingParams(
                        temperature=0, max_tokens=given["output_len"], ignore_eos=True, stop_token_ids=given["stop"],
                        extra_args=given["labels"], structured_outputs=masks if given.get("masked") else None,
                    ),
                    pooling_params=None,
                    block_hasher=hasher,
                    priority=given["priority"],
                    arrival_time=1000.0 + given["id"] / 64,
                    cache_salt=given["salt"],
                )
            )  # fmt: skip
        for when, id in to_leave:
            if when == step:
                core.abort_requests([id])
        outputs, _ = core.step_fn()
        for of_client in (outputs or {}).values():
            for output in of_client.outputs:
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    ends[output.request_id] = str(output.finish_reason)
                if output.prefill_stats is not None:
                    cached[output.request_id] = output.prefill_stats.num_cached_tokens
        step += 1
        if step > 20_000:
            raise RuntimeError("no end")
    return {"steps": steps, "told": told, "tokens": tokens, "ends": ends, "cached": cached}


def what_workers_are_told(plan: Any) -> dict[str, Any]:
    """Return what workers are told of a step, except tokens; numbers of blocks are compared, but not which blocks."""
    new, cached = plan.scheduled_new_reqs, plan.scheduled_cached_reqs
    return {
        "new": {one.req_id: [one.num_computed_tokens, len(one.block_ids[0]), one.prefill_token_ids] for one in new},
        "cached": {
            id: [computed, outputs, len(blocks[0]) if blocks else 0]
            for id, computed, outputs, blocks in zip(
                cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids, strict=True
            )
        },
        "resumed": sorted(cached.resumed_req_ids),
        "all": cached.all_token_ids,
        "finished": sorted(plan.finished_req_ids),
    }


class NoModel:
    """An executor without workers, which returns arbitrary tokens for the requests that the scheduler samples."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core

    def execute_model(self, plan: Any, non_block: bool = False) -> Future[Any]:
        requests = self._core.scheduler.requests
        ids = list(plan.num_scheduled_tokens)
        sampled = []
        for id in ids:
            request = requests[id]
            place = request.num_computed_tokens
            sampled.append([] if request.is_prefill_chunk else [(place * 7 + sum(map(ord, id))) % 500])
        made: Future[Any] = Future()
        numbers = {id: number for number, id in enumerate(ids)}
        made.set_result(
            ModelRunnerOutput(
                req_ids=ids, req_id_to_index=numbers, sampled_token_ids=sampled, logprobs=None,
                prompt_logprobs_dict={}, pooler_output=[],
            )
        )  # fmt: skip
        self._sampled = made
        return made

    def sample_tokens(self, masks: Any, non_block: bool = False) -> Future[Any]:
        return self._sampled


def piece_tokens(piece: list[Any], tokens: dict[str, list[int]]) -> list[int]:
    """Return prompt tokens: a number of tokens of a named text, or of a request's answer so far."""
    name, count = piece
    if name.startswith("out:"):
        return tokens.get(name[4:], [])[:count]
    seed = sum(map(ord, name)) + 31 * len(name)
    return [(seed * 7919 + index * index * 31 + index * 17) % 500 + 3 for index in range(count)]


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    init_none_hash(sha256)
    with tempfile.TemporaryDirectory() as folder:
        core = engine(Path(folder), asked["overlapped"])
        kv = core.scheduler.kv_cache_config
        if asked.get("v2"):
            core.model_executor, shut_down = NoModel(core), core.model_executor.shutdown
        answers = []
        for scenario in asked["scenarios"]:
            answers.append(
                {name: run(core, kv, scenario, name, asked.get("v2", False)) for name in scenario["policies"]}
            )
            Path(sys.argv[2]).write_text(json.dumps(answers))
        if asked.get("v2"):
            shut_down()
        else:
            core.shutdown()


if __name__ == "__main__":
    main()
