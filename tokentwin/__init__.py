"""tokentwin: a digital twin of LLM serving.

The functions do in Python what the commands do: see docs/python.md. Importing this is quick, because what a
function needs is imported when it is called.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokentwin.api import calibrate, compare, diagnose, plan, read_recording, simulate, sweep, validate

if TYPE_CHECKING:
    from serving.deployments.config import Deployment
    from serving.version import __version__
    from serving.workload import Workload

__all__ = [
    "Deployment",
    "Workload",
    "__version__",
    "calibrate",
    "compare",
    "diagnose",
    "plan",
    "read_recording",
    "simulate",
    "sweep",
    "validate",
]
_LATE = {
    "Deployment": "serving.deployments.config",
    "Workload": "serving.workload",
    "__version__": "serving.version",
}


def __getattr__(name: str) -> Any:
    """Imported when first named: the classes bring pydantic, and `python -m` has to find our packages first."""
    if name in _LATE:
        return getattr(import_module(_LATE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
