"""A fixed number of users: nested, in mid-session at the start; agents whose context grows by tools' results."""

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import WorkloadRequest
from tokentwin.traces.formats.parquet import write_parquet
from tokentwin.traces.formats.trace_file import read_workload
from tokentwin.traces.synth import SynthSpec, parse_spec, synthesise

BASE = {"duration_s": 100, "arrivals": {"kind": "users", "users": 6}, "prompt": 100, "output": 10}
AGENTS = {
    "arrivals": {"kind": "users", "users": 8, "think_ms": 30_000},
    "sessions": {
        "turns": {"kind": "uniform", "low": 2, "high": 9},
        "think_ms": {"kind": "exponential", "mean": 2000},
        "tools": {"parallel": {"kind": "uniform", "low": 1, "high": 4}, "result": 300},
    },
    "system_prompts": {"count": 3, "tokens": 50},
}


def requests(**changes: object) -> list[WorkloadRequest]:
    return list(synthesise(parse_spec({**BASE, **changes})).requests)


def by_user(requests: list[WorkloadRequest]) -> dict[str, list[WorkloadRequest]]:
    users: dict[str, list[WorkloadRequest]] = {}
    for request in requests:
        users.setdefault(request.session, []).append(request)
    return users


@pytest.mark.parametrize("changes", [{}, AGENTS])
def test_they_are_ordered_alike_twice_and_wait_for_each_of_their_answers(changes: dict, tmp_path) -> None:
    made = requests(**changes)
    assert made == requests(**changes)
    assert [r.id for r in made] == list(range(len(made)))
    assert all(before.arrival_ns <= after.arrival_ns for before, after in pairwise(made))
    for turns in by_user(made).values():
        assert [r.turn for r in turns] == list(range(len(turns)))
        assert turns[0].think_ns is None
        for before, after in pairwise(turns):
            assert after.arrival_ns == before.arrival_ns + (after.think_ns or 0)
    workload = synthesise(parse_spec({**BASE, **changes}))
    assert (workload.until_ns, workload.warm_up_ns) == (100 * 10**9, 25 * 10**9)
    write_parquet(workload, tmp_path / "w.parquet")
    again = read_workload(tmp_path / "w.parquet")
    assert (again.until_ns, again.warm_up_ns, list(again.requests)) == (100 * 10**9, 25 * 10**9, made)


@given(few=st.integers(1, 5), more=st.integers(0, 5), seed=st.integers(0, 99))
def test_more_users_include_the_fewer_and_longer_traffic_the_shorter(few: int, more: int, seed: int) -> None:
    def sizes(users: int, duration_s: int) -> dict[str, list[tuple[int, int, int]]]:
        made = requests(seed=seed, duration_s=duration_s, **(AGENTS | {"arrivals": {"kind": "users", "users": users}}))
        return {u: [(r.arrival_ns, r.prompt_len, r.output_len) for r in turns] for u, turns in by_user(made).items()}

    small, large = sizes(few, 60), sizes(few + more, 90)
    assert all(large[user][: len(turns)] == turns for user, turns in small.items())


def test_think_times_have_their_mean_and_users_start_spread_out() -> None:
    made = requests(duration_s=4000, arrivals={"kind": "users", "users": 20, "think_ms": 10_000})
    assert {r.think_ns for r in made} == {None, 10**10}
    first = [turns[0].arrival_ns for turns in by_user(made).values()]
    assert max(first) <= 10**10 and len(set(first)) == 20
    drawn = requests(duration_s=4000, arrivals={"kind": "users", "users": 20})
    assert len(drawn) == pytest.approx(20 * 4000 / 20, rel=0.05)


def test_agents_begin_in_the_middle_and_their_context_grows_by_results() -> None:
    made = requests(**AGENTS, duration_s=600)
    opened = [turns[0] for turns in by_user(made).values()]
    assert any(any(name.endswith(".past") for name, _ in request.prompt) for request in opened)
    sessions = 0
    for turns in by_user(made).values():
        for before, after in pairwise(turns):
            if after.prompt[0] != before.prompt[0] or len(after.prompt) <= len(before.prompt):
                assert after.think_ns == 30_000 * 10**6  # a new session, after the time between two sessions
                assert [n for _, n in after.prompt] == [50, 100]
                sessions += 1
            else:
                assert after.prompt[:-1] == (*before.prompt, (f"out:{before.id}", 10))
                assert after.prompt[-1][1] in (300, 600, 900, 1200)
    assert sessions > 20


def test_parallel_tools_take_as_long_as_the_slowest() -> None:
    def think_s(parallel: int) -> float:
        tools = {"parallel": parallel, "result": 10}
        sessions = {"turns": 50, "think_ms": {"kind": "exponential", "mean": 1000}, "tools": tools}
        arrivals = {"kind": "users", "users": 4, "think_ms": 1}
        times = [r.think_ns for r in requests(duration_s=1000, sessions=sessions, arrivals=arrivals) if r.think_ns]
        return sum(times) / len(times) / 1e9

    assert think_s(1) == pytest.approx(1.0, rel=0.1)
    assert think_s(3) == pytest.approx(1 + 1 / 2 + 1 / 3, rel=0.1)  # the mean of the largest of three


def test_open_sessions_take_tools_too() -> None:
    sessions = AGENTS["sessions"] | {"think_from": "answer"}
    made = requests(arrivals={"kind": "poisson", "rate": 1}, sessions=sessions)
    later = [r.prompt[-1][1] for r in made if r.turn]
    assert set(later) == {300, 600, 900, 1200}


def test_a_session_ends_before_its_prompt_is_too_long() -> None:
    sessions = {"turns": 99, "think_ms": 100, "max_prompt_tokens": 1000}
    made = requests(sessions=sessions)
    assert 890 < max(r.prompt_len for r in made) <= 1000


def test_expected_requests_are_those_of_users_who_never_wait() -> None:
    for changes in ({}, AGENTS):
        spec = parse_spec(BASE | changes | {"duration_s": 3000})
        assert len(list(synthesise(spec).requests)) == pytest.approx(spec.expected_requests, rel=0.15)
    assert len(list(islice(synthesise(parse_spec(BASE | {"duration_s": None, "requests": 30})).requests, 99))) == 30


def test_a_specification_survives_its_json() -> None:
    spec = parse_spec(BASE | AGENTS)
    assert SynthSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"warm_up_s": 100}, "warm_up_s 100 must be shorter than duration_s 100"),
        ({"arrivals": {"kind": "users", "users": 0}}, r"arrivals\.users: 0: must be at least 1"),
        (
            {"sessions": {"turns": 2, "think_ms": 1, "think_from": "arrival"}},
            "users wait for answers; leave sessions.think_from out",
        ),
        ({"duration_s": 1e9, "arrivals": {"kind": "users", "users": 1000000}}, "more than 1,000,000,000 requests"),
    ],
)
def test_a_wrong_spec_is_one_line(changes: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        requests(**changes)
