"""The interface of a medium for answers: a page (`tokentwin.dashboard.blocks`), or a file (`html_reports.document`)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import plotly.graph_objects as go

from tokentwin.calibration.trust import Trust
from tokentwin.dashboard.shown import capitalised, sentence
from tokentwin.serving.answers.report import Report, Table


class Fact(NamedTuple):
    """A headline figure under its name, with its 90 % band if it has one, and its meaning."""

    name: str
    value: str
    band: str | None = None
    help: str | None = None


class Sheet(Protocol):
    """A medium that takes blocks from top to bottom.

    Texts may contain bold text (`**`) and code (backquotes), but no other Markdown.

    `help` is shown on hover. `beside` returns places next to each other, and `fold` a place that can be folded away;
    blocks that are shown while a place is entered stand there.
    """

    def badge(self, trust: Trust) -> None: ...
    def heading(self, text: str, trust: Trust | None, help: str | None = None) -> None: ...
    def text(self, content: str, soft: bool = False) -> None: ...
    def warning(self, content: str) -> None: ...
    def facts(self, figures: Iterable[Fact]) -> None: ...
    def code(self, text: str) -> None: ...
    def settings(self, values: Any) -> None: ...
    def beside(self, count: int) -> Sequence[AbstractContextManager[Any]]: ...
    def fold(self, title: str) -> AbstractContextManager[Any]: ...

    def figure(
        self,
        plot: go.Figure,
        key: str,
        text: str,
        trust: Trust | None,
        help: str | None = None,
        *,
        small: bool = False,
    ) -> Any: ...

    def table(self, table: Table, **how: Any) -> None: ...


def show(to: Sheet, report: Report) -> None:
    """Show a report."""
    for part in report:
        if isinstance(part, Table):
            to.text(f"**{capitalised(part.title)}**" if part.title else "")
            to.table(part)
            continue
        match part.tone:
            case "title":
                to.heading(part.text, None)
            case "warning":
                to.warning(sentence(part.text))
            case "command":
                to.code(part.text)
            case "headline":
                to.text(f"**{sentence(part.text)}**")
            case tone:
                to.text(sentence(part.text), soft=tone == "note")
