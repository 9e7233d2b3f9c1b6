"""Outside of CUDA graphs, steps take the time of the device, or the host's time to launch their kernels."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.budget import examples
from tests.calibration.step_model_samples import LLAMA, Roofline, deployment
from tokentwin.calibration.operations import StepSizes, uniform_step
from tokentwin.calibration.step_operations import step_operations
from tokentwin.calibration.steps.explanation import explain
from tokentwin.calibration.steps.external_calibration import predicted_cost
from tokentwin.calibration.steps.launches import FITTED, UNKNOWN, LaunchCost, launches, measured_launches
from tokentwin.calibration.steps.observed import ObservedPrices
from tokentwin.calibration.steps.operation_cost import WAITING, HostTimes, OperationCost
from tokentwin.calibration.steps.pipeline_cost import PipelineCost
from tokentwin.calibration.steps.step_cost import Calibration, StepCost
from tokentwin.calibration.steps.step_trust import trust_within
from tokentwin.calibration.trust import TrustLevel
from tokentwin.cli import cli
from tokentwin.planning.costs import priced
from tokentwin.planning.measure.calibrator import fit_recordings
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.model_catalogue import find_model
from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import AGGREGATES, StepPlan
from tokentwin.sim.cluster import simulate_to
from tokentwin.traces.recording import Recording
from tokentwin.traces.synth import parse_spec, synthesise


def taking(launch_ns: float) -> LaunchCost:
    return LaunchCost(launch_ns, 0.0, "planted")


PLANTED_NS = 28_000
LLAMA_8B = find_model("Llama-3.1-8B")
EAGER = {
    launch: OperationCost(LLAMA, deployment(enforce_eager=True), Roofline(), host=HostTimes(0, 0, taking(launch)))
    for launch in (0, 30_000)
}


def plan(rows: int, context: int, chunk: int = 0) -> StepPlan:
    amounts = {"prefill_rows": 1, "prefill_tokens": chunk, "prefill_pairs": chunk * (chunk + 1) // 2} if chunk else {}
    rows_at = {"decode_rows": rows, "decode_context": rows * context, "decode_squares": rows * context**2}
    return StepPlan.from_amounts(**rows_at, **amounts, sampled_rows=rows + bool(chunk))


@examples(0.5)
@given(st.integers(0, 64), st.integers(1, 8000), st.sampled_from([0, 1, 40, 700, 2048]))
def test_a_step_takes_what_the_slower_of_device_and_host_takes(rows: int, context: int, chunk: int) -> None:
    if not rows and not chunk:
        return
    device, both = (EAGER[launch].step_ns(plan(rows, context, chunk)) for launch in (0, 30_000))
    sizes = uniform_step(rows, context, int(chunk > 0), chunk, 0)
    assert both == max(device, 30_000 * int(launches(step_operations(LLAMA, deployment(), sizes))))
    steps = list(EAGER[30_000].decode_run_ns(rows, rows * context, rows * context**2, 3)) if rows else []
    assert steps == [EAGER[30_000].step_ns(plan(rows, context + later)) for later in range(len(steps))]


def test_a_layer_of_llama_is_nine_kernels_and_ten_in_a_mixed_step() -> None:
    """As those of our own engine, which are counted in docs/kernels.md: 327 up to the head."""

    def count(*step: int) -> int:
        return int(launches(step_operations(LLAMA, deployment(), uniform_step(*step))))

    head = 1 + 4  # and sampling
    assert count(4, 100, 0, 0, 0) == 9 * 32 + head
    assert count(4, 100, 1, 64, 0) == 10 * 32 + head


def test_without_fusion_a_layer_is_28_kernels_more_and_every_step_takes_longer() -> None:
    """Eight more for each of two norms, eleven for rotary embedding and KV write, one for the activation."""
    apart = deployment(fusion=False)
    for step in ((1, 100, 0, 0, 0), (64, 4000, 1, 512, 0)):
        sizes = uniform_step(*step)
        fused, plain = (step_operations(LLAMA, engine, sizes) for engine in (deployment(), apart))
        assert int(launches(plain)) - int(launches(fused)) == 28 * 32
        more = sum(b.count * b.bytes - a.count * a.bytes for a, b in zip(fused, plain, strict=True))
        kept = 2 * 34 * 4096 + (16 * 32 + 20 * 8) * 128 + 4 * 14336  # bytes of a token in a layer
        assert more == pytest.approx(32 * kept * sizes.tokens)
    for eager in (False, True):
        engines = (deployment(model="Llama-3.1-8B", enforce_eager=eager, fusion=fusion) for fusion in (True, False))
        costs = [predicted_cost("H100", engine) for engine in engines]
        assert costs[0].step_ns(plan(1, 100)) < costs[1].step_ns(plan(1, 100))
    assert "fusion" not in deployment().model_dump() and not apart.model_validate(apart.model_dump()).fusion
    with pytest.raises(UserError, match="fusion"):
        step_operations(find_model("DeepSeek-V3"), deployment(fusion=False), uniform_step(1, 1, 0, 0, 0))


@pytest.mark.deep
def test_what_runs_op_by_op_is_what_pytorch_runs() -> None:
    """Kernels and bytes of transformers' own modules, as PyTorch dispatches them."""
    torch = pytest.importorskip("torch", reason="the engine extra is not installed")
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    class Count(TorchDispatchMode):
        kernels, moved = 0, 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if not func.is_view:
                self.kernels += 1
                tensors = [leaf for leaf in tree_leaves((args, out)) if isinstance(leaf, torch.Tensor)]
                self.moved += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            return out

    tokens, heads, kv_heads, dim, hidden, inter = 64, 32, 8, 128, 4096, 14336
    q, k, hid, gate = (torch.ones(1, n, tokens, d, dtype=torch.bfloat16)
                       for n, d in ((heads, dim), (kv_heads, dim), (1, hidden), (1, inter)))  # fmt: skip
    cos = torch.ones(1, tokens, dim, dtype=torch.bfloat16)
    norm = llama.LlamaRMSNorm(hidden).to(torch.bfloat16)
    cache = torch.empty_like(k)

    def rotary() -> None:
        llama.apply_rotary_pos_emb(q, k, cos, cos)
        for _ in range(2):
            cache.copy_(k)

    runs = {
        "norms": lambda: norm(hid + hid),
        "rotary, KV write": rotary,
        "activation": lambda: torch.nn.functional.silu(gate) * gate,
    }
    sizes = uniform_step(tokens, 10, 0, 0, 0)
    stated = {one.name: one for one in step_operations(LLAMA, deployment(fusion=False), sizes)}
    for name, run in runs.items():
        with torch.no_grad(), Count() as count:
            run()
        assert stated[name].launches == count.kernels, name
        assert stated[name].bytes == pytest.approx(count.moved, rel=0.1), name


