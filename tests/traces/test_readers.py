"""Readers: every format by its content, and every mistake as one line with file, line and field."""

import gzip
import json
import os

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.formats.request_table import SCHEMA
from tokentwin.traces.formats.trace_file import READERS, read_workload
from tokentwin.traces.recording_writer import RecordingWriter
from tokentwin.traces.reshape import spread_ticks

AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 23:59:59.9999999,374,44\r\n"
    "2023-11-17 00:00:00.0000000,396,109\r\n"
    "2023-11-17 00:00:04.5,879,55"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}\n'
    '{"timestamp": 3000, "input_length": 512, "output_length": 9, "hash_ids": [0]}\n'
)
SIMPLE = "arrival_s,prompt_tokens,output_tokens,tenant\n0.5,10,3,a\n0.1,20,4,\n"
SEGMENTS = (
    '{"id": 4, "arrival_ms": 1.5, "prompt": [["sys", 400], ["", 35]], "output_tokens": 80, '
    '"max_tokens": 500, "priority": 2}\n'
    "\n"
    '{"id": 9, "arrival_ms": 2, "prompt": [["sys", 400], ["out:4", 80], ["u", 7]], "output_tokens": 1}\n'
)


@pytest.fixture
def read(tmp_path):
    """Read a text from a file whose name does not tell its format."""

    def read(text):
        path = tmp_path / "trace"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return read_workload(path)

    return read


def test_azure(read):
    workload = read(AZURE)
    assert [r.arrival_ns for r in workload.requests] == [0, 100, 4_500_000_100]
    assert [(r.id, r.prompt, r.output_len) for r in workload.requests][1] == (1, (("", 396),), 109)
    assert not workload.shares_prefixes


def test_azure_2024_has_an_offset(read):
    text = "TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 02:00:00+02:00,1,1\n2024-05-10 00:00:01Z,1,1\n"
    assert [r.arrival_ns for r in read(text).requests] == [0, 1_000_000_000]


def test_mooncake_blocks_are_segments(read):
    first, second = read(MOONCAKE).requests
    assert first.prompt == (("h0", 512), ("h1", 488))
    assert (second.arrival_ns, second.prompt) == (3_000_000_000, (("h0", 512),))
    assert read(MOONCAKE).shares_prefixes


def test_simple_csv_is_sorted_and_its_ids_are_its_lines(read):
    first, second = read(SIMPLE).requests
    assert (first.id, first.arrival_ns, first.prompt_len, first.tenant) == (1, 100_000_000, 20, "")
    assert (second.id, second.arrival_ns, second.prompt_len, second.tenant) == (0, 500_000_000, 10, "a")


def test_simple_json_lines_have_segments(read):
    workload = read(SEGMENTS)
    assert list(workload.requests) == [
        WorkloadRequest(4, 1_500_000, (("sys", 400), ("", 35)), 80, priority=2, max_tokens=500),
        WorkloadRequest(9, 2_000_000, (("sys", 400), ("out:4", 80), ("u", 7)), 1),
    ]
    assert workload.shares_prefixes


@pytest.mark.parametrize(
    "text",
    [
        AZURE.replace(",44", ",0"),
        MOONCAKE.replace('"output_length": 5', '"output_length": 0'),
        SIMPLE.replace("20,4", "20,0"),
        '{"arrival_s": 0, "prompt_tokens": 9, "output_tokens": 0}\n'
        '{"arrival_s": 1, "prompt_tokens": 2, "output_tokens": 3}',
    ],
    ids=["azure", "mooncake", "csv", "json"],
)
def test_an_output_of_0_is_a_pooling_request(tmp_path, read, text):
    requests = list(read(text).requests)
    assert [request.pools for request in requests] == [True] + [False] * (len(requests) - 1)
    write_parquet(read(text), tmp_path / "trace.parquet")
    assert list(read_workload(tmp_path / "trace.parquet").requests) == requests


@pytest.mark.parametrize("unit, text", [("s", "0.000000001"), ("ms", "0.000001"), ("ns", "1")])
def test_times_are_exact(read, unit, text):
    big = read(f"arrival_{unit},prompt_tokens,output_tokens\n{text},1,1\n")
    assert big.requests[0].arrival_ns == 1


