"""The process that writes grammars and a twin's answers: `python -m tokentwin.apiserver.openai_api.grammar_process`.

It reads a constraint or an order for an answer from each line of its input, and writes the result or an error on each
line of its output, all in JSON. For a twin its arguments are the folder of the tokenizer and the size of the
vocabulary. Before the first result it writes an empty line, when it is ready.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

from tokentwin.realengine.grammar import grammar_of_rules, json_grammar, regex_grammar
from tokentwin.serving.errors import UserError

_WRITERS: dict[str, Callable[[Any], Any]] = {
    "json": json_grammar,
    "regex": regex_grammar,
    "grammar": grammar_of_rules,
}


def _answer(line: str) -> dict[str, Any]:
    """Return the result for the constraint or order in `line`, or the arguments of the UserError that refuses it."""
    ((kind, given),) = json.loads(line).items()
    try:
        return {"written": _WRITERS[kind](given)}
    except UserError as error:
        return {"error": [error.field, error.value, error.remedy]}


def main() -> None:
    """Answer the lines of the input until it ends."""
    if len(sys.argv) > 1:
        from tokentwin.apiserver.structured_filler import StructuredFiller  # only a twin needs it

        filler = StructuredFiller(sys.argv[1], int(sys.argv[2]))
        _WRITERS["answer"] = lambda order: filler.write(**order)
    print(flush=True)
    for line in sys.stdin:
        print(json.dumps(_answer(line)), flush=True)


if __name__ == "__main__":
    main()
