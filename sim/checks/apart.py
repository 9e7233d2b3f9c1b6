"""A check of a user's code in a process of its own, which is ended after a time limit, whatever the code does.

The process is `python -m tokentwin.sim.checks.apart FILE TASK ARGUMENTS`. It runs the function TASK (`module:function`)
with ARGUMENTS, which are JSON, and pickles what it returns, or the UserError that it raises, to FILE.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from time import sleep
from typing import Any

from tokentwin.serving.errors import UserError
from tokentwin.serving.python_process import module_command, module_environment
from tokentwin.serving.user_code.call_limit import GRACE_S, Fault, lasting_threads, watch


def run_apart(task: str, limit_s: float, *arguments: Any) -> Any:
    """Return what `task` returns. Raises the UserError that it raises, and `Fault` if it hangs."""
    with TemporaryDirectory(prefix="tokentwin-") as folder:
        answer = Path(folder, "answer")
        command = module_command("tokentwin.sim.checks.apart", str(answer), task, json.dumps(arguments))
        try:
            subprocess.run(command, env=module_environment(), timeout=limit_s, check=False)
        except subprocess.TimeoutExpired:
            raise Fault(f"is under way after {limit_s:g} s, the limit of the whole check") from None
        if not answer.exists():
            raise Fault("ends the process in which it is checked")
        result = pickle.loads(answer.read_bytes())
    if isinstance(result, Exception):
        raise result
    return result


def main(answer: Path, task: str, arguments: str) -> None:
    """Run `task` and write its answer; end the process even if threads go on."""

    def tell(result: object) -> None:
        answer.write_bytes(pickle.dumps(result))

    watch(lambda error: tell(Fault(f"{error.value} {error.remedy}")))
    module, _, function = task.partition(":")
    try:
        result = getattr(import_module(module), function)(*json.loads(arguments))
        sleep(GRACE_S if lasting_threads() else 0.0)
        threads = lasting_threads()
        tell(Fault(f"starts threads that do not end: {threads}") if threads else result)
    except UserError as error:
        tell(error)
    except KeyboardInterrupt:
        os._exit(130)
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
