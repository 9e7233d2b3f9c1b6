"""Recordings: streamed, whole or not there at all, and readable by anyone who reads Parquet."""

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.recording import Recording, notes_of
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.schema import DATASETS

RUN = {"run_id": "r1", "clock": "virtual", "deployment": '{"model": "m"}', "seed": 7, "calibration": "c1"}
WORKLOAD = Workload([WorkloadRequest(i, i * 1000, (("sys0", 4), ("", 9)), 3) for i in range(5)], "five")


def write(path, steps=3, **options):
    with RecordingWriter(path, RUN, **options) as writer:
        for step in range(steps):
            writer.add_step(replica=0, step=step, start_ns=step * 10, end_ns=step * 10 + 9, row_ids=[0, 1])
        writer.add_request(request_id=0, finish_ns=25, token_times_ns=[5, 15, 25])
        writer.add_request(request_id=1, status="rejected", reason="too long")
    return Recording.load(path)


def test_what_was_written_is_read_back(tmp_path):
    recording = write(tmp_path / "rec", workload=WORKLOAD)
    assert recording.run["run_id"] == "r1"
    assert recording.run["status"] == "complete"
    assert recording.run["duration_ns"] == 29
    assert recording.run["version"]
    assert recording.steps["step"].to_pylist() == [0, 1, 2]
    assert recording.steps["forward_ns"].null_count == 3
    assert recording.requests["token_times_ns"].to_pylist() == [[5, 15, 25], None]
    assert list(recording.workload().requests) == WORKLOAD.requests
    assert sorted(p.name for p in (tmp_path / "rec").iterdir()) == [
        "columns.json",
        "requests.parquet",
        "runs.parquet",
        "steps.parquet",
        "workload.parquet",
    ]


def test_every_file_says_where_it_comes_from_and_every_field_what_it_means(tmp_path):
    write(tmp_path / "rec")
    for dataset, columns in DATASETS.items():
        schema = pq.read_schema(tmp_path / "rec" / f"{dataset}.parquet")
        assert schema.metadata[b"tokentwin.seed"] == b"7"
        assert schema.metadata[b"tokentwin.calibration"] == b"c1"
        assert schema.metadata[b"tokentwin.deployment"] == b'{"model": "m"}'
        assert schema.names == [c.name for c in columns]
        assert all(field.metadata[b"definition"] for field in schema)


def test_rows_and_columns_keep_their_order(tmp_path):
    with RecordingWriter(tmp_path / "rec", RUN) as writer:
        writer.add_step(step=0)
        writer.add_steps({"step": [1, 2], "running": np.array([5, 6])})
        writer.add_steps({"step": range(3, 80_000)})
        writer.add_step(step=80_000)
    file = pq.ParquetFile(tmp_path / "rec" / "steps.parquet")
    assert file.metadata.row_group(0).num_rows <= 65_536
    steps = Recording.load(tmp_path / "rec").table("steps", ["running", "step"])
    assert steps.column_names == ["running", "step"]
    assert steps["step"].to_pylist() == list(range(80_001))
    assert steps["running"].to_pylist()[:4] == [None, 5, 6, None]


def test_lists_not_kept_are_null(tmp_path):
    recording = write(tmp_path / "rec", keep={"token_times_ns"})
    assert recording.steps["row_ids"].null_count == 3
    assert recording.requests["token_times_ns"].null_count == 1


def test_an_unknown_column_is_a_bug(tmp_path):
    with pytest.raises(KeyError, match="bogus"), RecordingWriter(tmp_path / "rec", RUN) as writer:
        writer.add_step(bogus=1)
    assert not (tmp_path / "rec").exists()


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(tmp_path, error):
    with pytest.raises(error), RecordingWriter(tmp_path / "rec", RUN, workload=WORKLOAD) as writer:
        writer.add_step(step=0)
        raise error
    assert list(tmp_path.iterdir()) == []


def test_what_there_is_after_an_interrupt_can_be_kept(tmp_path):
    writer = RecordingWriter(tmp_path / "rec", RUN)
    writer.add_step(step=0, end_ns=40)
    writer.close("interrupted")
    run = Recording.load(tmp_path / "rec").run
    assert (run["status"], run["duration_ns"]) == ("interrupted", 40)
    writer.discard()  # too late: closed is closed
    assert Recording.load(tmp_path / "rec").steps.num_rows == 1


def test_an_existing_recording_is_kept_unless_told(tmp_path):
    write(tmp_path / "rec", steps=3, workload=WORKLOAD)
    with pytest.raises(UserError, match="exists"):
        RecordingWriter(tmp_path / "rec", RUN)
    with pytest.raises(ZeroDivisionError), RecordingWriter(tmp_path / "rec", RUN, overwrite=True):
        raise ZeroDivisionError
    assert Recording.load(tmp_path / "rec").steps.num_rows == 3
    assert write(tmp_path / "rec", steps=1, overwrite=True).steps.num_rows == 1
    with pytest.raises(UserError, match=r"does not hold its trace, workload\.parquet"):
        Recording.load(tmp_path / "rec").workload()


def test_other_peoples_files_are_never_overwritten(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UserError, match="other files"):
        RecordingWriter(tmp_path, RUN, overwrite=True)
    with pytest.raises(UserError, match="is a file"):
        RecordingWriter(tmp_path / "thesis.tex", RUN)


