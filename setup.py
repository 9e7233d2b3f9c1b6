"""Only what pyproject.toml cannot say: with a C compiler, a wheel has a compiled core, and is for one platform."""

import runpy
import sys
from pathlib import Path

from setuptools import Distribution, setup

HERE = Path(__file__).parent


class _WithCore(Distribution):
    def has_ext_modules(self) -> bool:
        return (HERE / "serving" / "_compiled").exists()


if "bdist_wheel" in sys.argv:
    sys.path.insert(0, str(HERE))
    runpy.run_path(str(HERE / "compile_core.py"))["main"]()
setup(distclass=_WithCore)
