"""Claims: planted truths are found, every bundled file is a valid experiment, and the page shows the results."""

import json
import math
import re
from typing import Any

import pytest
from click.testing import CliRunner, Result

from lab.claims.__main__ import claims
from lab.claims.check import break_even, check
from lab.claims.claim import BreakEven, Claim, Expected, Experiment, load_claims
from lab.claims.figures import measured
from lab.claims.page import page as as_markdown
from tokentwin.calibration.trust import LEVELS
from tokentwin.planning.claims.document import CheckedCase, verdict_of
from tokentwin.serving.deployments.config import parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.front_door import FrontDoor

TRAFFIC = {
    "requests": 12,
    "arrivals": {"kind": "constant", "rate": 2},
    "prompt": {"kind": "fixed", "tokens": 400},
    "output": {"kind": "fixed", "tokens": 20},
}


def claim(expects: dict[str, float], figure: str, cases: list[dict[str, Any]], **experiment: Any) -> dict[str, Claim]:
    stated = {"claim": "so they say", "means": "this", "expects": expects, "cases": cases}
    return {"planted": Claim.model_validate({**stated, "experiment": {"figure": figure, **experiment}})}


def only_case(claims: dict[str, Claim]) -> CheckedCase:
    return check(claims).claims[0].cases[0]


def test_every_bundled_claim_is_an_experiment_with_cases_of_its_own() -> None:
    claims = load_claims()
    assert len(claims) >= 12
    for name, one in claims.items():
        experiments = [experiment.as_json() for _, experiment in one.experiments()]
        assert all(experiments.count(experiment) == 1 for experiment in experiments), name
        assert all(not case.when.startswith("when") for case in one.cases), name


def test_memory_is_told_by_hand() -> None:
    """80 layers, 8 KV heads of 128 dimensions, keys and values, 2 bytes: 327,680 bytes a token."""
    deployment = {"model": "Llama-3.1-70B", "device": "cuda"}
    case = only_case(claim({"most": 3}, "kv_gb", [{"when": "alone"}], deployment=deployment, tokens=8192))
    assert case.value == pytest.approx(327_680 * 8192 / 1e9)
    assert case.low == case.high == case.value
    assert case.holds == "yes"


@pytest.mark.parametrize("figure", ["ttft_ms.p50", "output_throughput"])
def test_a_change_that_changes_nothing_is_once_as_good_with_nothing_around_it(figure: str) -> None:
    case = only_case(claim({"least": 2}, figure, [{"when": "alone"}], baseline={}, offered={"traffic": TRAFFIC}))
    assert (case.value, case.low, case.high, case.holds) == (1.0, 1.0, 1.0, "no")


def test_a_faster_gpu_is_better_in_latency_and_in_the_rate_that_keeps_an_slo() -> None:
    two = {"baseline": {"gpu": "L40S"}, "change": {"gpu": "H100"}, "offered": {"traffic": {**TRAFFIC, "requests": 60}}}
    slo = {"slo": {"ttft_ms": 200.0}}
    for figure, more in (("ttft_ms.p50", {}), ("request_rate", slo)):
        assert (only_case(claim({"least": 1.2}, figure, [{"when": "alone"}], **two, **more)).value or 0) > 1.2


def test_only_short_prompts_are_measured_where_that_is_said() -> None:
    long = {**TRAFFIC, "prompt": {"kind": "fixed", "tokens": 6000}, "seed": 1}
    both = {"offered": {"traffic": [TRAFFIC, long]}}
    cases = [{"when": "all"}, {"when": "short", "set": {"longest_prompt": 400}}]
    deployment = {"model": "Llama-3.1-8B", "device": "cuda", "scheduler": {"max_num_batched_tokens": 2048}}
    everyone, short = check(claim({"least": 0}, "ttft_ms.p99", cases, deployment=deployment, **both)).claims[0].cases
    assert (short.value or math.inf) < (everyone.value or 0.0)


def case(holds: str, when: str) -> CheckedCase:
    return CheckedCase.model_validate(
        {"claim": "c", "when": when, "value": 1, "low": 1, "high": 1, "unit": "times", "holds": holds}
    )


def test_a_verdict_names_the_cases_in_which_a_claim_holds() -> None:
    yes, no, open_ = case("yes", "it rains"), case("no", "it snows"), case("open", "it may")
    assert verdict_of((yes, yes)) == "holds"
    assert verdict_of((no, no)) == "does not hold"
    assert verdict_of((yes, no)) == "holds when it rains"
    assert verdict_of((no, open_)) == "cannot be told when it may"
    assert verdict_of((yes, no, open_)) == "holds when it rains; cannot be told when it may"


def asked(*arguments: str) -> Result:
    """Run `python -m lab.claims`."""
    return CliRunner().invoke(claims, arguments, catch_exceptions=False)