def test_graphs_are_faster_where_a_step_is_launches_and_nothing_where_it_is_not() -> None:
    def times(model: str, step: StepPlan) -> list[int]:
        engines = (deployment(model=model, enforce_eager=eager) for eager in (True, False))
        return [predicted_cost("H100", engine).step_ns(step) for engine in engines]

    launch_ns = predicted_cost("H100", deployment(model="Qwen3-0.6B")).host.launch_ns
    for rows in (1, 8, 64):
        eager, graph = times("Qwen3-0.6B", plan(rows, 500))
        assert eager == pytest.approx(launch_ns * (28 * 9 + 5)) and eager > graph  # 28 dense layers, head and sampling
    eager, graph = times("Llama-3.1-8B", plan(0, 0, 2048))
    assert eager == graph


def capturing(engine: str, **more: object) -> OperationCost:
    """Return the cost of an engine with 128 sequences whose host takes `PLANTED_NS` a kernel, on a fast device."""
    of_engine = deployment(engine=engine, tensor_parallel_size=8, **more)
    return OperationCost(LLAMA, of_engine, Roofline(), host=HostTimes(0, 0, taking(PLANTED_NS)))


def test_prompts_beyond_the_captured_graphs_wait_for_launches() -> None:
    """vLLM captures twice its sequences, at most 512 tokens; the others capture no prompts unless told to."""
    every, pieces = 11 * 32 + 5 + 1, 32 + 32  # two all-reduces a layer, and the logits' gather; attention and graphs
    few, many = plan(0, 0, 200), plan(0, 0, 300)
    vllm, sglang = capturing("vllm"), capturing("sglang")
    assert vllm.step_ns(few) == max(vllm.step_ns(few), PLANTED_NS * pieces)
    assert vllm.step_ns(many) == PLANTED_NS * every
    assert sglang.step_ns(few) == sglang.step_ns(many) == PLANTED_NS * every
    for engine in ("vllm", "sglang", "trtllm"):
        captured = capturing(engine, max_cudagraph_capture_size=300)
        assert captured.step_ns(many) < PLANTED_NS * every == captured.step_ns(plan(0, 0, 301))
        alone = capturing(engine).step_ns(plan(8, 100))
        assert alone < PLANTED_NS * pieces  # decode steps are graphs
    for step in (few, many, plan(4, 100, 300)):
        rows, chunk = step.decode_rows, step.prefill_tokens
        parts = vllm.parts(uniform_step(rows, 100, 1, chunk, 0))
        assert sum(float(ns) for ns in parts.values()) == pytest.approx(vllm.step_ns(step), rel=0.01)


