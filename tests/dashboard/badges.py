"""Checks of a page's trust badges: one badge a page, and at every plot a heading that states its trust level."""

import re
from typing import NamedTuple

from tokentwin.calibration.trust import LEVELS

_BADGE = re.compile(rf":(?:green|blue|orange|gray)-badge\[:material/\w+: ({'|'.join(LEVELS)})\] ?(.*)", re.DOTALL)


class Badge(NamedTuple):
    """A trust level and its reason."""

    level: str
    reason: str


def page_badges(app):
    """Return the visible badges of a page."""
    matches = [_BADGE.fullmatch(leaf.value) for leaf in _leaves(app.main) if leaf.type == "markdown"]
    return [Badge(*match.groups()) for match in matches if match]


def badges(app):
    """Return what the heading of each plot of a page shows on hover, in order; fail if a plot has none."""
    return [_at(blocks) for blocks in _plots([app.main])]


def heading_levels(app):
    """Return the level of each heading of a page, in order."""
    return [int(leaf.tag[1:]) for leaf in _leaves(app.main) if leaf.type in ("title", "header", "subheader")]


def _plots(blocks):
    """Return the blocks around each plot, the outermost first."""
    for child in blocks[-1].children.values():
        if child.type == "plotly_chart":
            yield blocks
        elif hasattr(child, "children"):
            yield from _plots([*blocks, child])


def _at(blocks):
    for block in reversed(blocks):
        leaves = list(_leaves(block))
        helps = [getattr(leaf.proto, "help", "") for leaf in leaves if leaf.type in ("markdown", "header")]
        matches = [match for help in helps if (match := _BADGE.search(help.split("\n\n")[-1]))]
        if matches:
            plots = sum(leaf.type == "plotly_chart" for leaf in leaves)
            assert len(matches) == plots == 1, f"{len(matches)} badges and {plots} plots in one block"
            assert len(matches[0][2]) > len("."), "a level without a reason"
            return Badge(*matches[0].groups())
    raise AssertionError("a plot without a badge")


def _leaves(block):
    for child in block.children.values():
        if hasattr(child, "children"):
            yield from _leaves(child)
        else:
            yield child
