"""Only what pyproject.toml cannot say: a wheel with a compiled core is for one Python and one platform."""

from pathlib import Path

from setuptools import Distribution, setup


class _WithCore(Distribution):
    def has_ext_modules(self) -> bool:
        return Path(__file__).with_name("serving").joinpath("_compiled").exists()


setup(distclass=_WithCore)
