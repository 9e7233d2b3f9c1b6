"""Arrow in a process of our own, without pandas.

pyarrow imports pandas when it makes its first array, to know objects of pandas when it meets them. That takes longer
than a short simulation, and a command meets none. Tables still become data frames: `to_pandas` imports it then.
"""

from __future__ import annotations

import sys

import pyarrow as pa


class _Hidden:
    """Among the finders of modules, one that says that there is no pandas."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(name)


def spare_pandas() -> None:
    """Let pyarrow look for pandas now, in vain. Not for somebody's own process, who may give objects of pandas."""
    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _Hidden)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(_Hidden)
