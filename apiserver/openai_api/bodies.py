"""The bodies of requests, from the first byte to the tokens of the prompt, within limits of memory.

Parsed JSON takes many times the bytes of its body, and tokenising a long text takes seconds. So all long bodies
together have a budget of bytes, and few of them are parsed and tokenised at a time. A short body never waits for them.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import TypeVar

import msgspec
from aiohttp import web
from pydantic import BaseModel, ValidationError

from tokentwin.apiserver.openai_api.refusal import Refusal, invalid, malformed

_BUDGET = 32 << 20  # bytes of all long bodies under way, if the limit of a single body is not larger
_LONG = 1 << 14  # bytes from which a body counts, waits for its turn, and is tokenised in a thread
_VERY_LONG = 1 << 17
_LONG_AT_A_TIME = 2
_VERY_LONG_AT_A_TIME = 1
_MOST_VALUES = 1 << 19  # numbers, texts and so on in a body, counted by its commas

_READ = "body"  # key of a request whose body was read before

Kind = TypeVar("Kind", bound=BaseModel)


class Given:
    """The complete body of a request."""

    def __init__(self, data: bytearray, threads: ThreadPoolExecutor) -> None:
        self._data = data
        self._threads = threads
        self._is_long = len(data) >= _LONG
        self.parsed_s = 0.0  # seconds in which nothing else ran

    def parse(self, kind: type[Kind]) -> Kind:
        """Parse the body, and drop its bytes. Raises Refusal if it is not valid."""
        data, self._data = self._data, bytearray()
        if data.count(b",") > _MOST_VALUES:
            raise Refusal(413, f"the body has more than {_MOST_VALUES} commas; send less")
        gc.disable()  # a search for cycles in a million new objects takes seconds
        began_s = monotonic()
        try:
            return kind.model_validate_json(data)
        except ValidationError as error:
            raise invalid(error) from None
        finally:
            gc.enable()
            self.parsed_s = monotonic() - began_s

    async def apart(self, tokenise: Callable[[], list[int]]) -> list[int]:
        """Return the tokens of the body; a long body is tokenised in a thread, so that other requests do not wait.

        A thread cannot be cancelled. If the client leaves, the body keeps its turn until the thread has ended.
        """
        if not self._is_long:
            return tokenise()
        tokens = asyncio.get_running_loop().run_in_executor(self._threads, tokenise)
        try:
            return await asyncio.shield(tokens)
        except asyncio.CancelledError:
            await asyncio.wait([tokens])
            raise


@dataclass(slots=True, eq=False)
class _Unfinished:
    """A body that is being read; `counted` of its bytes are in the budget."""

    deadline: asyncio.Timeout
    counted: int = 0
    gave_way: bool = False


class Bodies:
    """The bodies of requests; each has at most `limit` bytes, and must arrive within `within_s` seconds.

    If the budget is used up, the longest body that has not arrived completely gives way. So a client is refused only
    by clients who have sent at least as much.
    """

    def __init__(self, limit: int, within_s: float) -> None:
        self._limit = limit
        self._within_s = within_s
        self._left = max(_BUDGET, 4 * limit)  # bytes
        self._unfinished: list[_Unfinished] = []  # in the order of arrival
        self._long = asyncio.Semaphore(_LONG_AT_A_TIME)
        self._very_long = asyncio.Semaphore(_VERY_LONG_AT_A_TIME)
        self._threads = ThreadPoolExecutor(_LONG_AT_A_TIME + _VERY_LONG_AT_A_TIME, "tokenise")

    @asynccontextmanager
    async def take(self, request: web.Request) -> AsyncIterator[Given]:
        """Yield the body of `request`, which must be JSON; in the block it is parsed and tokenised.

        Raises Refusal if the body does not arrive, or if there is no memory for it.
        """
        mine = _Unfinished(asyncio.timeout(self._within_s))
        try:
            given = Given(data := await self._read(request, mine), self._threads)
            turns = self._turns(len(data))
            del data
            if turns is None:
                yield given
                return
            await turns.acquire()
            try:
                yield given
            finally:  # others may run for as long as they had to wait
                asyncio.get_running_loop().call_later(given.parsed_s, turns.release)
        finally:
            self._left += mine.counted

    async def field_of(self, request: web.Request, names: Sequence[str]) -> str | None:
        """Return the first of `names` that is a field of the body; None if none is. The body can be taken afterwards.

        Raises Refusal if the body does not arrive, or is not a JSON object.
        """
        mine = _Unfinished(asyncio.timeout(self._within_s))
        try:
            request[_READ] = body = await self._read(request, mine)
        finally:
            self._left += mine.counted
        try:
            fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        except (msgspec.MsgspecError, RecursionError):
            raise malformed("the body is not a JSON object; send one") from None
        return next((name for name in names if name in fields), None)

    def close(self) -> None:
        """End the threads when they have nothing to do."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _read(self, request: web.Request, mine: _Unfinished) -> bytearray:
        if request.content_type != "application/json":
            raise malformed(f"Content-Type: {request.content_type} is not read; send application/json")
        if (coding := request.headers.get("Content-Encoding", "identity").lower()) != "identity":
            raise Refusal(415, f"Content-Encoding: {coding[:40]} is not read; send the body as it is")
        body: bytearray = request.get(_READ, bytearray())
        if not body and request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if len(body) >= _LONG:
            self._count(mine, len(body))
        self._unfinished.append(mine)
        try:
            async with mine.deadline:
                while chunk := await request.content.readany():
                    body += chunk
                    if len(body) > self._limit:
                        raise Refusal(413, f"the body has more than {self._limit} bytes; send less")
                    if len(body) >= _LONG:
                        self._count(mine, len(body))
        except TimeoutError:
            if mine.gave_way:
                raise _no_memory() from None
            raise Refusal(408, f"the body did not come within {self._within_s:g} s; send it faster") from None
        except web.RequestPayloadError:
            raise malformed("the body is not what its head says: see its length and encoding") from None
        finally:
            self._unfinished.remove(mine)
        return body

    def _count(self, mine: _Unfinished, bytes_so_far: int) -> None:
        self._left -= bytes_so_far - mine.counted
        mine.counted = bytes_so_far
        while self._left < 0:
            longest = max(self._unfinished, key=lambda body: body.counted)
            self._left += longest.counted
            longest.counted, longest.gave_way = 0, True
            if longest is mine:
                raise _no_memory()
            longest.deadline.reschedule(asyncio.get_running_loop().time())

    def _turns(self, size: int) -> asyncio.Semaphore | None:
        if size < _LONG:
            return None
        return self._very_long if size >= _VERY_LONG else self._long


def _no_memory() -> Refusal:
    return Refusal(503, "too many long bodies are under way; try again soon", retry_after_s=1)
