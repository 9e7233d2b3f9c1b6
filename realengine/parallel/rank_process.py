"""The process of a rank other than 0, which runs the calls of rank 0; how ranks join and leave their group."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections import deque
from datetime import timedelta
from multiprocessing.connection import Connection

from tokentwin.realengine.host_tier import Copy
from tokentwin.realengine.models.weights import ModelFiles
from tokentwin.realengine.parallel.tensor_parallel import DistributedGroup
from tokentwin.realengine.runner import ModelRunner
from tokentwin.realengine.step import Launched
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError

PATIENCE_S = 120.0  # a rank that does not answer for longer counts as dead
ENDING_S = 30.0  # time that ranks may take to end by themselves; on a busy machine they take seconds
_LOOK_AT_WORK_S = 0.002  # interval at which ranks check whether the work of a step has failed


def join_group(deployment: Deployment, rank: int, meeting: str) -> None:
    import torch.distributed as dist

    cuda = deployment.device == "cuda"
    dist.init_process_group(
        "nccl" if cuda else "gloo",
        init_method=f"file://{meeting}",  # a file instead of a port, which could be taken
        rank=rank,
        world_size=deployment.tensor_parallel_size,
        # Twice the time on CUDA, because NCCL's watchdog would end the process. Rank 0's own timeout is shorter, and
        # its error names the rank.
        timeout=timedelta(seconds=2 * PATIENCE_S if cuda else PATIENCE_S),
    )


def leave_group(in_step: bool) -> None:
    """Leave the process group, after all graphs were released.

    If the ranks are not `in_step`, NCCL's operations are aborted, because other ranks will not join them.
    """
    import torch.distributed as dist

    if not dist.is_initialized():
        return
    if in_step or dist.get_backend() != "nccl":
        dist.destroy_process_group()
        return
    from torch.distributed.distributed_c10d import _abort_process_group

    aborting = threading.Thread(target=_abort_process_group, daemon=True)
    aborting.start()
    aborting.join(ENDING_S)


def serve(deployment: Deployment, files: ModelFiles, rank: int, meeting: str, pipe: Connection) -> None:
    """Run rank `rank`, which is not 0: run the calls of rank 0 until rank 0 closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends Ctrl-C to all processes; rank 0 says when to end
    runner: ModelRunner | None = None
    in_step = False
    try:
        pipe.send(("answer", None))
        join_group(deployment, rank, meeting)
        runner = ModelRunner(deployment, files, DistributedGroup())
        runner.device.watch = _give_up
        _obey(runner, pipe)
    except (EOFError, ConnectionResetError):
        in_step = True
    except UserError as error:
        with contextlib.suppress(OSError):
            pipe.send(("refused", (error.field, error.value, error.remedy)))
    except Exception as error:
        with contextlib.suppress(OSError):
            pipe.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        if runner is not None:
            try:
                if in_step:
                    runner.device.synchronize()
            except Exception:
                in_step = False  # rank 0 has ended in the middle of a step
            runner.release_graphs()
            runner.close_device()
        leave_group(in_step)


def _obey(runner: ModelRunner, pipe: Connection) -> None:
    """Run the calls of rank 0.

    Raises EOFError when rank 0 closes the pipe, and the error of a step's work soon after it has happened.
    """
    result: object = None
    under_way: deque[Launched] = deque()
    copies: deque[Copy] = deque()
    steps_ended = copies_ended = 0
    while True:
        while under_way and not pipe.poll(_LOOK_AT_WORK_S):
            if under_way[0].done():
                under_way.popleft().wait()
                steps_ended += 1
        name, arguments = pipe.recv()
        if name in ("ready", "last_result"):
            pipe.send(("answer", result))
            continue
        if name == "await_copies":
            (until,) = arguments
            for _ in range(until - copies_ended):
                copies.popleft().times_ns()
            copies_ended = until
            continue
        if name == "copy":
            until, *arguments = arguments
            while steps_ended < until:
                under_way.popleft().wait()
                steps_ended += 1
            copies.append(runner.copy(*arguments))
            continue
        result = getattr(runner, name)(*arguments)
        if isinstance(result, Launched):
            under_way.append(result)


def _give_up(waited_s: float) -> None:
    if waited_s > PATIENCE_S:
        raise TimeoutError(f"its device has not answered for {waited_s:.0f} s")
