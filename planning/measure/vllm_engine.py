"""vLLM itself as the real engine: it runs in its own environment, and records as ours does.

`make vllm` builds the environment, in .venv-vllm; $TOKENTWIN_VLLM names another one.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

from planning.home import home
from planning.plan.vllm_command import vllm_options
from serving.deployments.config import Deployment, parse
from serving.errors import UserError
from serving.plugins import located
from serving.workload import Workload
from traces.parquet import write_parquet
from vllmside.replay_messages import About, Begin, Call, Ended
from vllmside.scheduler_settings import VLLM_SETTINGS

if TYPE_CHECKING:
    from realengine.offered_workload import Replayed

_ROOT = Path(__file__).parents[2]
_VARIABLE = "TOKENTWIN_VLLM"
_CPU_BLOCK = 32  # tokens in a KV block: vLLM's attention on a CPU takes multiples of it
_ENDING_S = 10.0  # how long the process may take to end by itself
_SEEN_EVERY_S = 0.2  # how often Ctrl-C is noticed while the process replays


def vllm_python() -> Path:
    """Return the Python of the environment with vLLM. Raises UserError if there is none."""
    stated = os.environ.get(_VARIABLE)
    python = (Path(stated) if stated else _ROOT / ".venv-vllm") / "bin" / "python"
    if not python.is_file():
        remedy = f"has no bin/python; run `make vllm` in the checkout, or set {_VARIABLE} to an environment with vLLM"
        raise UserError(_VARIABLE, str(python.parent.parent), remedy)
    return python


class VllmEngine:
    """vLLM, loaded, in a process of its own.

    deployment     as vLLM has resolved it, with the KV blocks that it has
    memory_report  empty: vLLM logs how it uses memory

    Raises UserError for what vLLM cannot serve here; the last line of its log is the remedy.
    """

    memory_report = ""

    def __init__(self, deployment: Deployment) -> None:
        python = vllm_python()
        words = _words(deployment)
        ours, theirs = socket.socketpair()
        self._folder = TemporaryDirectory(prefix="tokentwin-vllm-")
        self._log = Path(self._folder.name) / "vllm.log"
        with theirs, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "vllmside.replay_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_environment(deployment)},
                start_new_session=True,  # Ctrl-C is this process's to notice
            )
        self._pipe = Connection(ours.detach())
        try:
            about = cast(About, self._ask(Begin(words)))
        except BaseException:
            self.close()
            raise
        resolved = parse(Deployment, json.loads(about.deployment), where="vllm")
        self.deployment = resolved.model_copy(update={"model": deployment.model, "threads": deployment.threads})

    def warm_up(self) -> None:
        """Run steps of every size once, so that nothing is compiled or allocated later."""
        scheduler = self.deployment.scheduler
        for rows in (1, 2, scheduler.max_num_seqs // 2, scheduler.max_num_seqs):
            self.run_dummy([1] * max(rows, 1))
        self.run_dummy([min(scheduler.max_num_batched_tokens, scheduler.max_model_len - 1)])

    def run_dummy(self, sizes: Sequence[int]) -> int:
        """Run one step over rows of `sizes` tokens each, and return its time in ns."""
        return cast(int, self._ask(Call("run_dummy", (list(sizes),))))

    def record(
        self,
        workload: Workload,
        out: str | Path,
        *,
        overwrite: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Replayed:
        """Replay `workload` and write a recording to `out`.

        `progress` is called with the number of requests that have ended. Ctrl-C ends the run and writes what there is.
        """
        out = Path(out)
        if (out / "runs.parquet").exists():
            if not overwrite:
                remedy = "holds a recording; replace it with --force, or choose another directory"
                raise UserError("out", str(out), remedy)
            rmtree(out)
        offered = Path(self._folder.name) / "workload.parquet"
        write_parquet(replace(workload, requests=list(workload.requests)), offered)
        self._pipe.send(Call("replay", (str(offered), str(out.resolve()))))
        while True:
            said = self._hear()
            if not isinstance(said, Ended):
                return cast("Replayed", said)
            if progress is not None:
                progress(said.requests)

    def close(self) -> None:
        """End the process. May be called again, and after an error."""
        self._pipe.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _ask(self, message: Begin | Call) -> Any:
        with suppress(OSError):  # it has ended: what is heard next says why
            self._pipe.send(message)
        return self._hear()

    def _hear(self) -> Any:
        """Return what the process says next. Ctrl-C meanwhile stops a replay, which then says how far it came."""
        stopped = False
        while True:
            try:
                while not self._pipe.poll(_SEEN_EVERY_S):
                    pass
                said = self._pipe.recv()
                break
            except KeyboardInterrupt:
                if stopped:
                    raise
                stopped = True
                self._pipe.send("stop")
            except (EOFError, OSError):
                raise UserError("vllm", self._last_words(), "is why vLLM ended; mend that, and start again") from None
        if isinstance(said, UserError):
            raise said
        if isinstance(said, Exception):
            raise UserError("vllm", str(said), f"is why vLLM failed; its log ended with: {self._last_words()}")
        return said

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()


def _words(deployment: Deployment) -> list[str]:
    """Return the options of the `vllm serve` command of `deployment`.

    Raises UserError for what this machine or vLLM does not have.
    """
    if deployment.fleet is not None:
        raise UserError("fleet", None, "of several engines is not run on vLLM here; leave it out")
    model = deployment.model
    folder = home() / "models" / "smollm2" if model == "smollm2" else Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError("model", model, "has no config.json for vLLM; give smollm2, once fetched, or a model folder")
    words = ["--model", str(folder), *vllm_options(deployment.model_copy(update={"policy": "vllm"}))]
    if deployment.policy != "vllm":
        words += ["--additional-config", json.dumps({"tokentwin": _policy(deployment)})]
    if not any(folder.glob("*.safetensors")):
        words += ["--load-format", "dummy"]
    if deployment.device == "cpu":
        if deployment.scheduler.block_size % _CPU_BLOCK:
            remedy = f"must be a multiple of {_CPU_BLOCK} for vLLM on a CPU"
            raise UserError("scheduler.block_size", deployment.scheduler.block_size, remedy)
        words = [word for word in words if word != "--enforce-eager"] + ["--enforce-eager"]
    return words


def _policy(deployment: Deployment) -> dict[str, Any]:
    """Return what our policy is told inside vLLM: its name, and the settings that vLLM has no option for."""
    stated = deployment.scheduler.model_dump(mode="json", exclude_defaults=True)
    own = {name: value for name, value in stated.items() if name not in VLLM_SETTINGS}
    return {"policy": located(deployment.policy), "scheduler": own}


def _environment(deployment: Deployment) -> dict[str, str]:
    """Return what vLLM reads from its environment: it stays in one process and reaches for no network."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(deployment.threads),
        "OPENBLAS_NUM_THREADS": "1",  # which only tells how fast the machine is
        "HF_HUB_OFFLINE": "1",
        # Of a checkout the process takes these sources; else tokentwin is installed beside its vLLM.
        "PYTHONPATH": str(_ROOT) if (_ROOT / "pyproject.toml").is_file() else "",
    }
