"""The request bodies of OpenAI's API; an unsupported field is refused by name instead of ignored.

An unsupported field is accepted with a value that has no effect, because some clients send every field with its
default.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    RootModel,
    StrictBool,
    Tag,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from tokentwin.apiserver.openai_api.grammar_writer import Constraint
from tokentwin.apiserver.openai_api.kv_transfer import KvTransferParams
from tokentwin.apiserver.openai_api.limited import Limited, at_most
from tokentwin.apiserver.openai_api.structured import ResponseFormat, StructuredOutputs, schema_in
from tokentwin.apiserver.openai_api.tools import Calls, NamedTool, ToolChoice, call_schema, parameters_of

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
MOST_LOGPROBS = 20  # maximum number of alternatives returned with a token: OpenAI's limit, and vLLM's default
_MOST_BIASED = 1024
_MOST_ALLOWED = 4096  # token ids in `allowed_token_ids`
_MOST_METADATA = 16  # OpenAI's limit
MOST_MESSAGES = 1 << 14  # also parts of a message
MOST_TOOLS = 1024

Token = Annotated[int, Field(strict=True, ge=0, le=_INT32)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Label = Annotated[str, Field(max_length=1024)]
_Penalty = Annotated[Number, Field(ge=-2, le=2)]
_Truncation = Annotated[int, Field(strict=True, ge=-1, le=_INT32)]
_Stops = Annotated[
    list[Annotated[str, Field(strict=True, min_length=1, max_length=1024)]],
    Field(max_length=16, fail_fast=True),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given or []),
]


def _kind_of(prompt: Any) -> str | None:
    """Return the kind of a prompt by its first item, so that error messages are about the kind that was meant."""
    if isinstance(prompt, str):
        return "as text"
    if not isinstance(prompt, list):
        return None
    first = prompt[0] if prompt else None
    if isinstance(first, str):
        return "as texts"
    return "as lists of tokens" if isinstance(first, list) else "as tokens"


_Tokens = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
Prompt = Annotated[
    Annotated[str, Tag("as text")]
    | Annotated[_Tokens, Tag("as tokens")]
    | Annotated[list[str], Field(fail_fast=True), Tag("as texts")]
    | Annotated[list[_Tokens], Field(fail_fast=True), Tag("as lists of tokens")],
    Discriminator(_kind_of, "prompt_type", "must be a string or a list"),
]


def _token_id(text: str) -> str:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError("is no token id")
    return text


def neutral(*values: Any) -> Any:
    """Return the type of an unsupported field, which accepts only `values`, because these have no effect."""

    def check(value: Any) -> Any:
        if not any(value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in values):
            raise ValueError("is not supported; leave it out")
        return value

    return Annotated[Any, BeforeValidator(check)]


def _by_engine(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    try:
        return check(value)
    except ValidationError:
        raise ValueError("must be at least 0, or an object with such a number for each engine, by its index") from None


_Shown = Annotated[Number, Field(ge=0)]
_ByEngine = Annotated[_Shown | Annotated[dict[Label, _Shown], Field(min_length=1)], WrapValidator(_by_engine)]


class MetricsByHand(RootModel[dict[Label, _ByEngine]]):
    """The body of `PUT /admin/metrics`: by metric, its number, or its number for each engine by index."""


class StreamOptions(Limited):
    """The field `stream_options` of a request."""

    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # vLLM's option, which GuideLLM sets: usage so far in each chunk


_INPUT = {
    *("prompt", "messages", "tools", "documents", "chat_template_kwargs", "metadata", "logit_bias", "bad_words"),
    *("allowed_token_ids", "response_format", "structured_outputs", "vllm_xargs", "mm_processor_kwargs"),
}
_GUIDED = ("json", "regex", "choice", "grammar")


class Generation(Limited):
    """The fields that both endpoints have, with OpenAI's and vLLM's names."""

    model: Annotated[str, Field(max_length=256)] | None = None
    n: Annotated[int, Field(strict=True, ge=1, le=_INT32)] | None = None
    max_tokens: Annotated[int, Field(strict=True, ge=0, le=_INT32)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0, le=_INT32)] = 0
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    stream_interval: Annotated[int, Field(strict=True, ge=1, le=_INT32)] | None = None
    user: Annotated[str, Field(max_length=256)] | None = None
    request_id: Annotated[str, Field(pattern=r"^[ -~]{0,128}$")] = ""
    priority: Annotated[int, Field(strict=True, ge=-_INT32, le=_INT32)] = 0
    kv_transfer_params: KvTransferParams | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = None

    # Sampling
    temperature: Annotated[Number, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=_INT32)] | None = None
    min_p: Annotated[Number, Field(ge=0, le=1)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-_INT64, le=_INT64)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    repetition_penalty: Annotated[Number, Field(gt=0)] | None = None
    logit_bias: Annotated[dict[Annotated[str, AfterValidator(_token_id)], Number], at_most(_MOST_BIASED)] | None = None
    bad_words: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=128, fail_fast=True)]
        | None
    ) = None
    allowed_token_ids: Annotated[_Tokens, Field(max_length=_MOST_ALLOWED)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    # The end of an answer, and the form of its text
    stop: _Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[Token], Field(max_length=128, fail_fast=True)] | None = None
    include_stop_str_in_output: StrictBool = False
    ignore_eos: StrictBool = False
    skip_special_tokens: StrictBool = True
    return_token_ids: StrictBool | None = False
    return_tokens_as_token_ids: StrictBool | None = False
    prompt_logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_LOGPROBS)] | None = None

    # The prompt
    truncate_prompt_tokens: _Truncation | None = None
    truncation_side: Literal["left", "right"] | None = None

    # Fields without effect here
    session_id: Label | None = None
    spaces_between_special_tokens: StrictBool = True
    return_token_offsets: StrictBool | None = False  # vLLM ignores this and the next at these endpoints, too
    detokenize: StrictBool | None = None
    include_reasoning: StrictBool | None = None
    vllm_xargs: dict[str, Any] | None = None  # for plugins; ours, the policies inside vLLM, read a tenant
    mm_processor_kwargs: dict[str, Any] | None = None  # for images and sounds
    guided_decoding_backend: Label | None = None
    guided_whitespace_pattern: Label | None = None

    # Fields that are not supported
    use_beam_search: neutral(False) = False  # type: ignore[valid-type]
    length_penalty: neutral(1.0) = 1.0  # type: ignore[valid-type]
    logprob_token_ids: neutral(None, []) = None  # type: ignore[valid-type]
    ec_transfer_params: neutral(None, {}) = None  # type: ignore[valid-type]
    mm_payload: neutral("tensors") = "tensors"  # type: ignore[valid-type]
    repetition_detection: neutral(None) = None  # type: ignore[valid-type]
    return_mm_kwargs: neutral(None, False) = None  # type: ignore[valid-type]
    routed_experts_prompt_start: neutral(0) = 0  # type: ignore[valid-type]
    thinking_token_budget: neutral(None) = None  # type: ignore[valid-type]
    watermarking: neutral(None, False) = None  # type: ignore[valid-type]

    @model_validator(mode="before")
    @classmethod
    def _guided(cls, given: Any) -> Any:
        """Read the names that vLLM's structured outputs had in older releases."""
        names = {f"guided_{name}": name for name in _GUIDED}
        if not isinstance(given, dict) or given.keys().isdisjoint(names):
            return given
        guided = {names[name]: given[name] for name in names if given.get(name) is not None}
        if guided and given.get("structured_outputs"):
            raise ValueError(f"give either structured_outputs or guided_{next(iter(guided))}")
        others = {name: value for name, value in given.items() if name not in names}
        return {**others, **({"structured_outputs": guided} if guided else {})}

    @field_validator("stream_options")
    @classmethod
    def _of_a_stream(cls, options: StreamOptions | None, info: ValidationInfo) -> StreamOptions | None:
        if options is not None and info.data.get("stream") is False:
            raise ValueError("is for streams; leave it out, or set stream to true")
        return options

    @field_validator("prompt_logprobs")
    @classmethod
    def _of_a_whole(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top is not None and info.data.get("stream"):
            raise ValueError("are not in a stream; leave it out, or set stream to false")
        return top

    @model_validator(mode="after")
    def _structured_once(self) -> Generation:
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise ValueError("give either response_format or structured_outputs")
        return self

    @property
    def constraint(self) -> Constraint:
        """The constraint on the answer; empty for any text."""
        if self.structured_outputs is not None:
            return self.structured_outputs.constraint
        return {} if self.response_format is None else self.response_format.constraint

    def schema_in_prompt(self) -> dict[str, Any] | None:
        """Return the JSON schema that the prompt describes to the model; None if it has none."""
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """The maximum number of tokens to generate; None if the client does not state it."""
        return self.max_tokens

    @property
    def alternatives(self) -> int | None:
        """The number of alternatives returned with each output token; None if no log-probabilities are wanted."""
        raise NotImplementedError

    @property
    def prompt_alternatives(self) -> int | None:
        """The number of alternatives returned with each token of the prompt; None if its logprobs are not wanted."""
        return self.prompt_logprobs

    @property
    def drawn(self) -> int:
        """The number of answers to generate to each prompt; `n` of them are returned."""
        return self.n or 1

    @property
    def drawn_by(self) -> str:
        """The name of the field that states `drawn`."""
        return "best_of" if self.drawn > (self.n or 1) else "n"

    def drop_input(self) -> None:
        """Drop the fields that can be long, and that only the prompt and the constraint needed."""
        for name in _INPUT & type(self).model_fields.keys():
            setattr(self, name, None)


class CompletionRequest(Generation):
    """The body of `POST /v1/completions`; `prompt` is a text, a list of token ids, or a list of either kind."""

    prompt: Prompt | None = None
    echo: StrictBool | None = False
    logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_LOGPROBS)] | None = None
    add_special_tokens: StrictBool = True

    best_of: Annotated[int, Field(strict=True, ge=1, le=_INT32)] | None = None
    prompt_embeds: neutral(None) = None  # type: ignore[valid-type]
    suffix: neutral(None) = None  # type: ignore[valid-type]

    @field_validator("best_of")
    @classmethod
    def _chosen_from(cls, best_of: int | None, info: ValidationInfo) -> int | None:
        n = info.data.get("n") or 1
        if best_of is not None and best_of < n:
            raise ValueError(f"must be at least n, which is {n}")
        if best_of is not None and best_of > n and info.data.get("stream"):
            raise ValueError("needs whole answers; leave it out, or set stream to false")
        return best_of

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """The list of all prompts."""
        prompt = self.prompt if self.prompt is not None else []
        several = isinstance(prompt, list) and not isinstance(next(iter(prompt), None), int)
        return prompt if several else [prompt]  # type: ignore[return-value]

    def schema_in_prompt(self) -> dict[str, Any] | None:
        texts = [prompt for prompt in self.prompts if isinstance(prompt, str)]
        return schema_in("\n".join(texts))

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def prompt_alternatives(self) -> int | None:
        return self.logprobs if self.prompt_logprobs is None and self.echo else self.prompt_logprobs

    @property
    def drawn(self) -> int:
        return self.best_of or self.n or 1


