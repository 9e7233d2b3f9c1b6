"""The log of a server's processes."""

from __future__ import annotations

import logging
import sys

LOG = logging.getLogger("tokentwin")


def log_to_stderr() -> None:
    """Log to stderr, with the same prefix as the command's own messages."""
    logging.basicConfig(stream=sys.stderr, format="tokentwin: %(message)s", level=logging.WARNING)
    LOG.setLevel(logging.INFO)
