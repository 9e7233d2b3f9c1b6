"""The engine's end of the processes that compile grammars and keep them; see `tokentwin.realengine.grammar_process`."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Collection
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from tokentwin.realengine.grammar import Bits, library
from tokentwin.serving.request import Request

_MOST = 64  # number of processes; a new grammar takes the place of one without answers
_MOST_COMPILING = 8
_COMPILE_S = 5.0  # CPU time in which a grammar must be compiled


class Grammars:
    """The grammars of a model whose tokenizer.json is in `folder`. Raises UserError without the package llguidance."""

    def __init__(self, folder: Path, vocab_size: int, eos_ids: Collection[int]) -> None:
        library()
        self.end = np.zeros(-(-vocab_size // 32), dtype=np.int32)  # the mask that allows only the end
        for token in eos_ids:
            self.end.view(np.uint32)[token // 32] |= np.uint32(1 << token % 32)
        self._arguments = [str(_COMPILE_S), str(folder), str(vocab_size), *map(str, eos_ids)]
        self._begin()

    def _begin(self) -> None:
        self._orders, other = socket.socketpair()
        with other:
            number = other.fileno()
            command = [sys.executable, "-m", "tokentwin.realengine.grammar_process", str(number), *self._arguments]
            self._first = subprocess.Popen(command, pass_fds=[number], start_new_session=True)

    def start(self, written: str) -> GrammarProcess:
        """Begin to compile the grammar `written`, as `tokentwin.realengine.grammar` writes it, in a new process."""
        if self._first.poll() is not None:
            self._orders.close()
            self._begin()
        mine, other = socket.socketpair()
        with other, suppress(OSError):  # if the first process dies now, the new one seems to have died
            socket.send_fds(self._orders, [b"."], [other.fileno()])
        return GrammarProcess(Connection(mine.detach()), written, self.end)

    def close(self) -> None:
        """Kill all processes, whatever they do."""
        with suppress(ProcessLookupError):
            os.killpg(self._first.pid, signal.SIGKILL)
        self._first.wait()
        self._orders.close()


class GrammarProcess:
    """A process with one grammar, for the answers of any number of requests; it may have died."""

    def __init__(self, calls: Connection, written: str, end: Bits) -> None:
        self.end = end
        self.failed = False
        self.compiled = False
        self.requests: set[int] = set()
        self._calls = calls
        self._tell(written)

    def poll(self, wait: bool = False) -> bool:
        """Return whether the grammar is compiled, or never will be; with `wait`, wait for that."""
        if not self.compiled and (self.failed or self._calls.poll(None if wait else 0)):
            self._hear()
            self.compiled = True
        return self.compiled

    def call(self, id: int, method: str, *arguments: Any) -> Any:
        """Return the result of a method of `Grammar` for the answer to request `id`; None if the process has died."""
        self._tell((id, method, arguments))
        return self._hear()

    def close(self) -> None:
        self._calls.close()

    def _tell(self, message: Any) -> None:
        try:
            self._calls.send(message)
        except OSError:
            self.failed = True

    def _hear(self) -> Any:
        try:
            return None if self.failed else self._calls.recv()
        except (EOFError, OSError):
            self.failed = True


class AnswerGrammar:
    """The grammar of the answer to request `id`, and its state after the tokens so far; see `Grammar`.

    If it has failed because a call took too much work, only the end of the answer is allowed.
    """

    def __init__(self, id: int, process: GrammarProcess) -> None:
        self.failed = process.failed
        self._id = id
        self._process = process

    def mask(self, vocab_size: int) -> Bits:
        bits: Bits | None = self._call("mask", vocab_size)
        return self._process.end if bits is None else bits

    def take(self, token: int) -> bool:
        return self._call("take", token) is not False

    def advance(self, tokens: list[int]) -> int:
        return self._call("advance", tokens) or 0

    def take_back(self, tokens: int) -> None:
        if tokens:
            self._call("take_back", tokens)

    def _call(self, method: str, *arguments: Any) -> Any:
        result, failed = self._process.call(self._id, method, *arguments) or (None, True)
        self.failed = self.failed or failed
        return result


class GrammarCompiler:
    """The grammars of requests, and the requests that wait until theirs is compiled."""

    def __init__(self) -> None:
        self._processes: dict[str, GrammarProcess] = {}  # by grammar, the last used at the end
        self._under_way: dict[int, tuple[Request, Grammars, str]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def compile(self, request: Request, grammars: Grammars, written: str) -> None:
        """Begin to compile the grammar of `request`; the request cannot run before the grammar is ready."""
        self._under_way[request.id] = request, grammars, written
        request.await_grammar()
        self._process(grammars, written)

    def compiled(self, wait: bool = False) -> list[tuple[Request, AnswerGrammar]]:
        """Return newly compiled grammars with their requests; with `wait`, wait for one if any is being compiled.

        A grammar that took too much work has failed.
        """
        done: list[tuple[Request, AnswerGrammar]] = []
        for request, grammars, written in list(self._under_way.values()):
            process = self._process(grammars, written)
            if process is not None and process.poll(wait and not done):
                del self._under_way[request.id]
                request.compiling = False
                process.requests.add(request.id)
                done.append((request, AnswerGrammar(request.id, process)))
        return done

    def drop(self, id: int) -> None:
        """Drop the grammar of request `id`, which no longer needs it."""
        self._under_way.pop(id, None)
        for process in self._processes.values():
            if id in process.requests:
                process.requests.remove(id)
                process.call(id, "drop")

    def close(self) -> None:
        """Drop all grammars; the compiler may be used again."""
        self._under_way.clear()
        for process in self._processes.values():
            process.close()
        self._processes.clear()

    def _process(self, grammars: Grammars, written: str) -> GrammarProcess | None:
        """Return the process with a grammar, which is begun if there is room for it; None if there is none."""
        process = self._processes.pop(written, None)
        if process is None or (process.failed and not process.requests):
            compiling = [one for one in self._processes.values() if not one.poll()]
            wanted = {written for _, _, written in self._under_way.values()}
            idle = [key for key, one in self._processes.items() if not one.requests and key not in wanted]
            if len(self._processes) == _MOST and idle:
                self._processes.pop(idle[0]).close()
            if len(compiling) == _MOST_COMPILING or len(self._processes) == _MOST:
                return None
            process = grammars.start(written)
        self._processes[written] = process
        return process
