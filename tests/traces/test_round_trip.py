"""What is written is what is read: exactly in Parquet, in whole blocks in Mooncake's format."""

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import PRIVATE, Item, Workload, WorkloadRequest
from tokentwin.traces.formats.mooncake import BLOCK_TOKENS, MooncakeReader, write_mooncake
from tokentwin.traces.formats.parquet import ParquetReader, write_parquet
from tokentwin.traces.formats.trace_file import read_workload, write_workload

SHARED = Path(__file__).parents[3] / "shared" / "data"

text = st.text(st.characters(codec="utf-8"), max_size=8)
segment_names = text.filter(lambda name: not name.startswith("out:"))


@st.composite
def workloads(draw, names=segment_names, tokens=st.integers(1, 2**27), most=8):
    """Return any valid workload, with earlier outputs in its prompts."""
    count = draw(st.integers(0, most))
    ids = draw(st.lists(st.integers(0, 2**62), min_size=count, max_size=count, unique=True))
    arrivals = sorted(draw(st.lists(st.integers(0, 2**62), min_size=count, max_size=count)))
    requests: list[WorkloadRequest] = []
    for id_, arrival in sorted(zip(ids, arrivals, strict=True), key=lambda pair: pair[::-1]):
        segment = st.tuples(names, tokens)
        if requests:
            outputs = [(f"out:{r.id}", r.output_len) for r in requests]
            segment = st.one_of(segment, st.sampled_from(outputs))
        prompt = tuple(draw(st.lists(segment, min_size=1, max_size=4)))
        output = draw(tokens)
        priority = draw(st.integers(-(2**31), 2**31 - 1))
        limit = draw(st.sampled_from([{}, {"max_tokens": min(2 * output, 2**27)}]))
        requests.append(WorkloadRequest(id_, arrival, prompt, output, priority, draw(text), draw(text), **limit))
    concurrency = draw(st.none() | st.integers(1, 1000))
    return Workload(requests, draw(text), concurrency, draw(st.booleans()))


@given(workloads())
def test_parquet_is_exact(tmp_path_factory, workload):
    path = tmp_path_factory.mktemp("round") / "trace"
    write_parquet(workload, path)
    read = ParquetReader().read(path)
    assert list(read.requests) == workload.requests
    assert list(read.requests) == workload.requests  # a second time
    assert (read.name, read.concurrency, read.shares_prefixes) == (
        workload.name,
        workload.concurrency,
        workload.shares_prefixes,
    )


def test_adapters_are_kept_whenever_the_first_one_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("tokentwin.traces.formats.parquet.ROW_GROUP", 4)
    for first in (None, 0, 3, 4, 11, 30):
        requests = [
            WorkloadRequest(k, k, ((PRIVATE, 9),), 2, adapter="sql" if first is not None and k >= first else "")
            for k in range(31)
        ]
        path = tmp_path / "trace.parquet"
        write_parquet(Workload(requests, "adapted"), path)
        assert list(ParquetReader().read(path).requests) == requests
        assert ("adapter" in pq.read_schema(path).names) == (first is not None)  # no column that nobody uses


def test_items_are_kept_whenever_the_first_one_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("tokentwin.traces.formats.parquet.ROW_GROUP", 4)
    cat = (Item(2, 4, "cat", "video", 2), Item(6, 3))
    for first in (None, 0, 5, 30):
        requests = [
            WorkloadRequest(k, k, ((PRIVATE, 9),), 2, items=cat if first is not None and k >= first else ())
            for k in range(31)
        ]
        requests[7] = replace(requests[7], adapter="sql")
        path = tmp_path / "trace.parquet"
        write_parquet(Workload(requests, "pictures"), path)
        assert list(ParquetReader().read(path).requests) == requests
        assert ("items" in pq.read_schema(path).names) == (first is not None)  # no column that nobody uses


def tokens_of(request):
    return [
        (name, j) if name != PRIVATE else (request.id, part, j)
        for part, (name, n) in enumerate(request.prompt)
        for j in range(n)
    ]


@given(workloads(st.sampled_from(["", "a", "b"]), st.sampled_from([1, 112, 400, 512, 1024, 1100]), most=5))
def test_mooncake_ids_are_equal_exactly_where_whole_prefixes_are(tmp_path_factory, workload):
    path = tmp_path_factory.mktemp("round") / "trace"
    write_mooncake(workload, path)
    if not workload.requests:
        return
    read = list(MooncakeReader().read(path).requests)
    for request, back in zip(workload.requests, read, strict=True):
        assert back.arrival_ns == request.arrival_ns // 1_000_000 * 1_000_000
        assert (back.prompt_len, back.output_len) == (request.prompt_len, request.output_len)
    prompts = [tokens_of(request) for request in workload.requests]
    for left in range(len(read)):
        for right in range(left):
            blocks = zip(read[left].prompt, read[right].prompt, strict=False)
            for block, ((name, n), (other, m)) in enumerate(blocks):
                end = block * BLOCK_TOKENS + min(n, m)
                equal = prompts[left][:end] == prompts[right][:end]
                if n == m == BLOCK_TOKENS:
                    assert (name == other) == equal
                elif name == other:  # a partial block may be known, but never wrongly
                    assert equal


def test_the_published_mooncake_trace_comes_back_byte_for_byte(tmp_path):
    path = SHARED / "mooncake" / "conversation_trace.jsonl"
    if not path.exists():
        pytest.skip(f"needs {path.name} in ../shared/data")
    write_mooncake(read_workload(path), tmp_path / "again.jsonl")
    assert (tmp_path / "again.jsonl").read_bytes() == path.read_bytes()


def test_files_are_written_whole_or_not_at_all(tmp_path):
    def broken():
        yield WorkloadRequest(0, 0, (("", 1),), 1)
        raise RuntimeError

    with pytest.raises(RuntimeError):
        write_workload(Workload(broken()), tmp_path / "t.parquet")
    assert list(tmp_path.iterdir()) == []
    workload = Workload([WorkloadRequest(0, 0, (("", 1),), 1)])
    write_workload(workload, tmp_path / "t.parquet")
    with pytest.raises(UserError, match="exists"):
        write_workload(workload, tmp_path / "t.parquet")
    write_workload(workload, tmp_path / "t.parquet", "mooncake", overwrite=True)
    assert len(list(read_workload(tmp_path / "t.parquet").requests)) == 1
    with pytest.raises(UserError, match=r"t\.csv.*give --to"):
        write_workload(workload, tmp_path / "t.csv")
    with pytest.raises(UserError, match="cannot be written"):
        write_workload(workload, tmp_path / "no" / "t.parquet")
    assert [p.name for p in tmp_path.iterdir()] == ["t.parquet"]


def test_parquet_streams(tmp_path):
    class Many:
        def __init__(self, count):
            self.count = count

        def __iter__(self):
            return (WorkloadRequest(i, i, (("", 5),), 3) for i in range(self.count))

    def peak(count):
        tracemalloc.start()
        write_parquet(Workload(Many(count)), tmp_path / "t")
        assert sum(1 for _ in read_workload(tmp_path / "t").requests) == count
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    # What grows is two integers a request, kept to check that ids are unique.
    assert peak(30_000) < peak(10_000) + 20_000 * 64