def test_launches_are_a_part_of_a_step_that_was_measured_nowhere() -> None:
    host = HostTimes(launches=LaunchCost(PLANTED_NS, 0.3, FITTED))
    cost = OperationCost(LLAMA, deployment(enforce_eager=True), Roofline(), host=host)
    one = explain(cost, uniform_step(1, 100, 0, 0, 0))
    assert one.parts_ns[WAITING] > 0
    assert one.step_ns == pytest.approx(PLANTED_NS * 293)
    assert (one.level, one.why) == (TrustLevel.EXTRAPOLATED, WAITING)
    assert WAITING not in explain(cost, uniform_step(64, 8000, 0, 0, 0)).parts_ns
    assert trust_within(cost, [uniform_step(64, 8000, 0, 0, 0)]).level == "interpolated"
    assert explain(OperationCost(LLAMA, deployment(), Roofline(), host=host), uniform_step(1, 1, 0, 0, 0)).launches == 0


def recorded(
    launch_ns: float, engine: Deployment, eager: int = 200, graphs: int = 200, device_ns: float = 1e6
) -> pa.Table:
    """Return steps of our engine on a GPU whose host takes `launch_ns` a kernel; every other step is delayed."""
    random = np.random.default_rng(int(launch_ns))
    rows = []
    for at in range(eager + graphs):
        sizes = uniform_step(int(random.integers(1, 30)), int(random.integers(1, 4000)), 0, 0, 0)
        host = launch_ns * 293 if at < eager else 0.0
        took = max(device_ns, host) * (1 + (at % 2) * float(random.exponential(0.3)))
        named = {name: int(getattr(sizes, name)) for name in AGGREGATES}
        rows.append({**named, "start_ns": 0, "end_ns": round(took), "graph": at >= eager})
    return pa.Table.from_pylist(rows)


@pytest.mark.parametrize("launch_ns", [6_000, 28_000, 70_000])
def test_the_launch_cost_that_is_in_a_log_is_found_again(launch_ns: float) -> None:
    engine = deployment(model="Llama-3.1-8B")
    cost = measured_launches(recorded(launch_ns, engine), engine, "NVIDIA H200")
    assert cost.ns == pytest.approx(launch_ns, rel=0.03)
    assert cost.source == "200 eager steps on NVIDIA H200"


def test_a_log_that_cannot_tell_launches_says_why() -> None:
    engine = deployment(model="Llama-3.1-8B")
    drafting = {"method": "ngram", "num_speculative_tokens": 2}
    for log, of, why in (
        (recorded(28_000, engine, graphs=3), engine, "3 graphs of up to 64 tokens"),
        (recorded(28_000, engine, eager=3), engine, "3 eager steps"),
        (recorded(1, engine, device_ns=5e6), engine, "the device was the slower"),
        (recorded(28_000, engine), engine.model_copy(update={"device": "cpu"}), "a CPU launches no kernels"),
        (recorded(28_000, engine), engine.rescheduled(speculative=drafting), "kernels that are not counted"),
        (recorded(28_000, engine), engine.model_copy(update={"model": "random:llama"}), "not a known model"),
    ):
        cost = measured_launches(log, of, "NVIDIA H200")
        assert cost.ns is None and why in cost.source


def test_measured_launches_price_eager_steps_and_are_named() -> None:
    engine = deployment(model="Llama-3.1-8B", enforce_eager=True)
    sizes, measured = uniform_step(1, 100, 0, 0, 0), LaunchCost(60_000.0, 0.05, "200 eager steps on NVIDIA H200")
    fitted, own = (predicted_cost("H100", engine, launches=known) for known in (UNKNOWN, measured))
    assert own.step_ns(plan(1, 100)) == 60_000 * 293
    first, second = explain(fitted, sizes), explain(own, sizes)
    assert (first.launches, first.launch_source) == (293, FITTED) and 1e4 < first.launch_ns < 1e5
    assert (second.launch_ns, second.launch_source) == (60_000.0, measured.source)
    assert (first.level, second.level) == (TrustLevel.EXTRAPOLATED, TrustLevel.INTERPOLATED)
    assert second.interval[1] - second.interval[0] < first.interval[1] - first.interval[0]
    assert explain(predicted_cost("H100", deployment(model="Llama-3.1-8B")), sizes).launches == 0


