"""The process of a job: `python -m tokentwin.planning.jobs.worker DIRECTORY`.

It waits for a free slot (there is one for each CPU, held by a lock that is released when the process ends), runs the
task, and writes a result, or one line with the reason for its failure.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from tokentwin.planning.jobs.files import read_json, write_json
from tokentwin.planning.progress import Tell, TimeLeft
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.user_code.call_limit import end_threads, watch

Task = Callable[[dict[str, Any], Path, Tell], Any]


def _telling(directory: Path) -> Tell:
    """Return the function with which a task reports its stage and the share of its work that is done."""
    left = TimeLeft(time.monotonic())

    def tell(stage: str, share: float) -> None:
        share = min(max(share, 0.0), 1.0)
        document = {"stage": stage, "share": share, "left_s": left(share, time.monotonic())}
        write_json(directory / "progress.json", document)

    tell("starting", 0.0)
    return tell


def main(directory: Path) -> int:
    """Run the task that the directory's request names, and return the exit status."""
    os.nice(5)  # interactive processes come first
    # The process that started this one also writes this file, but may be gone by now.
    write_json(directory / "process.json", os.getpid())
    request = read_json(directory / "request.json")
    slot = _slot(directory.parent)
    watch(lambda error: _failed(directory, str(error)))
    try:
        module, _, function = request["task"].partition(":")
        task: Task = getattr(import_module(module), function)
        result = task(request["settings"], directory, _telling(directory))
        write_json(directory / "result.json", result)
    except UserError as error:
        return _failed(directory, str(error))
    except OSError as error:
        traceback.print_exc()
        return _failed(directory, f"runs: {str(directory)!r}: cannot be read or written: {reason(error)}")
    except Exception as error:
        traceback.print_exc()
        line = " ".join(str(error).split())[:300]
        return _failed(directory, f"a bug: {type(error).__name__}: {line}; {directory / 'log.txt'} has more")
    else:
        return 0
    finally:
        slot.close()


def _slot(root: Path) -> IO[str]:
    """Return a slot as soon as one is free; there is one slot for each CPU."""
    slots = [(root / f".slot-{number}").open("w") for number in range(len(os.sched_getaffinity(0)))]
    while True:
        for slot in slots:
            try:
                fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return slot
        time.sleep(0.2)


def _failed(directory: Path, error: str) -> int:
    write_json(directory / "outcome.json", {"state": "failed", "error": error})
    return 1


if __name__ == "__main__":
    status = main(Path(sys.argv[1]))
    end_threads()
    sys.exit(status)
