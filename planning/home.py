"""The directory of fetched files: `$TOKENTWIN_HOME`, or `~/.cache/tokentwin`."""

from __future__ import annotations

import os
from pathlib import Path


def home() -> Path:
    return Path(os.environ.get("TOKENTWIN_HOME") or Path.home() / ".cache" / "tokentwin")
