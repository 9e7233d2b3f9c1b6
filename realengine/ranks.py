"""Tensor parallelism: a process for every rank, this one being rank 0.

Rank 0 has the scheduler. What it asks of its own runner it asks of the others too, in the same order, over pipes;
everything else is said by torch.distributed, NCCL on CUDA and gloo on the CPU. Each rank samples from the same
joined logits, so no token has to be sent. A rank that is lost must never be waited for: NCCL would wait for ever.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from realengine.collective import DistributedGroup
from realengine.copier import Copy
from realengine.device import LOOK_EVERY_S, Pending
from realengine.devices import require_devices
from realengine.kv_budget import KvBudget
from realengine.launched import Launched
from realengine.rank_process import ENDING_S, PATIENCE_S, meet, part, serve
from realengine.runner import ModelRunner
from realengine.step_input import StepInput
from realengine.weights import ModelFiles
from serving.deployments.config import Deployment
from serving.errors import UserError
from serving.python_process import without_main

_ON_EVERY_RANK = (
    "allocate", "keep_in_host", "warm_up", "dummy_step", "graph_mixed_steps", "time_steps", "time_operations",
)  # fmt: skip
_LAST_WORDS_S = 5.0  # how long after a failed collective a rank may take to say why, or to end


class Ranks:
    """A `ModelRunner` on each of `tensor_parallel_size` ranks, used as one. Call `close` to end the processes.

    Raises UserError when the model cannot be divided, a rank cannot be started, or one is lost. After any error the
    ranks are out of step, and all that may follow is `close`.
    """

    def __init__(self, deployment: Deployment, files: ModelFiles) -> None:
        import torch.multiprocessing as mp

        require_devices(deployment)
        size = deployment.tensor_parallel_size
        self._meeting = tempfile.TemporaryDirectory(prefix="tokentwin-ranks-")
        meeting = str(Path(self._meeting.name) / "meeting")
        spawn = mp.get_context("spawn")
        self._mine: ModelRunner | None = None
        self._lost: Exception | None = None
        self._closed = False
        self._steps = self._steps_ended = 0
        self._copies = self._copies_ended = self._copies_told = 0
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        for rank in range(1, size):
            mine, theirs = spawn.Pipe()
            arguments = (deployment, files.to_send(), rank, meeting, theirs)
            process = spawn.Process(target=serve, args=arguments, daemon=True)
            with without_main():
                process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        try:
            with self._in_step():
                self._answers()  # each is there: what ends a process early ends it before it meets the others
                meet(deployment, 0, meeting)
                self._mine = ModelRunner(deployment, files, DistributedGroup())
                self._mine.device.watch = self._watch
                self._ask("ready")
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        """What is done on every rank, and what is the same on all of them: spec, device, attention, buckets."""
        return partial(self._do, name) if name in _ON_EVERY_RANK else getattr(self._mine, name)

    def launch(self, step: StepInput) -> Launched:
        assert self._mine is not None
        with _uninterrupted(), self._in_step():
            if self._copies_told < self._copies_ended:
                self._copies_told = self._copies_ended
                self._tell("await_copies", self._copies_told)
            self._tell("launch", step)
            launched = self._mine.launch(step)
        assert launched.pending is not None
        self._steps += 1
        launched.pending = _Watched(launched.pending, self, self._steps)
        return launched

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        """On every rank, after the steps that have ended on this one; the copy is this rank's.

        Others have ended theirs before the next step is launched after this has been seen to have ended.
        """
        assert self._mine is not None
        with _uninterrupted(), self._in_step():
            self._tell("copy", self._steps_ended, list(pairs), reads)
            self._copies += 1
            return _SeenCopy(self._mine.copy(pairs, reads), self, self._copies)

    def budget(self, utilization: float) -> KvBudget:
        """That of the rank with the least room."""
        mine: KvBudget = self._do("budget", utilization)
        with self._in_step():
            return min([mine, *self._ask("last_result")], key=lambda budget: budget.num_blocks)

    def close(self) -> None:
        """End the other ranks. Graphs go first, on every rank: they hold operations of the group.

        May be called again, and after an error; then the ranks are not waited for.
        """
        if self._closed:
            return
        self._closed = True
        try:
            if self._mine is not None and self._lost is None:
                self._mine.device.synchronize()
        except Exception as error:
            self._lost = error
        for pipe in self._pipes:
            pipe.close()  # at which a rank that is well ends
        if self._lost is not None:
            for process in self._processes:
                process.kill()
        if self._mine is not None:
            self._mine.release_graphs()
        part(in_step=self._lost is None)
        if self._mine is not None:
            self._mine.close_device()
        for process in self._processes:
            process.join(timeout=ENDING_S)
            if process.is_alive():
                process.kill()
                process.join()
        self._meeting.cleanup()

    def _do(self, name: str, *arguments: object) -> Any:
        with self._in_step():
            self._tell(name, *arguments)
            return getattr(self._mine, name)(*arguments)

    def _tell(self, name: str, *arguments: object) -> None:
        self._check()
        for pipe in self._pipes:
            pipe.send((name, arguments))

    def _ask(self, name: str) -> list[Any]:
        self._tell(name)
        return self._answers()

    def _answers(self) -> list[Any]:
        """One from every rank."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            for rank, said in self._heard(LOOK_EVERY_S):
                if isinstance(said, Exception):
                    raise said
                answers[rank] = said
        return [answers[rank] for rank in sorted(answers)]

    # What ranks say on their own, and lost ranks

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """An error in here leaves the ranks out of step, for good. Where a lost rank caused it, that is raised."""
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except BaseException as error:
            lost: Exception | None = error if isinstance(error, UserError) else None
            if isinstance(error, RuntimeError | OSError):  # of a collective or a pipe, perhaps
                lost = self._last_words() or (self._silent(PATIENCE_S) if "Timed out" in str(error) else None)
            self._lost = lost or UserError(
                *self._field(),
                f"the ranks lost their order after an error ({error or type(error).__name__}); start again",
            )
            if lost is not None and lost is not error:
                raise lost from None
            raise

    def _heard(self, seconds: float) -> list[tuple[int, Any]]:
        """What ranks have said, or say within `seconds`, by rank: answers, or the exception that ended one."""
        ready = wait(self._pipes, seconds)
        return [(rank, self._said(rank, pipe)) for rank, pipe in enumerate(self._pipes, 1) if pipe in ready]

    def _said(self, rank: int, pipe: Connection) -> Any:
        try:
            kind, said = pipe.recv()
        except (EOFError, OSError):
            return self._gone(rank)
        if kind == "refused":
            return UserError(*said)
        return RuntimeError(f"rank {rank}: {said}") if kind == "failed" else said

    def _check(self) -> None:
        """Raise what has ended a rank."""
        errors = [said for _, said in self._heard(0) if isinstance(said, Exception)]
        if errors:
            raise _first(errors)

    def _watch(self, waited_s: float) -> None:
        self._check()
        if waited_s > PATIENCE_S:
            raise self._silent(waited_s)

    def _last_words(self) -> Exception | None:
        """Why a collective failed: what a rank says or the end of one, if either comes soon."""
        errors = [said for _, said in self._heard(_LAST_WORDS_S) if isinstance(said, Exception)]
        if errors:  # the first may only have been told by the loss of another, which is about to be seen
            errors += [said for _, said in self._heard(LOOK_EVERY_S) if isinstance(said, Exception)]
        return _first(errors) if errors else None

    def _gone(self, rank: int) -> UserError:
        process = self._processes[rank - 1]
        process.join(timeout=_LAST_WORDS_S)
        code = process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else "ended; see its output"
        return UserError(*self._field(), f"rank {rank} {how}; start again")

    def _silent(self, seconds: float) -> UserError:
        names = " or ".join(str(rank) for rank in range(1, len(self._pipes) + 1))
        return UserError(*self._field(), f"rank {names} has not answered for {seconds:.0f} s; start again")

    def _field(self) -> tuple[str, int]:
        return "tensor_parallel_size", len(self._pipes) + 1


