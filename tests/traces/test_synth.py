"""Synthesis: reproducible, streamed, and of the distributions it claims."""

import hashlib
import tracemalloc
from collections import Counter
from dataclasses import replace
from itertools import islice, pairwise

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest, shares_prefixes
from tokentwin.traces.formats.parquet import ParquetReader, write_parquet
from tokentwin.traces.synth import parse_spec, synthesise

BASE = {"requests": 2000, "arrivals": {"kind": "poisson", "rate": 9}, "prompt": 100, "output": 10}


def make(**changes):
    return synthesise(parse_spec({**BASE, **changes}))


def requests(**changes):
    return list(make(**changes).requests)


lengths = st.one_of(
    st.integers(1, 500),
    st.fixed_dictionaries({"kind": st.just("uniform"), "low": st.integers(1, 9), "high": st.integers(9, 99)}),
    st.fixed_dictionaries({"kind": st.just("exponential"), "mean": st.floats(0.1, 1e4)}),
    st.fixed_dictionaries(
        {"kind": st.just("lognormal"), "mean": st.floats(1, 1e4), "sigma": st.floats(0, 3), "max": st.just(9000)}
    ),
)
rates = st.floats(0.01, 1e4)
arrivals = st.one_of(
    st.fixed_dictionaries({"kind": st.sampled_from(["poisson", "constant"]), "rate": rates}),
    st.fixed_dictionaries({"kind": st.just("gamma"), "rate": rates, "cv": st.floats(0.1, 10)}),
    st.fixed_dictionaries(
        {"kind": st.just("ramp"), "start_rate": st.floats(0, 99), "end_rate": rates, "over_s": st.floats(0.1, 99)}
    ),
)
specs = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**63 - 1),
        "requests": st.integers(1, 60),
        "arrivals": arrivals,
        "prompt": lengths,
        "output": lengths,
    },
    optional={
        "system_prompts": st.fixed_dictionaries(
            {
                "count": st.integers(1, 50),
                "tokens": lengths,
                "choice": st.sampled_from(["zipf", "uniform"]),
                "share": st.floats(0, 1),
            }
        ),
        "sessions": st.fixed_dictionaries({"turns": st.integers(1, 5), "think_ms": lengths}),
    },
)


@given(specs)
def test_any_spec_gives_a_valid_workload_twice_alike(spec):
    workload = synthesise(parse_spec(spec))
    first = list(workload.requests)
    assert first == list(workload.requests) == list(synthesise(parse_spec(spec)).requests)
    assert [r.id for r in first] == list(range(spec["requests"]))
    assert all(a.arrival_ns <= b.arrival_ns for a, b in pairwise(first))
    assert first[0].arrival_ns >= 0
    assert all(n >= 1 for r in first for _, n in r.prompt) and all(r.output_len >= 1 for r in first)
    if not workload.shares_prefixes:
        assert not shares_prefixes(first)
    for request in first:
        for name, tokens in request.prompt:
            if name.startswith("out:"):
                source = first[int(name[4:])]
                assert source.id < request.id and tokens == source.output_len
    longer = synthesise(parse_spec({**spec, "requests": spec["requests"] + 7}))
    assert list(islice(longer.requests, len(first))) == first


def test_bytes_do_not_change_from_one_version_to_the_next(tmp_path):
    spec = {
        "arrivals": {"kind": "gamma", "rate": 9, "cv": 2},
        "prompt": {"kind": "lognormal", "mean": 950, "p99": 6000, "max": 7000},
        "output": {"kind": "exponential", "mean": 200},
        "system_prompts": {"count": 10, "tokens": {"kind": "uniform", "low": 100, "high": 900}, "choice": "zipf"},
        "sessions": {"turns": {"kind": "exponential", "mean": 3}, "think_ms": 9000},
    }
    generated = [(r.id, r.arrival_ns, r.prompt, r.output_len) for r in requests(**spec)]
    assert hashlib.sha256(repr(generated).encode()).hexdigest()[:16] == "87748ace7b098af0"
    write_parquet(make(**spec), tmp_path / "a")
    write_parquet(make(**spec), tmp_path / "b")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_changing_one_quantity_leaves_the_others():
    one, two = requests(), requests(output={"kind": "exponential", "mean": 50}, prompt=7)
    assert [r.arrival_ns for r in one] == [r.arrival_ns for r in two]
    other = requests(seed=1)
    assert [r.arrival_ns for r in one] != [r.arrival_ns for r in other]


