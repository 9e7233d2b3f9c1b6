"""A kernel as it is launched somewhere, for compilation ahead of time, to see its needs without a GPU."""

from collections.abc import Callable
from typing import NamedTuple

from triton.runtime import JITFunction


class Specialisation(NamedTuple):
    """One kernel as it is launched.

    Attributes:
        launch: calls the kernel's launcher with tensors on torch's meta device, which are shapes and dtypes
        register_ceiling: most registers that a thread may use: more would mean fewer programs at once on a
            multiprocessor
        expects: strings that its PTX must contain, as "wgmma" or "cp.async"
        which: number, from 0, among the launches of the kernel by the launcher
        stack_ceiling: most bytes of a thread's memory that registers may be spilled to
    """

    name: str
    kernel: JITFunction
    launch: Callable[[], object]
    register_ceiling: int
    expects: tuple[str, ...]
    which: int = 0
    stack_ceiling: int = 0
