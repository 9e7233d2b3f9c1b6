"""A look at a server as a document: the layers of the server, and whether they are still those of its twin."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import ClassVar

import pyarrow as pa

from tokentwin.serving.answers.document import Document, Part, fact
from tokentwin.serving.answers.report import CHANGE, NUMBER, Column, Line, Table
from tokentwin.serving.errors import UserError
from tokentwin.serving.whole_file import write_whole
from tokentwin.traces.document_table import table_of

FILE = "watched.json"
_MANY = 1000  # percent, from which on a factor is easier to read
FEWEST = 20  # minimum number of requests for a verdict on a server's own traffic


class Layer(Part):
    """A layer of the server, as it was seen now and as its twin has it."""

    layer: str = fact("name of the layer")
    seen: float = fact("value seen now")
    twin: float = fact("value of the twin")
    unit: str = fact("unit of both")
    allowed_pct: float = fact("change that is not called drift", "%")
    at_most: bool = fact("true if the twin's value is an upper limit, so that less is no drift", default=False)

    @classmethod
    def of(cls, layer: str, seen: float, twin: float, unit: str, allowed_pct: float, at_most: bool = False) -> Layer:
        """Return a layer from plain values."""
        return cls(layer=layer, seen=seen, twin=twin, unit=unit, allowed_pct=allowed_pct, at_most=at_most)

    @property
    def change_pct(self) -> float:
        """The change against the twin in percent; 100 if only the twin's value is 0."""
        if self.twin == 0:
            return 100.0 * (self.seen != 0)
        return 100 * (self.seen / self.twin - 1)

    @property
    def change(self) -> str:
        """The change against the twin in words."""
        return f"{self.change_pct:+.0f} %" if self.change_pct < _MANY else f"{self.seen / self.twin:,.0f} times as long"

    @property
    def drifted(self) -> bool:
        return (self.change_pct if self.at_most else abs(self.change_pct)) > self.allowed_pct


class WatchedServer(Document):
    """One look at a server, and what has changed since its twin was learnt."""

    what: ClassVar[str] = "look at a server"
    where: ClassVar[str] = FILE

    url: str = fact("URL of the server")
    at: str = fact("time of the look")
    layers: tuple[Layer, ...] = fact("layers of the server")
    requests: int | None = fact("requests of other users that ended; null if the look sent its own", default=None)

    @classmethod
    def now(cls, url: str, layers: Sequence[Layer], requests: int | None = None) -> WatchedServer:
        """Return a look that ends now."""
        at = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        return cls(url=url, at=at, layers=tuple(layers), requests=requests)

    @property
    def judged(self) -> bool:
        """True if the look saw enough for a verdict: a layer that has changed, or enough requests."""
        return bool(self.drifted) or self.requests is None or self.requests >= FEWEST

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
        if not self.judged:
            return f"No verdict: {self.requests} requests ended meanwhile, and fewer than {FEWEST} tell too little"
        if not self.drifted:
            return "The server behaves as its twin"
        changes = ", ".join(f"{layer.layer} {layer.change}" for layer in self.drifted)
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


def keep(folder: Path, watched: WatchedServer, metrics: Path | None) -> None:
    """Write the look into the twin's folder, and its metrics, if asked, to a file for Prometheus."""
    write_whole(folder / FILE, lambda file: file.write_text(watched.dumps(), encoding="utf-8"), overwrite=True)
    if metrics is not None:
        write_whole(metrics, lambda file: file.write_text(watched.metrics(), encoding="utf-8"), overwrite=True)


def drift(folder: Path) -> str:
    """Return what has changed since the twin in `folder` was learnt; empty if nothing that was seen has."""
    seen = read_look(folder)
    return seen.headline() if seen is not None and seen.drifted else ""


def read_look(folder: Path) -> WatchedServer | None:
    """Return the last look at the server of the twin in `folder`; None if there was none, or it is damaged."""
    try:
        return WatchedServer.read(json.loads((folder / FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, UserError):
        return None
