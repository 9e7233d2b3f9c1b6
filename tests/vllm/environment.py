"""The environment that has vLLM, apart from ours: `make vllm` makes it."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_PYTHON = Path(os.environ.get("TOKENTWIN_VLLM", ROOT / ".venv-vllm"), "bin", "python")
PYTHON = _PYTHON if _PYTHON.exists() else None
SEES = PYTHON is not None and any(PYTHON.parents[1].glob("lib/*/site-packages/torchvision"))
"""Whether it has torchvision, without which no model sees; `make vllm` before 2026-11-28 left it out."""
needs_vllm = pytest.mark.skipif(PYTHON is None, reason="needs vLLM in .venv-vllm: `make vllm` (4 GB)")


def environment() -> dict[str, str]:
    """Return the environment variables of a program in it that imports this repository."""
    given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VLLM_"))}
    return given | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
