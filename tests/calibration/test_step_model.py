"""The step model: operations add up to the model, tables to their definition, and a fit to the truth."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import LLAMA, MIXTURE, Roofline, deployment
from tokentwin.calibration.kernels.catalogue import load_kernels
from tokentwin.calibration.operations import Collective, Estimate, Experts, Gemm, Operation, StepSizes, floor_ns
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.correction import FACTORS, WEIGHTS, Correction, fit_correction, step_parts
from tokentwin.calibration.steps.features import regimes
from tokentwin.calibration.steps.iteration_fit import read_iteration_log
from tokentwin.calibration.steps.operation_cost import HostTimes, OperationCost
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity, weight_bytes
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.deployments.model_spec import ModelSpec
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import Row, StepPlan
from tokentwin.serving.workload import WorkloadRequest

QUICK = examples(0.5)
LOG = Path(__file__).parents[3] / "shared/data/aiconfigurator/fpm_vllm0.20.1_b300/qwen3-32b_tp1"

rows_and_lengths = st.lists(st.integers(0, 8000), min_size=0, max_size=60)
prompts = st.lists(st.tuples(st.integers(2, 500), st.integers(0, 6000)), max_size=4)


def sizes_of(decodes: list[int], chunks: list[tuple[int, int]]) -> StepSizes:
    """Return the sizes of one step, as arrays of length one."""

    def one(value: float) -> np.ndarray:
        return np.array([float(value)])

    return StepSizes(
        prefill_rows=one(len(chunks)),
        prefill_tokens=one(sum(n for n, _ in chunks)),
        prefill_context=one(sum(c for _, c in chunks)),
        prefill_pairs=one(sum(n * (2 * c + n + 1) // 2 for n, c in chunks)),
        decode_rows=one(len(decodes)),
        decode_context=one(sum(decodes)),
        decode_spread=one(np.std(decodes) if decodes else 0),
        sampled_rows=one(len(decodes) + len(chunks)),
    )


def plan_of(decodes: list[int], chunks: list[tuple[int, int]]) -> StepPlan:
    plan = StepPlan(0, DecodeSet(16), 0)
    plan.add_decodes(len(decodes), sum(decodes), sum(c * c for c in decodes))
    for n, c in chunks:
        request = Request(WorkloadRequest(0, 0, (("", n + c),), 1))
        plan.add(Row(request, c, n, True))
    return plan


# Operations


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gemms_of_all_devices_hold_every_weight_once(tp: int) -> None:
    sizes = sizes_of([100], [])
    gemms = [op for op in step_operations(LLAMA, deployment(tensor_parallel_size=tp), sizes) if isinstance(op, Gemm)]
    weights = sum(op.count * op.n * op.k for op in gemms) * tp
    norms = (2 * LLAMA.num_layers + 1) * LLAMA.hidden_size
    assert weights == LLAMA.parameters - norms - LLAMA.vocab_size * LLAMA.hidden_size  # the embedding is looked up


MIXED = find_model("Qwen3-30B-A3B").model_copy(update={"shared_intermediate_size": 1024, "dense_at": (0, 1, 2)})


@pytest.mark.parametrize("model", [LLAMA, MIXED], ids=["dense", "mixture"])
@pytest.mark.parametrize("quantization", ["fp8", "fp8_block", "int4", "int8", "mxfp4"])
def test_what_quantisation_saves_in_memory_gemms_read_less(model: ModelSpec, quantization: str) -> None:
    """One truth: memory and times count a weight's bytes alike, in layers with experts and without."""
    kept, changed = deployment(), deployment(quantization=quantization)

    def read(engine: Deployment) -> float:
        total = 0.0
        for op in step_operations(model, engine, sizes_of([1], [])):
            if isinstance(op, Gemm) and op.width:
                total += op.count * op.width * op.n * op.k
            elif isinstance(op, Experts):
                total += op.count * op.width * 3 * op.hidden * op.inter * op.experts
        return total

    if quantization == "mxfp4" and not model.num_experts:
        for count in (read, lambda engine: kv_capacity(model, Roofline.gpu, engine)):
            with pytest.raises(UserError, match="is for a mixture's experts"):
                count(changed)
        return
    saved = weight_bytes(model, kept) - weight_bytes(model, changed)
    assert saved == pytest.approx(read(kept) - read(changed), rel=1e-5)
    assert saved > 0.4 * weight_bytes(model, kept)


