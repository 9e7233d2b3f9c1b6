"""UserError, the only exception for errors that a user can cause.

Its message is a single line that names the field, the value and the remedy. The command line prints the message and
exits with status 2. Any other exception that reaches the user is a bug in tokentwin.
"""

from __future__ import annotations

import os
import sysconfig
from pathlib import Path
from traceback import FrameSummary, extract_tb, format_exception_only, format_list

OURS = ("lab", "tokentwin")
_ROOT = Path(__file__).parents[2].parts


class UserError(Exception):
    """Bad input. `field` had `value` (None if it was not given); `remedy` says what is allowed or what to do."""

    def __init__(self, field: str, value: object, remedy: str) -> None:
        self.field = field
        self.value = value
        self.remedy = remedy
        self._carried = ""
        parts = [field, remedy] if value is None else [field, _quoted(value), remedy]
        super().__init__(one_line(": ".join(parts)))

    def __reduce__(self) -> tuple[type[UserError], tuple[str, object, str], dict[str, str]]:
        """Keep the user's traceback when a worker process sends the error to its parent."""
        return UserError, (self.field, self.value, self.remedy), {"_carried": self.own_traceback}

    @property
    def own_traceback(self) -> str:
        """The traceback of an error in the user's own code, without our frames; empty if that code raised no error."""
        error: BaseException | None = self
        while error is not None and type(error).__module__.partition(".")[0] in OURS:
            error = error.__cause__ or error.__context__
        if error is None:
            return self._carried
        frames = [frame for frame in extract_tb(error.__traceback__) if not _is_ours(frame.filename)]
        if all(map(_is_installed, frames)):
            return self._carried
        lines = [*format_list(frames), *format_exception_only(error)]
        return "Traceback (most recent call last):\n" + without_controls("".join(lines))


def reason(error: Exception) -> str:
    """Return the reason of `error`, without the path that an OSError repeats and the text that pyarrow adds."""
    return os.strerror(error.errno) if isinstance(error, OSError) and error.errno else str(error)


def raised(error: BaseException) -> str:
    """Return an error of a user's own code in one line: the exception, and the innermost line of the user's code."""
    frames = list(extract_tb(error.__traceback__))
    frames = [frame for frame in frames if not _is_ours(frame.filename)] or frames
    where = f" ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else ""
    try:
        said = str(error)
    except (Exception, SystemExit):  # the user's code, too
        said = "(its message cannot be read)"
    return one_line(type(error).__name__ + (f": {shortened(said, 300)}" if said else "") + where)


def _is_installed(frame: FrameSummary) -> bool:
    """Return whether a frame is in the code of Python itself or of an installed package."""
    places = (sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    return frame.filename.startswith(("<frozen", *places))


def _is_ours(file: str) -> bool:
    """Return whether `file` belongs to one of our packages. Both lie in one directory."""
    parts = Path(file).parts
    if parts[: len(_ROOT)] == _ROOT:  # only a compiled module has a relative path
        parts = parts[len(_ROOT) :]
    return bool(parts) and parts[0] in OURS


def shown(value: object) -> str:
    """Return `repr(value)` of a user's own object, shortened and in one line; if `repr` fails, name the type."""
    try:
        text = repr(value)
    except (Exception, SystemExit):  # the user's code, too
        text = f"a {type(value).__name__} that cannot be shown"
    return one_line(shortened(text, 300))


def one_line(text: str) -> str:
    """Return `text` without line breaks and control characters."""
    return without_controls(" ".join(text.split()))


def without_controls(text: str) -> str:
    """Return `text` with its control characters escaped, because they could steer a terminal; line breaks stay."""
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() or one == "\n" else one.encode("unicode_escape").decode() for one in text)


def shortened(text: str, most: int) -> str:
    """Return `text` with at most `most` characters; the middle is cut out, since a path's end says much."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[3 + most // 2 - most :]}"


def _quoted(value: object) -> str:
    return repr(shortened(value, 80)) if isinstance(value, str) else shortened(shown(value), 80)
