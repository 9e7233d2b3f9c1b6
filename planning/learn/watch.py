"""Whether a server still behaves as its twin: a few seconds of questions, and the layer that has changed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from planning.deployments import stated_deployment
from planning.learn import questions as ask
from planning.learn.answers import Answer
from planning.learn.document import FILE as LEARNT
from planning.learn.document import LearntServer
from planning.learn.learner import Server
from planning.learn.questions import Bounds
from planning.learn.seen_steps import decode_steps
from planning.learn.step_times import load_times
from planning.learn.twin import Setting, Twin
from serving.answers.document import Document, Part, fact
from serving.answers.report import CHANGE, NUMBER, Column, Line, Table
from serving.data_file import parse_json
from serving.errors import UserError, reason
from serving.front_door import FrontDoor
from serving.whole_file import write_whole
from traces.document_table import table_of
from traces.recording_writer import DEPLOYMENT

FILE = "watched.json"
_LONGEST = 4096  # tokens of the longest prompt
_ROWS = 16
_OWN = 0.04  # change of step times that is not called drift, beyond the twin's interval
_OUTSIDE = 0.25, 3.0  # share of a short TTFT, and milliseconds, by which the API server may change
_CACHED = 0.6  # share of the first TTFT below which a repeated prompt was cached


class Layer(Part):
    """A layer of the server, as it was seen now and as its twin has it."""

    layer: str = fact("name of the layer")
    seen: float = fact("value seen now")
    twin: float = fact("value of the twin")
    unit: str = fact("unit of both")
    allowed_pct: float = fact("change that is not called drift", "%")

    @property
    def change_pct(self) -> float:
        """The change against the twin in percent; 100 if only the twin's value is 0."""
        if self.twin == 0:
            return 100.0 * (self.seen != 0)
        return 100 * (self.seen / self.twin - 1)

    @property
    def drifted(self) -> bool:
        return abs(self.change_pct) > self.allowed_pct


class WatchedServer(Document):
    """One look at a server, and what has changed since its twin was learnt."""

    what: ClassVar[str] = "look at a server"
    where: ClassVar[str] = FILE

    url: str = fact("URL of the server")
    at: str = fact("time of the look")
    layers: tuple[Layer, ...] = fact("layers of the server")

    @property
    def tables(self) -> tuple[str, ...]:
        return ("layers",)

    def table(self, name: str) -> pa.Table:
        """Return the layers."""
        return table_of(Layer, self.layers)

    @property
    def drifted(self) -> tuple[Layer, ...]:
        """The layers that have changed."""
        return tuple(layer for layer in self.layers if layer.drifted)

    def headline(self) -> str:
        """Return the verdict in one sentence."""
        if not self.drifted:
            return "The server behaves as its twin"
        changes = ", ".join(f"{layer.layer} {layer.change_pct:+.0f} %" for layer in self.drifted)
        return f"The server has changed since its twin was learnt: {changes}"

    def report(self) -> Iterator[Line | Table]:
        yield Line(self.headline(), "headline")
        columns = [Column("layer"), Column("now", NUMBER), Column("twin", NUMBER), Column("unit")]
        columns += [Column("change", CHANGE), Column("allowed", CHANGE)]
        rows = [(one.layer, one.seen, one.twin, one.unit, one.change_pct, one.allowed_pct) for one in self.layers]
        yield Table(columns, rows, marked={(at, 4) for at, one in enumerate(self.layers) if one.drifted})

    def metrics(self) -> str:
        """Return gauges in the text format of Prometheus."""
        lines = [
            "# HELP tokentwin_twin_change_ratio Change of a layer against the twin.",
            "# TYPE tokentwin_twin_change_ratio gauge",
        ]
        lines += [
            f'tokentwin_twin_change_ratio{{layer="{one.layer}"}} {one.change_pct / 100:.6g}' for one in self.layers
        ]
        lines += ["# HELP tokentwin_twin_drift 1 if the layer has changed.", "# TYPE tokentwin_twin_drift gauge"]
        lines += [f'tokentwin_twin_drift{{layer="{one.layer}"}} {int(one.drifted)}' for one in self.layers]
        return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class KeptTwin:
    """A twin read from its folder, with the document of what was learnt."""

    twin: Twin
    learnt: LearntServer

    @classmethod
    def load(cls, folder: Path) -> KeptTwin:
        """Read a folder of `tokentwin learn`. Raises UserError if it holds no whole twin."""
        try:
            learnt = LearntServer.read(parse_json((folder / LEARNT).read_bytes()))
        except OSError as error:
            raise UserError("twin", str(folder), f"holds no {LEARNT} ({reason(error)}); make one with learn") from None
        except ValueError:
            raise UserError("twin", str(folder / LEARNT), "is damaged; learn again") from None
        times = load_times(folder)
        deployment = stated_deployment(folder / DEPLOYMENT)
        return cls(Twin(deployment, Setting.of(deployment), times, FrontDoor.load(folder)), learnt)


