"""Only what pyproject.toml cannot say: a wheel has a compiled core if there is a C compiler, and is then for one platform."""

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
