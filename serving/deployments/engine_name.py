"""Which serving engine a deployment is of, and of which release: what measured runs teach differs by both."""

from __future__ import annotations

import re
from typing import NamedTuple

ENGINES = ("vllm", "sglang", "trtllm")
_STATED = re.compile(rf"({'|'.join(ENGINES)})( \d+\.\d+(\.\d+)?)?")
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")


class EngineName(NamedTuple):
    """One of `ENGINES`, and its release with its name, e.g. `sglang 0.5.6`; empty where none is stated."""

    name: str
    version: str = ""

    @classmethod
    def read(cls, told: str) -> EngineName:
        """Of `vLLM 0.19.0`, as people write it: any other name is taken for vLLM, a nightly build for no release."""
        name = told.split(" ")[0].lower().replace("-", "").replace("tensorrt", "trt")
        engine = name if name in ENGINES else "vllm"
        release = None if "nightly" in told else _RELEASE.search(told)
        return cls(engine, f"{engine} {release[0]}" if release else "")

    def __str__(self) -> str:
        return self.version or self.name


def check_engine(stated: str | None) -> str | None:
    """`stated`, if it is a name of `ENGINES`, with or without a release. Raises ValueError for anything else."""
    if stated is not None and not _STATED.fullmatch(stated):
        raise ValueError(f"must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, with or without a release: sglang 0.5.6")
    return stated
