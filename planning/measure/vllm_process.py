"""vLLM in a separate process, in its own environment.

`make vllm` builds the environment in .venv-vllm; $TOKENTWIN_VLLM can name another environment.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokentwin.planning.home import home
from tokentwin.planning.plan.vllm_command import vllm_options
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.errors import UserError
from tokentwin.serving.user_code.plugins import located
from tokentwin.vllmside.replay_messages import Begin
from tokentwin.vllmside.scheduler_settings import VLLM_SETTINGS

_ROOT = Path(__file__).parents[3]
_VARIABLE = "TOKENTWIN_VLLM"
_CPU_BLOCK = 32  # tokens in a KV block; vLLM's attention on a CPU needs a multiple of it
_ENDING_S = 10.0  # time in which the process may end by itself before it is killed
_SEEN_EVERY_S = 0.2  # maximum time until Ctrl-C is noticed while the process works


def vllm_python() -> Path:
    """Return the Python of the environment with vLLM. Raises UserError if there is none."""
    stated = os.environ.get(_VARIABLE)
    python = (Path(stated) if stated else _ROOT / ".venv-vllm") / "bin" / "python"
    if not python.is_file():
        remedy = f"has no bin/python; run `make vllm` in the checkout, or set {_VARIABLE} to an environment with vLLM"
        raise UserError(_VARIABLE, str(python.parent.parent), remedy)
    return python


class VllmProcess:
    """A process with vLLM as engine number `number`; `gpus` is its CUDA_VISIBLE_DEVICES, if given.

    Its first message, once vLLM is loaded, is `About`, with the deployment as vLLM has resolved it. Calls raise
    UserError for a deployment that vLLM cannot serve here, with the last line of vLLM's log. Call `close` to end it.
    """

    def __init__(self, number: int, deployment: Deployment, gpus: str | None = None) -> None:
        python = vllm_python()
        words, adapters = vllm_words(deployment), _adapter_folder(deployment)
        ours, theirs = socket.socketpair()
        self.number = number
        self._folder = TemporaryDirectory(prefix="tokentwin-vllm-")
        self.folder = Path(self._folder.name)
        self._log = self.folder / "vllm.log"
        with theirs, self._log.open("w") as log:
            self._process = subprocess.Popen(
                [str(python), "-m", "tokentwin.vllmside.replay_process", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **_environment(deployment, gpus)},
                start_new_session=True,  # only this process notices Ctrl-C
            )
        self.pipe = Connection(ours.detach())
        self.send(Begin(words, deployment.model, adapters))

    def begin(self, call: str, *arguments: object) -> None:
        """Begin a call of `VllmReplayer`; `heard` returns the answer."""
        self.send((call, arguments))

    def ask(self, call: str, *arguments: object) -> Any:
        """Return the answer to a call."""
        self.begin(call, *arguments)
        return self.heard()

    def send(self, message: object) -> None:
        """Send a message to the process."""
        with suppress(OSError):  # the process has ended; `heard` raises the reason
            self.pipe.send(message)

    def heard(self) -> Any:
        """Return the next message of the process."""
        try:
            while not self.pipe.poll(_SEEN_EVERY_S):
                pass
            said = self.pipe.recv()
        except (EOFError, OSError):
            raise UserError("vllm", self._last_words(), "is why vLLM ended; mend that, and start again") from None
        if isinstance(said, UserError):
            raise said
        if isinstance(said, Exception):
            raise UserError("vllm", str(said), f"is why vLLM failed; its log ended with: {self._last_words()}")
        return said

    def close(self) -> None:
        """End the process. It may be called more than once, and after an error."""
        self.pipe.close()
        try:
            self._process.wait(_ENDING_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()

    def _last_words(self) -> str:
        lines = [line for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        errors = [line for line in lines if "Error" in line]
        return (errors or lines or ["it said nothing"])[-1].strip()


def vllm_words(deployment: Deployment) -> list[str]:
    """Return the options of the `vllm serve` command of `deployment`.

    Raises UserError for a setting that vLLM does not support, or a model that this machine does not have.
    """
    model = deployment.model
    folder = home() / "models" / "smollm2" if model == "smollm2" else Path(model).expanduser()
    if not (folder / "config.json").is_file():
        raise UserError("model", model, "has no config.json for vLLM; give smollm2, once fetched, or a model folder")
    words = ["--model", str(folder), *vllm_options(deployment.model_copy(update={"policy": "vllm"}))]
    if deployment.policy != "vllm":
        words += ["--additional-config", json.dumps({"tokentwin": _policy(deployment)})]
    if not any(folder.glob("*.safetensors")):
        words += ["--load-format", "dummy"]
    if not any(folder.glob("tokenizer*")):
        words += ["--skip-tokenizer-init"]
    if deployment.device == "cpu":
        if deployment.scheduler.block_size % _CPU_BLOCK:
            remedy = f"must be a multiple of {_CPU_BLOCK} for vLLM on a CPU"
            raise UserError("scheduler.block_size", deployment.scheduler.block_size, remedy)
        words = [word for word in words if word != "--enforce-eager"] + ["--enforce-eager"]
    return words


def _adapter_folder(deployment: Deployment) -> str:
    """Return the folder of the LoRA adapters, or an empty string; raise UserError for adapters without one."""
    if (lora := deployment.lora) is None:
        return ""
    if lora.adapters is None or lora.random_rank is not None or not Path(lora.adapters).expanduser().is_dir():
        remedy = "is no folder; vLLM needs one, with the PEFT folder of each adapter under its name"
        raise UserError("lora.adapters", lora.adapters, remedy)
    if lora.load_ms is not None:
        raise UserError("lora.load_ms", lora.load_ms, "is measured on vLLM; leave it out")
    return str(Path(lora.adapters).expanduser().resolve())


def _policy(deployment: Deployment) -> dict[str, Any]:
    """Return the configuration of our policy inside vLLM: its name, and the settings for which vLLM has no option."""
    stated = deployment.scheduler.model_dump(mode="json", exclude_defaults=True)
    own = {name: value for name, value in stated.items() if name not in VLLM_SETTINGS}
    return {"policy": located(deployment.policy), "scheduler": own}


def _environment(deployment: Deployment, gpus: str | None) -> dict[str, str]:
    """Return the environment variables with which vLLM stays in one process and sends no usage statistics."""
    devices = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return {
        **devices,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(deployment.threads),
        "OPENBLAS_NUM_THREADS": "1",  # OpenBLAS is used only to measure the machine's speed
        "HF_HUB_OFFLINE": "1",
        # From a checkout the process takes these sources; otherwise tokentwin is installed beside its vLLM.
        "PYTHONPATH": str(_ROOT) if (_ROOT / "pyproject.toml").is_file() else "",
    }
