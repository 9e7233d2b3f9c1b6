"""Rung 7: planted truths, the questions that are asked, the utility of choices, and the command."""

import json
from collections import Counter
from dataclasses import replace
from math import inf, log
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from lab.decisions import scoring
from lab.decisions.__main__ import decisions as choose
from lab.decisions.configurations import Configuration, Times
from lab.decisions.own_rows import OwnRows
from lab.decisions.page import markdown
from lab.decisions.questions import Group, Slo, groups, slos
from lab.decisions.rules import RULES, anchored, by_expected_worth, most_throughput
from lab.decisions.scoring import answers, common_share, decided, summed_up
from tests.budget import examples
from tests.calibration.test_evidence import run as predicted_run
from tokentwin.calibration.steps.evidence import bundled_evidence
from tokentwin.dashboard.trust_page.results import newest_decisions


def option(
    requests: int, tpot: float, predicted: float | None = None, spread: float = 1.0, gpus: int = 1, gpu: str = "H100"
) -> Configuration:
    """Return an option with so many requests in flight and this TPOT, predicted to within a factor of `spread`."""
    centre = tpot if predicted is None else predicted
    low, blind, high = (Times(100.0 * factor, centre * factor) for factor in (1 / spread, 1.0, spread))
    truth = Times(100.0, tpot)
    name = f"{gpu}-{gpus}-{requests}"
    return Configuration(
        name, "model", gpu, (1000, 500), requests, gpus, truth, low, blind, high, Times(50.0, tpot / 2)
    )


def group(*options: Configuration) -> Group:
    return Group("model", "H100", (1000, 500), options)


CENTRE, OURS = RULES["centre of the band"], by_expected_worth()


def test_a_bold_choice_that_breaks_is_worth_nothing_and_a_safe_one_wins() -> None:
    """The bold one is predicted just within the bound, to a factor of 1.5, and is slower in truth."""
    planted = group(
        option(8, 10), option(16, 20, spread=1.2), option(64, 35, predicted=27, spread=1.5), option(128, 80, spread=1.2)
    )
    slo = Slo(inf, 30.0)
    bold, safe = CENTRE(planted, slo), OURS(planted, slo)
    assert (bold.option, safe.option) == (2, 1)
    assert safe.promised is not None and safe.promised > 0.9
    assert by_expected_worth(risk=0.5)(planted, slo).option == 2
    asked = [
        answer for answer in answers([planted], CENTRE) if answer.slo.ttft_ms == inf and 27 < answer.slo.tpot_ms < 35
    ]
    assert asked and all(answer.broke and answer.utility == 0 for answer in asked)
    asked = [
        answer for answer in answers([planted], OURS) if answer.slo.ttft_ms == inf and 27 < answer.slo.tpot_ms < 35
    ]
    assert asked and all(answer.utility == 1 for answer in asked)


def test_an_option_that_is_surely_better_is_taken_whatever_the_risk() -> None:
    planted = group(*(option(n, 10 + n / 4) for n in (8, 16, 32, 64, 128)))
    for risk in (0.01, 0.5, 1.0):
        score = summed_up(answers([planted], by_expected_worth(risk)))
        assert (score.utility, score.broke, score.low, score.high) == (1, 0, 1, 1)
        assert score.promised == score.kept == 1
    assert summed_up(answers([planted], CENTRE)).utility == 1


def test_nothing_chosen_counts_nothing_and_breaks_nothing() -> None:
    slow = group(*(option(n, 10 + n / 4, predicted=1000) for n in (8, 16, 32, 64)))
    score = summed_up(answers([slow], CENTRE))
    assert (score.utility, score.broke, score.none) == (0, 0, 1) and score.regret is None


def test_the_anchored_constant_is_right_where_it_was_measured() -> None:
    """The roofline is twice as fast as the truth of every option: the factor mends that, and the roofline breaks."""
    planted = group(*(option(n, 10 + n / 4) for n in (8, 16, 32, 64)))
    assert summed_up(answers([planted], anchored)).utility == 1
    assert summed_up(answers([planted], most_throughput(lambda o: o.roofline))).broke == 1


@examples(0.5)
@given(st.lists(st.tuples(st.integers(1, 512), st.floats(1, 200)), min_size=1, max_size=8))
def test_every_question_has_an_answer_that_is_not_the_fastest_of_all(rows: list[tuple[int, float]]) -> None:
    asked = group(*(option(requests, tpot) for requests, tpot in rows))
    fastest = asked.options[max(range(len(rows)), key=asked.measured.__getitem__)]
    for slo in slos(asked):
        assert any(slo.kept(option.measured) for option in asked.options)
        assert not slo.kept(fastest.measured)
    for rule in RULES.values():
        for answer in answers([asked], rule):
            assert 0 <= answer.utility <= 1 and not (answer.broke and answer.utility)