def test_the_page_and_the_json_say_what_the_terminal_says(tmp_path) -> None:
    page = tmp_path / "claims.md"
    printed = asked("--only", "kv-of-a-70b", "--write", str(page)).stdout
    assert "2.68 GB" in printed and "holds when 32k tokens are kept" in printed
    assert ": 1.34 GB" in page.read_text()
    assert "- [kv-of-a-70b](#kv-of-a-70b): holds in 1 of 3" in page.read_text()
    answer = json.loads(asked("--only", "kv-of-a-70b", "--format", "json").stdout)
    assert [round(case["value"], 2) for case in answer["claims"][0]["cases"]] == [2.68, 1.34, 10.74]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"expects": {"least": 3, "most": 1}}, "expects: least must be at most 1"),
        (
            {"experiment": {"figure": "ttft_ms.p50", "offered": {"traffic": {"requests": 0}}}},
            "traffic.requests: 0: must be at least 1",
        ),
    ],
)
def test_a_file_that_makes_no_claim_is_refused_in_a_line(tmp_path, wrong: dict[str, Any], said: str) -> None:
    made = {"claim": "so", "means": "this", "expects": {"least": 1}, "cases": [{"when": "alone"}], "experiment": {}}
    (tmp_path / "mine.yaml").write_text(json.dumps(made | wrong))
    with pytest.raises(UserError) as error:
        load_claims(tmp_path)
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"experiment": {"figure": "speed"}}, "experiment.figure: 'speed': "),
        ({"experiment": {"figure": "ttft_ms.p50"}}, "experiment.offered: is missing"),
        ({"experiment": {"figure": "request_rate", "offered": {"traffic": TRAFFIC}}}, "experiment.slo: is missing"),
        (
            {"experiment": {"figure": "request_rate", "slo": {"e2e_ms": 1e6}, "offered": {"traffic": TRAFFIC}}},
            "are kept however fast the requests come",
        ),
    ],
)
def test_an_experiment_that_cannot_be_made_is_named(change: dict[str, Any], said: str) -> None:
    wrong = {"claim": "so", "means": "this", "expects": {"least": 1}, "cases": [{"when": "alone"}], **change}
    if wrong["experiment"]["figure"] == "speed":
        wrong["experiment"]["offered"] = {"traffic": TRAFFIC}
    with pytest.raises(UserError, match="claim planted, when alone") as error:
        check({"planted": Claim.model_validate(wrong)})
    assert said in str(error.value)


def test_a_break_even_lies_where_the_gain_is_one() -> None:
    drafts = {"model": "Llama-3.2-1B", "num_speculative_tokens": 3, "acceptance_rate": 0.7}
    made = Claim.model_validate(
        {
            "claim": "so",
            "means": "this",
            "expects": {"least": 1},
            "cases": [{"when": "alone"}],
            "break_even": {
                "path": "deployment.scheduler.speculative.acceptance_rate",
                "of": "change",
                "least": 0,
                "most": 0.95,
                "what": "of the drafts accepted",
            },
            "experiment": {
                "figure": "tpot_ms.p50",
                "deployment": {"model": "Llama-3.1-70B", "device": "cuda", "tensor_parallel_size": 4},
                "baseline": {},
                "change": {"deployment.scheduler.speculative": drafts},
                "offered": {"traffic": TRAFFIC},
            },
        }
    )
    ((_, experiment),) = made.experiments()
    assert made.break_even is not None
    for expects, sides in ((Expected(least=1.5), 2), (Expected(least=0.5, most=1.5), 1)):
        said = break_even(experiment, made.break_even, expects)
        assert said.startswith("From 0 to 0.95 of the drafts accepted: ")
        turns = [float(word) for word in re.findall(r"(?:above|below) about ([0-9.]+[0-9])", said)]
        bounds = [1.0, 1.5][-len(turns) :]
        assert len(turns) == sides
        for turn, bound in zip(turns, bounds, strict=True):
            for rate, over in ((turn - 0.1, False), (turn + 0.1, True)):
                moved = {"deployment.scheduler.speculative": {**drafts, "acceptance_rate": rate}}
                tried = parse(Experiment, {**experiment.as_json(), "change": moved}, "experiment")
                assert (measured(tried).value > bound) == over


@pytest.mark.parametrize(
    ("least", "most", "said"),
    [
        (8, 12, "the claim holds from about 23,000 to 36,000."),
        (8, None, "the claim holds above about 23,000."),
        (None, 12, "the claim holds below about 36,000."),
        (0, None, "the claim holds everywhere."),
        (100, 120, "the claim holds nowhere."),
    ],
)
def test_a_verdict_flips_where_the_figure_crosses_the_bounds(least, most, said):
    """327,680 bytes of KV a token: 8 GB are 24,414 tokens, and 12 are 36,621, to within 8 %."""
    experiment = {"figure": "kv_gb", "deployment": {"model": "Llama-3.1-70B", "device": "cuda"}}
    of = BreakEven(path="tokens", least=1024, most=131_072, what="tokens")
    sentence = break_even(parse(Experiment, experiment, "experiment"), of, Expected(least=least, most=most))
    assert sentence == f"From 1,024 to 131,072 tokens: {said}"


