"""The fields of a request by the names that a text trace gives its columns: usual names, or names that a user states.

Usual names are recognised whatever their case, and with spaces, hyphens or capitals between words. They are those of
OpenAI's API, vLLM, Vidur, BurstGPT and Azure. A name whose unit nobody can know, such as `latency`, is none of them.
Nor are Mooncake's `input_length` and `output_length`, because the `timestamp` beside them is in milliseconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

from tokentwin.serving.errors import UserError

USUAL = {
    "timestamp": ("arrival_time", "arrived_at", "created_at", "date", "datetime", "request_time", "start_time"),
    "prompt_tokens": (
        "context_tokens",
        "input_len",
        "input_tokens",
        "num_input_tokens",
        "num_prefill_tokens",
        "prompt_len",
        "prompt_length",
        "request_tokens",
    ),
    "output_tokens": (
        "completion_tokens",
        "generated_tokens",
        "num_decode_tokens",
        "num_output_tokens",
        "output_len",
        "response_tokens",
    ),
}
_FIELD = {name: field for field, names in USUAL.items() for name in names}


class Columns:
    """The field of each column of a trace.

    `stated` has the column of each field; other columns are then left out. Without it, usual names are recognised.
    Raises UserError for a field that is not in `known`, and for a column that is stated for two fields.
    """

    def __init__(self, stated: Mapping[str, str], known: Sequence[str]) -> None:
        for field, column in stated.items():
            if field not in known:
                raise UserError("columns", f"{field}={column}", f"must begin with a field: {', '.join(known)}")
        self._by_column: dict[str, str] = {}
        for field, column in stated.items():
            other = self._by_column.setdefault(column, field)
            if other != field:
                raise UserError("columns", f"{field}={column}", f"is the column of {other} already; name another")
        self._known = known
        self._of_header = lru_cache(64)(self._named)  # the objects of JSON lines have few different sets of names

    def fields(self, path: Path, line: int, header: tuple[str, ...]) -> tuple[str | None, ...]:
        """Return the field of each column in the `header`, None for a column that is left out.

        Raises UserError for a stated column that is not there.
        """
        try:
            return self._of_header(header)
        except KeyError as error:
            column = error.args[0]
            remedy = f"is not a column of line {line} of {path.name}; it has {', '.join(header)[:300]}"
            raise UserError("columns", f"{self._by_column[column]}={column}", remedy) from None

    def _named(self, header: tuple[str, ...]) -> tuple[str | None, ...]:
        """Return the fields as `fields` does. Raises KeyError with a stated column that is not there."""
        if self._by_column:
            for column in self._by_column:
                if column not in header:
                    raise KeyError(column)
            return tuple(map(self._by_column.get, header))
        taken = set(header)
        fields: list[str | None] = []
        for column in header:
            usual = None if column in self._known else usual_field(column, self._known)
            fields.append(column if usual is None or usual in taken else usual)
            taken |= {usual} if usual else set()
        return tuple(fields)


def usual_field(column: str, known: Sequence[str]) -> str | None:
    """Return the field of a column with a usual name; None for any other."""
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", column)
    name = re.sub(r"[^a-z0-9]+", "_", words.lower()).strip("_")
    return name if name in known else _FIELD.get(name)
