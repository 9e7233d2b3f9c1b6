"""Run workloads on vLLM itself, in this process, and record them: `python -m tests.vllm.live_run SCENARIO.json ...`.

Needs an environment with vLLM (`make vllm`). A scenario has `out` (the recording's directory), `model` (changes of the
tiny model's `config.json`, with random weights), `settings` (arguments of vLLM's `LLM`), and `requests`: a list of
rounds, each of which begins when the one before has ended. A request has `prompt` (token ids, or `[of, more]`: the
whole sequence of request number `of`, and ids after it), `max_tokens`, `at_step` of its round, and maybe `priority`,
`stop` (token ids), `abort_after` (steps), `adapter` (a number) and `sounds` or `pictures` (their numbers, one for each
placeholder in its own part of the prompt). A request without `max_tokens` wants an embedding.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.vllm.tiny_adapters import save_adapters
from tests.vllm.tiny_audio import save_processor, save_tokenizer, sound
from tests.vllm.tiny_model import TINY
from tests.vllm.tiny_pictures import picture
from tests.vllm.tiny_pictures import save_processor as save_processor_of_pictures

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}

from vllm import LLM, PoolingParams, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.lora.request import LoRARequest
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

_ITEMS = {"audio": ("sounds", sound), "image": ("pictures", picture)}  # by vLLM's names
SCHEDULER = "tokentwin.vllmside.recording_scheduler.RecordingScheduler"


def overlap_on_cpus() -> None:
    """Let vLLM run its overlapped loop on a CPU, where it turns that off.

    A step is computed at once there, so its tokens need no passing from one step in flight to the next. The scheduler
    and the loop are those of a GPU.
    """
    check = CpuPlatform.check_and_update_config.__func__
    make = CPUModelRunner.__init__

    def check_and_update_config(cls: type, config: Any) -> None:
        asked = config.scheduler_config.async_scheduling
        check(cls, config)
        config.scheduler_config.async_scheduling = asked

    def make_runner(runner: Any, *args: Any, **kwargs: Any) -> None:
        make(runner, *args, **kwargs)
        runner.use_async_scheduling = False

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)
    CPUModelRunner.__init__ = make_runner


def run(scenario: dict[str, Any]) -> None:
    """Run `scenario` and close its recording."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps({**TINY, **scenario.get("model", {})}))
        if "audio_config" in scenario.get("model", {}):
            save_processor(Path(folder))
        elif "vision_config" in scenario.get("model", {}):
            save_processor_of_pictures(Path(folder))
        elif not scenario.get("settings", {}).get("skip_tokenizer_init", True):
            save_tokenizer(Path(folder))
        save_adapters(Path(folder), scenario.get("adapters", 0))
        settings = {
            "model": folder, "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
            "dtype": "bfloat16", "block_size": 32, "max_model_len": 1024, "max_num_seqs": 16,
            "max_num_batched_tokens": 256, "async_scheduling": False, "scheduler_cls": SCHEDULER,
            "additional_config": {"tokentwin": {"record": scenario["out"]}},
            **scenario.get("settings", {}),
        }  # fmt: skip
        llm = LLM(**settings)
        _Driver(llm, folder).run(scenario["requests"])
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


class _Driver:
    def __init__(self, llm: LLM, folder: str) -> None:
        self._folder = folder
        self._items: dict[int, dict[str, list[int]]] = {}
        self._engine = llm.llm_engine
        self._said: dict[int, list[int]] = {}
        self._number = 0

    def run(self, rounds: list[list[dict[str, Any]]]) -> None:
        for requests in rounds:
            waiting = list(requests)
            aborts: dict[str, int] = {}
            step = 0
            while waiting or self._engine.has_unfinished_requests():
                while waiting and (step >= waiting[0].get("at_step", 0) or not self._engine.has_unfinished_requests()):
                    self._add(waiting.pop(0), aborts, step)
                for id in [id for id, at in aborts.items() if at <= step]:
                    del aborts[id]
                    self._engine.abort_request([id])
                for output in self._engine.step():
                    if output.finished and hasattr(output.outputs, "__getitem__"):
                        self._said[int(output.request_id)] += output.outputs[0].token_ids
                step += 1

    def _add(self, asked: dict[str, Any], aborts: dict[str, int], step: int) -> None:
        number, self._number = self._number, self._number + 1
        prompt = asked["prompt"]
        items = {kind: asked.get(name, []) for kind, (name, _) in _ITEMS.items()}
        if prompt and isinstance(prompt[-1], list):
            items = {kind: numbers + items[kind] for kind, numbers in self._items[prompt[0]].items()}
            prompt = self._said[prompt[0]] + prompt[1]
        self._said[number], self._items[number] = list(prompt), items
        params: Any = PoolingParams(task="embed")
        if "max_tokens" in asked:
            params = SamplingParams(
                temperature=asked.get("temperature", 1.0),
                max_tokens=asked["max_tokens"],
                ignore_eos=not asked.get("stop"),
                stop_token_ids=asked.get("stop"),
                detokenize=False,
            )
        given = TokensPrompt(prompt_token_ids=prompt)
        if any(items.values()):
            made = {kind: [_ITEMS[kind][1](item) for item in numbers] for kind, numbers in items.items() if numbers}
            given["multi_modal_data"] = made
        adapter = None
        if asked.get("adapter") is not None:
            adapter = LoRARequest(name := f"adapter{asked['adapter']}", 1 + asked["adapter"], f"{self._folder}/{name}")
        self._engine.add_request(str(number), given, params, lora_request=adapter, priority=asked.get("priority", 0))
        if "abort_after" in asked:
            aborts[str(number)] = step + asked["abort_after"]


if __name__ == "__main__":
    overlap_on_cpus()
    for path in sys.argv[1:]:
        run(json.loads(Path(path).read_text()))
