"""JSON, read as data.

Two mistakes that JSON allows are refused: a name twice, and data that nests deeper than Python can follow.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.errors import UserError, reason


def parse_json(text: str | bytes, **how: Any) -> Any:
    """Return the data in `text`; `how` is as `json.loads` takes it. Raises ValueError that says what is wrong."""
    try:
        return json.loads(text, object_pairs_hook=_object, **how)
    except json.JSONDecodeError as error:
        place = f"column {error.colno}" if error.lineno == 1 else f"line {error.lineno}, column {error.colno}"
        raise ValueError(f"is not JSON: {error.msg} at {place}") from None
    except UnicodeDecodeError:
        raise ValueError("is not JSON: it is not UTF-8 text") from None
    except RecursionError:
        raise ValueError("is not JSON that can be read: it is nested too deeply") from None
    except ValueError as error:  # a name twice, too many digits
        raise ValueError(f"is not JSON: {error}") from None


def read_json_file(path: str | Path, field: str, advice: str = "") -> Any:
    """Return the data in the file. Raises UserError of `field`, which names the file and ends in `advice`."""
    try:
        return parse_json(Path(path).read_bytes())
    except OSError as error:
        raise UserError(field, str(path), f"cannot be read: {reason(error)}{advice}") from None
    except ValueError as error:
        raise UserError(field, str(path), f"{error}{advice}") from None


def no_constant(name: str) -> Any:
    """Raise ValueError, as a `parse_constant`: Python reads NaN and infinities, which JSON does not have."""
    raise ValueError(f"{name} is no number")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{max(names, key=names.count)!r} is given twice; leave one of them out")
    return members
