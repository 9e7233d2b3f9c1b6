"""The column dictionary says of every column what the Parquet files say, and stands beside each dataset."""

import json

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tokentwin.cli import cli
from tokentwin.serving.errors import UserError
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.schema import DATASETS, columns_at, recording_columns


@pytest.fixture
def recording(tmp_path):
    with RecordingWriter(tmp_path / "rec", {"run_id": "r"}):
        pass
    return tmp_path / "rec"


def test_every_column_has_a_definition():
    datasets = recording_columns()
    assert list(datasets) == ["workload", *DATASETS]
    assert all(column["definition"] for columns in datasets.values() for column in columns)


def test_it_stands_beside_a_recording_and_says_what_its_files_say(recording):
    beside = json.loads((recording / "columns.json").read_text())
    assert beside == recording_columns()
    for name in DATASETS:
        schema = pq.read_schema(recording / f"{name}.parquet")
        assert [column["name"] for column in beside[name]] == schema.names
        assert columns_at(recording / f"{name}.parquet") == {name: beside[name]}
    (recording / "columns.json").unlink()  # recorded before there was one
    assert columns_at(recording) == {name: beside[name] for name in DATASETS}


def test_the_verb_prints_them(recording):
    shown = CliRunner().invoke(cli, ["columns", str(recording), "--dataset", "steps", "--format", "json"])
    assert json.loads(shown.output) == {"steps": recording_columns()["steps"]}
    assert "when the scheduler began to plan" in CliRunner().invoke(cli, ["columns"]).output


@pytest.mark.parametrize("name", ["none.parquet", "bad.parquet", "empty"])
def test_what_is_no_dataset_is_one_line(tmp_path, name):
    (tmp_path / "bad.parquet").write_text("no")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="columns"):
        columns_at(tmp_path / name)
