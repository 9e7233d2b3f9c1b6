"""Evidence by levels: what one configuration says about another, and how wide the band is without evidence."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lab.external.leave_out import HEADER, leave_out, table
from lab.external.page import left_out_section
from lab.external.teaching import fit
from tests.budget import examples
from tokentwin.calibration.operations import uniform_step
from tokentwin.calibration.steps.correction import step_parts, wider_types
from tokentwin.calibration.steps.evidence import (
    LEVELS,
    NUMBERS,
    PLACE,
    Belief,
    Evidence,
    Missed,
    Origin,
    Taught,
    bundled_evidence,
    reach_of,
)
from tokentwin.calibration.steps.external_calibration import blind, kernels, predicted_cost, transferred
from tokentwin.calibration.steps.interval import StepInterval, factors_of, widened
from tokentwin.calibration.steps.observed import observed
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.validation.external.case import Case
from tokentwin.calibration.validation.external.predicted_run import PredictedRun, predicted_runs
from tokentwin.calibration.validation.external.schedule import schedule
from tokentwin.calibration.validation.external.scoring import simulated_figures
from tokentwin.dashboard.bundled import EXTERNAL_SAMPLE
from tokentwin.dashboard.trust_page.results import covered, load_external
from tokentwin.serving.deployments.config import Deployment, parse
from tokentwin.serving.deployments.engines import EngineName
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.measured.run import MeasuredRun

COUNT = len(NUMBERS)
SPREADS = dict.fromkeys(LEVELS, 0.5)
HERE = Origin("vllm", "H100", "Hopper", "a", "fp8", "", "a/H100/vllm")
ELSEWHERE = Origin("sglang", "B200", "Blackwell", "b", "nvfp4", "nvfp4", "b/B200/sglang")


def taught(origin: Origin, logs: np.ndarray, certain: float = 1e4) -> Taught:
    """Return evidence with enough rows to determine all numbers of an origin."""
    return Taught(origin, certain * np.eye(COUNT), certain * logs, 30)


def test_what_nobody_measured_has_its_prior_and_all_of_its_spread() -> None:
    belief = Evidence([], SPREADS).belief(ELSEWHERE)
    assert np.array_equal(belief.logs, np.zeros(COUNT))
    for name, number in NUMBERS.items():
        levels = sum(number.family in families for families in LEVELS.values())
        assert belief.covariance[PLACE[name], PLACE[name]] == pytest.approx(number.spread**2 * (1 + 0.25 * levels))


@examples(0.3)
@given(st.integers(0, 1000))
def test_a_level_that_taught_narrows_the_band_and_one_that_did_not_widens_it(seed: int) -> None:
    logs = 0.3 * np.random.default_rng(seed).standard_normal(COUNT)
    evidence = Evidence([taught(HERE, logs, certain=1e5)], SPREADS)
    slopes = np.random.default_rng(seed).dirichlet(np.ones(COUNT))
    other_gpu = replace(HERE, gpu="B200", generation="Blackwell")
    steps = (
        HERE,
        replace(HERE, source=""),
        replace(HERE, source="", model="c"),
        replace(other_gpu, source=""),
        ELSEWHERE,
    )
    variances = [float(evidence.belief(origin).variance(slopes)) for origin in steps]
    assert variances[0] < variances[1] < variances[2] < variances[4] and variances[1] < variances[3] < variances[4]
    assert float(Evidence([], SPREADS).belief(HERE).variance(slopes)) > variances[4]
    assert evidence.belief(HERE).logs == pytest.approx(logs, abs=0.02)
    shared = evidence.belief(ELSEWHERE).logs
    assert np.all(np.sign(shared) == np.sign(logs)) and np.all(np.abs(shared) < np.abs(logs))


@pytest.mark.parametrize(
    ("stated", "named"),
    [
        ("vLLM 0.19.0", ("vllm", "vllm 0.19.0")),
        ("TensorRT-LLM 1.2.0rc6.post3", ("trtllm", "trtllm 1.2.0")),
        ("vllm nightly-5b8c30d62b754b57", ("vllm", "")),
        ("sglang", ("sglang", "")),
        ("version unknown", ("vllm", "")),
    ],
)
def test_an_engine_is_named_with_its_version(stated: str, named: tuple[str, str]) -> None:
    assert EngineName.read(stated) == named


@pytest.mark.parametrize(("level", "seen"), [("version", "vllm 0.19.0"), ("client", "one client")])
def test_a_level_that_is_not_stated_is_as_wide_as_one_that_nobody_measured(level: str, seen: str) -> None:
    """What a version or a client taught stays with it; one of another name, or of none, has its whole spread."""
    evidence = Evidence([taught(replace(HERE, **{level: seen}), np.full(COUNT, 0.4))], SPREADS)
    same, other, unstated = (
        evidence.belief(replace(HERE, source="", **{level: name})) for name in (seen, "another 1.0.0", "")
    )
    place = PLACE["request"]
    assert same.covariance[place, place] < other.covariance[place, place] == unstated.covariance[place, place]
    assert same.logs[place] > other.logs[place] == unstated.logs[place] > 0


@examples(0.3)
@given(st.floats(-2, 2), st.sampled_from(["gpu", "engine", "model", "source"]))
def test_what_is_left_out_leaves_no_trace(off: float, level: str) -> None:
    there = taught(ELSEWHERE, np.full(COUNT, 0.2))
    left = [
        Evidence([taught(HERE, np.full(COUNT, logs)), there], SPREADS).without(
            lambda origin: getattr(origin, level) == getattr(HERE, level)
        )
        for logs in (0.1, off)
    ]
    first, second = (evidence.belief(HERE) for evidence in left)
    assert np.array_equal(first.logs, second.logs) and np.array_equal(first.covariance, second.covariance)


def test_joined_equations_are_fitted_as_if_all_were_known_at_once() -> None:
    first, second, third = (
        taught(HERE, np.linspace(-0.3, 0.4, COUNT)),
        taught(ELSEWHERE, np.ones(COUNT)),
        taught(replace(HERE, source="own"), np.full(COUNT, 0.2)),
    )
    together = Evidence([first, second, third], SPREADS)
    joined = Evidence([first], SPREADS).joined([second]).joined([third])
    for origin in (HERE, ELSEWHERE, replace(HERE, source="own"), replace(HERE, source="another", gpu="B200")):
        one, other = together.belief(origin), joined.belief(origin)
        assert other.logs == pytest.approx(one.logs, abs=1e-9)
        assert other.covariance == pytest.approx(one.covariance, abs=1e-9)


def test_evidence_is_kept_in_a_file() -> None:
    known = Evidence([taught(HERE, np.linspace(-0.3, 0.4, COUNT)), taught(ELSEWHERE, np.ones(COUNT))], SPREADS)
    again = Evidence.read(json.loads(json.dumps(known.as_dict())))
    assert again.belief(HERE).logs == pytest.approx(known.belief(HERE).logs, abs=1e-4)
    assert again.untaught(HERE) == known.untaught(HERE) == ""
    assert "fp8" in known.untaught(replace(HERE, generation="Blackwell"))
    assert "engine" not in known.untaught(replace(HERE, engine="other")) and "other" in known.untaught(
        replace(HERE, engine="other")
    )


# Measured runs


def run(concurrency: int, prompt: int, outputs: int, overlapped: bool, spread: int = 0) -> PredictedRun:
    requests = [
        WorkloadRequest(at, 0, ((PRIVATE, prompt - at % (spread + 1)),), outputs - at % (spread + 1))
        for at in range(4 * concurrency)
    ]
    loop = Workload(requests, concurrency=concurrency, shares_prefixes=False)
    scheduler = {"max_num_batched_tokens": 2048, "max_model_len": 8192, "num_blocks": 4000, "max_num_seqs": 64}
    deployment = Deployment.model_validate(
        {"model": "Llama-3.1-8B", "device": "cuda", "scheduler": {**scheduler, "async_scheduling": overlapped}}
    )
    run = MeasuredRun("made up", loop, {"tpot_ms.mean": 9.0, "ttft_ms.mean": 80.0}, by_client=True)
    case = Case.model_validate(
        {"name": "c", "title": "", "source": "", "engine": "vLLM 1", "gpu": "H100", "deployment": {}, "shown": [],
         "measured": {"format": "lab.external.silicon_table:SiliconTable", "file": "none", "systems": {}}}
    )  # fmt: skip
    return PredictedRun(HERE, case, run, "H100", deployment)


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize(("concurrency", "prompt", "outputs", "spread"), [(1, 900, 40, 0), (12, 1500, 60, 31)])
def test_a_closed_loops_figures_are_those_of_the_simulator(concurrency, prompt, outputs, spread, overlapped):
    """Sums over steps of one simulation, against simulations of their own: figures, and their slopes.

    An overlapped loop that was idle plans its first step in plain sight, which the sums leave out.
    """
    one = run(concurrency, prompt, outputs, overlapped, spread)
    logs = np.linspace(-0.2, 0.3, COUNT)
    belief = Belief(logs, np.zeros((COUNT, COUNT)))
    model = find_model("Llama-3.1-8B")
    cost = OperationCost(model, one.deployment, kernels("H100"), belief.correction(""), belief.host)
    simulated = simulated_figures(one.measured_run, one.deployment, cost, belief.values["request"] / 1e6)
    predicted, slopes = one.predicted(logs)
    assert predicted == pytest.approx([simulated[name] for name in one.figures], rel=0.05 if overlapped else 0.01)
    for place in range(COUNT):
        beside = logs + 1e-4 * np.eye(COUNT)[place]
        assert np.log(one.predicted(beside)[0] / predicted) / 1e-4 == pytest.approx(slopes[:, place], abs=1e-3)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_a_closed_loop_with_drafts_is_that_of_the_simulator(acceptance: float) -> None:
    """Verifying three drafts and proposing them, of which all are accepted or none, so that no coin decides."""
    plain = run(6, 900, 41, overlapped=False)
    drafts = {"method": "mtp", "num_speculative_tokens": 3, "acceptance_rate": acceptance}
    stated = Deployment.model_validate(
        {"model": "DeepSeek-V3", "quantization": "fp8_block", "device": "cuda", "tensor_parallel_size": 8,
         "scheduler": {**plain.deployment.scheduler.model_dump(), "speculative": drafts}}
    )  # fmt: skip
    one, logs = replace(plain, deployment=stated, gpu="H200"), np.zeros(COUNT)
    belief = Belief(logs, np.zeros((COUNT, COUNT)))
    cost = OperationCost(find_model("DeepSeek-V3"), stated, kernels("H200"), belief.correction(""), belief.host)
    simulated = simulated_figures(one.measured_run, stated, cost, belief.values["request"] / 1e6)
    predicted, slopes = one.predicted(logs)
    assert predicted == pytest.approx([simulated[name] for name in one.figures], rel=0.02)
    assert slopes.sum(axis=1) == pytest.approx([1, 1])


@pytest.mark.parametrize(
    "layout",
    [
        {"state_blocks": 3, "block_size": 512},
        {"kv_groups": [64, 0]},  # gpt-oss: with blocks for one group only, requests were rejected
        {"kv_groups": [64, 64, 64, 0], "enable_prefix_caching": True},
        {"kv_reservation": "max_model_len"},
        {"kv_reservation": "max_tokens", "kv_reserved_max_tokens": 500},
    ],
    ids=str,
)
def test_every_kv_layout_has_blocks_for_all_requests_of_a_loop(layout: dict[str, object]) -> None:
    """Four requests at once wait for no memory, whatever their layers hold."""
    loop = Workload(
        [WorkloadRequest(at, 0, ((PRIVATE, 300),), 20) for at in range(8)], concurrency=4, shares_prefixes=False
    )
    scheduler = {"max_model_len": 1024, "num_blocks": 4000, "enable_prefix_caching": False}
    plain, held = (
        schedule(loop, Deployment.model_validate({"scheduler": {**scheduler, **more}})) for more in ({}, layout)
    )
    assert held.ttft.sum() == plain.ttft.sum() and held.tpot.sum() == plain.tpot.sum()


def test_a_log_teaches_what_its_steps_take_and_is_left_out_with_its_likes(tmp_path: Path) -> None:
    """Medians by kind of step, spikes and rare kinds aside; TP1 and TP4 of a model on a GPU are one source."""
    columns = "sum_prefill_tokens,num_prefill_requests,sum_prefill_kv_tokens,num_decode_requests,"
    rows = ["0,0,0,8,8000,0,9", "0,0,0,8,8000,0,90", "0,0,0,8,8000,0,9", "2048,1,0,8,8000,0,70", "0,0,0,64,9000,0,1"]
    (tmp_path / "log.csv").write_text(columns + "sum_decode_kv_tokens,var_decode_kv_tokens,latency_ms\n")
    with (tmp_path / "log.csv").open("a", encoding="utf-8") as file:
        file.write("\n".join([*rows[:4], rows[3], rows[3], rows[4]]) + "\n")
    logged = [
        predicted_runs(
            Case.model_validate(
                {"name": f"tp{tp}", "title": "", "source": "", "engine": "vLLM 0.20.1", "gpu": "B300", "shown": [],
                 "deployment": {"model": "Llama-3.1-8B", "tensor_parallel_size": tp},
                 "measured": {"format": "iteration-log", "file": "log.csv"}}
            ), tmp_path,
        )[0] for tp in (1, 4)
    ]  # fmt: skip
    assert [one.measured_run.figures for one in logged[0]] == [{"tpot_ms.mean": 9.0}, {"ttft_ms.mean": 70.0}]
    assert len({one.origin for one in (*logged[0], *logged[1])}) == 1
    assert logged[0][0].origin.version == "vllm 0.20.1"
    logs = np.zeros(COUNT)
    decode, mixed = (one.predicted(logs) for one in logged[0])
    assert decode[1][0, PLACE["prompt attention"]] == 0 < mixed[1][0, PLACE["prompt attention"]]
    assert decode[0][0] < mixed[0][0] and decode[1].sum() == pytest.approx(1)
    assert np.all(fit(logged[0]).taught[0].information.diagonal() >= 0)
    rows_of = [row[0] for row in table(leave_out([*logged[0], run(2, 400, 20, True)], Evidence([], SPREADS), "gpu"))]
    assert rows_of[0] == "steps of iteration logs" and "B300" not in rows_of


def test_left_out_groups_have_a_table() -> None:
    one = run(2, 400, 20, True)
    other = replace(one, origin=ELSEWHERE)
    evidence = Evidence([taught(HERE, np.zeros(COUNT)), taught(ELSEWHERE, np.ones(COUNT))], SPREADS)
    scored = leave_out([one, other], evidence, "gpu")
    alone = Evidence([taught(ELSEWHERE, np.ones(COUNT))], SPREADS).belief(HERE)
    assert [s.predicted for s in scored[:2]] == pytest.approx(one.predicted(alone.logs)[0])
    assert all(s.covered == (abs(s.error) <= s.reach) and s.reach >= s.sigma for s in scored)
    rows = list(table(scored))
    assert {len(row) for row in rows} == {len(HEADER)} and [row[0] for row in rows][-2:] == ["B200", "H100"]
    levels = {"extrapolated": 4}  # nobody taught Hopper what B200 needs, nor the other way round
    assert {row[0]: 2 * int(row[1]) for row in rows if row[0].endswith("polated")} == levels
    bold = left_out_section({"gpu": [("all", "2", "7.1", "16.0", "9", "9"), ("of these, x", "2", "9", "", "84", "90")]})
    assert "| **7.1** | 16.0 | 9 | 9 |" in bold and "| 9 |  | **84** | 90 |" in bold


def test_prefill_and_decode_apart_are_simulated_where_their_workers_are_known() -> None:
    """Left out like others, with slopes of a step and a prompt; the datasheet is faster, and nothing is taught."""
    pools = [{"name": role, "role": role, "replicas": count} for role, count in (("prefill", 1), ("decode", 2))]
    whole = run(4, 900, 40, True)
    split = Deployment.model_validate({**whole.deployment.model_dump(), "fleet": {"pools": pools}})
    apart = replace(whole, deployment=split)
    logs = bundled_evidence().belief(HERE).logs
    predicted, slopes = apart.predicted(logs)
    assert slopes.sum(axis=1) == pytest.approx([1, 1]) and slopes.min() >= 0
    assert (apart.at_roofline() < predicted).all()
    assert predicted[0] < whole.predicted(logs)[0][0]  # no prompts between decodes
    (first, *_) = leave_out([apart], fit([apart]), "source")
    assert first.predicted > 0 and first.reach > 0 and fit([apart]) is bundled_evidence()


# Predictions


def deployment(**over: object) -> Deployment:
    return Deployment.model_validate({"model": "Llama-3.1-8B", "device": "cuda", **over})


def test_a_calibration_of_another_configuration_is_refused_or_widened() -> None:
    learnt = replace(blind("H100", deployment()), gpu="H100", interval=(0.97, 1.03), prompt_interval=(0.97, 1.03))
    plan = StepPlan.from_amounts(decode_rows=8, decode_context=8000, decode_squares=8_000_000, sampled_rows=8)
    same, split = (predicted_cost("H100", deployment(tensor_parallel_size=tp), learnt) for tp in (1, 4))
    assert same.known_interval == learnt.step_interval
    plain = predicted_cost("H100", deployment(tensor_parallel_size=4))
    assert split.step_ns(plan) == pytest.approx(plain.step_ns(plan), rel=1e-3)  # it learnt nothing that was not known
    low, high = split.known_interval.decode
    assert low < plain.known_interval.decode[0] and high > plain.known_interval.decode[1]
    judged = observed(split)
    judged.step_ns(plan)
    level, why = judged.trust()
    assert level == "extrapolated" and why.endswith("it was learnt as tensor_parallel_size 1")
    for gpu, model in (("B200", "Llama-3.1-8B"), ("H100", "Qwen3-8B")):
        with pytest.raises(UserError, match="is not what the calibration was learnt on"):
            transferred(learnt, find_gpu(gpu), deployment(model=model), learnt, learnt)
    there, here = (blind("H100", deployment(engine=engine)) for engine in ("vllm", "sglang"))
    moved = transferred(replace(learnt, request_ms=7.0), find_gpu("H100"), deployment(engine="sglang"), here, there)
    assert moved.request_ms == pytest.approx(7.0 * here.request_ms / there.request_ms) != 7.0
    wider = replace(learnt, correction=replace(learnt.correction, wider={"bfloat16": {"weights": 1.1}}))
    assert wider.id != learnt.id


@given(
    gpu=st.sampled_from(["H100", "H200", "B200", "B300", "RTX-PRO-6000", "L40S"]),
    engine=st.sampled_from(["vllm", "sglang 0.5.9", "trtllm"]),
    tp=st.sampled_from([1, 2, 8]),
    model=st.sampled_from(["Llama-3.1-70B", "Mixtral-8x7B"]),
    dtype=st.sampled_from(["nvfp4", "mxfp4", "fp8", "fp8_block", "int4", "int8"]),
    rows=st.integers(0, 512),
    chunk=st.integers(0, 16384),
)
@examples(1)
def test_a_step_of_less_precision_is_never_slower(gpu, engine, tp, model, dtype, rows, chunk):
    """Whole steps as corrected; the experts alone where a mixture in 4 bits leaves in 16 what 8 bits do not."""
    spec = find_model(model)
    assume(rows + chunk and (spec.num_experts or dtype != "mxfp4"))
    sizes = uniform_step(rows, 1000, int(chunk > 0), max(chunk, 1), 0, 0)

    def parts_ns(dtype: str) -> dict[str, float]:
        stated = deployment(model=model, quantization=dtype, tensor_parallel_size=tp, engine=engine)
        known = blind(gpu, stated).correction
        raw = step_parts(spec, stated, kernels(gpu), sizes, known.by_type)
        return {name: float(ns) for name, ns in known.apply(raw, sizes).items()}

    narrow = parts_ns(dtype)
    for wider in wider_types(dtype, find_gpu(gpu)):
        wide = parts_ns("none" if wider == "bfloat16" else wider)
        if spec.num_experts and "fp4" in dtype and wider != "bfloat16":
            alone, wide = ({name: ns[name] for name in ("experts", "expert compute")} for ns in (narrow, wide))
            assert sum(alone.values()) <= sum(wide.values()) * (1 + 1e-9)
        else:
            assert sum(narrow.values()) <= sum(wide.values()) * (1 + 1e-9)


def test_an_engine_is_priced_by_what_its_own_runs_taught() -> None:
    """Said by the policy or by `engine`, with a release or without; a calibration of another is widened."""
    plan = StepPlan.from_amounts(decode_rows=8, decode_context=8000, decode_squares=8_000_000, sampled_rows=8)
    asked = {
        "": {}, "said": {"engine": "vllm"}, "policy": {"policy": "sglang"}, "engine": {"engine": "sglang"},
        "order": {"engine": "vllm", "policy": "sglang"}, "release": {"engine": "sglang 0.5.9"},
    }  # fmt: skip
    costs = {name: predicted_cost("B200", deployment(**over)) for name, over in asked.items()}
    ns = {name: cost.step_ns(plan) for name, cost in costs.items()}
    assert ns[""] == ns["said"] == ns["order"] != ns["policy"] == ns["engine"] != ns["release"]
    widths = {name: high / low for name, cost in costs.items() for low, high in [cost.known_interval.decode]}
    assert widths["release"] < widths["engine"]
    learnt = replace(blind("B200", deployment(engine="vllm 0.19.0")), gpu="B200", interval=(0.97, 1.03))
    for over, differs in ({}, ""), ({"engine": "vllm 0.19.0"}, ""), ({"engine": "vllm 0.18.0"}, "engine vllm 0.19.0"):
        assert learnt.differs(deployment(**over)) == differs
    moved = predicted_cost("B200", deployment(policy="sglang"), learnt)
    assert moved.untaught == "it was learnt as engine vllm 0.19.0"
    assert moved.step_ns(plan) == pytest.approx(ns["policy"], rel=1e-3)
    assert moved.known_interval.decode[0] < costs["policy"].known_interval.decode[0]
    assert "engine" not in deployment(policy="sglang").model_dump()
    with pytest.raises(UserError, match="engine: 'orca': must be vllm, sglang or trtllm, with or without a release"):
        parse(Deployment, {"engine": "orca"}, where="deployment")


@given(st.floats(0.01, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_step_is_as_sure_as_what_it_is_made_of(reach_: float, further: float, share: float) -> None:
    interval = StepInterval(factors_of(reach_), factors_of(2 * reach_))
    low, high = interval.of_step(share)
    assert interval.prompts[0] <= low <= interval.decode[0] <= 1 <= interval.decode[1] <= high * (1 + 1e-12)
    wide = widened((low, high), further)
    assert wide[0] <= low * (1 + 1e-12) and wide[1] >= high * (1 - 1e-12)


def test_the_bundled_intervals_are_taught_by_the_others_and_hold_what_they_say() -> None:
    """Rung 5 of published engines: about nine in ten, of which some rows are known to be wrong."""
    external = load_external(EXTERNAL_SAMPLE)
    assert 0.8 <= covered(external.rows) / len(external.rows) <= 0.97
    assert len(external.rows) > 500
    for row in (row for case in external.cases for row in case.rows):
        json.dumps([row.low, row.high], allow_nan=False)
        assert row.low <= row.blind <= row.high


def test_a_band_is_that_of_what_is_most_alike() -> None:
    """Nine of ten of what others missed; those with the engine, GPU and model in common count most. Never under 1."""
    sure, bold = (Missed(origin, "f", 100, [far] * 10) for origin, far in ((HERE, 1.5), (ELSEWHERE, 6.0)))
    assert reach_of([sure], HERE) == 1.5 and reach_of([replace(sure, misses=[0.1])], HERE) == 1.0
    assert reach_of([sure, bold], ELSEWHERE) == 6.0
    assert reach_of([sure, replace(bold, rows=4)], HERE) == 1.5
    assert reach_of([], HERE) == pytest.approx(1.645)