@pytest.mark.parametrize(
    "process, cv",
    [
        ({"kind": "poisson", "rate": 9}, 1.0),
        ({"kind": "gamma", "rate": 9, "cv": 3}, 3.0),
        ({"kind": "gamma", "rate": 9, "cv": 0.25}, 0.25),
        ({"kind": "constant", "rate": 9}, 0.0),
    ],
)
def test_rate_and_burstiness(process, cv):
    times = np.array([r.arrival_ns for r in requests(requests=40_000, arrivals=process)]) / 1e9
    gaps = np.diff(times)
    # Five standard errors of the mean of 40,000 gaps.
    assert gaps.mean() == pytest.approx(1 / 9, rel=5 * cv / 200 + 1e-6)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-6)


@pytest.mark.parametrize("start, end", [(0, 100), (100, 10), (50, 50)])
def test_a_ramp_has_its_rate_everywhere(start, end):
    ramp = {"kind": "ramp", "start_rate": start, "end_rate": end, "over_s": 100}
    times = np.array([r.arrival_ns for r in requests(requests=None, duration_s=150, arrivals=ramp)]) / 1e9
    for low in range(0, 150, 10):
        rate = np.interp([low, low + 10], [0, 100], [start, end]).mean()
        count = np.count_nonzero((times >= low) & (times < low + 10))
        assert abs(count - 10 * rate) < 5 * np.sqrt(10 * rate) + 1


def test_lengths():
    def drawn(spec):
        return np.array([r.output_len for r in requests(requests=40_000, output=spec)])

    assert set(drawn(7)) == {7}
    assert set(drawn({"kind": "uniform", "low": 3, "high": 6})) == {3, 4, 5, 6}
    assert drawn({"kind": "exponential", "mean": 200}).mean() == pytest.approx(200, rel=0.03)
    by_sigma = drawn({"kind": "lognormal", "mean": 950, "sigma": 0.8})
    assert by_sigma.mean() == pytest.approx(950, rel=0.03)
    assert np.log(by_sigma).std() == pytest.approx(0.8, rel=0.03)
    by_p99 = drawn({"kind": "lognormal", "mean": 950, "p99": 4000})
    assert by_p99.mean() == pytest.approx(950, rel=0.03)
    assert np.percentile(by_p99, 99) == pytest.approx(4000, rel=0.05)
    assert np.median(drawn({"kind": "lognormal", "mean": 950, "p50": 500})) == pytest.approx(500, rel=0.03)
    clipped = drawn({"kind": "exponential", "mean": 200, "min": 50, "max": 300})
    assert (clipped.min(), clipped.max()) == (50, 300)


def test_empirical_lengths_stay_together(tmp_path):
    pairs = [(10, 1), (20, 2), (30, 3)]
    trace = tmp_path / "t.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"0,{p},{o}\n" for p, o in pairs))
    both = {"kind": "empirical", "path": str(trace)}
    assert {(r.prompt_len, r.output_len) for r in requests(prompt=both, output=both)} == set(pairs)
    assert {(r.prompt_len, r.output_len) for r in requests(prompt=both, output=9)} == {(p, 9) for p, _ in pairs}
    with pytest.raises(UserError, match="nowhere"):
        make(prompt={"kind": "empirical", "path": "nowhere"})


