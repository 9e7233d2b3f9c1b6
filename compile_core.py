"""Compile the hot modules of `serving` and `sim` with mypyc into `serving/_compiled`, and report the result in a line.

`make core` runs this, and `setup.py` when a wheel is built. It needs mypy and a C compiler. Without a compiled core, or
with one whose sources have changed since, everything runs in pure Python. `serving/compiled_core.py` decides which of
the two is imported.
"""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from setuptools import Distribution

from tokentwin.serving.compiled_core import BY_CHOICE, COMPILED, COMPILED_CORE, CORE, DIGEST, sources_digest

MODULES = (
    "tokentwin/serving/clients.py",
    "tokentwin/serving/contract.py",
    "tokentwin/serving/decode_set.py",
    "tokentwin/serving/kv/block_pool.py",
    "tokentwin/serving/kv/block_runs.py",
    "tokentwin/serving/kv/grouped_pool.py",
    "tokentwin/serving/kv/prefix_tree.py",
    "tokentwin/serving/kv/radix_pool.py",
    "tokentwin/serving/kv/radix_tree.py",
    "tokentwin/serving/kv/state_pool.py",
    "tokentwin/serving/policies/residents.py",
    "tokentwin/serving/policies/sglang_budget.py",
    "tokentwin/serving/policies/sglang_queue.py",
    "tokentwin/serving/policies/sglang_scheduler.py",
    "tokentwin/serving/policies/steady_decode.py",
    "tokentwin/serving/policies/vllm.py",
    "tokentwin/serving/request.py",
    "tokentwin/serving/step_plan.py",
    "tokentwin/serving/step_prices.py",
    "tokentwin/sim/clock.py",
    "tokentwin/sim/gateway.py",
    "tokentwin/sim/leap.py",
    "tokentwin/sim/replica.py",
    "tokentwin/sim/run_log.py",
    "tokentwin/sim/step_log.py",
)


def missing() -> str:
    """Return what this machine lacks for compiling; empty if it lacks nothing."""
    compiler = (os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc").split()[0]
    if shutil.which(compiler) is None:
        return "pure Python: no C compiler"
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        return "pure Python: no headers of Python for a C compiler"
    return ""


def build(folder: Path) -> None:
    """Compile the modules into `folder`; raise the errors of setuptools and mypyc."""
    from mypyc.build import mypycify

    extensions = mypycify(["--config-file=pyproject.toml", *MODULES], target_dir=str(folder / "c"))
    made = Distribution({"ext_modules": extensions})
    command = made.get_command_obj("build_ext")
    command.build_lib, command.build_temp = str(folder / "core"), str(folder / "o")
    made.run_command("build_ext")


def main() -> int:
    os.chdir(Path(__file__).parent)
    if known := CORE if CORE in (COMPILED_CORE, BY_CHOICE) else missing():
        print(known)
        return 0
    digest = sources_digest()
    with tempfile.TemporaryDirectory(dir=COMPILED.parent, prefix="_compiled-") as made:
        folder, log = Path(made), Path(made, "log")
        try:
            with log.open("w") as out, redirect_stdout(out), redirect_stderr(out):
                build(folder)
        except (Exception, SystemExit) as error:
            print(log.read_text(), file=sys.stderr)
            print(f"pure Python: the core could not be compiled: {error}")
            return 1
        (folder / "core" / DIGEST).write_text(digest)
        shutil.rmtree(COMPILED, ignore_errors=True)
        (folder / "core").rename(COMPILED)
    print("compiled core")
    return 0


if __name__ == "__main__":
    sys.exit(main())