@pytest.mark.parametrize(
    "times",
    [
        ("2026-11-24 10:00:01.5", "2026-11-24T10:00:00Z", "2026-11-24T12:00:02.25+02:00"),
        ("1795514401.5", "1795514400", "1795514402.25"),
        ("1.5", "0", "2.25"),
    ],
)
def test_timestamps_count_from_the_first(read, times):
    text = "timestamp,prompt_tokens,output_tokens\n" + "".join(f"{time},10,{i + 1}\n" for i, time in enumerate(times))
    requests = list(read(text).requests)
    assert [(r.arrival_ns, r.output_len) for r in requests] == [(0, 2), (1_500_000_000, 1), (2_250_000_000, 3)]
    plain = [float(time) if time.replace(".", "").isdigit() else time for time in times]
    objects = [json.dumps({"timestamp": time, "prompt_tokens": 10, "output_tokens": 1}) for time in plain]
    assert [r.arrival_ns for r in read("\n".join(objects)).requests] == [0, 1_500_000_000, 2_250_000_000]


@pytest.mark.parametrize(
    "header",
    [
        "timestamp,prompt_tokens,output_tokens",
        "created_at,input_tokens,completion_tokens",
        "Arrival Time,InputTokens,Output-Tokens",
        "arrived_at,num_prefill_tokens,num_decode_tokens",  # Vidur
        "Timestamp,Request tokens,Response tokens",  # BurstGPT
    ],
)
def test_usual_names_of_columns_need_no_option(read, header):
    rows = [["2026-11-24T10:00", 10, 3], ["2026-11-24T10:00:01.5+0000", 20, 4]]
    text = "\n".join([header, *(",".join(map(str, row)) for row in rows)])
    seen = [(0, 10, 3), (1_500_000_000, 20, 4)]
    assert [(r.arrival_ns, r.prompt_len, r.output_len) for r in read(text).requests] == seen
    objects = "\n".join(json.dumps(dict(zip(header.split(","), row, strict=True))) for row in rows)
    assert [(r.arrival_ns, r.prompt_len, r.output_len) for r in read(objects).requests] == seen


@given(st.permutations(["=1+1", "in", "prompt_tokens", "out tokens", "a.b"]), st.sampled_from(["s", "ms", "us", "ns"]))
def test_stated_columns_mean_the_same_by_any_names(tmp_path_factory, names, unit):
    when, prompt, output, tenant, _ = names
    per_s = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[unit]
    text = ",".join(names) + f"\n{7 * per_s},10,3,a,x\n{5 * per_s},20,4,b,y\n"
    path = tmp_path_factory.getbasetemp() / "columns.csv"
    path.write_text(text)
    timestamp = "timestamp" if unit == "s" else f"timestamp_{unit}"
    columns = {timestamp: when, "prompt_tokens": prompt, "output_tokens": output, "tenant": tenant}
    requests = [
        (r.arrival_ns, r.prompt_len, r.output_len, r.tenant) for r in read_workload(path, None, columns).requests
    ]
    assert requests == [(0, 20, 4, "b"), (2_000_000_000, 10, 3, "a")]


@pytest.mark.parametrize(
    ("text", "columns", "says"),
    [
        (
            SIMPLE,
            {"prompt_tokens": "size"},
            "'prompt_tokens=size': is not a column of line 1 of trace; it has arrival_s",
        ),
        (SIMPLE, {"size": "tenant"}, "'size=tenant': must begin with a field: arrival_s"),
        (SIMPLE, {"prompt_tokens": "prompt_tokens"}, "arrival: '': give exactly one of"),
        (MOONCAKE, {"prompt_tokens": "tokens"}, "is not a column of line 1"),
        ("hello\nworld\n", {"prompt_tokens": "hello"}, "is neither CSV nor JSON lines"),
        (SIMPLE.replace("tenant", "input_tokens"), None, ":1: header: 'input_tokens': is not a known column"),
    ],
)
def test_wrong_columns_are_one_line(tmp_path, text, columns, says):
    (tmp_path / "trace").write_text(text)
    with pytest.raises(UserError) as error:
        read_workload(tmp_path / "trace", None, columns)
    assert says in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("text", [AZURE, MOONCAKE, SIMPLE, SEGMENTS])
def test_gzip_and_byte_order_mark(read, text):
    requests = list(read(text).requests)
    assert list(read(gzip.compress(text.encode())).requests) == requests
    assert list(read(b"\xef\xbb\xbf" + text.encode()).requests) == requests