class Part(Limited):
    """A part of a message's content; only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(Limited):
    """One message of a conversation; extra fields go to the model's chat template."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | Annotated[list[Part], Field(max_length=MOST_MESSAGES, fail_fast=True)] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the message as templates expect it: with its content as one text, and calls' arguments as objects."""
        content = self.content
        text = "\n".join(part.text for part in content) if isinstance(content, list) else content or ""
        role = "system" if self.role == "developer" else self.role  # templates know only the older name
        extra = dict(self.model_extra or {})
        if isinstance(calls := extra.get("tool_calls"), list):
            extra["tool_calls"] = list(map(_call_for_template, calls))
        return {**extra, "role": role, "content": text}


def _call_for_template(call: Any) -> Any:
    """Return a tool call whose arguments are an object, if they are one in JSON: templates write them as JSON again."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments := function.get("arguments"), str):
        return call
    with suppress(ValueError, RecursionError):  # they may be nested too deeply
        return {**call, "function": {**function, "arguments": json.loads(arguments or "{}")}}
    return call


class _Chat(Limited):
    """Messages, and the options for turning them into a prompt with the model's chat template."""

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MOST_MESSAGES, fail_fast=True)]
    tools: Annotated[list[dict[str, Any]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    add_special_tokens: StrictBool = False
    chat_template_kwargs: dict[str, Any] | None = None
    documents: Annotated[list[dict[str, str]], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    reasoning_effort: Label | None = None
    chat_template: neutral(None) = None  # type: ignore[valid-type]
    media_io_kwargs: neutral(None, {}) = None  # type: ignore[valid-type]

    @field_validator("continue_final_message")
    @classmethod
    def _goes_on_or_begins(cls, goes_on: bool, info: ValidationInfo) -> bool:
        if goes_on and info.data.get("add_generation_prompt"):
            raise ValueError("needs add_generation_prompt false: one message goes on, or another begins")
        return goes_on

    def for_template(self) -> dict[str, Any]:
        """Return the arguments of `Texts.chat_text`; as in vLLM, the template also gets two fields of the body."""
        given = {"documents": self.documents, "reasoning_effort": self.reasoning_effort}
        of_body = {name: value for name, value in given.items() if value is not None}
        return {
            "messages": [message.for_template() for message in self.messages],
            "tools": self.tools,
            "add_generation_prompt": self.add_generation_prompt,
            "continue_final_message": self.continue_final_message,
            "special": self.add_special_tokens,
            "more": {**(self.chat_template_kwargs or {}), **of_body},
        }


class ChatRequest(_Chat, Generation):
    """The body of `POST /v1/chat/completions`."""

    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, le=_INT32)] | None = None
    logprobs: StrictBool | None = False
    top_logprobs: Annotated[int, Field(strict=True, ge=0, le=MOST_LOGPROBS)] | None = None

    parallel_tool_calls: StrictBool | None = True
    metadata: Annotated[dict[str, str], at_most(_MOST_METADATA)] | None = None
    store: StrictBool | None = None
    service_tier: Label | None = None
    safety_identifier: Label | None = None
    prompt_cache_key: Label | None = None

    tool_choice: ToolChoice | None = None
    echo: neutral(False) = False  # type: ignore[valid-type]
    return_prompt_text: neutral(None, False) = None  # type: ignore[valid-type]

    @field_validator("tool_choice")
    @classmethod
    def _of_the_tools(cls, choice: ToolChoice | None, info: ValidationInfo) -> ToolChoice | None:
        if choice in (None, "none", "auto"):
            return choice
        if not (tools := info.data.get("tools")):
            raise ValueError("needs tools")
        known = parameters_of(tools)
        if isinstance(choice, NamedTool) and choice.function.name not in known:
            raise ValueError(f"names none of the tools, which are {', '.join(known)}")
        return choice

    @field_validator("top_logprobs")
    @classmethod
    def _beside_logprobs(cls, top: int | None, info: ValidationInfo) -> int | None:
        if top and not info.data.get("logprobs"):
            raise ValueError("needs logprobs true")
        return top

    @property
    def calls(self) -> Calls | None:
        """The tool calls of which the answer must consist; None if no tool must be called."""
        if isinstance(self.tool_choice, NamedTool):
            return Calls(self.tool_choice.function.name)
        return Calls(None) if self.tool_choice == "required" else None

    @property
    def constraint(self) -> Constraint:
        if (calls := self.calls) is not None:
            known = parameters_of(self.tools or [])
            return {"json": call_schema(known, calls.name, self.parallel_tool_calls is False)}
        return super().constraint

    def schema_in_prompt(self) -> dict[str, Any] | None:
        return schema_in("\n".join(message.for_template()["content"] for message in self.messages))

    @property
    def role(self) -> str:
        """The role of the answer's message: `assistant`, or the role of the last message if the answer continues it."""
        return "assistant" if self.add_generation_prompt else self.messages[-1].role

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs or 0 if self.logprobs else None


class TokenizeText(Limited):
    """The body of `POST /tokenize` for a text."""

    model: Annotated[str, Field(max_length=256)] | None = None
    prompt: str
    add_special_tokens: StrictBool = True
    return_token_strs: StrictBool | None = False


class TokenizeChat(_Chat):
    """The body of `POST /tokenize` for a chat."""

    model: Annotated[str, Field(max_length=256)] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_token_strs: StrictBool | None = False


def _kind_of_body(body: Any) -> str:
    return "as a chat" if isinstance(body, dict) and "messages" in body else "as a text"


class TokenizeRequest(RootModel[TokenizeText | TokenizeChat]):
    """The body of `POST /tokenize`."""

    root: Annotated[
        Annotated[TokenizeText, Tag("as a text")] | Annotated[TokenizeChat, Tag("as a chat")],
        Discriminator(_kind_of_body),
    ]


class DetokenizeRequest(Limited):
    """The body of `POST /detokenize`."""

    model: Annotated[str, Field(max_length=256)] | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]
