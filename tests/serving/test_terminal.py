"""Tables on a terminal: whatever its width, every figure and every word that is printed is whole."""

import io
import os
import re
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from tests.budget import examples
from tokentwin.serving.answers.report import BAND, COUNT, FIGURE, METRIC, Column, Line, Table
from tokentwin.serving.answers.terminal import print_report

WORDS = st.text("abc_(=é漢", min_size=1, max_size=30)
TEXTS = st.lists(WORDS, min_size=1, max_size=6).map(" ".join)
COUNTS = st.integers(0, 10**15)
CELLS = {
    COUNT: COUNTS,
    FIGURE: st.builds("{:,} ms ({:+,} %)".format, COUNTS, COUNTS),
    BAND: st.tuples(COUNTS, COUNTS),
    METRIC: WORDS,
    None: TEXTS,
}


@st.composite
def tables(draw: st.DrawFn) -> Table:
    forms = draw(st.lists(st.sampled_from([*CELLS]), min_size=1, max_size=9))
    columns = [
        Column(f"<{at}> {draw(TEXTS)}", form, spare=draw(st.integers(0, 2)) if at else 0)
        for at, form in enumerate(forms)
    ]
    rows = draw(st.lists(st.tuples(*(CELLS[form] for form in forms)), min_size=1, max_size=4))
    return Table(columns, rows, sentences=draw(st.booleans()))


def printed(table: Table, width: int, terminal: bool = True) -> list[str]:
    out = io.StringIO()
    with patch.dict(os.environ):
        os.environ.pop("COLUMNS", None)
        print_report([table, Line("end")], Console(file=out, width=width, force_terminal=terminal, color_system=None))
    lines = out.getvalue().split("\n")
    assert lines[-2:] == ["end", ""]
    return lines[:-3]


def wholes(column: Column, text: str) -> list[str]:
    """Return the parts of a cell that must not be cut: a figure, or the words of a text or a band."""
    return text.split("\n") if column.right and column.form is not BAND else text.split()


@examples(3)
@given(tables(), st.integers(1, 200))
def test_every_figure_that_is_printed_is_whole(table: Table, width: int) -> None:
    """Spare columns are left out by rank, and none where there is room; then a table is wider than the terminal."""
    lines = printed(table, width)
    shown = "\n".join(lines)
    words = re.split(r"\s+|─+", shown)
    texts = table.texts()

    def is_shown(at: int) -> bool:
        parts = [part for row in texts for part in wholes(table.columns[at], row[at])]
        return all(part in (shown if " " in part else words) for part in (*parts, *table.columns[at].name.split()))

    spared = [column.spare for at, column in enumerate(table.columns) if not is_shown(at)]
    assert min(spared, default=1) > 0
    wide = max(map(cell_len, lines)) > width
    assert not wide or all(not column.spare or not is_shown(at) for at, column in enumerate(table.columns))
    assert not spared or max(column.spare for column in table.columns) in spared
    widest = sum(
        max(cell_len(text) for text in (column.name, *(row[at] for row in texts))) + 2
        for at, column in enumerate(table.columns)
    )
    assert width < widest or all(is_shown(at) for at in range(len(table.columns)))


@examples(1)
@given(tables(), st.integers(1, 80))
def test_nothing_wraps_or_is_left_out_where_no_terminal_is(table: Table, width: int) -> None:
    """Scripts read one line for each row; sentences alone wrap."""
    lines = printed(table, width, terminal=False)
    if not table.sentences:
        rows = [column.name for column in table.columns], *table.texts()
        assert [re.split(r"\s{2,}", line.strip()) for line in (lines[0], *lines[2:])] == [list(row) for row in rows]


def test_a_narrow_terminal_leaves_out_spare_columns_and_cuts_no_figure() -> None:
    """As the table of a comparison at 80 columns, whose 22,364 was 22,36."""
    columns = [Column("metric"), *(Column(name, COUNT) for name in "ABCDEFGH"), Column("spare", COUNT, spare=1)]
    table = Table(columns, [("TTFT (ms)", *[22_364] * 8, 7)])
    lines = printed(table, 60)
    assert lines[2].split() == ["TTFT", "(ms)", *["22,364"] * 8] and "spare" not in lines[0]
