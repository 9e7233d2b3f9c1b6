"""The compilation of grammars on a thread beside the engine's, one after the other; a large one takes many steps."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from realengine.grammar import Grammar, Grammars
from serving.request import Request


class GrammarCompiler:
    """The grammars that are being compiled, for requests that wait for them."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None  # made when it is first needed
        self._under_way: dict[int, tuple[Request, Future[Grammar]]] = {}

    @property
    def busy(self) -> bool:
        return bool(self._under_way)

    def compile(self, request: Request, grammars: Grammars, written: str) -> None:
        """Begin to compile the grammar of `request`, which cannot run before it is ready."""
        self._thread = self._thread or ThreadPoolExecutor(1, "grammars")
        self._under_way[request.id] = request, self._thread.submit(grammars.make, written)
        request.await_grammar()

    def compiled(self, wait: bool = False) -> list[tuple[Request, Grammar]]:
        """Return ready grammars, each once, with their requests; with `wait`, at least one if any is under way."""
        if wait and self._under_way:
            next(iter(self._under_way.values()))[1].result()
        done = [(request, future.result()) for request, future in self._under_way.values() if future.done()]
        for request, _ in done:
            self.drop(request.id)
            request.compiling = False
        return done

    def drop(self, id: int) -> None:
        """Drop the grammar of request `id`, for which nobody waits any more."""
        self._under_way.pop(id, None)

    def close(self) -> None:
        """Drop all grammars; the compiler may be used again."""
        self._under_way.clear()
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
            self._thread = None
