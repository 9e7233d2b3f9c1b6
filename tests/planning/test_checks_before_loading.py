"""What can be checked without a model is checked before one is loaded; nothing is written."""

import pytest

from tests.command import tokentwin
from tokentwin.serving.workload import PRIVATE, Item, Workload, WorkloadRequest
from tokentwin.traces.formats.parquet import write_parquet

pytest.importorskip("torch", reason="the engine extra is not installed")


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("generate hello --model {0} --top-k -1", "top_k: -1: must be 0 (off)"),
        (
            "generate hello --model {0} --max-tokens 9999",
            "max-tokens: 9999: and 1 tokens of the prompt exceed",
        ),
        ("bench {0}/text.parquet -o {0}", "holds other files; choose another directory"),
        ("bench {0}/text.parquet -o {0}/text.parquet/below", "cannot be made"),
        ("bench {0}/picture.parquet -o {0}/out", "request 3: items: 1: need the simulator"),
    ],
)
def test_it_is_refused(command, line, tmp_path, monkeypatch):
    monkeypatch.setattr("tokentwin.planning.measure.real_engine._runnable", None)  # which begins to load
    (tmp_path / "config.json").write_text("{}")
    words = '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"hello": 0, "u": 1}, "unk_token": "u"}}'
    (tmp_path / "tokenizer.json").write_text(words)
    request = WorkloadRequest(3, 0, ((PRIVATE, 9),), 2)
    write_parquet(Workload([request], "text"), tmp_path / "text.parquet")
    seen = WorkloadRequest(3, 0, ((PRIVATE, 9),), 2, items=(Item(2, 4),))
    write_parquet(Workload([seen], "picture"), tmp_path / "picture.parquet")
    before = sorted(tmp_path.rglob("*"))
    done = tokentwin(*command.format(tmp_path).split())
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert line in done.stderr
    assert sorted(tmp_path.rglob("*")) == before
