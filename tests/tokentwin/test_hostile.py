"""The hostile corpus: each row is a wrong command, which ends in one line and leaves nothing behind.

Some rows of each kind run before a merge, all of them in the long lane.
"""

import shlex
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from shutil import rmtree

import pytest

from tests.tokentwin.hostile import answers, options, recordings, reported, settings_files, trace_files
from tests.tokentwin.hostile.case import Case, problem

# By kind: all its rows, and one of how many runs before a merge.
CORPUS: dict[str, tuple[Callable[[], Iterator[Case]], int]] = {
    "answers": (answers.cases, 40),
    "options": (options.cases, 13),
    "recordings": (recordings.cases, 23),
    "reported": (reported.cases, 5),
    "settings files": (settings_files.cases, 19),
    "trace files": (trace_files.cases, 7),
}
_PARTS = 8


def problems(cases: Iterable[Case], folder: Path) -> list[str]:
    found = []
    for number, case in enumerate(cases):
        place = folder / str(number)
        place.mkdir()
        if said := problem(case, shlex.split(case.command), place):
            found.append(f"{case.command:.200} ({case.wrong}): {said}")
        rmtree(place)
    return found


@pytest.mark.parametrize("kind", CORPUS)
def test_bad_input_is_one_line(kind: str, tmp_path: Path) -> None:
    cases, every = CORPUS[kind]
    found = problems(islice(cases(), 0, None, every), tmp_path)
    assert not found, "\n".join(found)


@pytest.mark.deep
@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.parametrize("kind", CORPUS)
def test_all_bad_input_is_one_line(kind: str, part: int, tmp_path: Path) -> None:
    cases, _ = CORPUS[kind]
    found = problems(islice(cases(), part, None, _PARTS), tmp_path)
    assert not found, "\n".join(found)


def test_the_corpus_is_large() -> None:
    rows = {kind: sum(1 for _ in cases()) for kind, (cases, _) in CORPUS.items()}
    assert sum(rows.values()) >= 3000
    assert sum(-(-rows[kind] // every) for kind, (_, every) in CORPUS.items()) >= 200


def test_what_is_right_or_ends_badly_is_told(tmp_path: Path) -> None:
    """A corpus of which nothing can fail would say nothing."""
    assert problem(Case("gpus", {}, ()), ["gpus"], tmp_path).startswith("exit status 0")
    refused = ["trace", "inspect", "no.csv"]
    assert problem(Case("", {}, ("no.csv",)), refused, tmp_path) == ""
    assert problem(Case("", {}, ("yes.csv",)), refused, tmp_path).startswith("does not name ['yes.csv']")
