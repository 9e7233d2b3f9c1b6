"""Grammars are compiled on a thread beside the engine's, one after the other: a large one takes longer than steps."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from realengine.grammar import Grammar, Grammars
from serving.request import Request


class GrammarCompiler:
    """What is being compiled for requests that wait for it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # once somebody needs it
        self._under_way: dict[int, tuple[Request, Future[Grammar]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def compile(self, request: Request, grammars: Grammars, written: str) -> None:
        """Begin with the grammar of `request`, which cannot run before it is there."""
        self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
        self._under_way[request.id] = request, self._thread.submit(grammars.make, written)
        request.await_grammar()

    def compiled(self, wait: bool = False) -> list[tuple[Request, Grammar]]:
        """Grammars that are there, each once, and whose they are; with `wait`, at least one if any is under way."""
        if wait and self._under_way:
            next(iter(self._under_way.values()))[1].result()
        done = [(request, future.result()) for request, future in self._under_way.values() if future.done()]
        for request, _ in done:
            self.drop(request.id)
            request.compiling = False
        return done

    def drop(self, id: int) -> None:
        """Nobody waits for the grammar of request `id` any more."""
        self._under_way.pop(id, None)

    def close(self) -> None:
        """Forget all; may be used again."""
        self._under_way.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
