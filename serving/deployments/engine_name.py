"""The serving engine of a deployment and its release: measured runs of different ones teach different times."""

from __future__ import annotations

import re
from typing import NamedTuple

ENGINES = ("vllm", "sglang", "trtllm")
_STATED = re.compile(rf"({'|'.join(ENGINES)})( \d+\.\d+(\.\d+)?)?")
_RELEASE = re.compile(r"\d+\.\d+(\.\d+)?")


class EngineName(NamedTuple):
    """The name of an engine, and its release with that name, e.g. `sglang 0.5.6`; empty if no release is stated."""

    name: str
    version: str = ""

    @classmethod
    def read(cls, text: str) -> EngineName:
        """Read a name such as `vLLM 0.19.0`, as people write it.

        Any unknown name is taken for vLLM, and a nightly build has no release.
        """
        name = text.split(" ")[0].lower().replace("-", "").replace("tensorrt", "trt")
        engine = name if name in ENGINES else "vllm"
        release = None if "nightly" in text else _RELEASE.search(text)
        return cls(engine, f"{engine} {release[0]}" if release else "")

    def __str__(self) -> str:
        return self.version or self.name


def check_engine(stated: str | None) -> str | None:
    """Return `stated` if it is a name of `ENGINES`, with or without a release. Raises ValueError for other text."""
    if stated is not None and not _STATED.fullmatch(stated):
        raise ValueError(f"must be {', '.join(ENGINES[:-1])} or {ENGINES[-1]}, with or without a release: sglang 0.5.6")
    return stated
