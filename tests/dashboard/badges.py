"""What tests of pages look for at every plot: one badge, in the smallest block around it that holds any."""

import re
from typing import NamedTuple

from calibration.provenance import MARKS

_BADGE = re.compile(rf":(?:green|blue|orange|gray)-badge\[:material/\w+: ({'|'.join(MARKS)})\]")


class Found(NamedTuple):
    """A plot's badge: its mark, and what it says on hover."""

    mark: str
    reason: str


def badges(app):
    """The badge of each plot of a page, in their order. Fails where a plot has none or shares one."""
    return [_at(blocks) for blocks in _plots([app.main])]


def _plots(blocks):
    """The blocks around each plot, the outermost first."""
    for child in blocks[-1].children.values():
        if child.type == "plotly_chart":
            yield blocks
        elif hasattr(child, "children"):
            yield from _plots([*blocks, child])


def _at(blocks):
    for block in reversed(blocks):
        leaves = list(_leaves(block))
        marks = [leaf for leaf in leaves if leaf.type == "markdown" and _BADGE.fullmatch(leaf.value)]
        if marks:
            plots = sum(leaf.type == "plotly_chart" for leaf in leaves)
            assert len(marks) == plots == 1, f"{len(marks)} badges and {plots} plots in one block"
            (mark,) = marks
            assert len(mark.proto.help.split("\n\n")[0]) > len("."), "a badge without a reason"
            return Found(_BADGE.fullmatch(mark.value)[1], mark.proto.help)
    raise AssertionError("a plot without a badge")


def _leaves(block):
    for child in block.children.values():
        if hasattr(child, "children"):
            yield from _leaves(child)
        else:
            yield child
