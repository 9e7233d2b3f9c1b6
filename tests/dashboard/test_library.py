"""The runs directory: all runs are seen, the newest are listed, and a second look is cheap."""

import os
from pathlib import Path

import pytest

pytest.importorskip("streamlit")

from tokentwin.dashboard import library
from tokentwin.dashboard.library import MOST, RECORDING, find


def recording(at: Path, seconds: int = 0) -> None:
    """Write as much of a recording as the library reads, with its times set to seconds after the epoch."""
    at.mkdir(parents=True)
    (at / RECORDING).touch()
    for path in (at / RECORDING, at):
        os.utime(path, (seconds, seconds))


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Write more recordings than are listed; the newest are the last by name."""
    for number in range(MOST + 20):
        recording(tmp_path / "exp" / f"r{number:04}", number)
    recording(tmp_path / "zz_newest", 10_000)
    return tmp_path


def test_of_too_many_the_newest_are_listed(many: Path) -> None:
    names = list(find(many, RECORDING))
    assert len(names) == MOST
    assert names[0] == "zz_newest" and names[1] == f"exp/r{MOST + 19:04}"
    assert "exp/r0000" not in names


def test_one_that_a_link_names_is_found_however_old(many: Path) -> None:
    paths = find(many, RECORDING, "exp/r0000", None)
    assert paths["exp/r0000"] == many / "exp/r0000" and len(paths) == MOST + 1


@pytest.mark.parametrize("name", ["../secret", "exp/../../secret", "/etc", "exp", ".hidden/r", ""])
def test_a_name_of_a_link_is_never_a_path(tmp_path: Path, name: str) -> None:
    recording(tmp_path / "secret")
    recording(tmp_path / "runs" / "exp" / "r")
    recording(tmp_path / "runs" / ".hidden" / "r")
    (tmp_path / "runs" / "linked").symlink_to(tmp_path / "secret")
    assert list(find(tmp_path / "runs", RECORDING, name)) == ["exp/r"]


def test_a_second_look_reads_no_directory(many: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory, _, _ in os.walk(many):
        os.utime(directory, (1, 1))
    first = find(many, RECORDING)
    read: list[str] = []
    scandir = os.scandir
    monkeypatch.setattr(library.os, "scandir", lambda path: (read.append(str(path)), scandir(path))[1])
    assert find(many, RECORDING) == first and not read
    recording(many / "exp" / "new", 20_000)
    assert next(iter(find(many, RECORDING))) == "exp/new"
    assert read == [str(many / "exp"), str(many / "exp" / "new")]


def test_what_was_just_written_is_looked_at_again(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert not find(tmp_path, RECORDING)
    (tmp_path / "run" / RECORDING).touch()
    assert list(find(tmp_path, RECORDING)) == ["run"]
    (tmp_path / "run" / RECORDING).unlink()
    assert not find(tmp_path, RECORDING)


def test_hidden_directories_and_deep_ones_are_left_out(tmp_path: Path) -> None:
    for name in ("a", "b/c", ".hidden", "1/2/3/4/5/6"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / RECORDING).touch()
    (tmp_path / "empty").mkdir()
    assert set(find(tmp_path, RECORDING)) == {"a", "b/c"}
    assert list(find(tmp_path / "a", RECORDING)) == ["a"]
    assert find(tmp_path / "nowhere", RECORDING) == {}