def test_a_killed_run_is_no_recording_and_can_be_written_over(tmp_path):
    killed = RecordingWriter(tmp_path / "rec", RUN)
    killed.add_step(step=0)
    with pytest.raises(UserError, match="is not a recording"):
        Recording.load(tmp_path / "rec")
    killed._lock._file.close()  # as the end of a process does
    assert write(tmp_path / "rec").steps.num_rows == 3
    assert not list((tmp_path / "rec").glob(".*"))


def test_a_recording_is_written_by_one_process_at_a_time(tmp_path):
    with RecordingWriter(tmp_path / "rec", RUN) as writer:
        writer.add_step(step=0)
        with pytest.raises(UserError, match="is being written by another process; wait for it"):
            RecordingWriter(tmp_path / "rec", RUN, overwrite=True)
    assert Recording.load(tmp_path / "rec").run["status"] == "complete"


def test_notes_may_follow_from_what_was_recorded(tmp_path):
    """They are made before there is a recording, and what was read for them is right after it, too."""
    read = []

    def note(recording: Recording) -> dict[str, Any]:
        read.append(recording)
        assert recording.run["status"] == "complete" and not (tmp_path / "rec" / "runs.parquet").exists()
        return {"steps": recording.rows("steps")}

    with RecordingWriter(tmp_path / "rec", {**RUN, "notes": '{"gpu": "H100"}'}) as writer:
        writer.add_step(step=0, start_ns=0, end_ns=10)
        writer.close(note=note)
    made = Recording.load(tmp_path / "rec")
    assert notes_of(made.run) == {"gpu": "H100", "steps": 1} and made.steps.equals(read[0].steps)
    assert made.runs.drop_columns("notes").equals(read[0].runs.drop_columns("notes"))
    with pytest.raises(ValueError, match="JSON"), RecordingWriter(tmp_path / "bad", RUN) as writer:
        writer.close(note=lambda recording: {"bad": float("nan")})
    assert not (tmp_path / "bad").exists()
    for said in ("", None, "not JSON", "[1]"):
        assert notes_of({"notes": said}) == {}


def test_damage_is_one_line(tmp_path):
    with pytest.raises(UserError, match="is not a directory"):
        Recording.load(tmp_path / "nothing")
    write(tmp_path / "rec")
    steps = tmp_path / "rec" / "steps.parquet"
    whole = steps.read_bytes()
    steps.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match=r"steps\.parquet.*cannot be read"):
        Recording.load(tmp_path / "rec")
    steps.unlink()
    with pytest.raises(UserError, match=r"rec': is damaged: steps\.parquet is missing; record the run again$"):
        Recording.load(tmp_path / "rec")
    pq.write_table(pa.table({"step": [1]}), steps)
    with pytest.raises(UserError, match="is not the dataset 'steps'"):
        Recording.load(tmp_path / "rec")


def test_a_wrong_type_is_named(tmp_path):
    write(tmp_path / "rec")
    path = tmp_path / "rec" / "steps.parquet"
    table = pq.read_table(path)
    pq.write_table(table.set_column(1, "step", table["step"].cast(pa.string())), path)
    with pytest.raises(UserError, match="step: 'string': must be step: int64"):
        Recording.load(tmp_path / "rec")


def test_a_column_added_since_is_null(tmp_path):
    write(tmp_path / "rec")
    path = tmp_path / "rec" / "steps.parquet"
    table = pq.read_table(path)
    pq.write_table(table.drop_columns([table.column_names[-1]]), path)
    assert Recording.load(tmp_path / "rec").steps["stopped_ids"].null_count == 3


def test_duckdb_and_polars_read_it(tmp_path):
    duckdb, polars = pytest.importorskip("duckdb"), pytest.importorskip("polars")
    write(tmp_path / "rec", workload=WORKLOAD)
    rec, database = tmp_path / "rec", duckdb.connect()
    query = f"select count(*), max(end_ns), sum(len(row_ids)) from '{rec}/steps.parquet'"
    assert database.execute(query).fetchall() == [(3, 29, 6)]
    query = f"select r.seed, q.reason from '{rec}/runs.parquet' r, '{rec}/requests.parquet' q order by all"
    assert database.execute(query).fetchall() == [(7, "too long"), (7, None)]
    query = f"select sum(s.tokens) from (select unnest(prompt) s from '{rec}/workload.parquet')"
    assert database.execute(query).fetchall() == [(65,)]
    frame = polars.read_parquet(rec / "requests.parquet")
    assert frame["token_times_ns"].to_list() == [[5, 15, 25], None]
    assert polars.read_parquet(rec / "workload.parquet")["prompt"].to_list()[0][0] == {"segment": "sys0", "tokens": 4}


def test_memory_does_not_grow_with_the_run(tmp_path):
    def peak(steps):
        tracemalloc.start()
        before = pa.total_allocated_bytes()
        most_arrow = 0
        with RecordingWriter(tmp_path / f"rec{steps}", RUN) as writer:
            for step in range(steps):
                writer.add_step(step=step, running=5, row_ids=[1, 2, 3])
                if step % 500 == 0:
                    most_arrow = max(most_arrow, pa.total_allocated_bytes() - before)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most, most_arrow

    short, long = peak(10_000), peak(50_000)
    assert long[0] < 1.5 * short[0]
    assert long[1] < 2 * short[1] + 2**22
