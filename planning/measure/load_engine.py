"""Loading the real engine."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from planning.home import home

if TYPE_CHECKING:
    from realengine.engine import Engine
    from serving.deployments.config import Deployment


def load_engine(deployment: Deployment, say: Callable[[str], None], warm: bool = True) -> Engine:
    """An engine, warmed up unless its times do not matter. On a CPU it computes in the faster type if none is stated.

    `say` is told how its memory is used, and of the type if it is not the usual one.

    Raises UserError if torch is not installed or the model cannot be loaded.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read once, when torch loads OpenMP
    from serving.errors import UserError

    try:
        import torch  # noqa: F401
    except ImportError:
        raise UserError("torch", None, "is not installed; pip install 'tokentwin[engine]'") from None
    from realengine.engine import Engine
    from realengine.fast_dtype import with_fast_dtype
    from realengine.weights import load_model_files

    deployment, chosen = with_fast_dtype(deployment)
    if chosen:
        say(chosen)
    engine = Engine(deployment, load_model_files(deployment.model, home()))
    if engine.memory_report:
        say(engine.memory_report)
    if warm:
        engine.warm_up()
    return engine