def test_system_prompts():
    system = {"count": 4, "tokens": 50, "choice": "zipf", "exponent": 1, "share": 0.75}
    made = requests(requests=40_000, system_prompts=system)
    named = [r.prompt[0][0] for r in made if len(r.prompt) == 2]
    assert len(named) / len(made) == pytest.approx(0.75, abs=0.02)
    counts = [named.count(f"sys{k}") / len(named) for k in range(4)]
    assert counts == pytest.approx([12 / 25, 6 / 25, 4 / 25, 3 / 25], abs=0.02)
    assert all(r.prompt[-1] == ("", 100) for r in made)


def test_sessions_carry_the_conversation():
    made = requests(requests=300, sessions={"turns": 3, "think_ms": 5_000}, system_prompts={"count": 1, "tokens": 40})
    by_session: dict[str, list[WorkloadRequest]] = {}
    for request in made:
        by_session.setdefault(request.prompt[1][0].split(".")[0], []).append(request)
    assert max(map(len, by_session.values())) == 3
    for turns in by_session.values():
        for before, after in pairwise(turns):
            assert after.prompt[:-1] == (*before.prompt, (f"out:{before.id}", before.output_len))
            assert after.arrival_ns == before.arrival_ns + 5_000_000_000
    short = requests(requests=300, sessions={"turns": 9, "think_ms": 1, "max_prompt_tokens": 250})
    assert max(r.prompt_len for r in short) == 100 + 10 + 100


def test_a_closed_loop_arrives_at_once():
    workload = make(arrivals={"kind": "closed", "concurrency": 32})
    assert workload.concurrency == 32
    assert {r.arrival_ns for r in workload.requests} == {0}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"requests": 0}, r"spec\.requests: 0:"),
        ({"requests": None}, "exactly one of requests and duration_s"),
        ({"duration_s": 5}, "exactly one of requests and duration_s"),
        ({"prompt": 0}, r"spec\.prompt: 0: must be at least 1"),
        ({"prompt": {"kind": "normal"}}, "'normal'"),
        ({"prompt": {"kind": "exponential", "mean": float("nan")}}, "nan"),
        ({"prompt": {"kind": "uniform", "low": 9, "high": 3}}, "low 9 must not be above high 3"),
        ({"prompt": {"kind": "fixed", "tokens": 5, "min": 9, "max": 3}}, "min 9 must not be above max 3"),
        ({"prompt": {"kind": "lognormal", "mean": 9}}, "exactly one of sigma"),
        ({"prompt": {"kind": "lognormal", "mean": 10, "p99": 5}}, "p99 5 must be above mean 10"),
        ({"prompt": {"kind": "lognormal", "mean": 9, "p50": 10}}, "p50 10 must be at most 9 for mean 9"),
        ({"prompt": {"kind": "lognormal", "mean": 9, "p99": 1e6}}, "must be at most 135"),
        ({"arrivals": {"kind": "poisson", "rate": 0}}, r"arrivals\.poisson\.rate: 0:"),
        ({"arrivals": {"kind": "poisson", "rate": 9, "cv": 1}}, r"poisson\.cv: 1: is not a setting"),
        (
            {"arrivals": {"kind": "closed", "concurrency": 3}, "sessions": {"turns": 2, "think_ms": 1}},
            "arrivals of users",
        ),
        ({"seed": -1}, r"spec\.seed: -1"),
        ({"adapters": 0}, r"spec\.adapters: 0: must be at least 1"),
        ({"images": 9, "sessions": {"turns": 2, "think_ms": 1}}, "images cannot be combined with sessions"),
        ({"sead": 1}, r"spec\.sead: 1: is not a setting"),
        ({"sessions": {"turns": {"kind": "empirical", "path": "x"}, "think_ms": 1}}, "cannot be empirical"),
    ],
)
def test_a_wrong_spec_is_one_line(changes, message):
    with pytest.raises(UserError, match=message) as caught:
        make(**changes)
    assert "\n" not in str(caught.value)


def test_a_workload_of_centuries_is_refused():
    with pytest.raises(UserError, match="146 years"):
        requests(arrivals={"kind": "constant", "rate": 1e-9}, requests=10_000)


