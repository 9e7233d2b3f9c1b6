"""Rung 0: every recording of vLLM's and SGLang's own schedulers is reproduced, and one that was changed is noticed."""

import gzip
import json
from pathlib import Path

import pytest

from tests.command import tokentwin
from tokentwin.serving.errors import UserError
from tokentwin.sim.checks.conformance import conform

DATA = Path(__file__).parents[1] / "data"
RECORDINGS = sorted((DATA / "oracle").glob("*.rec.json.gz"))
WINDOWS = sorted((DATA / "oracle_windows").glob("*.rec.json.gz"))  # of block tables by group; see docs/serving.md
HYBRID = sorted((DATA / "oracle_hybrid").glob("*.rec.json.gz"))  # of models with cached states, by vLLM 0.32
FEATURES = sorted((DATA / "oracle_features").glob("*.rec.json.gz"))  # rarer ones, a few recordings of each
SGLANG = sorted((DATA / "oracle_sglang").glob("*.rec.json.gz"))  # by SGLang 0.5.23: lab/oracles/sglang_clock.py
ALL = RECORDINGS + WINDOWS + HYBRID + FEATURES + SGLANG
SMALLEST = min(RECORDINGS, key=lambda path: path.stat().st_size)


@pytest.fixture
def tampered(tmp_path):
    """Return the smallest recording, changed by a function, as plain JSON."""

    def change(edit):
        recording = read(SMALLEST)
        edit(recording)
        path = tmp_path / "tampered.rec.json"
        path.write_text(json.dumps(recording))
        return path

    return change


def one_ns_later(recording):
    recording["steps"][40]["t"] += 1


def read(path):
    return json.loads(gzip.decompress(path.read_bytes()))


def test_the_recordings_cover_both_loops_and_preemption():
    assert len(RECORDINGS) >= 9
    names = {path.name.split(".")[0] for path in RECORDINGS}
    assert {"fcfs_tight_kv", "priority_tight_kv", "overlap_tight_kv", "prefix_multiturn"} <= names


@pytest.mark.parametrize("path", ALL, ids=lambda path: path.name.split(".")[0])
def test_every_recording_is_reproduced(path):
    result = conform(path)
    assert result.identical, result.difference
    assert result.identical_steps == result.steps > 0
    assert result.identical_requests == result.requests > 0
    assert not result.not_compared


def test_the_recordings_of_sglang_cover_retraction_shared_prefixes_and_its_settings():
    recordings = [read(path) for path in SGLANG]
    assert {recording["config"]["block_size"] for recording in recordings} >= {1, 16, 64}
    assert {recording["config"]["schedule_policy"] for recording in recordings} == {
        "fcfs", "lpm", "lof", "dfs-weight", "random",
    }  # fmt: skip
    features = ("priority_scheduling_preemption_threshold", "speculative")
    for feature in features:
        assert {r["config"]["async_scheduling"] for r in recordings if feature in r["config"]} == {False, True}
    hung_up = [
        (recording["config"]["async_scheduling"], result["tokens"] > 0)
        for recording in recordings
        for request, result in zip(recording["requests"], recording["results"], strict=True)
        if request.get("abort_ns") == result["finish_ns"]
    ]
    assert {*hung_up} == {(False, False), (False, True), (True, False), (True, True)}
    assert any(request["output_len"] == 0 for recording in recordings for request in recording["requests"])
    for overlaps in (False, True):
        of_loop = [recording for recording in recordings if recording["config"]["async_scheduling"] == overlaps]
        assert sum(len(step["pre"]) for recording in of_loop for step in recording["steps"]) > 3
        assert sum(row["prefix_hit_tokens"] for recording in of_loop for row in recording["results"]) > 1000


def test_a_difference_from_sglang_is_shown_with_its_name(tmp_path):
    recording = read(SGLANG[0])
    recording["steps"][20]["t"] += 1
    (tmp_path / "changed.json").write_text(json.dumps(recording))
    result = conform(tmp_path / "changed.json")
    assert result.identical_steps == 20 and "SGLang: {" in result.difference


