"""Saved answers with one field wrong: every field of the first levels, and one in `_EVERY` of those below."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from tests.tokentwin.hostile.case import Case
from tests.tokentwin.hostile.wrong import HUGE, Wrong, wrong_documents
from tokentwin.dashboard.bundled import ANSWERS

_EVERY = 97  # of the leaves below
_EXPORT = "export a.json --to html -o a.html"
_FREE = (
    "inputs",
    "deployment",
    "vllm_serve",
    "settings",
    "both",
    "feasible",
)  # of anything; what follows from the rest


def cases() -> Iterator[Case]:
    seen = set()
    for known in json.loads(ANSWERS.read_text(encoding="utf-8")):
        answer = known["answer"]
        kind = next(name for name in ("recommendation", "tallies", "counterfactuals") if name in answer)
        if kind in seen:
            continue
        seen.add(kind)
        yield from _of(answer)
        text = json.dumps(answer)
        yield _case(text.replace("{", '{"schema_version": 1, ', 1), "schema_version", "twice")
        yield _case(text[:-9], "is not json", "cut short")
        yield _case(json.dumps({**answer, "schema_version": 2}), "schema_version", "of a later version")
    for text, says in (("", "is not json"), ("[]", "cannot be exported"), ("{}", "cannot be exported")):
        yield _case(text, says, text)
    yield _case("[" * 10_000 + "]" * 10_000, "nested too deeply", "deep")
    yield _case('{"recommendation": \ud83d'.encode("utf-8", "replace").decode(), "is not json", "half a character")


def _of(answer: dict[str, Any]) -> Iterator[Case]:
    for at, wrong in enumerate(wrong_documents(answer, skipped=_FREE, unknown=False)):
        huge = isinstance(wrong.value, int) and abs(wrong.value) == HUGE  # but a number
        if not huge and (len(wrong.way) == 1 or at % _EVERY == 0):
            yield _written(wrong)


def _written(wrong: Wrong) -> Case:
    files = {"a.json": lambda path: path.write_text(json.dumps(wrong.document))}
    return Case(_EXPORT, files, (f"{wrong.names}|is not json",), str(wrong))


def _case(text: str, says: str, wrong: str) -> Case:
    return Case(_EXPORT, {"a.json": text}, (says,), wrong)
