"""Every link in the documentation leads to an existing file and, if it names one, to an existing heading."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("lab/results/*.md"))
)
_CODE = re.compile(r"^```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ +(.+?)\s*$", re.MULTILINE)


def anchors(page: str) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them: lower case, hyphens, no other punctuation."""
    titles = _HEADING.findall(re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL))
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_links(page: str, folder: Path) -> list[str]:
    """Return the links of `page`, a text in `folder`, that lead nowhere; links to other sites are not followed."""
    dead = []
    for link in _LINK.findall(_CODE.sub("", page)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = folder / name
        there = target.exists()
        if there and anchor:
            there = anchor in anchors(target.read_text(encoding="utf-8") if name else page)
        if not there:
            dead.append(link)
    return dead


@pytest.mark.parametrize("name", PAGES)
def test_every_link_leads_somewhere(name: str) -> None:
    path = ROOT / name
    assert dead_links(path.read_text(encoding="utf-8"), path.parent) == []


def test_a_link_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# One, two\n```\n# no heading\n```\n")
    page = (
        "## Here we `are`\n[a](#here-we-are) [b](#kernel-tables) [c](other.md#one-two) [d](other.md#no-heading) "
        "[e](gone.md) [f](https://example.org/gone#gone) `[g](gone.md)`\n"
    )
    assert dead_links(page, tmp_path) == ["#kernel-tables", "other.md#no-heading", "gone.md"]