def look(kept: KeptTwin, server: Server, reported: dict[str, Any]) -> WatchedServer:
    """Ask the server a few questions, and compare it with its twin. `reported` are settings from its metrics."""
    twin = kept.twin
    longest = min(_LONGEST, twin.deployment.scheduler.max_model_len - 64)
    bounds = Bounds(_ROWS, longest + 64)
    lone, decoding, repeated = (
        server.ask(question)
        for question in (
            ask.two_lengths(64, longest, bounds),
            ask.plateau(_ROWS, 128, bounds),
            ask.repeated_prompt(twin.setting.replicas, bounds),
        )
    )
    allowed = 100 * (kept.learnt.high_factor * (1 + _OWN) - 1)
    short, long = _first_ms(lone, 64), _first_ms(lone, longest)
    twin_short, twin_long = _twin_ms(twin, lone, 64), _twin_ms(twin, lone, longest)
    steps = decode_steps(decoding)
    step_ms, twin_step_ms = (float(np.median(ns)) / 1e6 for ns in (steps.measured_ns, twin.step_ns(steps.sizes)))
    share, most_ms = _OUTSIDE
    layers = [
        ("decode steps", step_ms, twin_step_ms, "ms", allowed),
        ("prefill", long - short, twin_long - twin_short, "ms", allowed),
        ("API server", short, twin_short, "ms", 100 * max(share, most_ms / twin_short)),
        ("prefix caching", float(_cached(repeated)), float(twin.setting.enable_prefix_caching), "on", 0.0),
    ]
    if "num_blocks" in reported:
        layers.append(("KV blocks", reported["num_blocks"], twin.setting.num_blocks, "blocks", 0.0))
    fields = ("layer", "seen", "twin", "unit", "allowed_pct")
    return WatchedServer(
        url=kept.learnt.url,
        at=f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC",
        layers=tuple(Layer.model_validate(dict(zip(fields, layer, strict=True))) for layer in layers),
    )


def keep(folder: Path, watched: WatchedServer, metrics: Path | None) -> None:
    """Write the look into the twin's folder, and its metrics, if asked, to a file for Prometheus."""
    write_whole(folder / FILE, lambda file: file.write_text(watched.dumps(), encoding="utf-8"), overwrite=True)
    if metrics is not None:
        write_whole(metrics, lambda file: file.write_text(watched.metrics(), encoding="utf-8"), overwrite=True)


def read_look(folder: Path) -> WatchedServer | None:
    """Return the last look at the server of the twin in `folder`; None if there was none, or it is damaged."""
    try:
        return WatchedServer.read(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, UserError):
        return None


def _first_ms(answer: Answer, length: int) -> float:
    ids = _of_length(answer, length)
    return float(np.median([answer.tokens_ns[id][0] - answer.sent_ns[id] for id in ids])) / 1e6


def _twin_ms(twin: Twin, answer: Answer, length: int) -> float:
    (said,) = twin.answers([answer])
    return float(np.median([said.tokens_ns[id][0] - said.sent_ns[id] for id in _of_length(answer, length)])) / 1e6


def _of_length(answer: Answer, length: int) -> Sequence[int]:
    ids = [one.id for one in answer.as_sent.requests if one.prompt_len == length]
    if not ids:
        raise UserError("url", "the server", f"did not answer a prompt of {length} tokens; is it another server?")
    return ids


def _cached(repeated: Answer) -> bool:
    first, *again = (times[0] - repeated.sent_ns[id] for id, times in sorted(repeated.tokens_ns.items()))
    return bool(again) and float(np.median(again)) < _CACHED * float(first)
