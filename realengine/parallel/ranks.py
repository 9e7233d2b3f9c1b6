"""Tensor parallelism with a process for every rank; this process is rank 0.

Rank 0 has the scheduler. It repeats every call of its own runner on the runners of the other ranks, over pipes and in
the same order. All other communication goes through torch.distributed, with NCCL on CUDA and gloo on the CPU. Each rank
samples from the same joined logits, so no token has to be sent. The code must never wait for a lost rank, because NCCL
would wait for ever.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tokentwin.realengine.devices.device import LOOK_EVERY_S, Pending
from tokentwin.realengine.devices.machine import require_devices
from tokentwin.realengine.devices.memory import KvBudget
from tokentwin.realengine.host_tier import Copy
from tokentwin.realengine.models.weights import ModelFiles
from tokentwin.realengine.parallel.rank_process import ENDING_S, PATIENCE_S, join_group, leave_group, serve
from tokentwin.realengine.parallel.tensor_parallel import DistributedGroup
from tokentwin.realengine.runner import ModelRunner
from tokentwin.realengine.step import Launched
from tokentwin.realengine.step_input import StepInput
from tokentwin.realengine.undisturbed import ctrl_c_delayed
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.python_process import without_main

_ON_EVERY_RANK = (
    "allocate", "keep_in_host", "warm_up", "dummy_step", "graph_mixed_steps", "time_steps", "time_operations",
)  # fmt: skip
_LAST_WORDS_S = 5.0  # time that a rank gets after a failed collective to report why, or to end


class Ranks:
    """The `ModelRunner`s of `tensor_parallel_size` ranks, used as one runner. Call `close` to end the processes.

    Raises UserError if the model cannot be divided, if a rank cannot be started, and if a rank is lost. After any error
    the ranks may no longer have run the same calls, and only `close` may follow.
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
        self._copies = self._copies_ended = self._copies_reported = 0
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
                # wait for every rank to start, because a process with an early error never joins the group
                self._answers()
                join_group(deployment, 0, meeting)
                self._mine = ModelRunner(deployment, files, DistributedGroup())
                self._mine.device.watch = self._watch
                self._ask("ready")
        except BaseException:
            self.close()
            raise

    def __getattr__(self, name: str) -> Any:
        """Return a function that calls every rank, or an attribute of rank 0, such as spec, device and attention."""
        return partial(self._do, name) if name in _ON_EVERY_RANK else getattr(self._mine, name)

    def launch(self, step: StepInput) -> Launched:
        assert self._mine is not None
        with ctrl_c_delayed(), self._in_step():
            if self._copies_reported < self._copies_ended:
                self._copies_reported = self._copies_ended
                self._tell("await_copies", self._copies_reported)
            self._tell("launch", step)
            launched = self._mine.launch(step)
        assert launched.pending is not None
        self._steps += 1
        launched.pending = _Watched(launched.pending, self, self._steps)
        return launched

    def copy(self, pairs: Sequence[tuple[int, int]], reads: bool) -> Copy:
        """Copy blocks on every rank, after the steps that have ended on rank 0; return rank 0's copy.

        After rank 0 has noticed the end of this copy, the other ranks wait for their copies before they launch the next
        step.
        """
        assert self._mine is not None
        with ctrl_c_delayed(), self._in_step():
            self._tell("copy", self._steps_ended, list(pairs), reads)
            self._copies += 1
            return _SeenCopy(self._mine.copy(pairs, reads), self, self._copies)

    def budget(self, utilization: float) -> KvBudget:
        """Return the budget of the rank on which the fewest blocks fit."""
        mine: KvBudget = self._do("budget", utilization)
        with self._in_step():
            return min([mine, *self._ask("last_result")], key=lambda budget: budget.num_blocks)

    def close(self) -> None:
        """End the other ranks.

        Every rank first releases its graphs, because they contain operations of the process group. This method may be
        called more than once. After an error it kills the other ranks instead of waiting for them.
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
            pipe.close()  # a healthy rank ends when its pipe is closed
        if self._lost is not None:
            for process in self._processes:
                process.kill()
        if self._mine is not None:
            self._mine.release_graphs()
        leave_group(in_step=self._lost is None)
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
        """Wait for one answer from every other rank and return the answers in order."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self._pipes):
            for rank, said in self._messages(LOOK_EVERY_S):
                if isinstance(said, Exception):
                    raise said
                answers[rank] = said
        return [answers[rank] for rank in sorted(answers)]

    # Errors that ranks report, and lost ranks

    @contextlib.contextmanager
    def _in_step(self) -> Iterator[None]:
        """Note after an error in the block that the ranks are unusable from now on.

        If the loss of a rank caused the error, raise an error about that rank instead.
        """
        if self._lost is not None:
            raise self._lost
        try:
            yield
        except BaseException as error:
            lost: Exception | None = None
            if isinstance(error, UserError):
                lost = error
            elif isinstance(error, RuntimeError | OSError):  # perhaps an error of a collective or a pipe
                lost = self._last_words()
                if lost is None and "Timed out" in str(error):
                    lost = self._silence(PATIENCE_S)
            self._lost = lost or UserError(
                *self._field(),
                f"the ranks lost their order after an error ({error or type(error).__name__}); start again",
            )
            if lost is not None and lost is not error:
                raise lost from None
            raise

    def _messages(self, seconds: float) -> list[tuple[int, Any]]:
        """Return the messages that ranks have sent or send within `seconds`, each with its rank.

        A message is an answer, or the error that ended the rank.
        """
        ready = wait(self._pipes, seconds)
        return [(rank, self._message(rank, pipe)) for rank, pipe in enumerate(self._pipes, 1) if pipe in ready]

    def _message(self, rank: int, pipe: Connection) -> Any:
        try:
            kind, said = pipe.recv()
        except (EOFError, OSError):
            return self._end(rank)
        if kind == "refused":
            return UserError(*said)
        return RuntimeError(f"rank {rank}: {said}") if kind == "failed" else said

    def _check(self) -> None:
        """Raise an error if one has ended a rank."""
        errors = [said for _, said in self._messages(0) if isinstance(said, Exception)]
        if errors:
            raise _cause(errors)

    def _watch(self, waited_s: float) -> None:
        self._check()
        if waited_s > PATIENCE_S:
            raise self._silence(waited_s)

    def _last_words(self) -> Exception | None:
        """Return the cause of a failed collective, if a rank soon reports an error or ends; else None."""
        errors = [said for _, said in self._messages(_LAST_WORDS_S) if isinstance(said, Exception)]
        if errors:  # wait a little: the first error may be a mere effect of the loss of another rank
            errors += [said for _, said in self._messages(LOOK_EVERY_S) if isinstance(said, Exception)]
        return _cause(errors) if errors else None

    def _end(self, rank: int) -> UserError:
        process = self._processes[rank - 1]
        process.join(timeout=_LAST_WORDS_S)
        code = process.exitcode
        how = f"was ended by signal {-code}" if code is not None and code < 0 else "ended; see its output"
        return UserError(*self._field(), f"rank {rank} {how}; start again")

    def _silence(self, seconds: float) -> UserError:
        names = " or ".join(str(rank) for rank in range(1, len(self._pipes) + 1))
        return UserError(*self._field(), f"rank {names} has not answered for {seconds:.0f} s; start again")

    def _field(self) -> tuple[str, int]:
        return "tensor_parallel_size", len(self._pipes) + 1


class _Watched:
    """A step on rank 0, which the other ranks compute at the same time."""

    def __init__(self, pending: Pending, ranks: Ranks, number: int) -> None:
        self._pending, self._ranks, self._number = pending, ranks, number

    def done(self) -> bool:
        return self._pending.done()

    def wait(self) -> None:
        with self._ranks._in_step():
            self._pending.wait()
        self._ranks._steps_ended = max(self._ranks._steps_ended, self._number)


class _SeenCopy:
    """A copy on rank 0, which the other ranks also make; the copies of all ranks end in the same order."""

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


def _cause(errors: list[Exception]) -> Exception:
    """Return the likely cause among `errors`: a UserError, because collectives that fail after a loss raise others."""
    return min(errors, key=lambda error: not isinstance(error, UserError))