def test_parquet_and_recordings(tmp_path, read):
    workload = read(SEGMENTS)
    write_parquet(workload, tmp_path / "x.csv")
    assert list(read_workload(tmp_path / "x.csv").requests) == workload.requests
    with RecordingWriter(tmp_path / "rec", {"run_id": "r"}, workload=workload):
        pass
    assert list(read_workload(tmp_path / "rec").requests) == workload.requests


CSV = "arrival_s,prompt_tokens,output_tokens\n"
JSONL = '{"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1}\n'
CAKE = '{"timestamp": 0, "input_length": 1000, "output_length": 5, "hash_ids": [0, 1]}\n'

MISTAKES = {
    "empty": (b"", "trace.*is empty"),
    "blank": ("\n \n", "is empty"),
    "junk": (bytes(range(256)) * 9, "has no known format"),
    "words": ("hello\nworld\n", "has no known format"),
    "header only": (CSV, "holds no requests"),
    "azure header only": (AZURE.splitlines()[0], "holds no requests"),
    "azure time": (AZURE.replace("2023-11-17 00:00:04.5", "yesterday"), ":4: TIMESTAMP: 'yesterday'"),
    "azure date": (AZURE.replace("11-17 00:00:04.5", "13-17 00:00:04.5"), ":4: TIMESTAMP"),
    "azure zero": (AZURE.replace("396", "0"), ":3: ContextTokens: '0': must be at least 1"),
    "azure column": (AZURE.replace("GeneratedTokens", "Tokens"), ":1: header: 'Tokens': is not a known column"),
    "no unit": (
        "arrival,prompt_tokens,output_tokens\n1,1,1\n",
        ":1: header: 'arrival': is not a known column; choose from arrival_s",
    ),
    "header of something else": (
        "time,size\n",
        ":1: header: 'time': is not a known column; choose from arrival_s, arrival_ms",
    ),
    "underscore": (CSV + "0,1_000,1\n", ":2: prompt_tokens: '1_000': must be a number in the digits 0 to 9"),
    "other digits": (CSV + "0,\u0661,1\n", ":2: prompt_tokens: '\u0661': must be a number in the digits 0 to 9"),
    "azure digits": (AZURE.replace("04.5", "0\u0664.5"), ":4: TIMESTAMP: "),
    "json twice": (JSONL.replace("}", ', "arrival_s": 3}'), ":1: .*'arrival_s' is given twice"),
    "half a character": (JSONL.replace("}", r', "tenant": "\ud800"}'), ":1: tenant: .*is not a valid character"),
    "segment of half a character": (
        JSONL.replace('"prompt_tokens": 1', r'"prompt": [["\ud800", 1]]'),
        ":1: prompt: .*is not a valid character",
    ),
    "no arrival": ("prompt_tokens,output_tokens\n1,1\n", ":2: arrival: '': give exactly one of"),
    "two arrivals": ("arrival_s,arrival_ms,prompt_tokens,output_tokens\n1,1,1,1\n", "exactly one of"),
    "no output": ("arrival_s,prompt_tokens\n1,1\n", ":2: output_tokens: is missing"),
    "negative": (CSV + "0,1,1\n0,-5,1\n", ":3: prompt_tokens: '-5': must be at least 1"),
    "negative output": (CSV + "0,1,-1\n", ":2: output_tokens: '-1': must be at least 0"),
    "a limit on nothing": (JSONL.replace("1}", '0, "max_tokens": 4}'), ":1: max_tokens: 4: is for requests that get"),
    "fraction": (CSV + "0,1.5,1\n", ":2: prompt_tokens: '1.5': must be a whole number"),
    "nan": (CSV + "nan,1,1\n", ":2: arrival_s: 'nan': must be a finite number"),
    "infinite": (CSV + "inf,1,1\n", "must be a finite number"),
    "before the start": (CSV + "-1,1,1\n", ":2: arrival_s: '-1': must be at least 0"),
    "far future": (CSV + "1e300,1,1\n", ":2: arrival_s: '1e300'"),
    "292 years": (CSV + "9.3e9,1,1\n", ":2: arrival_s: '9.3e9': is too late; a workload ends within 146 years"),
    "huge prompt": (CSV + "0,999999999999,1\n", ":2: prompt_tokens: '999999999999': must be at most 2,147,483,647"),
    "huge output": (CSV + "0,1,2147483648\n", ":2: output_tokens: '2147483648': must be at most 2,147,483,647"),
    "a limit below the output": (
        JSONL.replace("1}", '5, "max_tokens": 4}'),
        ":1: max_tokens: 4: must be at least output_to",
    ),
    "huge priority": (JSONL.replace("}", ', "priority": 9e9}'), ":1: priority: .*must be at most 2,147,483,647"),
    "huge sum": (
        JSONL.replace('"prompt_tokens": 1', '"prompt": [["a", 2000000000], ["b", 2000000000]]'),
        ":1: prompt: '4000000000 tokens': must be at most 2,147,483,647 tokens in all",
    ),
    "azure huge": (AZURE.replace("396", "39600000000"), ":3: ContextTokens: '39600000000': must be at most"),
    "cake huge": (CAKE.replace("1000", "1000000000000"), ":1: input_length: 1000000000000: must be at most"),
    "word": (CSV + "0,many,1\n", ":2: prompt_tokens: 'many': must be a number"),
    "short row": (CSV + "0,1\n", ":2: '0,1': has 2 cells, but the header has 3"),
    "same column": ("arrival_s,arrival_s\n1,1\n", "'arrival_s': appears twice"),
    "open quote": (CSV + '"0,1,1\n', "is not CSV"),
    "not text": (CSV.encode() + b"0,\xff,1\n", ":2.*is not UTF-8"),
    "no date": ("timestamp,prompt_tokens,output_tokens\n2026-13-01 10:00:00,1,1\n", ":2: timestamp: .*must look like"),
    "word for a time": ("timestamp,prompt_tokens,output_tokens\nnoon,1,1\n", ":2: timestamp: 'noon': must be a number"),
    "milliseconds": (
        "timestamp,prompt_tokens,output_tokens\n1795514401500,1,1\n",
        ":2: timestamp: '1795514401500': is too late",
    ),
    "timestamp once": (JSONL.replace("arrival_s", "timestamp") + JSONL, ":2: timestamp: is missing; give every"),
    "same id": (
        "id,arrival_s,prompt_tokens,output_tokens\n3,0,1,1\n3,1,1,1\n",
        ":3: id: 3: is already the id of line 2",
    ),
    "truncated": (JSONL + JSONL[:20], ":2: .*is not JSON"),
    "array": ('{"a": 1}\n'.replace('{"a": 1}', "[1]"), "has no known format"),
    "array later": (JSONL + "[1]\n", ":2: .*must be a JSON object"),
    "json nan": (JSONL.replace('"arrival_s": 0', '"arrival_s": NaN'), ":1: arrival_s: .*finite"),
    "json type": (JSONL.replace('"prompt_tokens": 1', '"prompt_tokens": [1]'), ":1: prompt_tokens: .*a number"),
    "json bool": (JSONL.replace('"prompt_tokens": 1', '"prompt_tokens": true'), "prompt_tokens: True"),
    "json null": (JSONL.replace('"prompt_tokens": 1', '"prompt_tokens": null'), "prompt_tokens: must be a number"),
    "deep": ("{" + '"a":[' * 100_000 + "\n", ":1: .*is not JSON"),
    "tenant": (JSONL.replace("}", ', "tenant": 3}'), ":1: tenant: 3: must be a string"),
    "no segments": (JSONL.replace('"prompt_tokens": 1', '"prompt": []'), "must hold at least one segment"),
    "segment": (JSONL.replace('"prompt_tokens": 1', '"prompt": [["a"]]'), r"must be a segment \[name, tokens\]"),
    "empty segment": (JSONL.replace('"prompt_tokens": 1', '"prompt": [["a", 0]]'), "prompt: 0: must be at least"),
    "sum": (JSONL.replace("}", ', "prompt": [["a", 4]]}'), "prompt_tokens: 1: must be 4, the sum of the segments"),
    "no such output": (SEGMENTS.replace("out:4", "out:5"), ":3: prompt: 'out:5': must name an earlier request"),
    "too much output": (
        SEGMENTS.replace('"out:4", 80', '"out:4", 81'),
        "must name an earlier request that generates at least 81 tokens",
    ),
    "items": (JSONL.replace("}", ', "items": [[0, 1]]}'), ":1: items: .*must be objects such as"),
    "an item's field": (JSONL.replace("}", ', "items": [{"offset": 0, "tokens": "1"}]}'), ":1: items: .*such as"),
    "an item too long": (JSONL.replace("}", ', "items": [{"offset": 0, "tokens": 2}]}'), ":1: items: .*ends at 1"),
    "a kind of item": (
        JSONL.replace("}", ', "items": [{"offset": 0, "tokens": 1, "kind": "smell"}]}'),
        ":1: items: .*must be image, video or audio",
    ),
    "odd frames": (
        JSONL.replace('tokens": 1, ', 'tokens": 9, ').replace(
            "}", ', "items": [{"offset": 0, "tokens": 4, "frames": 3}]}'
        ),
        ":1: items: .*must divide its 4 tokens",
    ),
    "own output": (SEGMENTS.replace("out:4", "out:9"), "must name an earlier request"),
    "cake ids": (CAKE.replace("[0, 1]", "[0]"), ":1: hash_ids: '1 ids': must have 2 entries for input_length 1000"),
    "cake id": (CAKE.replace("[0, 1]", '[0, "x"]'), ":1: hash_ids: 'x': must hold whole numbers only"),
    "cake no ids": (CAKE + JSONL, ":2: arrival_s: 0: is not a known field"),
    "cake length": (CAKE.replace("1000", "-1"), ":1: input_length: -1: must be at least 1"),
    "cut gzip": (gzip.compress(AZURE.encode() * 999)[:200], "cannot be read|is not"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_one_line(read, name):
    text, message = MISTAKES[name]
    with pytest.raises(UserError, match=message) as caught:
        list(read(text).requests)
    assert "\n" not in str(caught.value)


def test_what_is_no_regular_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", "/dev/zero"):
        with pytest.raises(UserError, match="is not a regular file"):
            read_workload(path)


def test_a_missing_file_and_a_directory(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        read_workload(tmp_path / "nothing")
    with pytest.raises(UserError, match="is a directory"):
        read_workload(tmp_path)


PARQUET_MISTAKES = {
    "unsorted": ({"arrival_ns": [5, 4]}, "row 1: arrival_ns: 4: rows must be sorted"),
    "same id": ({"id": [3, 3]}, "id: 3: appears twice"),
    "negative": ({"arrival_ns": [-1, 4]}, "row 0: arrival_ns: -1: must be at least 0"),
    "negative output": ({"output_len": [1, -1]}, "row 1: output_len: -1: must be at least 0"),
    "huge prompt": ({"prompt": [[("a", 2**40)], [("a", 7)]], "prompt_len": [2**40, 7]}, "row 0: prompt_len: .*at most"),
    "huge output": ({"output_len": [1, 2**31]}, "row 1: output_len: 2147483648: must be at most"),
    "a limit below the output": ({"max_tokens": [None, 2]}, "row 1: max_tokens: 2: must be at least output_len"),
    "a huge limit": ({"max_tokens": [2**40, 3]}, "row 0: max_tokens: 1099511627776: must be at most"),
    "huge priority": ({"priority": [0, 2**31]}, "row 1: priority: 2147483648: must be at most"),
    "too late": ({"arrival_ns": [0, 2**62 + 1]}, "row 1: arrival_ns: .*is too late"),
    "null": ({"tenant": ["", None]}, "row 1: tenant: must not be null"),
    "sum": ({"prompt_len": [7, 8]}, "row 1: prompt_len: 8: must be the sum"),
    "no prompt": ({"prompt": [[], [("a", 7)]]}, "row 0: prompt_len"),
    "empty segment": ({"prompt": [[("a", 7), ("b", 0)], [("a", 7)]]}, "row 0: prompt: 7: each segment"),
    "output": ({"prompt": [[("a", 7)], [("out:0", 4), ("a", 3)]]}, "row 1: prompt: 'out:0': must name an earlier"),
    "own output": ({"prompt": [[("out:0", 1), ("a", 6)], [("a", 7)]]}, "row 0: prompt: 'out:0': must name an earlier"),
    "odd output": (
        {"prompt": [[("a", 7)], [("out:x", 7)]]},
        "row 1: prompt: 'out:x': must have the id of a request after",
    ),
}


@pytest.mark.parametrize("name", PARQUET_MISTAKES)
def test_parquet_mistakes_are_one_line(tmp_path, name):
    changes, message = PARQUET_MISTAKES[name]
    columns = {
        "id": [0, 1],
        "arrival_ns": [0, 4],
        "prompt": [[("a", 7)], [("a", 7)]],
        "prompt_len": [7, 7],
        "output_len": [3, 3],
        "priority": [0, 0],
        "tenant": ["", ""],
        "slo_class": ["", ""],
        "session": ["", ""],
        "turn": [0, 0],
        "think_ns": [None, None],
        "cancel_ns": [None, None],
        "structured": [False, False],
        "stop_ns": [None, None],
        "skip_reading_prefix_cache": [False, False],
        "grammar_compile_ns": [0, 0],
        "max_tokens": [None, 9],
    } | changes
    columns["prompt"] = [[{"segment": s, "tokens": n} for s, n in row] for row in columns["prompt"]]
    about = json.dumps({"name": "n", "concurrency": None, "shares_prefixes": True})
    # A foreign writer has nullable fields, and so could we not refuse what it wrote otherwise.
    fields = [pa.field(f.name, f.type) for f in SCHEMA]
    arrays = [pa.array(columns[f.name], f.type) for f in SCHEMA]
    schema = pa.schema(fields, {"tokentwin.workload": about})
    pq.write_table(pa.Table.from_arrays(arrays, schema=schema), tmp_path / "t")
    with pytest.raises(UserError, match=message):
        read_workload(tmp_path / "t")


def test_foreign_and_damaged_parquet(tmp_path):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "t")
    with pytest.raises(UserError, match="not a tokentwin trace"):
        read_workload(tmp_path / "t")
    about = {"tokentwin.workload": "{}"}
    pq.write_table(pa.table({"id": [1]}).replace_schema_metadata(about), tmp_path / "t")
    with pytest.raises(UserError, match="arrival_ns: this column is missing"):
        read_workload(tmp_path / "t")
    (tmp_path / "t").write_bytes(b"PAR1" + bytes(100))
    with pytest.raises(UserError, match="not a readable Parquet"):
        read_workload(tmp_path / "t")


@given(
    st.one_of(
        st.binary(max_size=200),
        st.tuples(st.sampled_from([AZURE, MOONCAKE, SIMPLE, SEGMENTS]), st.integers(0, 300), st.binary(max_size=4)).map(
            lambda t: t[0].encode()[: t[1]] + t[2] + t[0].encode()[t[1] + 1 :]
        ),
    )
)
def test_no_input_makes_a_traceback(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "t"
    path.write_bytes(data)
    try:
        requests = list(read_workload(path).requests)
    except UserError as error:
        assert "\n" not in str(error)
    else:
        assert requests == sorted(requests, key=lambda r: (r.arrival_ns, r.id))
        assert all(r.prompt_len >= 1 and r.output_len >= 1 and r.arrival_ns >= 0 for r in requests)


def test_formats_have_names():
    assert len({reader.name for reader in READERS}) == len(READERS)


def test_spreading_ticks(read):
    rows = [(0, 3), (3000, 2), (6000, 1), (60_000, 2)]
    lines = "".join(f"{t},5,5\n" for t, n in rows for _ in range(n))
    workload = read("arrival_ms,prompt_tokens,output_tokens\n" + lines)
    spread = spread_ticks(workload)
    assert [r.arrival_ns // 1_000_000 for r in spread.requests] == [0, 1000, 2000, 3000, 4500, 6000, 60_000, 61_500]
    assert [r.id for r in spread.requests] == list(range(8))
    distinct = read(CSV + "0,1,1\n1,1,1\n")
    assert spread_ticks(distinct) is distinct


def test_numbers_in_quotes_are_refused_in_json(read):
    for field in ("arrival_s", "prompt_tokens", "output_tokens"):
        with pytest.raises(UserError, match=f":1: {field}: .* without quotes"):
            read(json.dumps({"arrival_s": 0, "prompt_tokens": 1, "output_tokens": 1} | {field: "1"}))


def test_what_unpacks_for_ever_is_refused(read):
    rows = gzip.compress(CSV.encode()) + gzip.compress(b"0" * (1 << 20)) * 9
    with pytest.raises(UserError, match="unpacks to more than 100 times its size"):
        read(rows)