@pytest.mark.parametrize("rows", [1, 8, 32])
def test_decode_is_faster_the_fewer_bits_while_it_reads_weights(rows: int) -> None:
    h100 = load_kernels(find_gpu("H100"))
    model = find_model("Llama-3.1-70B")
    times = []
    for quantization in ("none", "fp8", "int4"):
        cost = OperationCost(model, deployment(quantization=quantization), h100)
        times.append(cost.step_ns(plan_of([500] * rows, [])))
    assert times[0] > 1.5 * times[1] > 1.5 * 1.3 * times[2]


def test_flops_of_a_prompt_are_two_a_weight_and_four_a_pair() -> None:
    sizes = sizes_of([], [(512, 0)])
    operations = step_operations(LLAMA, deployment(), sizes)
    gemms = sum(op.count * op.flops.item() for op in operations if isinstance(op, Gemm) and op.name != "head")
    blocks = LLAMA.parameters - 2 * LLAMA.vocab_size * LLAMA.hidden_size - 65 * LLAMA.hidden_size
    assert gemms == pytest.approx(2 * 512 * blocks)
    (attention,) = [op for op in operations if op.name == "prefill attention"]
    assert attention.flops.item() == 4 * (512 * 513 // 2) * 32 * 128


def test_experts_are_touched_as_tokens_choose() -> None:
    def touched(tokens: int, ep: int = 1) -> float:
        return float(Experts("experts", np.array(float(tokens)), 4096, 1024, 4, 64, ep=ep).touched)

    assert touched(1) == pytest.approx(4)
    assert touched(10_000) == pytest.approx(64)
    assert touched(10_000, ep=8) == pytest.approx(8)
    drawn = np.random.default_rng(0).random((400, 20, 64)).argsort(axis=2)[:, :, :4]  # 20 tokens choose 4 of 64
    counted = np.mean([len(np.unique(step)) for step in drawn])
    assert touched(20) == pytest.approx(counted, rel=0.02)


def test_a_window_bounds_what_is_read() -> None:
    operations = {op.name: op for op in step_operations(MIXTURE, deployment(), sizes_of([5000, 50], []))}
    assert operations["decode attention"].count == 16
    assert operations["decode attention (window)"].context.item() <= 2 * 128
    assert operations["decode attention"].context.item() == 5052


def test_collectives_appear_with_devices() -> None:
    sizes = sizes_of([10, 20], [])
    assert not [op for op in step_operations(LLAMA, deployment(), sizes) if isinstance(op, Collective)]
    collectives = [
        op for op in step_operations(LLAMA, deployment(tensor_parallel_size=4), sizes) if isinstance(op, Collective)
    ]
    assert {op.kind: op.count for op in collectives} == {"all_reduce": 64, "all_gather": 1}
    assert collectives[0].elements.item() == 2 * 4096


# The sum


@QUICK
@given(rows_and_lengths, prompts, st.sampled_from([LLAMA, MIXTURE]), st.sampled_from([1, 4]))
def test_a_step_is_never_below_its_roofline_and_its_parts_are_not_negative(decodes, chunks, model, tp):
    if not decodes and not chunks:
        return
    settled = deployment(tensor_parallel_size=tp)
    sizes = sizes_of(decodes, chunks)
    parts = step_parts(model, settled, Roofline(), sizes)
    assert all((ns >= 0).all() for ns in parts.values())
    floor = sum(op.count * floor_ns(Roofline.gpu, op) for op in step_operations(model, settled, sizes))
    assert sum(parts.values()).item() >= floor.item()


@QUICK
@given(rows_and_lengths, prompts, st.integers(1, 200))
def test_more_tokens_and_longer_context_never_take_less(decodes, chunks, more):
    cost = OperationCost(LLAMA, deployment(), Roofline())
    longer = [c + more for c in decodes]
    bigger = [(n + more, c) for n, c in chunks] or [(more + 1, 0)]
    time = cost.step_ns(plan_of(decodes, chunks))
    assert cost.step_ns(plan_of(longer, chunks)) >= 0.999 * time
    assert cost.step_ns(plan_of(decodes, bigger)) >= 0.99 * time


@QUICK
@given(rows_and_lengths, prompts, st.sampled_from([LLAMA, MIXTURE]))
def test_the_tables_give_what_the_parts_sum_to(decodes, chunks, model):
    if not decodes and not chunks:
        return
    added = {"step": 3e6, "decode row": 1e5, "prompt": 1e6, "prompts only": 2e6, "prompts only, token": 1e4}
    correction = Correction(added_ns=added)
    cost = OperationCost(model, deployment(enforce_eager=True), Roofline(), correction)
    exact = sum(cost.parts(sizes_of(decodes, chunks)).values()).item()
    assert cost.step_ns(plan_of(decodes, chunks)) == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("wider", [{}, {"bfloat16": dict.fromkeys(WEIGHTS, 0.9)}], ids=["one type", "two types"])
def test_scaled_costs_share_what_kernels_take_unless_factors_choose_the_type(wider) -> None:
    asked, timed = [], Roofline()

    class Counted:
        gpu = timed.gpu

        def time(self, operation: Operation) -> Estimate:
            asked.append(operation)
            return timed.time(operation)

    correction, of_fp8 = Correction(wider=wider), deployment(quantization="fp8")
    cost = OperationCost(LLAMA, of_fp8, Counted(), correction)
    plans = [plan_of([100, 900], []), plan_of([50], [(300, 100)])]
    known = [cost.step_ns(plan) for plan in plans]
    scaled, before = cost.scaled(0.7, 1.6), len(asked)
    times = [scaled.step_ns(plan) for plan in plans]
    assert (len(asked) == before) == (not wider)
    anew = OperationCost(LLAMA, of_fp8, timed, correction.scaled(0.7, 1.6))
    assert times == [anew.step_ns(plan) for plan in plans]
    assert [cost.step_ns(plan) for plan in plans] == known


def test_graphs_pad_decode_steps_to_their_bucket() -> None:
    graphs, eager = (OperationCost(LLAMA, deployment(enforce_eager=e), Roofline()) for e in (False, True))
    of_graphs, of_eager = graphs._prices, eager._prices
    assert of_graphs.sized_ps(9, 9) == of_eager.sized_ps(16, 9) > of_eager.sized_ps(9, 9)


def test_uneven_rows_cost_where_a_block_walks_a_row_and_not_where_kernels_cut_rows() -> None:
    """Ours cut a step's rows at one length, batch-invariant ones each into 16 (docs/kernels.md)."""
    sizes = sizes_of([100] * 60 + [8000] * 4, [])

    def imbalance(**how: object) -> float:
        return step_parts(LLAMA, deployment(**how), Roofline(), sizes)["imbalance"].item()

    assert imbalance() > 0
    assert imbalance(attention="triton") == imbalance(attention="hybrid") == 0
    assert 0 < imbalance(attention="triton", batch_invariant=True) < imbalance() / 8


def test_host_time_is_apart() -> None:
    cost = OperationCost(LLAMA, deployment(), Roofline(), host=HostTimes(1e6, 1e4))
    plan = plan_of([100] * 10, [])
    assert cost.cpu_ns(plan) == 1_100_000
    assert OperationCost(LLAMA, deployment(), Roofline()).step_ns(plan) == cost.step_ns(plan)


# The correction


def many_steps(rng: np.random.Generator, count: int) -> StepSizes:
    rows = rng.integers(0, 64, count).astype(float)
    prompt = np.where((rng.random(count) < 0.5) | (rows == 0), rng.integers(16, 8192, count), 0).astype(float)
    past = np.where(rng.random(count) < 0.5, prompt * rng.integers(0, 3, count), 0.0)
    return StepSizes(
        prefill_rows=(prompt > 0).astype(float),
        prefill_tokens=prompt,
        prefill_context=past,
        prefill_pairs=prompt * past + prompt * (prompt + 1) / 2,
        decode_rows=rows,
        decode_context=rows * rng.integers(100, 8000, count),
        decode_spread=rng.uniform(0, 2000, count) * (rows > 1),
        sampled_rows=rows,
    )


def test_a_fit_recovers_the_correction_that_made_the_steps() -> None:
    rng = np.random.default_rng(2)
    sizes = many_steps(rng, 3000)
    parts = step_parts(LLAMA, deployment(), Roofline(), sizes)
    truth = Correction(
        factors=Correction().factors
        | {"weights": 1.1, "compute@1024": 1.1, "compute@8192": 1.3, "decode attention": 0.8},
        added_ns={"step": 8e5, "decode row": 2e4, "prompt": 3e5, "prompts only": 2e6, "prompts only, token": 500.0},
    )
    clean = sum(truth.apply(parts, sizes).values())
    noisy = clean * np.exp(0.02 * rng.standard_normal(3000))
    noisy[::40] *= 3  # interruptions
    fitted = fit_correction(parts, sizes, noisy, "test")
    predicted = sum(fitted.apply(parts, sizes).values())
    assert np.median(np.abs(predicted / clean - 1)) < 0.005
    assert np.percentile(np.abs(predicted / clean - 1), 95) < 0.02
    assert fitted.factors["compute@8192"] == pytest.approx(1.3, rel=0.05)
    assert fitted.factors["decode attention"] == pytest.approx(0.8, rel=0.05)
    assert fitted.sigma["decode"] == pytest.approx(0.02, rel=0.3)


def test_what_the_steps_do_not_show_stays_at_its_prior() -> None:
    sizes = many_steps(np.random.default_rng(3), 400)
    parts = step_parts(LLAMA, deployment(), Roofline(), sizes)
    fitted = fit_correction(parts, sizes, sum(Correction().apply(parts, sizes).values()) + 1e6, "test")
    assert fitted.factors["experts"] == fitted.factors["collectives"] == 1.0
    assert set(fitted.factors) == set(FACTORS)


def test_too_few_steps_for_a_correction_is_one_line() -> None:
    sizes = sizes_of([10], [])
    with pytest.raises(UserError, match="at least 20"):
        fit_correction(step_parts(LLAMA, deployment(), Roofline(), sizes), sizes, np.array([1e6]), "test")


# Per-iteration logs

HEADER = (
    "sum_prefill_tokens,num_prefill_requests,sum_prefill_kv_tokens,num_decode_requests,sum_decode_kv_tokens,"
    "var_decode_kv_tokens,latency_ms\n"
)


def test_an_iteration_log_is_read_in_its_units(tmp_path: Path) -> None:
    path = tmp_path / "log.csv.gz"
    path.write_bytes(gzip.compress(f"{HEADER}0,0,0,4,404,25,12.5\n100,2,60,1,11,0,7\n0,0,0,0,0,0,3\n".encode()))
    log = read_iteration_log(path)
    assert log.measured_ns.tolist() == [12.5e6, 7e6]  # a step without tokens is none
    assert log.sizes.decode_context.tolist() == [400, 10]  # tokens before the step
    assert log.sizes.decode_spread.tolist() == [5, 0]
    assert log.sizes.prefill_pairs.tolist() == [0, 100 * 30 + 2 * 50 * 51 / 2]
    assert regimes(log.sizes).tolist() == [1, 2]
    assert len(log.take(np.array([False, True]))) == 1


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot be read"),
        ("a,b\n1,2\n", "has no column"),
        (HEADER + "x,0,0,1,1,0,3\n", "is not a number"),
        (HEADER, "no step"),
    ],
)
def test_a_log_that_is_none_is_one_line(tmp_path: Path, content: str | None, says: str) -> None:
    path = tmp_path / "log.csv"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError, match=says) as caught:
        read_iteration_log(path)
    assert "\n" not in str(caught.value)
