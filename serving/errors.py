"""The one exception for everything a user can cause.

Its message is a single line that names the field, the value and the remedy. The command line prints it
and exits 2. Any other exception that reaches the user is a bug in tokentwin.
"""

from __future__ import annotations

import os
from pathlib import Path
from traceback import extract_tb


class UserError(Exception):
    """Bad input: `field` had `value`, None if it was not given; `remedy` says what is allowed or what to do."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        parts = [field, remedy] if value is None else [field, _shown(value), remedy]
        super().__init__(" ".join(": ".join(parts).split()))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str]]:
        """On the way from a worker's process, too."""
        return UserError, (self.field, self.value, self.remedy)


def reason(error: Exception) -> str:
    """What went wrong, without the path that an OSError repeats, and what pyarrow adds to one."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def raised(error: BaseException) -> str:
    """What a user's own code raised, in one line: the exception and the line of the innermost call."""
    frames = extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text + where


def shortened(text: str, most: int) -> str:
    """`text` in no more than `most` characters, without its middle: the end of a path tells most."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 + most // 2 - most :]}"


def _shown(value: object) -> str:
    text = shortened(value if isinstance(value, str) else repr(value), 80)
    return repr(text) if isinstance(value, str) else text
