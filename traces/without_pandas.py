"""Arrow without pandas, in a process of our own.

pyarrow imports pandas when it makes its first array, to recognise objects of pandas. The import takes longer than a
short simulation, and a command meets no such objects. Tables still become data frames: `to_pandas` imports pandas then.
"""

from __future__ import annotations

import sys

import pyarrow as pa


class _Hidden:
    """A module finder that says that there is no pandas."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(name)


def spare_pandas() -> None:
    """Let pyarrow look for pandas now, without success.

    A process of the user's must not call this, since the user may pass objects of pandas.
    """
    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _Hidden)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(_Hidden)