def test_what_comes_as_fast_as_another_run_is_served_is_served_as_fast_at_every_end() -> None:
    """The file offers a tenth of what two users take who wait for their answers."""
    closed = {"offered.traffic.arrivals": {"kind": "closed", "concurrency": 2}}
    offered = {"traffic": {**TRAFFIC, "requests": 60, "arrivals": {"kind": "constant", "rate": 0.5}}}
    sides = {"baseline": {"as_fast_as": closed}, "change": closed, "offered": offered}
    case = only_case(claim({"least": 0}, "request_throughput", [{"when": "alone"}], **sides))
    assert 0.95 < (case.low or 0.0) <= (case.high or 9.0) < 1.05


def test_the_terms_of_a_request_are_its_time_and_each_says_what_it_is_known_from() -> None:
    asked = claim({"least": 0}, "e2e_ms.mean", [{"when": "alone"}], offered={"traffic": TRAFFIC})["planted"]
    asked = asked.model_copy(update={"terms": True})
    *inside, outside = only_case({"planted": asked}).terms
    assert sum(term.ms for term in inside) == pytest.approx(only_case({"planted": asked}).value)
    assert outside.name.startswith("around the engine") and 1 < outside.ms < 100
    assert {"decode: weights", "prefill: compute"} <= {term.name for term in inside}
    door = FrontDoor(
        client_ns=1e6, request_ns=2e6, prompt_token_ns=5e3, chunk_ns=3e5, engine_step_ns=1e5, source="two runs"
    )
    split = check({"planted": asked}, front_door=door).claims[0].cases[0].terms[len(inside) :]
    known = {"client and network": 1.0, "tokenise": 4.0, "detokenise and write the last chunk": 0.3}
    known |= {"from the engine to the API server": 0.0, "end the answer": 0.0, "engine slowed by the API server": 2.0}
    assert {term.name: term.ms for term in split} == pytest.approx(known)  # 400 prompt tokens, 20 output tokens
    assert {(term.source, term.level) for term in split} == {("two runs", "measured")}
    assert all(term.source and term.level in LEVELS for term in (*inside, outside))


def test_every_bundled_claim_has_an_experiment_on_the_engine_or_says_why_not() -> None:
    claims = load_claims()
    assert all((one.engine is None) == bool(one.not_on_engine) for one in claims.values())
    only = {name: claims[name].model_copy(update={"cases": (), "break_even": None}) for name in claims}
    answer = check(only, engine=lambda claim: None)
    untried = {one.name: one.untried for one in answer.claims}
    assert untried["cuda-graphs"] == "it needs a GPU, and this machine has none"
    assert untried["kv-of-a-70b"] == "it follows from shapes"
    assert untried["kv-of-a-70b"] in as_markdown(answer)


@pytest.mark.deep
@pytest.mark.engine
def test_a_claim_is_tried_on_the_real_engine(tmp_path) -> None:
    """With what was found, how much it differs from pair to pair, the machine and the day."""
    pytest.importorskip("torch", reason="the engine extra is not installed")
    (tmp_path / "small.yaml").write_text(
        """
claim: so
means: this
expects: {least: 0.001}
experiment: {figure: kv_gb, deployment: {model: Llama-3.1-8B, device: cuda}}
cases: [{when: alone}]
engine:
  when: a small model is tried
  set:
    figure: output_throughput
    deployment: {model: "random:llama", device: cpu, dtype: float32, scheduler: {max_model_len: 64, num_blocks: 20}}
    baseline: {deployment.policy: static, deployment.scheduler.static_timeout_ms: 1}
    change: {}
    offered.traffic: {requests: 3, arrivals: {kind: closed, concurrency: 3}}
    offered.traffic.prompt: {kind: fixed, tokens: 8}
    offered.traffic.output: {kind: fixed, tokens: 4}
"""
    )
    said = json.loads(asked("--claims", str(tmp_path), "--engine", "--format", "json").stdout)
    tried = said["claims"][0]["engine"]
    assert tried["low"] <= tried["value"] <= tried["high"] and tried["noise"] >= 0 and tried["holds"] == "yes"
    assert "torch" in said["machine"] and said["date"].startswith("20")


def test_a_folder_without_claims_and_an_unknown_name_are_one_line(tmp_path) -> None:
    with pytest.raises(UserError, match="has no YAML file"):
        load_claims(tmp_path)
    with pytest.raises(UserError, match="is no claim"):
        load_claims(only=("x",))