COLUMNS = [
    *(("steps", column) for column in ("t", "dt", "n", "pre", "s", "enc", "drafts", "got", "waste")),
    *(("results", column) for column in ("id", "first_token_ns", "finish_ns", "prefix_hit_tokens", "tokens", "finish")),
]


def rows_with(recording, dataset, column):
    """Return the places of rows with something to change in the column, and with two requests in its order of rows."""
    many = 1 if column == "n" else 0
    return [
        place
        for place, row in enumerate(recording[dataset])
        if (value := row.get(column)) is not None and (not isinstance(value, list | dict) or len(value) > many)
    ]


def changed(value, ordered):
    """Yield every kind of change of a value; `ordered` if the order of a mapping counts."""
    if isinstance(value, dict):
        *others, (last, amount) = value.items()
        yield dict(others)
        yield value | {last: value[last] + 1 if isinstance(amount, int) else [77]}
        yield dict(others) | {"77": amount}
        yield value | {"77": amount}
        if ordered:
            yield dict(reversed(value.items()))
    elif isinstance(value, list):
        yield value[:-1]
        yield [*value, "77"]
        yield ["77", *value[1:]]
    elif isinstance(value, str):
        yield from {"length", "stop", "abort", "error"} - {value}
    else:
        yield from (value + 1, value - 1, None)


def is_noticed(recording, folder):
    (folder / "changed.json").write_text(json.dumps(recording))
    try:
        return not conform(folder / "changed.json").identical
    except UserError:
        return True


