"""Commands without a trace: mean lengths with a rate, users or requests in flight, and mistakes in one line."""

import json
import re

import pytest
from click.testing import CliRunner, Result

import tokentwin as twin
from tokentwin.cli import cli
from tokentwin.planning.exports.exportable import open_exportable
from tokentwin.planning.made_up import made_up
from tokentwin.serving.errors import UserError

LENGTHS = ("--prompt", 40, "--output", 8)
H100 = ("--gpu", "H100")


def ask(*arguments: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False)


@pytest.mark.parametrize(
    ("arrivals", "said"),
    [
        (("--rate", 2), "2 requests per second (Poisson), 1,200 in all"),
        (("--users", 9, "--think", 3), "9 users who read 3 s on average (exponential)"),
        (("--concurrency", 50), "50 requests always in flight, 1,000 in all, of which the first 150 do not count"),
    ],
)
def test_simulate_says_what_it_assumed(arrivals: tuple, said: str, tmp_path) -> None:
    out = ("-o", tmp_path / "run", "--summary-only", "--no-band")
    told = ask("simulate", *LENGTHS, *arrivals, *H100, *out).stdout
    assert f"made-up traffic: {said}" in told and "prompts with mean 40 (sigma 1, at most 320)" in told
    again = ask("simulate", *LENGTHS, *arrivals, *H100, *out, "--force", "--format", "json")
    assert json.loads(again.stdout)["assumed"].startswith("made-up traffic: ")
    assert json.loads(again.stdout)["requests"].keys() == {"finished"}


def test_plan_sizes_for_users_and_finds_the_most_users_of_a_fleet(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        "tokentwin.planning.made_up._ASKED", 500
    )  # of 2000 requests; their number is the time of the test
    traffic = (*LENGTHS, "--users", 30, "--think", 20, *H100, "--slo", "ttft_ms p95<=40", "--jobs", 1)
    told = ask("plan", *traffic).stdout
    assert told.startswith("1 replica x TP1 H100 = 1 GPU")
    rate = re.search(r"traffic: 30 clients who wait for answers, ([\d.]+) requests per second", told)
    assert rate is not None and float(rate[1]) == pytest.approx(30 / 20, rel=0.15)
    assert "made-up traffic: 30 users who read 20 s on average" in told
    strict = (*LENGTHS, "--users", 20, "--think", 5, *H100, "--slo", "ttft_ms p95<=12", "--jobs", 1, "--replicas", 1)
    told = ask("plan", *strict, "--save", tmp_path / "users.json")
    assert (
        "users: so many does 1 replica x TP1 H100 ($2.69/h) bear within the SLOs. Slow to fast steps: " in told.stdout
    )
    (fleet,) = json.loads((tmp_path / "users.json").read_text())["fleets"]
    assert open_exportable(tmp_path / "users.json").table("fleets")["clients"].to_pylist() == [fleet["clients"]]
    assert 0 < fleet["if_slow"] <= fleet["clients"] <= fleet["as_predicted"] <= fleet["if_fast"]


def test_most_users_of_a_fleet_that_is_too_slow_for_one() -> None:
    slow = (*LENGTHS, "--users", 2, "--think", 2, *H100, "--slo", "tpot_ms p95<=1", "--jobs", 1, "--replicas", 1)
    refused = ask("plan", *slow)
    assert refused.exit_code == 4
    assert "Infeasible: 1 replica x TP1 H100 ($2.69/h) breaks tpot_ms p95<=1 even for 1 user." in refused.stdout


def test_compare_pairs_the_requests_that_both_sides_got(tmp_path) -> None:
    sides = ("--b", "max_num_seqs=2", *H100)
    told = json.loads(ask("compare", *LENGTHS, "--users", 40, "--think", 1, *sides, "--format", "json").stdout)
    assert told["difference"] and told["winner"] == "A"
    assert told["assumed"].startswith("made-up traffic: 40 users who read 1 s")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "is missing; give a trace, or --prompt and --output with one of --rate, --users and --concurrency"),
        (("--users", 3), "prompt: is missing; without a trace give --prompt, e.g. --prompt 1500"),
        (("--prompt", 9, "--rate", 3), "output: is missing; without a trace give --output, e.g. --output 300"),
        (LENGTHS, "rate, users, concurrency: give exactly one of them"),
        ((*LENGTHS, "--users", 3, "--rate", 3), "rate, users, concurrency: 'rate and users': give exactly one"),
        ((*LENGTHS, "--rate", 3, "--think", 3), "think: 3.0: needs --users; leave it out"),
        ((*LENGTHS, "--users", 3, "--think", 0), "think: 0.0: must be at least 0.001"),
        (("--prompt", 0, "--output", 9, "--rate", 3), "prompt: 0: must be at least 1"),
        (("x.csv", "--prompt", 9), "prompt: 9: makes traffic up, but a trace is given; leave one of them out"),
    ],
)
def test_mistakes_are_one_line(arguments: tuple, message: str, tmp_path) -> None:
    for command in (("simulate", "-o", tmp_path / "o"), ("plan", "--slo", "ttft_ms p99<=1")):
        with pytest.raises(UserError) as refused:
            ask(*command, *arguments, *H100)
        assert message in str(refused.value) and "\n" not in str(refused.value)


def test_replicas_need_users() -> None:
    with pytest.raises(UserError, match="replicas: 2: needs users who wait for answers"):
        ask("plan", *LENGTHS, "--rate", 2, *H100, "--slo", "ttft_ms p99<=100", "--replicas", 2)


def test_python_takes_the_same(tmp_path) -> None:
    traffic = {"prompt": 40, "output": 8, "users": 5, "think_s": 2}
    run = twin.simulate(traffic, gpu="H100", out=tmp_path / "run", band=False, details=False)
    assert run.metrics.finished.all()
    answer = twin.most_users(traffic, ["ttft_ms p95<=12"], replicas=1, gpus=["H100"], jobs=1)
    assert answer.to_pandas()["clients"][0] == answer.fleets[0].clients > 0


@pytest.mark.parametrize(("users", "think_s", "lasts_s"), [(30, 20, 1333.333), (500, 20, 300), (10_000, 30, 90)])
def test_the_more_users_the_shorter_a_simulation_need_be(users: int, think_s: float, lasts_s: float) -> None:
    spec = made_up({"prompt": 800, "output": 200, "users": users, "think_s": think_s})
    assert spec.duration_s == lasts_s
