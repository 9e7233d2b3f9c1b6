"""The package `lab`, which exists only in a checkout of the repository: wheels do not contain it."""

from __future__ import annotations

import sys
from pathlib import Path

from tokentwin.serving.errors import UserError

_ROOT = Path(__file__).parents[2]


def lab_is_here() -> bool:
    """Return True if this installation runs from a checkout, and make its package `lab` importable."""
    if not all((_ROOT / name).is_file() for name in ("pyproject.toml", "lab/__init__.py")):
        return False
    if str(_ROOT) not in sys.path:
        sys.path.insert(0, str(_ROOT))
    return True


def need_lab(field: str, otherwise: str = "") -> None:
    """Make `lab` importable. Raises UserError about `field` if there is no `lab`; `otherwise` is another remedy."""
    if not lab_is_here():
        remedy = "needs the folder lab, which only a checkout of the repository has; run the command in a checkout"
        raise UserError(field, None, f"{remedy}, or {otherwise}" if otherwise else remedy)
