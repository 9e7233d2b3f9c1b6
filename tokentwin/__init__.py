"""tokentwin: a digital twin of LLM serving.

For each command there is a Python function that does the same; see docs/python.md. This package is quick to import,
because each function imports what it needs when it is called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokentwin.api import calibrate, compare, diagnose, most_users, plan, read_recording, simulate, sweep, validate

if TYPE_CHECKING:
    from tokentwin.serving.deployments.config import Deployment
    from tokentwin.serving.version import __version__
    from tokentwin.serving.workload import Workload

__all__ = [
    "Deployment",
    "Workload",
    "__version__",
    "calibrate",
    "compare",
    "diagnose",
    "most_users",
    "plan",
    "read_recording",
    "simulate",
    "sweep",
    "validate",
]
_LATE = {
    "Deployment": "tokentwin.serving.deployments.config",
    "Workload": "tokentwin.serving.workload",
    "__version__": "tokentwin.serving.version",
}


def __getattr__(name: str) -> Any:
    """Import a class when it is first used.

    The classes need pydantic, and `python -m` must find our own packages before anything else is imported.
    """
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
