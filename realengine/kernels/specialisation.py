"""A kernel as it is launched somewhere: what is compiled ahead of time, to see what it needs without a GPU."""

from collections.abc import Callable
from typing import NamedTuple

from triton.runtime import JITFunction


class Specialisation(NamedTuple):
    """One kernel as it is launched.

    launch            calls the kernel's launcher with tensors on torch's meta device, which are shapes and dtypes
    register_ceiling  most registers a thread may use: more would mean fewer programs at once on a multiprocessor
    expects           what its PTX must contain, as "wgmma" or "cp.async"
    which             of the times that the launcher launches the kernel, from 0
    """

    name: str
    kernel: JITFunction
    launch: Callable[[], object]
    register_ceiling: int
    expects: tuple[str, ...]
    which: int = 0
