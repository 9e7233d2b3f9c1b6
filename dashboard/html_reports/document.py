"""One HTML file, made of blocks: text, tables and figures. Light or dark follows the browser; print is light.

Every function takes text and escapes it; what it returns is HTML.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import IO, Any

import plotly.graph_objects as go
import yaml
from plotly.offline import get_plotlyjs

from calibration.provenance import Provenance
from dashboard.shown import sentence

_OF_OURS = re.compile(r"<(?!br>|/?b>|/?extra>)")  # a tag in a figure's text that none of the charts writes
_NUMBER = re.compile(r"[-+]?[\d.,]+( %| points| to [-+]?[\d.,]+)?")

_STYLE, _DRAW = (Path(__file__).with_suffix(suffix).read_text(encoding="utf-8") for suffix in (".css", ".js"))
_LINE = 24  # characters of a name that stays on a line
_PAIR, _CARDS = "420px", "260px"


def write_document(out: IO[bytes], title: str, blocks: Iterable[str]) -> None:
    """The file: `title` as its heading, then the blocks."""
    parts = [
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}: tokentwin</title>',
        f'<meta name="viewport" content="width=device-width"><style>\n{_STYLE}</style>',
        f"<script>{get_plotlyjs()}</script></head><body>",
        f"<h1>{escape(title)}</h1>",
        *filter(None, blocks),
        f"<script>\n{_DRAW}</script></body></html>\n",
    ]
    out.write("\n".join(parts).encode())


def heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str, soft: bool = False) -> str:
    return f'<p class="soft">{escape(text)}</p>' if soft else f"<p>{escape(text)}</p>"


def warning(text: str) -> str:
    return f'<p class="warning">{escape(text)}</p>'


def badge(provenance: Provenance) -> str:
    """How far a figure can be trusted, and why: the page's badge, with what is there on hover beside it."""
    mark, reason = provenance
    return f'<p class="badge {mark}"><b>{escape(mark)}</b>{escape(sentence(reason))}</p>'


def facts(values: Mapping[str, str]) -> str:
    """Headline numbers over what they are."""
    cells = "".join(f"<div><span>{escape(name)}</span><b>{escape(value)}</b></div>" for name, value in values.items())
    return f'<div class="facts">{cells}</div>'


def figure(drawn: go.Figure, provenance: Provenance, caption: str = "") -> str:
    """A figure with its badge: a place for it, and its JSON, in which nothing can end the script."""
    drawn.update_layout(template="none", autosize=True)
    content = json.dumps(_plain(json.loads(drawn.to_json()))).replace("<", "\\u003c")
    height = drawn.layout.height
    place = f'<div style="height:{height}px"></div><script type="application/json" class="figure">{content}</script>'
    title = f"<figcaption>{escape(caption)}</figcaption>" if caption else ""
    return f"<figure>{title}{badge(provenance)}{place}</figure>"


def beside(blocks: Sequence[str]) -> str:
    """Two blocks, or a few small ones, next to each other where there is room."""
    least = _PAIR if len(blocks) == 2 else _CARDS
    return f'<div class="grid" style="--least:{least}">{"".join(f"<div>{block}</div>" for block in blocks)}</div>'


def table(rows: Sequence[Mapping[str, Any]], help: Mapping[str, str] | None = None) -> str:
    """Rows under the names of their fields; numbers with four digits. `help` is what a name means, on hover."""
    if not rows:
        return ""
    names = list(dict.fromkeys(name for row in rows for name in row))
    kinds = {name: _kind([row.get(name) for row in rows]) for name in names}
    heads = "".join(f"<th{kinds[name]}{_title(help, name)}>{escape(name)}</th>" for name in names)
    body = "".join(
        "<tr>" + "".join(f"<td{kinds[name]}>{escape(number(row.get(name)))}</td>" for name in names) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table></div>'


def code(text: str) -> str:
    return f"<pre>{escape(text)}</pre>"


def details(summary: str, values: Any) -> str:
    """Settings as YAML, folded away; text is text."""
    text = values if isinstance(values, str) else yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def number(value: Any) -> str:
    """A number as people read it; a dash for none."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, int | float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 or isinstance(value, int) else f"{value:.4g}"


def _plain(value: Any) -> Any:
    """A figure's JSON in which Plotly, which reads tags and entities in any text, finds only those of our charts."""
    if isinstance(value, str):
        return _OF_OURS.sub("&lt;", value.replace("&", "&amp;"))
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return value


def _kind(values: Sequence[Any]) -> str:
    """The class of a column: numbers, names that stay on a line, or sentences."""
    texts = [value for value in values if isinstance(value, str) and not _NUMBER.fullmatch(value)]
    return (' class="long"' if max(map(len, texts)) > _LINE else ' class="text"') if texts else ""


def _title(help: Mapping[str, str] | None, name: str) -> str:
    return f' title="{escape(help[name])}"' if help and name in help else ""


def origin(
    version: str, inputs: Mapping[str, Any], page: str, command: str = "", files: Mapping[str, str] | None = None
) -> str:
    """The version, and the command that was asked; of an answer of `page` its inputs and, if there is one, a command.

    `files` are what the command reads: names and contents.
    """
    version = f"Made by tokentwin {version or 'of an unknown version'}"
    blocks = [heading("How to get it again")]
    if "command" in inputs:
        return "".join([*blocks, paragraph(f"{version} with this command:"), code(inputs["command"])])
    if command:
        kept = [details(name, text) for name, text in (files or {}).items()]
        blocks += [paragraph(f"{version}, on the {page} page. This command asks the same:"), code(command), *kept]
    else:
        blocks.append(paragraph(f"{version}, on the {page} page, with these inputs."))
    return "".join([*blocks, details("every input", dict(inputs))] if inputs else blocks)
