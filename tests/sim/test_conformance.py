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
SGLANG = sorted((DATA / "oracle_sglang").glob("*.rec.json.gz"))  # by SGLang 0.5.23: sglangside/virtual_clock.py
SMALLEST = min(RECORDINGS, key=lambda path: path.stat().st_size)


@pytest.fixture
def tampered(tmp_path):
    """Return the smallest recording, changed by a function, as plain JSON."""

    def change(edit):
        recording = json.loads(gzip.decompress(SMALLEST.read_bytes()))
        edit(recording)
        path = tmp_path / "tampered.rec.json"
        path.write_text(json.dumps(recording))
        return path

    return change


def one_more_token(recording):
    tokens = recording["steps"][40]["n"]
    tokens[next(iter(tokens))] += 1


def one_ns_later(recording):
    recording["steps"][40]["t"] += 1


def no_last_step(recording):
    recording["steps"].pop()


def finishes_sooner(recording):
    recording["results"][7]["finish_ns"] -= 1


def forgets_a_request(recording):
    recording["results"].pop(7)


def test_the_recordings_cover_both_loops_and_preemption():
    assert len(RECORDINGS) >= 9
    names = {path.name.split(".")[0] for path in RECORDINGS}
    assert {"fcfs_tight_kv", "priority_tight_kv", "overlap_tight_kv", "prefix_multiturn"} <= names


@pytest.mark.parametrize("path", RECORDINGS + WINDOWS + HYBRID + FEATURES, ids=lambda path: path.name.split(".")[0])
def test_every_recording_is_reproduced(path):
    result = conform(path)
    assert result.identical, str(result)
    assert result.identical_steps == result.steps > 0
    assert result.identical_requests == result.requests > 0


@pytest.mark.parametrize("path", SGLANG, ids=lambda path: path.name.split(".")[0])
def test_every_recording_of_sglang_is_reproduced(path):
    result = conform(path)
    assert result.identical, str(result)
    assert result.identical_steps == result.steps > 0
    assert result.identical_requests == result.requests > 0


def test_the_recordings_of_sglang_cover_retraction_shared_prefixes_and_its_settings():
    recordings = [json.loads(gzip.decompress(path.read_bytes())) for path in SGLANG]
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
    recording = json.loads(gzip.decompress(SGLANG[0].read_bytes()))
    recording["steps"][20]["t"] += 1
    (tmp_path / "changed.json").write_text(json.dumps(recording))
    result = conform(tmp_path / "changed.json")
    assert result.identical_steps == 20 and "SGLang: {" in result.difference


@pytest.mark.parametrize("edit", [one_more_token, one_ns_later], ids=lambda edit: edit.__name__)
def test_a_changed_step_is_shown_with_both_sides(tampered, edit):
    result = conform(tampered(edit))
    assert not result.identical
    assert result.identical_steps == 40
    head, ours, theirs = result.difference.splitlines()
    assert head.strip() == "first difference at step 40"
    assert ours.strip().startswith('ours: {"t"') and theirs.strip().startswith('vLLM: {"t"')
    assert ours.split(": ", 1)[1] != theirs.split(": ", 1)[1]


def test_a_missing_step_is_shown_as_nothing(tampered):
    result = conform(tampered(no_last_step))
    assert result.identical_steps == result.steps
    assert result.difference.endswith("vLLM: nothing")


@pytest.mark.parametrize("edit", [finishes_sooner, forgets_a_request], ids=lambda edit: edit.__name__)
def test_a_changed_result_is_shown_with_both_sides(tampered, edit):
    result = conform(tampered(edit))
    assert result.identical_steps == result.steps
    assert "first difference at request 7" in result.difference
    assert '"finish_ns"' in result.difference.splitlines()[1]


def test_another_policy_does_not_conform():
    assert not conform(SMALLEST, policy="static").identical


def test_the_command_exits_0_when_identical_and_1_when_not(tampered):
    same = tokentwin("conformance", SMALLEST)
    assert same.returncode == 0, same.stderr
    assert same.stdout.rstrip().endswith("identical")
    path = tampered(one_ns_later)
    different = tokentwin("conformance", SMALLEST, path)
    assert different.returncode == 1
    assert "DIFFERENT" in different.stdout and "ours:" in different.stdout and "vLLM:" in different.stdout
    assert different.stderr == ""


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
        (("steps", 5, "colour"), r"steps\[5\]\.colour"),
        (("results", 2, "colour"), r"results\[2\]\.colour"),
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
    recording = json.loads(gzip.decompress(path.with_suffix(".rec.json.gz").read_bytes()))
    for request in recording["requests"][::2]:
        request[field] = value
    (tmp_path / "changed.json").write_text(json.dumps(recording))
    assert not conform(tmp_path / "changed.json").identical


def test_the_command_exits_2_with_one_line(tmp_path):
    (tmp_path / "file.json").write_text("{}")
    done = tokentwin("conformance", tmp_path / "file.json")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1 and "not an oracle recording" in done.stderr
    assert done.stdout == ""
