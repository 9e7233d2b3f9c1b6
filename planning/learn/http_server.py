"""A server behind a URL, whose answers are recorded in a folder, so that an interrupted session can be resumed."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from time import monotonic
from typing import Any

from tokentwin.planning.bench.client import bench
from tokentwin.planning.bench.request import BenchTarget
from tokentwin.planning.learn.answers import Answer, Counted
from tokentwin.planning.learn.questions import Question
from tokentwin.planning.learn.reported import counted, read_page, running, sglang_blocks, sglang_settings, vllm_settings
from tokentwin.planning.learn.server import TimeIsUp
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload
from tokentwin.traces.recording import Recording

_COUNTED = "counted.json"  # beside a recording: what the server's metrics counted meanwhile


class Interrupted(Exception):
    """Ctrl-C was pressed while a question was sent."""


@dataclass
class HttpServer:
    """A server with OpenAI's API. Each answer is a recording in `folder`, in a folder named after its question.

    Attributes:
        model: name of the model to ask for; None for the first that the server lists
        seconds: time for questions, after which none is sent
        say: called with a line for each question
        counts: whether the server's metrics are read before and after each question
        asked_s: time that was spent on questions
    """

    target: BenchTarget
    folder: Path
    model: str | None = None
    seconds: float = float("inf")
    say: Callable[[str], None] = lambda line: None
    counts: bool = False
    asked_s: float = field(default=0.0, init=False)

    def ask(self, question: Question) -> Answer:
        """Return the recorded answer, or send the question and record it.

        Raises TimeIsUp if no time is left, and Interrupted after Ctrl-C.
        """
        place = self.folder / question.name
        if (place / "runs.parquet").is_file():
            recording = Recording.load(place)
            if recording.run["status"] == "complete" and _same(recording.workload(), question.workload):
                return self._loaded(question, place)
        if self.asked_s >= self.seconds:
            raise TimeIsUp
        began = monotonic()
        before = self._get("/metrics") if self.counts else ""
        if others := running(before):
            self.say(f"{others} {'request' if others == 1 else 'requests'} of others running: they disturb the answer")
        status = bench(question.workload, self.target, place, model=self.model, overwrite=True)
        if status != "complete":
            raise Interrupted
        if self.counts and (seen := counted(before, self._get("/metrics"))) is not None:
            (place / _COUNTED).write_text(json.dumps(seen._asdict()) + "\n", encoding="utf-8")
        took_s = monotonic() - began
        self.asked_s += took_s
        self.say(f"asked {question.name}, {question.reveals}: {took_s:.1f} s")
        return self._loaded(question, place)

    def _loaded(self, question: Question, place: Path) -> Answer:
        answer = Answer.load(question, place)
        if not self.counts or not (place / _COUNTED).is_file():
            return answer
        return replace(answer, counted=Counted(**json.loads((place / _COUNTED).read_text(encoding="utf-8"))))

    def reported(self) -> dict[str, Any]:
        """Return the settings that the server reports: in its metrics, or SGLang in `/server_info`; else empty."""
        metrics = self._get("/metrics")
        if settings := vllm_settings(metrics):
            return settings
        for page in ("/server_info", "/get_server_info"):  # the second is the name in older releases
            if settings := sglang_settings(self._json(page)):
                return settings
        return sglang_blocks(metrics)

    def longest(self) -> int | None:
        """Return the maximum length of a sequence in tokens, if the server's list of models states it."""
        models = self._json("/v1/models").get("data") or []
        lengths = [one.get("max_model_len") for one in models if self.model in (None, one.get("id"))]
        return next((length for length in lengths if isinstance(length, int)), None)

    def _json(self, path: str) -> dict[str, Any]:
        """Return the JSON object at `path`; empty if there is none."""
        try:
            content = json.loads(self._get(path) or "{}")
        except ValueError:
            return {}
        return content if isinstance(content, dict) else {}

    def _get(self, path: str) -> str:
        """Return the text at `path`; empty if there is none."""
        try:
            return read_page(self.target.url + path, self.target.api_key)
        except (OSError, ValueError):
            return ""


def check_folder(folder: Path, url: str, overwrite: bool) -> None:
    """Create the folder for a twin of the server at `url`.

    Raises UserError if it holds the twin of another server, or a finished one that may not be replaced.
    """
    about = folder / "asked.json"
    if about.is_file():
        asked = json.loads(about.read_text(encoding="utf-8")).get("url")
        if asked != url:
            raise UserError("out", str(folder), f"holds answers of {asked}; choose another directory")
    if (folder / "learnt.json").is_file() and not overwrite:
        raise UserError(
            "out", str(folder), "already holds a twin; replace it with --force, or choose another directory"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        about.write_text(json.dumps({"url": url}) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError("out", str(folder), f"cannot be written: {error.strerror}") from None


def _same(asked: Workload | None, workload: Workload) -> bool:
    return asked is not None and [(r.id, r.prompt_len, r.output_len) for r in asked.requests] == [
        (r.id, r.prompt_len, r.output_len) for r in workload.requests
    ]
