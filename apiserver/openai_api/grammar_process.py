"""The process that writes grammars: `python -m apiserver.openai_api.grammar_process`.

It reads a constraint from each line of its input, and writes a grammar or an error on each line of its output, all in
JSON. Before the first grammar it writes an empty line, when it is ready.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from realengine.grammar import json_grammar, regex_grammar
from serving.errors import UserError

_WRITERS: dict[str, Callable[[Any], str]] = {"json": json_grammar, "regex": regex_grammar}


def _answer(line: str) -> dict[str, Any]:
    """Return the grammar of the constraint in `line`, or the arguments of the UserError that refuses it."""
    ((kind, given),) = json.loads(line).items()
    try:
        return {"grammar": _WRITERS[kind](given)}
    except UserError as error:
        return {"error": [error.field, error.value, error.remedy]}


def main() -> None:
    """Answer the lines of the input until it ends."""
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)


if __name__ == "__main__":
    main()
