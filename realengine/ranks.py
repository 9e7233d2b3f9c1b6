"""Tensor parallelism: a process for every rank, this one being rank 0.

Rank 0 has the scheduler. What it asks of its own runner it asks of the others too, in the same order, over pipes;
everything else is said by torch.distributed, NCCL on CUDA and gloo on the CPU. Each rank samples from the same
joined logits, so no token has to be sent.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from realengine.collective import DistributedGroup
from realengine.device import require_devices
from realengine.kv_budget import KvBudget
from realengine.runner import Launched, ModelRunner
from realengine.step_input import StepInput
from realengine.weights import ModelFiles
from serving.config import Deployment
from serving.errors import UserError

_PATIENCE = timedelta(seconds=120)  # a rank that is silent for longer is taken for dead


class Ranks:
    """A `ModelRunner` on each of `tensor_parallel_size` ranks, used as one. Call `close` to end the processes.

    Raises UserError when the model cannot be divided or a rank cannot be started.
    """

    def __init__(self, deployment: Deployment, files: ModelFiles) -> None:
        import torch.multiprocessing as mp

        require_devices(deployment)
        size = deployment.tensor_parallel_size
        self._meeting = tempfile.TemporaryDirectory(prefix="tokentwin-ranks-")
        meeting = str(Path(self._meeting.name) / "meeting")
        spawn = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for rank in range(1, size):
            mine, theirs = spawn.Pipe()
            arguments = (deployment, files.to_send(), rank, meeting, theirs)
            process = spawn.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self._processes.append(process)
        try:
            _meet(deployment, 0, meeting)
            self._mine = ModelRunner(deployment, files, DistributedGroup())
            self._ask("ready")
        except BaseException:
            self._stop()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._mine, name)  # what is the same on every rank: spec, device, attention, buckets

    def launch(self, step: StepInput) -> Launched:
        with _uninterrupted():
            self._tell("launch", step)
            return self._mine.launch(step)

    def allocate(self, num_blocks: int) -> None:
        self._tell("allocate", num_blocks)
        self._mine.allocate(num_blocks)

    def budget(self, utilization: float) -> KvBudget:
        """That of the rank with the least room."""
        self._tell("budget", utilization)
        mine = self._mine.budget(utilization)
        return min([mine, *self._ask("last_result")], key=lambda budget: budget.num_blocks)

    def dummy_step(self, sizes: list[int], draw: bool = False) -> int:
        self._tell("dummy_step", sizes, draw)
        return self._mine.dummy_step(sizes, draw)

    def warm_up(self) -> None:
        self._tell("warm_up")
        self._mine.warm_up()

    def time_operations(self) -> None:
        self._tell("time_operations")
        self._mine.time_operations()

    def time_steps(self, timed: bool) -> None:
        self._tell("time_steps", timed)
        self._mine.time_steps(timed)

    def close(self) -> None:
        self._stop()
        self._mine.close()

    def _tell(self, name: str, *arguments: object) -> None:
        for pipe in self._pipes:
            self._check(pipe)
            try:
                pipe.send((name, arguments))
            except OSError:
                self._check(pipe)
                raise

    def _ask(self, name: str) -> list[Any]:
        self._tell(name)
        answers = []
        for rank, pipe in enumerate(self._pipes, 1):
            try:
                kind, answer = pipe.recv()
            except EOFError:
                raise UserError(
                    "tensor_parallel_size", len(self._pipes) + 1, f"rank {rank} ended; see its output"
                ) from None
            if kind == "error":
                raise answer
            answers.append(answer)
        return answers

    def _check(self, pipe: Connection) -> None:
        """Raise what a rank has sent unasked: its error."""
        if pipe.poll():
            try:
                raise pipe.recv()[1]
            except EOFError:
                raise UserError(
                    "tensor_parallel_size", len(self._pipes) + 1, "a rank has ended; see its output"
                ) from None

    def _stop(self) -> None:
        import torch.distributed as dist

        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(timeout=5)
            if process.is_alive():
                process.terminate()
        if dist.is_initialized():
            dist.destroy_process_group()
        self._meeting.cleanup()


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
        if seen and callable(before):
            before(*seen[0])


def _meet(deployment: Deployment, rank: int, meeting: str) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        "nccl" if deployment.device == "cuda" else "gloo",
        init_method=f"file://{meeting}",  # no port that could be taken
        rank=rank,
        world_size=deployment.tensor_parallel_size,
        timeout=_PATIENCE,
    )


def _serve(deployment: Deployment, files: ModelFiles, rank: int, meeting: str, pipe: Connection) -> None:
    """The life of ranks 1, 2, ...: do what rank 0 says until it hangs up."""
    import torch.distributed as dist

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to all; rank 0 says when to end
    try:
        _meet(deployment, rank, meeting)
        runner = ModelRunner(deployment, files, DistributedGroup())
        result: object = None
        while True:
            name, arguments = pipe.recv()
            if name in ("ready", "last_result"):
                pipe.send(("answer", result))
            else:
                result = getattr(runner, name)(*arguments)
    except (EOFError, ConnectionResetError):
        pass
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(("error", error if isinstance(error, UserError) else RuntimeError(f"rank {rank}: {error}")))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