def test_groups_are_of_one_gpu_and_of_all_where_there_are_several() -> None:
    options = [option(n, 10 + n, gpu=gpu) for gpu in ("H200", "H100") for n in (1, 2, 4, 8)]
    assert [(g.gpu, len(g.options)) for g in groups(options)] == [("H100 or H200", 8), ("H100", 4), ("H200", 4)]
    assert not groups(options[:3])


def test_throughput_is_littles_law() -> None:
    of = option(32, 20, gpus=4)
    assert of.throughput(of.measured) == pytest.approx(32 * 500 / (0.1 + 499 * 0.020) / 4)


def test_what_is_decided_is_summed_up_by_model_and_gpu() -> None:
    planted = group(*(option(n, 10 + n / 4, spread=1.3) for n in (8, 16, 32, 64)))
    decisions = decided([planted])
    assert list(decisions.rules) == list(RULES) and list(decisions.parts) == [("model", "H100")]
    ours = next(iter(decisions.rules.values()))
    assert decisions.appetites[0.1] == decisions.parts["model", "H100"] == decisions.closer[1, 0.1] == ours


def test_without_errors_choices_are_the_best(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every other TPOT is predicted 40 % too long, as its band allows. All TTFTs lie on a bound."""
    monkeypatch.setattr(scoring, "SHARES", (1.0, 1e-6))
    planted = group(*(option(n, 10 + n / 4, (10 + n / 4) * 1.4 ** (n % 2), spread=1.6) for n in range(4, 128, 5)))
    closer = decided([planted]).closer
    assert closer[1, 0.1].utility < 0.9
    assert closer[1e-6, 0.1].utility > 0.99 and closer[1e-6, 0.1].broke == 0


@pytest.mark.parametrize(
    ("factor", "sentence"),
    [
        (1, "The target is met with 100 % of the errors, at a risk of 20 %."),
        (4, "The target is met with 50 % of the errors, at a risk of 10 %."),
        (64, "The target would take less than 50 % of the errors."),
    ],
)
def test_the_page_says_how_large_errors_may_be(factor: int, sentence: str) -> None:
    """The two fastest are predicted to be faster yet by a factor, of which their bands allow 4."""
    sure = [option(n, 10 + n / 4) for n in (4, 8, 16, 32)]
    unsure = [option(n, 10 + n / 4, predicted=(10 + n / 4) / factor, spread=4) for n in (64, 128)]
    assert sentence in markdown(decided([group(*sure, *unsure)]), Counter())


def test_what_a_family_is_off_by_together_is_common() -> None:
    """All off by the same factor: everything is. Off by as much either way: nothing is."""
    alike = [option(n, 10.0 + n, predicted=20.0 + 2 * n, spread=1.3) for n in (8, 16, 32, 64)]
    for options, expected in ((alike, 1.0), ([option(8, 10, 12, 1.3), option(16, 12, 10, 1.3)], 0.0)):
        assert common_share(options) == pytest.approx(expected, abs=0.01)


@pytest.mark.parametrize("sign", [1, -1])
def test_errors_of_ttft_and_tpot_may_go_together_or_not(sign: int) -> None:
    skew = [1.2 ** (n % 3 - 1) for n in range(40)]
    options = [option(n, 10.0 + n, predicted=(10.0 + n) * skew[n] ** sign, spread=1.3) for n in range(4, 40)]
    moved = [replace(o, measured=o.measured._replace(ttft_ms=100 / skew[o.requests])) for o in options]
    assert decided([group(*moved)]).between == pytest.approx(sign)


COLUMNS = "id,silicon_data_source,backend,backend_version,model_path,system,precision,mode,isl,osl,batch_size,tp_size,"
COLUMNS += "pp_size,attention_dp_size,moe_ep_size,silicon_ttft_ms,silicon_tpot_ms"


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """Rows of five concurrencies, one written twice, one of an unknown model, one with prefill apart; and a case."""
    row = "{id},x,vllm,0.9,{model},h100_sxm,bf16,{mode},64,16,{batch},1,1,,,{ttft},{tpot}"
    rows = [
        row.format(id=f"c{n}", model="llama", mode="agg", batch=n, ttft=10 + n, tpot=6 + n / 4) for n in (1, 4, 8, 32)
    ]
    rows.append(rows[-1].replace("c32", "twin"))
    rows.insert(0, row.format(id="large", model="too-large", mode="agg", batch=1, ttft=1, tpot=1))
    rows.append(row.format(id="other", model="unheard-of", mode="agg", batch=1, ttft=1, tpot=1))
    rows.append(row.format(id="split", model="llama", mode="disagg", batch=1, ttft=1, tpot=1))
    folder = tmp_path / "aiconfigurator"
    folder.mkdir()
    (folder / "silicon_sample_mine.csv").write_text("\n".join([COLUMNS, *rows[:6]]) + "\n")
    (folder / "silicon_sample_rest.csv").write_text("\n".join([COLUMNS, *rows[6:]]) + "\n")
    deployment = {"model": "Llama-3.1-8B", "gpu_memory_utilization": 0.9, "scheduler": {"max_model_len": 1024}}
    rules = [{"when": {"model_path": "too-large"}, "deployment": {"model": "Llama-3.1-70B"}}]
    table = {
        "rules": rules,
        "format": "lab.external.silicon_table:SiliconTable",
        "file": "aiconfigurator/silicon_sample_mine.csv",
        "systems": {"h100_sxm": "H100"},
    }
    case = {"name": "mine", "title": "mine", "source": "made up", "engine": "vLLM", "gpu": "H100"}
    case |= {"deployment": deployment, "measured": table, "shown": ["ttft_ms.mean", "tpot_ms.mean"]}
    (tmp_path / "cases").mkdir()
    (tmp_path / "cases" / "mine.yaml").write_text(yaml.safe_dump(case))
    return tmp_path


def test_the_command_scores_what_is_described_and_counts_the_rest(measured: Path) -> None:
    result = CliRunner().invoke(
        choose,
        f"--data {measured} --cases {measured}/cases --format json --write {measured}/page.md "
        f"--out {measured}/runs/rung".split(),
        catch_exceptions=False,
    )
    assert result.exit_code == 0
    answer = json.loads(result.stdout)
    assert [rule["rule"] for rule in answer["rules"]] == list(RULES)
    assert answer["rules"][0]["groups"] == 1 and answer["rules"][0]["questions"] > 4
    too_large = next(why for why in answer["left_out"] if why.startswith("has room for 0 KV blocks"))
    assert answer["left_out"] == {
        too_large: 1,
        "no case says how vllm ran unheard-of in bf16": 1,
        "prefill and decode on workers of their own": 1,
        "written twice, to the last digit": 1,
    }
    page = (measured / "page.md").read_text()
    assert "| 1 | written twice, to the last digit |" in page and "| roofline |" in page
    assert newest_decisions(measured / "runs").ours.utility == answer["rules"][0]["utility"]


def test_a_few_measured_configurations_are_known_and_teach_the_others() -> None:
    """A server whose numbers are all 20 % slower than believed: three of six configurations were measured."""
    evidence = bundled_evidence()
    options = []
    for slots in (1, 2, 4, 8, 12, 16):
        row = predicted_run(slots, 900, 40, True)
        logs = evidence.belief(row.origin).logs
        believed, slower = (
            dict(zip(row.figures, row.predicted(at)[0].tolist(), strict=True)) for at in (logs, logs + 0.2)
        )
        row = replace(row, measured_run=replace(row.measured_run, figures=slower))
        blind, truth = (Times(figures["ttft_ms.mean"], figures["tpot_ms.mean"]) for figures in (believed, slower))
        wide = Times(2 * blind.ttft_ms, 2 * blind.tpot_ms)
        options.append(
            Configuration(f"c{slots}", "m", "H100", (900, 40), slots, 1, truth, blind, blind, wide, blind, row)
        )
    known = OwnRows(evidence).known(group(*options), 3, 0)
    measured = [at for at, option in enumerate(known.options) if option.low == option.high]
    assert len(measured) == 3 and all(known.options[at].blind == options[at].measured for at in measured)
    for before, after in zip(options, known.options, strict=True):
        error, blind_error = (log(option.blind.tpot_ms / before.measured.tpot_ms) for option in (after, before))
        assert abs(error) < abs(blind_error) / 2 and after.low.tpot_ms <= after.blind.tpot_ms <= after.high.tpot_ms
    assert OwnRows(evidence).known(group(*options), 3, 0) == known != OwnRows(evidence).known(group(*options), 3, 1)
