"""vLLM itself as the real engine. It runs in its own environment, and makes the same recordings as our engine."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from shutil import move, rmtree
from typing import TYPE_CHECKING, cast

from tokentwin.planning.measure.vllm_process import VllmProcess
from tokentwin.planning.pooling import check_pooling, refuse_pooling
from tokentwin.realengine.offered_workload import adapters_of
from tokentwin.realengine.parallel.replica_pipe import About
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.model_catalogue import pooling_model
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.workload import Workload
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.vllmside.replay_messages import Ended

if TYPE_CHECKING:
    from tokentwin.realengine.offered_workload import Replayed


class VllmEngine:
    """A loaded vLLM, in a separate process.

    Attributes:
        deployment: the deployment as vLLM has resolved it, with its number of KV blocks
        memory_report: an empty string, because vLLM logs its use of memory

    Raises UserError for a deployment that vLLM cannot serve here; its text is the last line of vLLM's log.
    """

    memory_report = ""

    def __init__(self, deployment: Deployment) -> None:
        self._process = VllmProcess(0, deployment)
        try:
            about = cast(About, self._process.heard())
        except BaseException:
            self.close()
            raise
        resolved = parse(Deployment, json.loads(about.deployment), where="vllm")
        stated = {"model": deployment.model, "threads": deployment.threads, "lora": deployment.lora}
        self.deployment = resolved.model_copy(update=stated)

    def warm_up(self) -> None:
        """Run steps of every size once, so that nothing is compiled or allocated later."""
        self._process.ask("warm_up")

    def run_dummy(self, sizes: Sequence[int]) -> int:
        """Run one step over rows of `sizes` tokens each, and return its time in ns."""
        return cast(int, self._process.ask("run_dummy", list(sizes)))

    def record(
        self,
        workload: Workload,
        out: str | Path,
        *,
        overwrite: bool = False,
        progress: Callable[[int], None] | None = None,
    ) -> Replayed:
        """Replay `workload` and write a recording to `out`.

        `progress` is called with the number of requests that have ended. Ctrl-C ends the run and writes the part that
        was run.
        """
        out = Path(out)
        check_pooling(workload, [self.deployment.model])
        if pooling_model(self.deployment.model) is None:
            refuse_pooling(workload, "vLLM with a model that generates")
        self._process.ask("check_adapters", adapters_of(workload.requests))
        if (out / "runs.parquet").exists() and not overwrite:
            remedy = "holds a recording; replace it with --force, or choose another directory"
            raise UserError("out", str(out), remedy)
        offered, made = self._process.folder / "workload.parquet", self._process.folder / "made" / out.name
        rmtree(made, ignore_errors=True)
        write_parquet(replace(workload, requests=list(workload.requests)), offered)
        self._process.begin("replay_workload", str(offered), str(made))
        stopped = False
        while True:
            try:
                said = self._process.heard()
            except KeyboardInterrupt:  # the replay ends, and then reports the requests that have ended
                if stopped:
                    raise
                stopped = True
                self._process.send("stop")
                continue
            if not isinstance(said, Ended):
                _put(made, out)
                return cast("Replayed", said)
            if progress is not None:
                progress(said.requests)

    def close(self) -> None:
        """End the process. It may be called more than once, and after an error."""
        self._process.close()


def _put(made: Path, out: Path) -> None:
    """Move the files of a recording to `out`; other files there stay. Raises UserError if they cannot be written."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        for file in sorted(made.iterdir()):
            move(file, out / file.name)
    except OSError as error:
        raise UserError("out", str(out), f"cannot be written: {reason(error)}") from None
