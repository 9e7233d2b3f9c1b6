"""A medium that writes one HTML file from the blocks of a page. Light or dark follows the browser; print is light.

All content is escaped. The file needs no network: plotly.js is inside, once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from html import escape
from pathlib import Path
from typing import IO, Any

import plotly.graph_objects as go
import yaml
from plotly.offline import get_plotlyjs

from tokentwin.calibration.trust import Trust
from tokentwin.dashboard.in_words import in_words
from tokentwin.dashboard.sheet import Fact
from tokentwin.dashboard.shown import prose, sentence
from tokentwin.serving.answers.report import Column, Table

_OF_OURS = re.compile(r"<(?!br>|/?b>|/?extra>)")  # a tag in a figure's text that none of the charts writes

_STYLE, _DRAW = (Path(__file__).with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
_LINE = 24  # length of a name that stays on a line, in characters
_PAIR, _CARDS = "420px", "260px"


def write_document(out: IO[bytes], title: str, blocks: Iterable[str]) -> None:
    """Write the file: `title` as its heading, then the blocks."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: tokentwin</title>',
        f'<meta name="viewport" content="width=device-width"><style>\n{_STYLE}</style>',
        f"<script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{escape(title)}</h1>",
        *blocks,
        f"<script>\n{_DRAW}</script></body></html>\n",
    ]
    out.write("\n".join(parts).encode())


class Document:
    """A `Sheet` whose blocks are HTML."""

    def __init__(self) -> None:
        self.blocks: list[str] = []

    def badge(self, trust: Trust) -> None:
        level, reason = trust
        self.blocks.append(f'<p class="badge {level}"><b>{escape(level)}</b>{_inline(sentence(reason))}</p>')

    def heading(self, text: str, trust: Trust | None, help: str | None = None) -> None:
        self.blocks.append(f"<h2{_title(help)}>{_inline(text)}</h2>")

    def text(self, content: str, soft: bool = False) -> None:
        if content:
            self.blocks.append(f'<p class="soft">{_inline(content)}</p>' if soft else f"<p>{_inline(content)}</p>")

    def warning(self, content: str) -> None:
        self.blocks.append(f'<p class="warning">{_inline(content)}</p>')

    def facts(self, figures: Iterable[Fact]) -> None:
        self.blocks.append('<div class="facts">')
        for name, value, band, help in figures:
            text = escape(f"{value} ({band})" if band else value)
            self.blocks.append(f"<div{_title(help)}><span>{escape(name)}</span><b>{text}</b></div>")
        self.blocks.append("</div>")

    def code(self, text: str) -> None:
        self.blocks.append(f"<pre>{escape(text)}</pre>")

    def settings(self, values: Any) -> None:
        """Write settings as YAML; a text is written unchanged."""
        self.code(values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False, allow_unicode=True))

    def beside(self, count: int) -> Sequence[AbstractContextManager[None]]:
        """Return two large or a few small places, to be entered one after another."""
        grid = f'<div class="grid" style="--least:{_PAIR if count == 2 else _CARDS}">'
        ends = [(grid if at == 0 else "", "</div>" if at == count - 1 else "") for at in range(count)]
        return [self._within(f"{first}<div>", f"</div>{last}") for first, last in ends]

    def fold(self, title: str) -> AbstractContextManager[None]:
        return self._within(f"<details><summary>{escape(title)}</summary>", "</details>")

    def figure(
        self,
        plot: go.Figure,
        key: str,
        text: str,
        trust: Trust | None,
        help: str | None = None,
        *,
        small: bool = False,
    ) -> None:
        """Write a figure under its heading and its badge: a place for it, and its JSON, escaped for the script."""
        drawn = go.Figure(plot).update_layout(template="none", autosize=True)
        content = json.dumps(_plain(json.loads(drawn.to_json()))).replace("<", "\\u003c")
        with self._within("<figure>", "</figure>"):
            if small:
                self.blocks.append(f"<figcaption{_title(help)}>{_inline(text)}</figcaption>")
            else:
                self.heading(text, None, help)
            if trust is not None:
                self.badge(trust)
            seen = f'role="img" aria-label="{escape(in_words(plot))}"'
            self.blocks.append(f'<div {seen} style="height:{drawn.layout.height}px"></div>')
            self.blocks[-1] += f'<script type="application/json" class="figure">{content}</script>'

    def table(self, table: Table, **how: Any) -> None:
        """Write a table."""
        if not table.rows:
            return
        texts = table.texts(page=True)
        kinds = [_kind(column, [row[at] for row in texts]) for at, column in enumerate(table.columns)]
        titles = zip(table.titles, table.columns, kinds, strict=True)
        heads = "".join(f"<th{kind}{_title(column.help)}>{escape(title)}</th>" for title, column, kind in titles)
        body = "".join(f"<tr>{''.join(map(_cell, row, kinds))}</tr>" for row in texts)
        self.blocks.append(
            f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'
        )

    @contextmanager
    def _within(self, opening: str, closing: str) -> Iterator[None]:
        self.blocks.append(opening)
        yield
        self.blocks.append(closing)


def _inline(text: str) -> str:
    """Return text as HTML, with bold and code from Markdown."""
    return re.sub(r"`(.+?)`", r"<code>\1</code>", re.sub(r"\*\*(.+?)\*\*", r"<b>\1</b>", escape(prose(text))))


def _cell(text: str, kind: str) -> str:
    return f"<td{kind}>{escape(text)}</td>"


def _plain(value: Any) -> Any:
    """Return a figure's JSON in which only tags of our charts remain: Plotly reads tags and entities in any text."""
    if isinstance(value, str):
        return _OF_OURS.sub("&lt;", value.replace("&", "&amp;"))
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value


def _kind(column: Column, texts: Sequence[str]) -> str:
    """Return the class of a column: numbers, names that stay on a line, or sentences."""
    if column.right:
        return ""
    return ' class="long"' if max(map(len, texts)) > _LINE else ' class="text"'


def _title(help: str | None) -> str:
    """Return the attribute for help on hover."""
    return f' title="{escape(help)}"' if help else ""
