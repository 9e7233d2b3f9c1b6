"""Every field of vLLM's requests is taken at vLLM's default, because some clients send all fields."""

import json
import subprocess
from typing import Any

import pytest

from tests.vllm.environment import PYTHON, environment, needs_vllm
from tokentwin.apiserver.openai_api.protocol import ChatRequest, CompletionRequest, TokenizeChat


def fields(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_BOTH: dict[str, Any] = {
    **fields(
        "allowed_token_ids cache_salt ec_transfer_params frequency_penalty kv_transfer_params logit_bias "
        "logprob_token_ids min_p model presence_penalty prompt_logprobs repetition_detection repetition_penalty "
        "response_format return_mm_kwargs return_token_ids return_tokens_as_token_ids seed session_id stream_interval "
        "stream_options structured_outputs temperature thinking_token_budget top_k top_p truncate_prompt_tokens "
        "truncation_side user vllm_xargs watermarking",
        None,
    ),
    **fields(
        "echo ignore_eos include_stop_str_in_output return_token_offsets stream use_beam_search",
        False,
    ),
    **fields(
        "bad_words stop stop_token_ids",
        [],
    ),
    **fields(
        "min_tokens priority routed_experts_prompt_start",
        0,
    ),
    **fields(
        "skip_special_tokens spaces_between_special_tokens",
        True,
    ),
    "n": 1,
    "length_penalty": 1.0,
    "mm_payload": "tensors",
}
COMPLETION = {
    **_BOTH,
    **fields(
        "logprobs prompt_embeds suffix",
        None,
    ),
    "max_tokens": 16,
    "add_special_tokens": True,
}
CHAT = {
    **_BOTH,
    **fields(
        "chat_template chat_template_kwargs documents max_completion_tokens max_tokens media_io_kwargs "
        "mm_processor_kwargs reasoning_effort return_prompt_text tools",
        None,
    ),
    **fields(
        "add_special_tokens continue_final_message logprobs",
        False,
    ),
    **fields(
        "add_generation_prompt include_reasoning parallel_tool_calls",
        True,
    ),
    "tool_choice": "none",
    "top_logprobs": 0,
}
TOKENIZE = {
    **fields("chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs model tools", None),
    **fields("add_special_tokens continue_final_message return_token_strs", False),
    "add_generation_prompt": True,
}
NEUTRAL = {"repetition_penalty": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "presence_penalty": 0.0}
KINDS = {
    "completion": (CompletionRequest, {"prompt": "a"}, COMPLETION),
    "chat": (ChatRequest, {"messages": [{"role": "user", "content": "a"}]}, CHAT),
    "tokenize": (TokenizeChat, {"messages": [{"role": "user", "content": "a"}]}, TOKENIZE),
}


@pytest.mark.parametrize("endpoint", sorted(KINDS))
def test_a_default_of_vllm_is_no_reason_to_refuse(endpoint: str) -> None:
    kind, needed, defaults = KINDS[endpoint]
    for given in (defaults, {} if kind is TokenizeChat else NEUTRAL):
        for name, value in given.items():
            assert kind.model_validate_json(json.dumps({**needed, name: value})), name
        assert kind.model_validate_json(json.dumps({**needed, **given}))


@pytest.mark.vllm
@needs_vllm
def test_the_fields_are_those_of_vllm() -> None:
    program = """
import json
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
def defaults(kind):
    given = {name: field.get_default(call_default_factory=True) for name, field in kind.model_fields.items()}
    return {name: given[name] for name in given.keys() - {"messages", "prompt", "request_id"}}
print(json.dumps([defaults(CompletionRequest), defaults(ChatCompletionRequest)]))
"""
    ran = subprocess.run([PYTHON, "-c", program], capture_output=True, text=True, env=environment(), check=True)
    assert json.loads(ran.stdout.splitlines()[-1]) == [COMPLETION, CHAT]