class _Watched:
    """A step of rank 0 that other ranks compute with it."""

    def __init__(self, pending: Pending, ranks: Ranks, number: int) -> None:
        self._pending, self._ranks, self._number = pending, ranks, number

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> None:
        with self._ranks._in_step():
            self._pending.wait()
        self._ranks._steps_ended = max(self._ranks._steps_ended, self._number)


class _SeenCopy:
    """A copy of rank 0 that other ranks make, too; copies end in order."""

    def __init__(self, copy: Copy, ranks: Ranks, number: int) -> None:
        self._copy, self._ranks, self._number = copy, ranks, number

    def done(self) -> bool:
        if done := self._copy.done():
            self._see()
        return done

    def times_ns(self) -> tuple[int, int]:
        times_ns = self._copy.times_ns()
        self._see()
        return times_ns

    def _see(self) -> None:
        self._ranks._copies_ended = max(self._ranks._copies_ended, self._number)


def _first(errors: list[Exception]) -> Exception:
    """The cause of the others: losing a rank makes collectives fail on those that are left, which is no UserError."""
    return min(errors, key=lambda error: not isinstance(error, UserError))


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end: a rank that left half way would leave the others in the middle of a collective."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen: list[Any] = []
    before = signal.signal(signal.SIGINT, lambda *received: seen.append(received))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if callable(before):
            for received in seen:
                before(*received)
