"""The grammars of structured answers: no schema makes other requests wait, and no process stays behind."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tokentwin.apiserver.openai_api.grammar_writer import GrammarWriter, as_text
from tokentwin.apiserver.openai_api.refusal import Refusal
from tokentwin.realengine.grammar import json_grammar, regex_grammar
from tokentwin.serving.errors import UserError

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}


def written(*constraints: Any, within_s: float = 30.0) -> list[Any]:
    """Return the grammar or the error of each constraint, from one process."""

    async def write() -> list[Any]:
        writer = GrammarWriter(within_s)
        answers = await asyncio.gather(*map(writer.write, map(as_text, constraints)), return_exceptions=True)
        await writer.close()
        return answers

    return asyncio.run(write())


def test_a_grammar_is_the_same_as_in_this_process() -> None:
    assert written({}, {"json": SCHEMA}, {"regex": "(a|b)+"}) == ["", json_grammar(SCHEMA), regex_grammar("(a|b)+")]


@pytest.mark.parametrize(
    ("constraint", "why"),
    [
        ({"regex": "(a"}, "regex: '(a'"),
        ({"json": {"type": "number", "minimum": int("9" * 301)}}, "has a value that no grammar can express"),
    ],
)
def test_what_no_grammar_expresses_is_refused(constraint: Any, why: str) -> None:
    refused, next_one = written(constraint, {"json": SCHEMA})
    assert isinstance(refused, UserError) and why in str(refused)
    assert next_one == json_grammar(SCHEMA)


def test_a_grammar_that_takes_too_long_ends_with_its_process() -> None:
    """The next constraint gets a new process."""

    async def write() -> None:
        writer = GrammarWriter()
        await writer.write(as_text({"json": SCHEMA}))
        process, writer._within_s = writer._process, 0.0
        with pytest.raises(UserError, match="takes more than 0 s"):
            await writer.write(as_text({"regex": "a"}))
        writer._within_s = 30.0
        assert await writer.write(as_text({"regex": "a"})) == regex_grammar("a")
        assert process is not None and process is not writer._process and await process.wait() < 0
        await writer.close()

    asyncio.run(write())


def test_a_client_that_leaves_ends_the_process_of_its_grammar() -> None:
    async def write() -> None:
        writer = GrammarWriter(30.0)
        await writer.write(as_text({"json": SCHEMA}))
        process = writer._process
        left = asyncio.create_task(writer.write(as_text({"regex": "b"})))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.gather(left, return_exceptions=True)
        assert process is not None and await process.wait() < 0
        assert await writer.write(as_text({"regex": "b"})) == regex_grammar("b")
        await writer.close()

    asyncio.run(write())


def test_only_so_many_wait() -> None:
    answers = written(*({"regex": f"a{number}"} for number in range(70)))
    assert [number for number, answer in enumerate(answers) if isinstance(answer, Refusal)] == list(range(64, 70))
    assert all(isinstance(answer, str) for answer in answers[:64])


def test_answers_wait_among_the_grammars() -> None:
    async def write() -> list[Any]:
        writer = GrammarWriter(30.0)
        writer.tokenizer = "", 32_000
        try:
            asked = (writer.answer(regex_grammar("yes"), number, 0, 9) for number in range(66))
            return await asyncio.gather(*asked, return_exceptions=True)
        finally:
            await writer.close()

    answers = asyncio.run(write())
    assert all(isinstance(answer, Refusal) and answer.status == 503 for answer in answers[64:])
    assert all(isinstance(answer, list) and answer for answer in answers[:64])