def test_memory_does_not_grow_with_the_number():
    def peak(count):
        workload = make(requests=count, system_prompts={"count": 10, "tokens": 40})
        tracemalloc.start()
        assert sum(1 for _ in workload.requests) == count
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most

    assert peak(60_000) < 1.3 * peak(20_000)


def test_a_share_of_structured_requests_changes_nothing_else():
    plain, some = requests(), requests(structured=0.3)
    assert [replace(request, structured=False) for request in some] == plain
    assert sum(request.structured for request in some) == pytest.approx(0.3 * len(some), rel=0.1)
    assert requests(structured=0.3, requests=50) == some[:50]
    waiting = requests(structured=0.3, grammar_compile_ms=2.5)
    assert {(request.structured, request.grammar_compile_ns) for request in waiting} == {(True, 2_500_000), (False, 0)}


def test_adapters_are_skewed_and_change_nothing_else():
    skewed = {"count": 20, "exponent": 1.0, "share": 0.9}
    plain, some = requests(requests=4000), requests(requests=4000, adapters=skewed)
    assert [replace(request, adapter="") for request in some] == plain
    counts = Counter(request.adapter for request in some)
    assert counts[""] == pytest.approx(400, rel=0.15)
    harmonic = sum(1 / k for k in range(1, 21))
    for k in (1, 2, 5):
        assert counts[f"adapter{k - 1}"] == pytest.approx(3600 / k / harmonic, rel=0.15)
    assert requests(requests=50, adapters=skewed) == some[:50]
    assert requests(requests=4000, adapters=20) == requests(requests=4000, adapters={"count": 20})
    talks = requests(requests=500, adapters=8, sessions={"turns": 4, "think_ms": 1})
    of_session = {(request.session, request.adapter) for request in talks}
    assert len(of_session) == len({request.session for request in talks})


def test_images_come_before_the_users_part_and_change_nothing_else():
    some = {"count": 2, "tokens": {"kind": "uniform", "low": 10, "high": 90}, "share": 0.75, "distinct": 30}
    plain, made = requests(requests=800), requests(requests=800, images=some)
    sizes: dict[str, int] = {}
    for before, after in zip(plain, made, strict=True):
        own = after.prompt[: len(before.prompt) - 1] + after.prompt[-1:]
        assert replace(after, prompt=own, items=()) == before
        for item in after.items:
            assert item.tokens == sizes.setdefault(item.content, item.tokens)  # one image has one size
        assert after.prompt_len - before.prompt_len == sum(item.tokens for item in after.items)
    assert sum(bool(request.items) for request in made) == pytest.approx(600, rel=0.1)
    assert len(sizes) == 30
    video = requests(requests=5, images={"tokens": 100, "kind": "video", "frames": 16})
    assert {request.items[0][1:] for request in video} == {(112, "", "video", 16)}
    assert requests(requests=5, images=64) == requests(requests=5, images={"tokens": 64})


def test_shares_of_requests_change_logits_and_score_their_prompts(tmp_path):
    plain, marked = requests(), requests(changes_logits=0.3, scores_prompt=0.2)
    assert sum(request.changes_logits for request in marked) == pytest.approx(600, rel=0.15)
    assert sum(request.scores_prompt for request in marked) == pytest.approx(400, rel=0.15)
    assert all(request.skip_reading_prefix_cache == request.scores_prompt for request in marked)
    off = {"changes_logits": False, "scores_prompt": False, "skip_reading_prefix_cache": False}
    assert [replace(request, **off) for request in marked] == plain
    for name, offered, columns in (("plain", plain, 0), ("marked", marked, 2)):
        write_parquet(Workload(offered), tmp_path / name)
        assert list(ParquetReader().read(tmp_path / name).requests) == offered
        assert len({"changes_logits", "scores_prompt"} & set(pq.read_schema(tmp_path / name).names)) == columns
