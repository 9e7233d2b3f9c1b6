"""Arrow without pandas in processes of our own.

pyarrow imports pandas when it makes its first array, to recognise pandas objects. Our commands have no such objects,
and the import takes longer than a short simulation. `to_pandas` still works: it imports pandas when it is called.
"""

from __future__ import annotations

import sys

import pyarrow as pa


class _Hidden:
    """A module finder for which pandas does not exist."""

    @staticmethod
    def find_spec(name: str, *_: object) -> None:
        if name == "pandas":
            raise ImportError(name)


def spare_pandas() -> None:
    """Make pyarrow look for pandas now and not find it, so that it never imports pandas for an array.

    Do not call this in a user's own process, because the user may pass pandas objects.
    """
    if "pandas" in sys.modules:
        return
    sys.meta_path.insert(0, _Hidden)
    try:
        pa.array([0])
    finally:
        sys.meta_path.remove(_Hidden)