@pytest.mark.parametrize("dataset, column", COLUMNS)
def test_every_change_of_a_column_is_noticed(tmp_path, dataset, column):
    by_size = sorted((path for path in ALL), key=lambda path: path.stat().st_size)
    recording = next(one for one in map(read, by_size) if rows_with(one, dataset, column))
    places = rows_with(recording, dataset, column)
    for place in {places[0], places[len(places) // 2]}:
        row = recording[dataset][place]
        for value in changed(row[column], column == "n"):
            other = [*recording[dataset][:place], row | {column: value}, *recording[dataset][place + 1 :]]
            assert is_noticed(recording | {dataset: other}, tmp_path), value
        without = {name: row[name] for name in row if name != column}
        rows = [*recording[dataset][:place], without, *recording[dataset][place + 1 :]]
        assert is_noticed(recording | {dataset: rows}, tmp_path) or dataset == "results", "left out"


@pytest.mark.parametrize("dataset", ["steps", "results"])
def test_a_row_that_is_missing_doubled_or_moved_is_noticed(tmp_path, dataset):
    recording = read(min(SGLANG, key=lambda path: path.stat().st_size))
    *rows, last = recording[dataset]
    for other in (rows, [*rows, last, last], *([[*rows[1:2], rows[0], *rows[2:], last]] if dataset == "steps" else [])):
        assert is_noticed(recording | {dataset: other}, tmp_path)


def test_columns_of_another_kind_are_named_and_change_nothing(tampered):
    """KV events say what the cache holds. The configuration switches them on, and no decision depends on them."""

    def with_events(recording):
        recording["config"]["kv_events_config"] = {"enable_kv_cache_events": True, "publisher": "zmq"}
        recording["steps"][3]["kv_events"] = [{"type": "BlockStored"}]

    result = conform(tampered(with_events))
    assert result.identical and list(result.not_compared) == ["kv_events"]


def test_a_changed_step_is_shown_with_both_sides(tampered):
    result = conform(tampered(one_ns_later))
    assert not result.identical
    assert result.identical_steps == 40
    head, ours, theirs = result.difference.splitlines()
    assert head.strip() == "first difference at step 40"
    assert ours.strip().startswith('ours: {"t"') and theirs.strip().startswith('vLLM: {"t"')
    assert ours.split(": ", 1)[1] != theirs.split(": ", 1)[1]


def test_a_missing_step_is_shown_as_nothing(tampered):
    result = conform(tampered(lambda recording: recording["steps"].pop()))
    assert result.identical_steps == result.steps
    assert result.difference.endswith("vLLM: nothing")


def test_a_changed_result_is_shown_with_both_sides(tampered):
    result = conform(tampered(lambda recording: recording["results"][7].update(finish_ns=1)))
    assert result.identical_steps == result.steps
    assert "first difference at request 7" in result.difference
    assert all('"finish_ns"' in line for line in result.difference.splitlines()[1:])


def test_another_policy_does_not_conform():
    assert not conform(SMALLEST, policy="static").identical


def test_the_command_says_how_each_feature_went_and_goes_on_after_a_file_that_it_refuses(tampered, tmp_path):
    refused = tmp_path / "file.json"
    refused.write_text("{}")
    same = tokentwin("conformance", SGLANG[0], refused, SMALLEST)
    assert same.returncode == 2
    assert [line.split(": recordings ")[0] for line in same.stdout.splitlines()] == [
        "SGLang aborts",
        f"vLLM {SMALLEST.name.split('_')[0]}",
        "total",
    ]
    assert same.stdout.splitlines()[-1].startswith("total: recordings 2/2 identical, steps ")
    assert len(same.stderr.splitlines()) == 1 and "not an oracle recording" in same.stderr
    path = tampered(one_ns_later)
    different = tokentwin("conformance", SMALLEST, path, path)
    assert different.returncode == 1 and different.stderr == ""
    feature, total, *differences = different.stdout.splitlines()
    assert "recordings 1/3 identical" in feature and "recordings 1/3 identical" in total
    assert [line.split(": {")[0].strip() for line in differences] == 2 * [
        f"{read(SMALLEST)['name']} DIFFERS", "first difference at step 40", "ours", "vLLM",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "content, message",
    [
        (None, "cannot be read"),
        (b"steps", "must be JSON"),
        (b"\x1f\x8bnot gzip", "cannot be read"),
        (b"\xff\xfe\x00", "must be JSON"),
        (b"[1, 2]", "not an oracle recording"),
        (b'{"config": {}, "cost": {}, "steps": []}', "is not an oracle recording: it has no requests, results"),
        (b'{"config": {"max_num_seqs": 0}, "cost": {}, "requests": [], "steps": [], "results": []}', "max_num_seqs"),
        (b'{"config": {}, "cost": {"ns": 1}, "requests": [], "steps": [], "results": []}', "not an oracle recording"),
        (b'{"config": {}, "cost": [], "requests": [{}], "steps": [], "results": []}', "not an oracle recording"),
    ],
)
def test_what_is_no_recording_is_refused_in_one_line(tmp_path, content, message):
    path = tmp_path / "file.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        conform(path)


def unknown(recording, *way):
    for key in way[:-1]:
        recording = recording[key]
    recording[way[-1]] = 7


@pytest.mark.parametrize(
    "way, field",
    [
        (("config", "colour"), r"config\.colour"),
        (("requests", 3, "colour"), r"requests\[3\]\.colour"),
        (("cost", "colour"), "colour"),
    ],
)
def test_a_field_that_is_not_known_is_refused_by_name(tampered, way, field):
    path = tampered(lambda recording: unknown(recording, *way))
    with pytest.raises(UserError, match=field) as error:
        conform(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "field, value",
    [("abort_ns", 700_000_000), ("max_tokens", 4000), ("salt", "a"), ("skip_cache", True), ("grammar_ns", 10**12)],
)
def test_a_field_that_is_known_is_not_ignored(tmp_path, field, value):
    """Salts of two kinds, because a salt that all have changes nothing."""
    path = DATA / "oracle" / ("overlap_prefix_multiturn" if field != "max_tokens" else "overlap_roomy")
    recording = read(path.with_suffix(".rec.json.gz"))
    for request in recording["requests"][::2]:
        request[field] = value
    (tmp_path / "changed.json").write_text(json.dumps(recording))
    assert not conform(tmp_path / "changed.json").identical
