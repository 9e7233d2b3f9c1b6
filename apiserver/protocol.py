"""What OpenAI's clients may ask for. What is not supported is refused by name; nothing is ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StrictBool, field_validator, model_validator

from apiserver.kv_transfer import KvTransferParams
from realengine.grammar import ANY_OBJECT, json_grammar, regex_grammar

_INT32 = 2**31 - 1
_INT64 = 2**63 - 1

Token = Annotated[int, Field(strict=True, ge=0, le=_INT32)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Stops = Annotated[
    list[Annotated[str, Field(strict=True, min_length=1, max_length=1024)]],
    Field(max_length=16),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given or []),
]


def _neutral(*values: Any) -> Any:
    """A field of OpenAI's whose effect is not supported: only values without effect are taken."""

    def check(value: Any) -> Any:
        if not any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in values):
            raise ValueError("is not supported; leave it out")
        return value

    return Annotated[Any, BeforeValidator(check)]


class StreamOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")
    include_usage: StrictBool = False
    continuous_usage_stats: StrictBool = False  # vLLM's, which GuideLLM asks for: usage so far in each chunk


class JsonSchema(BaseModel):
    """OpenAI's wrapping of a schema; `name`, `description` and `strict` change nothing: every schema is kept to."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    name: Annotated[str, Field(min_length=1, max_length=64)]
    described: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: StrictBool | None = None


class ResponseFormat(BaseModel):
    """What an answer must be: any text, a JSON object, or JSON by a schema."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_by_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs json_schema, and no other type takes it")
        return self


class StructuredOutputs(BaseModel):
    """vLLM's field for the same: a JSON schema, or a regular expression."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True)
    by_schema: dict[str, Any] | None = Field(None, alias="json")
    regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> StructuredOutputs:
        if (self.by_schema is None) == (self.regex is None):
            raise ValueError("give either json or regex")
        return self


class _Generation(BaseModel):
    """What both endpoints take. Fields are OpenAI's and vLLM's, by their names."""

    model_config = ConfigDict(extra="forbid")

    model: Annotated[str, Field(max_length=256)] = ""
    max_tokens: Annotated[int, Field(strict=True, ge=1, le=_INT32)] | None = None
    min_tokens: Annotated[int, Field(strict=True, ge=0, le=_INT32)] = 0
    temperature: Annotated[Number, Field(ge=0, le=100)] | None = None
    top_p: Annotated[Number, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(strict=True, ge=-1, le=_INT32)] | None = None
    seed: Annotated[int, Field(strict=True, ge=-_INT64, le=_INT64)] | None = None
    stop: _Stops = []
    ignore_eos: StrictBool = False
    priority: Annotated[int, Field(strict=True, ge=-_INT32, le=_INT32)] = 0
    user: Annotated[str, Field(max_length=256)] = ""
    stream: StrictBool | None = False
    stream_options: StreamOptions | None = None
    return_token_ids: StrictBool | None = False
    kv_transfer_params: KvTransferParams | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None

    n: _neutral(1, None) = None  # type: ignore[valid-type]
    presence_penalty: _neutral(0, None) = None  # type: ignore[valid-type]
    frequency_penalty: _neutral(0, None) = None  # type: ignore[valid-type]
    logit_bias: _neutral({}, None) = None  # type: ignore[valid-type]

    @field_validator("user", mode="before")
    @classmethod
    def _nobody(cls, user: Any) -> Any:
        return "" if user is None else user

    @model_validator(mode="after")
    def _structured_once(self) -> _Generation:
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise ValueError("give either response_format or structured_outputs")
        return self

    @property
    def grammar(self) -> str:
        """What the answer keeps to, as `realengine.grammar` writes it; empty for any text. Raises UserError for a
        schema or an expression that cannot be kept to."""
        format, outputs = self.response_format, self.structured_outputs
        if outputs is not None and outputs.regex is not None:
            return regex_grammar(outputs.regex)
        schema = outputs.by_schema if outputs is not None else None
        if format is not None and format.type != "text":
            schema = ANY_OBJECT if format.json_schema is None else format.json_schema.described
        return "" if schema is None else json_grammar(schema)

    @property
    def limit(self) -> int | None:
        """The most tokens to generate; None if nothing is said."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """Whether the log-probability of each token is wanted."""
        raise NotImplementedError


class CompletionRequest(_Generation):
    """`POST /v1/completions`. The prompt is text or token ids."""

    prompt: str | Annotated[list[Token], Field(min_length=1)]
    logprobs: Annotated[int, Field(strict=True, ge=0, le=1)] | None = None

    echo: _neutral(False, None) = None  # type: ignore[valid-type]
    best_of: _neutral(1, None) = None  # type: ignore[valid-type]
    suffix: _neutral("", None) = None  # type: ignore[valid-type]

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None


class Part(BaseModel):
    """A piece of a message's content; only text."""

    model_config = ConfigDict(extra="forbid")
    type: Literal["text"]
    text: str


class ChatMessage(BaseModel):
    """One message of a conversation; what else it holds is for the model's chat template."""

    model_config = ConfigDict(extra="allow")
    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str | list[Part] | None = None

    def for_template(self) -> dict[str, Any]:
        """As chat templates want it: content as one text."""
        content = self.content
        text = "".join(part.text for part in content) if isinstance(content, list) else content or ""
        return {**(self.model_extra or {}), "role": self.role, "content": text}


class ChatRequest(_Generation):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(strict=True, ge=1, le=_INT32)] | None = None
    tools: list[dict[str, Any]] | None = None
    logprobs: StrictBool | None = False

    top_logprobs: _neutral(0, None) = None  # type: ignore[valid-type]
    tool_choice: _neutral("auto", "none", None) = None  # type: ignore[valid-type]
    store: _neutral(False, None) = None  # type: ignore[valid-type]

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)


class TokenizeRequest(BaseModel):
    """`POST /tokenize`: of a prompt, or of a chat."""

    model_config = ConfigDict(extra="forbid")
    model: Annotated[str, Field(max_length=256)] = ""
    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    add_special_tokens: StrictBool = True
