"""The cost of verifying and drafting: closed forms on a plain roofline, tables against parts, and refusals."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.calibration.step_model_samples import SCHEDULER, Roofline
from tokentwin.calibration.operations import DecodeAttention, Gemm, StepSizes, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.correction import ADDED, FACTORS, Correction
from tokentwin.calibration.steps.draft_cost import StatedDraft
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import kernels
from tokentwin.calibration.steps.features import CPU_FEATURES, STEP_FEATURES
from tokentwin.calibration.steps.operation_cost import OperationCost
from tokentwin.calibration.steps.step_cost import Calibration
from tokentwin.cli import cli
from tokentwin.planning.costs import priced
from tokentwin.planning.plan.vllm_command import vllm_command
from tokentwin.serving.decode_set import DecodeSet
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.deployments.gpu_spec import find_gpu
from tokentwin.serving.deployments.kv_capacity import kv_capacity, weight_bytes
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.speculative import Coins, SpeculativeConfig
from tokentwin.serving.step_plan import Row, StepPlan
from tokentwin.serving.workload import WorkloadRequest

TARGET, DRAFT = "Llama-3.1-8B", "Llama-3.2-1B"
CORRECTION = Correction(dict.fromkeys(FACTORS, 1.1), dict.fromkeys(ADDED, 3000.0))


def speculating(k: int = 3, **more: object) -> SpeculativeConfig:
    return SpeculativeConfig.model_validate({"num_speculative_tokens": k, "acceptance_rate": 0.7, **more})


def cost(speculative: SpeculativeConfig | None, model: str = TARGET, kernel_times: object = None) -> OperationCost:
    scheduler = SCHEDULER.model_copy(update={"speculative": speculative})
    deployment = Deployment(model=model, device="cuda", scheduler=scheduler)
    return OperationCost(find_model(model), deployment, kernel_times or Roofline(), CORRECTION)  # type: ignore[arg-type]


def verifying(rows: int, context: int, drafts: int, prompts: tuple[tuple[int, int], ...] = ()) -> StepPlan:
    """Return a plan of `rows` that each verify `drafts`, and of prompts (tokens, past) that end in it."""
    plan = StepPlan(0, DecodeSet(16), 0)
    request = Request(WorkloadRequest(0, 0, (("", 1),), 1))
    for _ in range(rows):
        plan.add(Row(request, context, 1 + drafts, True, drafts))
    for tokens, past in prompts:
        plan.add(Row(request, past, tokens, True))
    return plan


FREE = speculating(method="ngram", draft_us=0)


def test_a_dense_draft_knows_nothing_of_the_experts_of_its_target() -> None:
    scheduler = SCHEDULER.model_copy(update={"speculative": speculating(model="Qwen3-0.6B")})
    spread = {"tensor_parallel_size": 4, "enable_expert_parallel": True, "scheduler": scheduler}
    prices = [
        OperationCost(
            find_model("Qwen3-30B-A3B"),
            Deployment(model="Qwen3-30B-A3B", device="cuda", expert_imbalance=imbalance, **spread),  # type: ignore[arg-type]
            Roofline(),
        )
        for imbalance in (1.0, "random")
    ]
    even, uneven = (price.parts(uniform_step(64, 100, 0, 0, 0, 3)) for price in prices)
    assert sum(uneven.values()) > sum(even.values()) and uneven["drafting"] == even["drafting"]


def test_a_row_to_verify_reads_its_kv_once_and_goes_through_every_gemm_with_its_drafts() -> None:
    deployment = cost(FREE).deployment
    model = find_model(TARGET)
    plain, verify = (
        {op.name: op for op in step_operations(model, deployment, uniform_step(8, 1000, 0, 1, 0, drafts))}
        for drafts in (0, 3)
    )
    for name, operation in plain.items():
        if isinstance(operation, Gemm):
            assert (operation.m, verify[name].m) == (8, 32), name  # type: ignore[attr-defined]
    attention, verified = plain["decode attention"], verify["decode attention"]
    assert isinstance(attention, DecodeAttention) and isinstance(verified, DecodeAttention)
    assert verified.context == attention.context and verified.flops == 4 * attention.flops
    assert attention.bytes < verified.bytes < 1.02 * attention.bytes


@pytest.mark.parametrize(
    "speculative",
    [
        speculating(model=DRAFT),
        speculating(1, model=DRAFT),
        FREE,
        speculating(method="eagle", draft_step_share=0.1),
        speculating(method="eagle", draft_us=300),
    ],
)
@pytest.mark.parametrize(("rows", "prompts"), [(1, ()), (16, ()), (64, ()), (16, ((400, 0),)), (0, ((700, 100),))])
def test_the_simulator_pays_what_explain_shows(speculative, rows, prompts):
    made, drafts = cost(speculative), speculative.num_speculative_tokens if rows else 0
    plan = verifying(rows, 1500, drafts, prompts)
    sizes = StepSizes(
        plan.prefill_rows,
        plan.prefill_tokens,
        plan.prefill_context,
        plan.prefill_pairs,
        rows,
        1500 * rows,
        0,
        plan.sampled_rows,
        plan.draft_tokens,
    )
    assert made.step_ns(plan) == pytest.approx(sum(made.parts(sizes).values()), rel=0.03)


def test_a_step_with_nothing_to_draft_for_costs_what_it_does_without_speculation() -> None:
    plan = verifying(16, 1500, 0, ((300, 0),))
    assert cost(FREE).step_ns(plan) == pytest.approx(cost(None).step_ns(plan), rel=2e-3)
    assert cost(speculating(method="eagle", draft_step_share=0.1)).step_ns(plan) == pytest.approx(
        1.3 * cost(None).step_ns(plan), rel=2e-3
    )


def test_verifying_is_nearly_free_for_few_rows_and_computes_in_full_for_many() -> None:
    """Few rows wait for weights, many for tensor cores: the reason why speculation pays at low load."""
    h100 = kernels("H100")
    few, many = (
        cost(FREE, kernel_times=h100).step_ns(verifying(rows, 500, 3))
        / cost(None, kernel_times=h100).step_ns(verifying(rows, 500, 0))
        for rows in (1, 64)
    )
    assert 1.0 <= few < 1.15 < many < 4.0


def test_drafting_is_a_pass_over_the_step_and_decode_steps_of_the_draft() -> None:
    plan = verifying(32, 800, 3)
    alone = OperationCost(
        find_model(DRAFT),
        cost(None, DRAFT).deployment,
        Roofline(),
        CORRECTION.of_kernels(),  # type: ignore[arg-type]
    )
    context = 32 * 801
    again = list(alone.decode_run_ns(32, context, context**2 // 32, 3))
    for k in (1, 2, 4):
        free = cost(speculating(k, method="ngram", draft_us=0)).step_ns(plan)
        drafting = cost(speculating(k, model=DRAFT)).step_ns(plan) - free
        assert drafting == pytest.approx(alone.step_ns(plan) + sum(again[: k - 1]), abs=k)


def test_a_run_of_decode_steps_is_priced_as_one_by_one() -> None:
    made = cost(speculating(model=DRAFT))
    rows, context, squares, one_by_one = 4, 4000, 4 * 1000**2, []
    for _ in range(5):
        plan = StepPlan(0, DecodeSet(16), 0)
        plan.add_decodes(rows, context, squares)
        one_by_one.append(made.cpu_ns(plan) + made.step_ns(plan))
        context, squares = context + rows, squares + 2 * context + rows
    assert list(made.decode_run_ns(4, 4000, 4 * 1000**2, 5)) == one_by_one


def test_a_faster_engine_drafts_faster_too() -> None:
    made = cost(speculating(model=DRAFT))
    plan = verifying(8, 1000, 3)
    assert made.scaled(0.5, 0.5).step_ns(plan) == pytest.approx(0.5 * made.step_ns(plan), rel=1e-3)


def test_explain_lists_the_draft_model_s_operations() -> None:
    explained = explain(cost(speculating(model=DRAFT)), uniform_step(8, 1000, 0, 1, 0, 3))
    names = [operation.name for operation in explained.operations]
    assert len(names) == len(set(names))
    assert {"qkv", "draft qkv", "draft, 2 more: qkv"} <= set(names)
    drafting = sum(operation.ns for operation in explained.operations if operation.name.startswith("draft"))
    assert explained.parts_ns["drafting"] == pytest.approx(1.1 * drafting, rel=1e-3)


def test_a_draft_model_takes_memory_from_the_target() -> None:
    gpu, target, draft = find_gpu("H100"), find_model(TARGET), find_model(DRAFT)
    plain = Deployment(model=TARGET)
    drafted = plain.model_copy(update={"scheduler": SchedulerConfig(speculative=speculating(model=DRAFT))})
    alone, both = (kv_capacity(target, gpu, deployment) for deployment in (plain, drafted))
    assert both.weights - alone.weights == weight_bytes(draft, plain)
    assert both.block / alone.block == pytest.approx(
        1
        + draft.num_layers
        * draft.num_kv_heads
        * draft.head_dim
        / (target.num_layers * target.num_kv_heads * target.head_dim)
    )
    assert both.num_blocks < alone.num_blocks


# What a user meets


def test_a_draft_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(UserError, match="choose one of its family"):
        cost(speculating(model="Qwen3-8B"))
    with pytest.raises(UserError, match="model"):
        cost(speculating(model="no-such-model"))


def test_the_simulator_needs_to_be_told_what_the_engine_finds_out() -> None:
    with pytest.raises(UserError, match=r"draft_us.*the simulator needs it"):
        StatedDraft(SpeculativeConfig(method="ngram", num_speculative_tokens=2, acceptance_rate=0.5))
    with pytest.raises(UserError, match=r"acceptance_rate.*the simulator needs it"):
        Coins(SpeculativeConfig(method="ngram", num_speculative_tokens=2, draft_us=1))


def test_a_deployment_file_speculates(tmp_path: Path) -> None:
    file, trace, out = tmp_path / "d.yaml", tmp_path / "t.parquet", tmp_path / "run"
    file.write_text(
        "model: Llama-3.1-8B\ndevice: cuda\nscheduler:\n  max_num_seqs: 16\n  max_model_len: 1024\n"
        "  speculative: {model: Llama-3.2-1B, num_speculative_tokens: 3, acceptance_rate: 1.0}\n"
    )
    run = CliRunner().invoke
    shape = "--requests 5 --arrivals poisson:rate=2 --prompt 100 --output 41"
    made = run(cli, ["trace", "synth", str(trace), *shape.split()])
    assert made.exit_code == 0, made.output
    arguments = f"simulate {trace} --gpu H100 -d {file} -o {out} --no-band --format json".split()
    done = run(cli, arguments)
    assert done.exit_code == 0, done.output
    scalars = json.loads(done.output)
    assert scalars["acceptance_length"] == 4 and scalars["rejected_draft_tokens"] == 0


def test_vllm_is_told_what_drafts() -> None:
    def command(speculative: SpeculativeConfig) -> str:
        return vllm_command(Deployment(scheduler=SchedulerConfig(speculative=speculative)))

    assert '"model": "Llama-3.2-1B", "num_speculative_tokens": 3}' in command(speculating(model=DRAFT))
    assert '{"method": "ngram", "num_speculative_tokens": 3}' in command(FREE)
    with pytest.raises(UserError, match="checkpoint"):
        command(speculating(method="eagle", draft_us=1))


def test_a_calibration_of_an_engine_without_drafts_has_no_price_for_them(tmp_path: Path) -> None:
    own = Deployment(model="random:llama")
    Calibration(
        id="none",
        deployment=own.model_dump_json(),
        hardware={},
        version="",
        created="",
        step_prices_ps=dict.fromkeys(STEP_FEATURES, 1),
        cpu_prices_ps=dict.fromkeys(CPU_FEATURES, 1),
        domain={},
        residuals={},
        noise={},
        fitted_steps=0,
    ).save(tmp_path)
    drafted = own.model_copy(update={"scheduler": SchedulerConfig(speculative=FREE)})
    assert priced(str(tmp_path), None, own).calibration == "none"
    with pytest.raises(UserError, match=r"must be left out, as the calibration was measured"):
        priced(str(tmp_path), None, drafted)
