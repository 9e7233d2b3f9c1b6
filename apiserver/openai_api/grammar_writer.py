"""The grammars of structured answers and, for a twin, the answers, written and checked in a process of their own.

A schema of a few hundred bytes can take a minute. The process is killed when a grammar takes too long, or when its
client leaves, so that no other request waits for it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from typing import Any

from tokentwin.apiserver.openai_api.refusal import Refusal
from tokentwin.serving.errors import UserError

_LONGEST = 1 << 26  # bytes in a line between the processes
_KEPT = 64  # number of grammars that are kept for requests with the same constraint
_MOST_WAITING = 64
_MOST_CHARACTERS = 1 << 18  # of a constraint

Constraint = dict[str, Any]
"""What an answer must follow: `{"json": schema}`, `{"regex": pattern}` or `{"grammar": rules}`; empty for any text."""


def as_text(constraint: Constraint) -> str:
    """Return the constraint as JSON; empty for any text. Raises UserError if it is too long."""
    asked = json.dumps(constraint) if constraint else ""
    if len(asked) > _MOST_CHARACTERS:
        raise UserError("structured output", None, f"has more than {_MOST_CHARACTERS} characters; simplify it")
    return asked


class GrammarWriter:
    """Writes one grammar or answer after another, each in at most `within_s` seconds.

    Attributes:
        tokenizer: for a twin, folder of the tokenizer of its answers (empty without one) and size of the vocabulary
    """

    def __init__(self, within_s: float = 5.0) -> None:
        self.tokenizer: tuple[str, int] | None = None
        self._within_s = within_s
        self._turn = asyncio.Lock()
        self._waiting = 0
        self._process: Process | None = None
        self._kept: dict[str, str] = {}

    async def write(self, asked: str) -> str:
        """Return the grammar of a constraint `as_text`, for `tokentwin.realengine.grammar`; empty for any text.

        Raises UserError if the constraint is not supported, or takes too long, and Refusal if too many wait.
        """
        if not asked:
            return ""
        if asked not in self._kept:
            written = await self._in_turn(asked)
            if len(self._kept) == _KEPT:
                self._kept.pop(next(iter(self._kept)))
            self._kept[asked] = str(written)
        return self._kept[asked]

    async def answer(self, grammar: str, seed: int, least: int, most: int) -> list[int]:
        """Return a twin's answer that follows `grammar`; the arguments are those of `StructuredFiller.write`.

        Raises UserError if the answer cannot be completed, or takes too long, and Refusal if too many wait.
        """
        order = json.dumps({"answer": {"grammar": grammar, "seed": seed, "least": least, "most": most}})
        tokens: list[int] = await self._in_turn(order)
        return tokens

    async def close(self) -> None:
        """Kill the process; the next grammar starts another."""
        process, self._process = self._process, None
        if process is not None:
            if process.returncode is None:
                process.kill()
            await process.communicate()

    async def _in_turn(self, asked: str) -> Any:
        if self._waiting == _MOST_WAITING:
            raise Refusal(503, "too many structured answers wait for their grammar", retry_after_s=1)
        self._waiting += 1
        try:
            async with self._turn:
                return await self._ask(asked)
        finally:
            self._waiting -= 1

    async def _ask(self, asked: str) -> Any:
        answer = None
        try:
            if self._process is None:
                command = [
                    sys.executable,
                    "-m",
                    "tokentwin.apiserver.openai_api.grammar_process",
                    *map(str, self.tokenizer or ()),
                ]
                self._process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, limit=_LONGEST)
                await self._process.stdout.readline()  # type: ignore[union-attr]  # it is ready
            async with asyncio.timeout(self._within_s):
                self._process.stdin.write(asked.encode() + b"\n")  # type: ignore[union-attr]
                answer = json.loads(await self._process.stdout.readline())  # type: ignore[union-attr]
        except (TimeoutError, ValueError, ConnectionError):
            remedy = f"takes more than {self._within_s:g} s or too much memory to compile; simplify it"
            raise UserError("structured output", None, remedy) from None
        finally:
            if answer is None:  # too long, too large, or the client has left
                await self.close()
        if "error" in answer:
            raise UserError(*answer["error"])
        return answer["written"]
