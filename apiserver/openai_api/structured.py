"""The constraints on an answer: OpenAI's `response_format`, and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field, StrictBool, model_validator

from tokentwin.apiserver.openai_api.grammar_writer import Constraint
from tokentwin.apiserver.openai_api.limited import Limited
from tokentwin.realengine.grammar import ANY_OBJECT
from tokentwin.serving.data_file import parse_json

_MOST_OBJECTS = 64  # braces in a text at which a schema may begin


class JsonSchema(Limited):
    """OpenAI's wrapper of a schema; every schema is enforced, so `name`, `description` and `strict` have no effect."""

    model_config = ConfigDict(populate_by_name=True)
    name: Annotated[str, Field(min_length=1, max_length=64)]
    described: dict[str, Any] = Field(alias="schema")
    description: str | None = None
    strict: StrictBool | None = None


class ResponseFormat(Limited):
    """The required form of an answer: any text, a JSON object, or JSON that follows a schema."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _schema_by_type(self) -> ResponseFormat:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("type json_schema needs json_schema, and no other type takes it")
        return self

    @property
    def constraint(self) -> Constraint:
        """The constraint on the answer; empty for any text."""
        if self.type == "text":
            return {}
        return {"json": ANY_OBJECT if self.json_schema is None else self.json_schema.described}


def _parsed(schema: Any) -> Any:
    """Return a schema that is given as text, as vLLM takes it, as an object."""
    return parse_json(schema.encode()) if isinstance(schema, str) else schema


def schema_in(text: str) -> dict[str, Any] | None:
    """Return the last JSON schema of an object that is written in `text`; None if there is none.

    Clients that ask for any JSON object describe it so to the model, which a twin does not have.
    """
    decoder, found, at = json.JSONDecoder(), None, text.find("{")
    for _ in range(_MOST_OBJECTS):
        if at < 0:
            break
        try:
            value, end = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            end = at + 1
        else:
            if isinstance(value.get("properties"), dict) and value.get("type", "object") == "object":
                found = value
        at = text.find("{", end)
    return found


class StructuredOutputs(Limited):
    """A constraint: a JSON schema, a regular expression, a list of possible answers, or a grammar."""

    model_config = ConfigDict(populate_by_name=True)
    by_schema: Annotated[dict[str, Any], BeforeValidator(_parsed)] | None = Field(None, alias="json")
    json_object: StrictBool | None = None
    regex: Annotated[str, Field(min_length=1, max_length=10_000)] | None = None
    choice: (
        Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1024, fail_fast=True)]
        | None
    ) = None
    grammar: Annotated[str, Field(min_length=1, max_length=1 << 16)] | None = None
    disable_any_whitespace: StrictBool = False  # JSON never has white space here

    @model_validator(mode="after")
    def _one_of_them(self) -> StructuredOutputs:
        given = [self.by_schema, self.regex, self.choice, self.grammar, self.json_object or None]
        if given.count(None) != len(given) - 1:
            raise ValueError("give one of json, regex, choice, grammar, json_object")
        return self

    @property
    def constraint(self) -> Constraint:
        """The constraint on the answer."""
        if self.by_schema is not None or self.json_object:
            return {"json": ANY_OBJECT if self.by_schema is None else self.by_schema}
        if self.grammar is not None:
            return {"grammar": self.grammar}
        return {"regex": self.regex or "|".join(map(re.escape, self.choice or ()))}
