"""What tests of pages look for: one badge a page, and at every plot a heading that says how far to trust it."""

import re
from typing import NamedTuple

from calibration.trust import LEVELS

_BADGE = re.compile(rf":(?:green|blue|orange|gray)-badge\[:material/\w+: ({'|'.join(LEVELS)})\] ?(.*)", re.DOTALL)


class Badge(NamedTuple):
    """A level of trust and its reason."""

    level: str
    reason: str


def page_badges(app):
    """The badges of a page that are in sight."""
    matches = [_BADGE.fullmatch(leaf.value) for leaf in _leaves(app.main) if leaf.type == "markdown"]
    return [Badge(*match.groups()) for match in matches if match]


def badges(app):
    """What the heading of each plot of a page says on hover, in their order. Fails where a plot has none."""
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
        helps = [getattr(leaf.proto, "help", "") for leaf in leaves if leaf.type in ("markdown", "subheader")]
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
