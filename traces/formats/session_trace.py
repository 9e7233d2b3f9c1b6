"""Files with sessions of agents and conversations, recognised by names in them and read by a module each.

The modules are imported when they are needed, because most runs read none of these formats.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload

if TYPE_CHECKING:
    from tokentwin.traces.formats.sessions import Assumed


class SessionTraceReader:
    """A trace reader whose module has a function `read(path, assumed)`. See `traces.formats.trace_file.TraceReader`.

    Attributes:
        name: the name of the format
        opens: characters of which one begins the file
        marks: alternatives; a file in the format has all texts of one of them within its first 64 KiB
        module: name of the module
        texts: True if the file has texts, which a tokenizer makes tokens of
    """

    def __init__(
        self, name: str, opens: str, marks: tuple[tuple[str, ...], ...], module: str, texts: bool = False
    ) -> None:
        self.name = name
        self._texts = texts
        self._opens = opens.encode()
        self._marks = [[mark.encode() for mark in texts] for texts in marks]
        self._module = module

    def matches(self, head: bytes) -> bool:
        """Return True if a file that begins with `head` is in the format."""
        first = head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
        return first in self._opens and any(all(mark in head for mark in texts) for texts in self._marks)

    def read(self, path: Path, assumed: Assumed | None = None) -> Workload:
        """Return the workload; `assumed` is what the file does not state. Raises UserError for an invalid file."""
        from tokentwin.traces.formats.sessions import NOTHING

        if assumed is not None and assumed.tokenizer is not None and not self._texts:
            raise UserError("tokenizer", None, f"is not needed, because {path.name} states tokens; leave it out")
        workload: Workload = import_module(self._module).read(path, assumed or NOTHING)
        return workload


SESSION_TRACES = (
    SessionTraceReader(
        "OpenTelemetry GenAI spans", "{", (('"resourceSpans"',),), "tokentwin.traces.formats.genai_spans"
    ),
    SessionTraceReader(
        "Dynamo", "{", (('"dynamo.request.trace.',), ('"dynamo.agent.trace.',)), "tokentwin.traces.formats.dynamo"
    ),
    SessionTraceReader(
        "Mooncake with sessions",
        "{",
        (('"session_id"', '"input_length"'),),
        "tokentwin.traces.formats.mooncake_sessions",
    ),
    SessionTraceReader(
        "AIPerf inputs",
        "{",
        (('"turns"',), ('"payloads"', '"data"')),
        "tokentwin.traces.formats.aiperf_inputs",
        texts=True,
    ),
    SessionTraceReader(
        "ShareGPT", "[{", (('"conversations"',), ('"messages"',)), "tokentwin.traces.formats.sharegpt", texts=True
    ),
)
