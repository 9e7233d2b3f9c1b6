"""Where an answer comes from, and how to get it again: the last block of every report of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dashboard.html_reports.document import code, details, heading, paragraph


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
