"""Files that exist complete or not at all."""

import os
import subprocess
from pathlib import Path

from tokentwin.serving.whole_file import whole_file


def test_what_killed_processes_left_of_a_file_goes_when_it_is_written_again(tmp_path: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    kept = {f".a[1].json.{os.getppid()}.partial", f".b.json.{ended.pid}.partial", ".a[1].json.x.partial", "a[1].json"}
    for name in (*kept, f".a[1].json.{ended.pid}.partial"):
        (tmp_path / name).touch()
    with whole_file(tmp_path / "a[1].json") as partial:
        partial.touch()
    assert {file.name for file in tmp_path.iterdir()} == kept