LAUNCH_NS = 60_000
TRAFFIC = {"requests": 60, "seed": 3, "arrivals": {"kind": "closed", "concurrency": 6},
           "prompt": {"kind": "lognormal", "mean": 200, "sigma": 1.5, "max": 4000},
           "output": {"kind": "exponential", "mean": 40}}  # fmt: skip


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """Return logs of an engine whose host takes `LAUNCH_NS` a kernel, by whether it is eager (without CUDA graphs)."""
    paths, workload = {}, synthesise(parse_spec(TRAFFIC))
    for eager in (False, True):
        paths[eager] = folder = tmp_path_factory.mktemp("logs") / "run"
        engine = deployment(model="Llama-3.1-8B", attention="hybrid", enforce_eager=eager)
        host = HostTimes(0, 0, taking(LAUNCH_NS) if eager else UNKNOWN)
        cost = OperationCost(LLAMA, engine, Roofline(), host=host)
        simulate_to(folder, workload, engine, cost)
        _overwrite(folder / "steps.parquet", graph=not eager)
        _overwrite(folder / "runs.parquet", clock="wall", hardware='{"gpu": "NVIDIA H200"}')
    return paths


def _overwrite(file: Path, **values: object) -> None:
    table = pq.read_table(file)
    for name, value in values.items():
        at = table.schema.get_field_index(name)
        field = table.schema.field(at)
        table = table.set_column(at, field, pa.array([value] * table.num_rows, field.type))
    pq.write_table(table, file)


def test_the_launches_of_a_log_price_every_command_s_steps_without_graphs(
    logs: dict[bool, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without graphs takes as long as the fit says of graphs, or as its kernels take to launch."""
    monkeypatch.chdir(tmp_path)

    def run(*words: object) -> str:
        done = CliRunner().invoke(cli, [str(word) for word in words])
        assert done.exit_code == 0, done.output
        return " ".join(done.output.split())

    run("calibrate", "-o", "c", *(part for log in logs.values() for part in ("--from-recordings", log)))
    learnt = Calibration.load(tmp_path / "c")
    assert learnt.launches.ns == pytest.approx(LAUNCH_NS, rel=0.01)
    assert not learnt.learnt_as.enforce_eager
    eager = learnt.learnt_as.model_copy(update={"enforce_eager": True})
    alone = fit_recordings([logs[False]], tmp_path / "alone")
    assert alone.step_prices_ps == learnt.step_prices_ps  # eager steps teach nothing else
    assert "0 eager steps" in str(alone.launches)
    with pytest.raises(UserError, match="enforce_eager: True: must be False"):
        priced("alone", None, eager)

    (tmp_path / "eager.yaml").write_text(eager.model_dump_json())
    for name, more in (("graphs", []), ("eager", ["-d", "eager.yaml"])):
        result = run("simulate", logs[True], "-c", "c", "-o", name, *more)
        assert ("launches take 60.0 µs a kernel (" in result) == (name == "eager")
    graphs, waited, ran = StepCost(learnt), 0, Recording.load(tmp_path / "eager").steps.to_pylist()
    for step in ran:
        amounts = {name: step[name] or 0 for name in AGGREGATES}
        kernels = launches(step_operations(LLAMA_8B, learnt.learnt_as, StepSizes(**amounts)))
        took, alike = step["end_ns"] - step["start_ns"], graphs.step_ns(StepPlan.from_amounts(**amounts))
        assert took == max(alike, int(learnt.launches.ns * kernels))
        waited += took > alike
    assert 0.5 < waited / len(ran) < 1

    sure = replace(learnt, interval=(1.0, 1.0), launches=replace(learnt.launches, sigma=0.2))
    again = fit_recordings([*logs.values()], tmp_path / "again")
    assert (again.id == learnt.id) == (again.created == learnt.created) and alone.id != learnt.id
    cost = ObservedPrices(StepCost(sure, eager))
    for end, share in zip(cost.ends(), (-1.0, 1.0), strict=True):
        assert end.step_ns(plan(1, 100)) == pytest.approx(LAUNCH_NS * 293 * np.exp(share * 1.645 * 0.2), rel=0.01)
        assert end.step_ns(plan(0, 0, 2000)) == cost.step_ns(plan(0, 0, 2000))  # which the device takes longer for
        assert list(end.decode_run_ns(1, 100, 100**2, 2)) == [end.cpu_ns(plan(1, 100)) + end.step_ns(plan(1, 100))] * 2


def test_every_stage_of_a_pipeline_has_a_host() -> None:
    host = HostTimes(launches=taking(PLANTED_NS))
    cost = PipelineCost(LLAMA, deployment(enforce_eager=True, pipeline_parallel_size=2), Roofline(), host=host)
    first, last = cost.stages_ns(plan(1, 100))
    assert (first, last) == (PLANTED_NS * 9 * 16, PLANTED_NS * (9 * 16 + 5))
    whole = sum(cost.parts(uniform_step(1, 100, 0, 0, 0)).values())
    assert cost.step_ns(plan(1, 100)) == pytest.approx(float(np.sum(whole)), rel=1e-3)
    assert list(cost.decode_run_ns(1, 100, 100**2, 1)) == [cost.step_ns(plan(1, 100))]
