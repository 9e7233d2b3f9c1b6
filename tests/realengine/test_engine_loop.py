"""The engine's loop: overlapped or plain, eager or as graphs, on one rank or two, the same tokens come out."""

import itertools
import os
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the engine extra is not installed")

from tokentwin.calibration.validation.decision_replay import replay_decisions  # noqa: E402
from tokentwin.realengine.attention.kv_cache import LayerKv, read, write  # noqa: E402
from tokentwin.realengine.devices.machine import find_device  # noqa: E402
from tokentwin.realengine.engine import Engine  # noqa: E402
from tokentwin.realengine.models.weights import ModelFiles, load_model_files  # noqa: E402
from tokentwin.realengine.replay import record  # noqa: E402
from tokentwin.realengine.sampling import SamplingParams  # noqa: E402
from tokentwin.realengine.step import Step  # noqa: E402
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig  # noqa: E402
from tokentwin.serving.errors import UserError  # noqa: E402
from tokentwin.serving.workload import STOPPED, Workload, WorkloadRequest  # noqa: E402
from tokentwin.traces.recording import Recording  # noqa: E402

pytestmark = pytest.mark.engine

OUTPUTS = 20
SETTINGS = {"max_model_len": 200, "max_num_batched_tokens": 40, "num_blocks": 100, "block_size": 4, "max_num_seqs": 6}


def files(name: str = "qwen3") -> ModelFiles:
    return load_model_files(f"random:{name}", Path())


def engine_for(model: str = "qwen3", scheduler: dict[str, Any] | None = None, **deployment: Any) -> Engine:
    config = SchedulerConfig(**{**SETTINGS, **(scheduler or {})})
    return Engine(
        Deployment(**{"model": f"random:{model}", "dtype": "float32", "scheduler": config, **deployment}), files(model)
    )


def prompts(count: int = 10) -> list[list[int]]:
    draw = random.Random(11)
    shared = [draw.randrange(1024) for _ in range(24)]
    return [
        (shared if i % 3 == 0 else []) + [draw.randrange(1024) for _ in range(draw.randrange(1, 60))]
        for i in range(count)
    ]


def run(
    engine: Engine, drawn: bool = False, forced: bool = False, stop_ids: tuple[int, ...] = ()
) -> tuple[list[list[int]], list[Step]]:
    """Run every prompt through the engine, two arriving before each plan; return outputs and steps."""
    waiting = list(enumerate(prompts()))
    sequences, steps = {}, []
    while waiting or engine.scheduler.requests:
        for number, prompt in waiting[:2]:
            how = SamplingParams(0.8, top_k=30, top_p=0.9, seed=number) if drawn and number % 2 else None
            engine.add(
                WorkloadRequest(number, number, (("", len(prompt)),), OUTPUTS, number % 3),
                prompt,
                sampling=how,
                forced=[7 * number + i for i in range(OUTPUTS)] if forced else None,
                stop_ids=stop_ids,
            )
            sequences[number] = engine.sequences[number]
        del waiting[:2]
        if engine.has_room and engine.launch() and engine.has_room:
            continue
        step = engine.finish()
        if step is not None:
            steps.append(step)
        for request in engine.scheduler.requests.values():
            request.check()
    while (step := engine.finish()) is not None:
        steps.append(step)
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
    return [sequences[n].outputs for n in range(len(sequences))], steps


@pytest.fixture(scope="module")
def plain() -> list[list[int]]:
    return run(engine_for(), drawn=True)[0]


TIGHT = {"num_blocks": 40, "scheduler_reserve_full_isl": False}


@pytest.mark.parametrize(
    "scheduler",
    [
        {},
        TIGHT,
        {**TIGHT, "enable_prefix_caching": False},
        {**TIGHT, "policy": "priority", "forget_withdrawn": True},
        {"max_num_batched_tokens": 9},
        {"block_size": 16},
    ],
)
def test_the_overlapped_loop_gives_the_same_tokens(scheduler: dict[str, Any], plain: list[list[int]]) -> None:
    engine = engine_for(scheduler={**scheduler, "async_scheduling": True})
    outputs, steps = run(engine, drawn=True)
    engine.close()
    assert outputs == plain
    assert {step.plan.lag for step in steps} == {0, 1}
    assert any(step.plan.preempted for step in steps) == ("num_blocks" in scheduler)


def test_steps_overlap_in_time_and_keep_their_order() -> None:
    engine = engine_for(scheduler={"async_scheduling": True})
    _, steps = run(engine)
    engine.close()
    for before, after in itertools.pairwise(steps):
        assert before.end_ns <= after.start_ns
        assert after.plan_ns <= after.scheduled_ns <= after.prepared_ns
        assert after.start_ns <= after.computed_ns <= after.end_ns
        assert after.host_ns is not None and after.host_ns > 0
    assert any(after.plan_ns < before.end_ns for before, after in itertools.pairwise(steps))


@pytest.mark.parametrize("overlapped", [False, True])
def test_a_stop_token_ends_a_request_that_is_already_in_the_next_step(overlapped: bool, plain: list[list[int]]) -> None:
    whole = run(engine_for())[0]
    stop = (whole[2][5], whole[4][0], whole[7][9])
    engine = engine_for(scheduler={"async_scheduling": overlapped})
    outputs, steps = run(engine, stop_ids=stop)
    engine.close()
    for got, all_of_it in zip(outputs, whole, strict=True):
        ends = [i for i, token in enumerate(all_of_it) if token in stop]
        assert got == all_of_it[: ends[0] + 1 if ends else None]
    assert sum(len(step.sampled) for step in steps) == sum(len(output) for output in outputs)


def test_forced_outputs_need_no_look_at_the_device() -> None:
    outputs, _ = run(engine_for(scheduler={"async_scheduling": True}), forced=True)
    assert outputs == [[7 * number + i for i in range(OUTPUTS)] for number in range(10)]


def test_an_abort_in_flight_leaves_nothing_behind() -> None:
    engine = engine_for(scheduler={"async_scheduling": True})
    for number, prompt in enumerate(prompts(4)):
        engine.add(WorkloadRequest(number, 0, (("", len(prompt)),), OUTPUTS), prompt)
    for _ in range(6):
        engine.step()
    assert engine.launch() or not engine.has_room
    for number in range(4):
        engine.abort(number)
    while engine.finish() is not None:
        pass
    assert not engine.launch()
    assert engine.scheduler.pool.free == engine.scheduler.pool.total
    engine.close()


def test_graphs_and_eager_steps_agree(plain: list[list[int]]) -> None:
    graphed, steps = run(engine_for(), drawn=True)
    eager, eager_steps = run(engine_for(enforce_eager=True), drawn=True)
    assert graphed == eager == plain
    assert not any(step.graph for step in eager_steps)
    assert all(step.graph == (step.plan.prefill_rows == 0) for step in steps)


def test_operations_are_timed_on_demand_and_add_up() -> None:
    engine = engine_for()
    engine.time_operations()
    _, steps = run(engine)
    names = {"embedding", "norm", "qkv", "rope_store", "attention", "out", "gate_up", "silu_mul", "down", "head"}
    for step in steps:
        assert step.op_ns is not None and set(step.op_ns) == names
        assert 0 < sum(step.op_ns.values()) <= step.computed_ns - step.start_ns


@pytest.mark.parametrize(("model", "overlapped", "experts"), [("mixtral", False, False), ("qwen2-moe", True, True)])
def test_two_ranks_give_the_same_tokens_as_one(model, overlapped, experts, monkeypatch):
    alone = run(engine_for(model), drawn=True)[0]
    engine = engine_for(model, {"async_scheduling": overlapped}, tensor_parallel_size=2, enable_expert_parallel=experts)
    graphs, leave = engine.runner._mine._graphs, torch.distributed.destroy_process_group
    left: list[int] = []
    monkeypatch.setattr(torch.distributed, "destroy_process_group", lambda: (left.append(len(graphs)), leave()))
    try:
        together, steps = run(engine, drawn=True)
        assert graphs
    finally:
        engine.close()
    engine.close()
    assert left == [0]  # on CUDA graphs hold operations of the group
    assert [process.exitcode for process in engine.runner._processes] == [0]
    assert together == alone
    for step in steps:
        assert step.op_ns is not None and set(step.op_ns) == {"all_reduce", "all_gather"}
        assert all(ns > 0 for ns in step.op_ns.values())


def test_a_model_that_cannot_be_divided_is_one_line() -> None:
    with pytest.raises(UserError, match=r"tensor_parallel_size.*num_kv_heads"):
        engine_for(tensor_parallel_size=3)


@pytest.mark.parametrize("model", ["llama", "qwen2"])
def test_fp8_is_near_the_real_thing(model: str) -> None:
    """Weights and activations in e4m3 have 3 bits of mantissa: 6 % a number, less in a sum."""
    for setting, limit in ({"kv_cache_dtype": "fp8"}, 0.08), ({"quantization": "fp8"}, 0.15):
        exact, rough = (last_logits(engine_for(model, dtype="bfloat16", **how)) for how in ({}, setting))
        error = float((exact - rough).norm() / exact.norm())
        assert 0 < error < limit, (setting, error)


def last_logits(engine: Engine) -> torch.Tensor:
    """Return the float32 logits after a prompt of 60 tokens."""
    seen = []
    compute = engine.runner.model.compute_logits
    engine.runner.model.compute_logits = lambda *a: seen.append(compute(*a)) or seen[-1]  # type: ignore[method-assign]
    prompt = [random.Random(3).randrange(1024) for _ in range(30)] * 2
    engine.add(WorkloadRequest(0, 0, (("", 60),), 1), prompt)
    while engine.scheduler.requests:
        engine.step()
    return seen[-1][0].float()


def test_memory_is_measured_and_the_blocks_follow() -> None:
    free, total = find_device(Deployment()).memory()
    engine = engine_for(gpu_memory_utilization=(total - free + 2e9) / total)
    sized = engine.deployment
    assert sized.gpu_memory_utilization is None
    assert sized.scheduler.num_blocks > 1000
    assert engine.runner.kv.num_blocks == sized.scheduler.num_blocks
    assert f"= {sized.scheduler.num_blocks:,}" in engine.memory_report


def test_too_little_memory_names_the_knob() -> None:
    with pytest.raises(UserError, match=r"gpu_memory_utilization.*raise it"):
        engine_for(gpu_memory_utilization=1e-6)
    with pytest.raises(UserError, match=r"scheduler\.num_blocks.*lower it"):
        engine_for(scheduler={"num_blocks": 10_000_000, "block_size": 4096})
    with pytest.raises(UserError, match=r"model.*GiB of weights"):
        Engine(
            Deployment(model="x", dtype="float32"),
            ModelFiles(files("llama-3.1-8b").spec.model_copy(update={"num_layers": 10_000}), None, "x"),
        )


@pytest.mark.parametrize(
    ("scheduler", "step"),
    [
        ({"max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 200}, [1] * 5 + [35]),
        ({"max_num_seqs": 6, "max_num_batched_tokens": 40, "max_model_len": 16}, [1] * 3 + [16, 16, 5]),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 40, "max_model_len": 16}, [16, 16]),
        ({"max_num_seqs": 6, "max_num_batched_tokens": 4, "max_model_len": 16}, [1, 1, 1, 1]),
        ({"max_num_seqs": 1, "max_num_batched_tokens": 40, "max_model_len": 16}, [16]),
    ],
)
def test_memory_is_measured_on_the_largest_step_there_can_be(scheduler: dict[str, Any], step: list[int]) -> None:
    engine = engine_for(scheduler=scheduler)
    assert engine.runner._largest_step() == step
    assert engine.run_dummy(step) > 0


def test_batches_beyond_the_buckets_are_not_captured() -> None:
    engine = engine_for(scheduler={"max_num_seqs": 1100, "max_num_batched_tokens": 1100, "max_model_len": 8})
    for rows, captured in (1024, True), (1025, False):
        graphs = len(engine.runner._graphs)
        engine.run_dummy([1] * rows)
        assert (len(engine.runner._graphs) > graphs) == captured


def test_fp8_stores_the_largest_number_it_has_and_not_nan() -> None:
    kv = LayerKv(*torch.zeros(2, 2, 1, 4, 8).to(torch.float8_e4m3fn))
    write(kv, torch.tensor([5]), torch.full((1, 1, 8), 1e4), torch.full((1, 1, 8), -1e4))
    keys, values = read(kv, torch.tensor([1]), 0, 2, torch.float32)
    assert keys[0, 1].tolist() == [448.0] * 8 and values[0, 1].tolist() == [-448.0] * 8


def test_memory_that_cuda_itself_lacks_is_one_line_too() -> None:
    """A graph, pinned memory or a library's workspace is not torch's allocator's."""
    engine = engine_for()

    def lacking(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    engine.runner.device.submit = lacking  # type: ignore[method-assign]
    with pytest.raises(UserError, match=r"max_num_batched_tokens.*lower it"):
        engine.run_dummy([1])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_ctrl_c_between_two_lines_tears_no_step(tmp_path: Path, asynchronous: bool) -> None:
    """Pressed while the requests of a step are being noted: all of that step is recorded, and nothing after it."""
    engine = engine_for(scheduler={"async_scheduling": asynchronous})
    workload = Workload([WorkloadRequest(n, 0, (("", 5),), 3 if n < 6 else 150) for n in range(12)], "torn")
    done = record(workload, engine, tmp_path / "run", progress=lambda ended: ended == 1 and os.kill(os.getpid(), 2))
    assert done.status == "interrupted" and done.finished >= 6
    recording = Recording.load(tmp_path / "run")
    assert replay_decisions(recording).exact
    rows = recording.requests.to_pylist()
    assert {row["request_id"] for row in rows if row["status"] == "finished"} == set(range(6))
    sampled = sum(recording.steps["sampled_rows"].to_pylist())
    assert sampled == sum(row["output_tokens"] for row in rows)


def test_ctrl_c_twice_ends_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    def press(_: int) -> None:
        os.kill(os.getpid(), 2)
        os.kill(os.getpid(), 2)

    workload = Workload([WorkloadRequest(n, 0, (("", 5),), 3) for n in range(12)], "twice")
    with pytest.raises(KeyboardInterrupt):
        record(workload, engine_for(), tmp_path / "run", progress=press)
    assert not (tmp_path / "run").exists()


def test_ctrl_c_is_heard_while_it_waits_for_an_arrival(tmp_path: Path) -> None:
    later = 10**12  # ns: longer than any test may take
    workload = Workload([WorkloadRequest(n, n * later, (("", 5),), 3) for n in range(2)], "waiting")
    press = threading.Timer(0.3, os.kill, (os.getpid(), 2))
    done = record(
        workload, engine_for(), tmp_path / "run", progress=lambda ended: press.start() if ended == 1 else None
    )
    assert (done.status, done.finished) == ("interrupted", 1)


def test_clients_that_hang_up_give_their_blocks_back(tmp_path: Path) -> None:
    """While their requests wait or run; one that had its answer by then is as if it never meant to."""
    hang_up_ns = {1: 0, 2: 30_000_000, 3: 60_000_000_000}
    requests = [WorkloadRequest(n, 0, (("", 20),), 3 if n == 3 else 150, cancel_ns=hang_up_ns.get(n)) for n in range(4)]
    engine = engine_for(scheduler={"max_num_seqs": 2})
    done = record(Workload(requests, "impatient"), engine, tmp_path / "run")
    rows = {row["request_id"]: row for row in Recording.load(tmp_path / "run").requests.to_pylist()}
    assert done.status == "complete"
    assert [rows[n]["status"] for n in range(4)] == ["finished", "cancelled", "cancelled", "finished"]
    assert rows[2]["end_ns"] >= 30_000_000 and rows[2]["end_ns"] > rows[1]["end_ns"]
    assert engine.scheduler.pool.free == engine.scheduler.pool.total


def test_a_stop_string_of_a_trace_ends_an_answer_that_has_begun(tmp_path: Path) -> None:
    stop_ns = {0: 400_000_000, 1: 0}
    requests = [WorkloadRequest(n, 0, (("", 20),), 3900, stop_ns=at_ns) for n, at_ns in stop_ns.items()]
    engine = engine_for(scheduler={"max_num_seqs": 1, "max_model_len": 4000, "num_blocks": 1100})
    record(Workload(requests, "stopped"), engine, tmp_path / "run")
    rows = {row["request_id"]: row for row in Recording.load(tmp_path / "run").requests.to_pylist()}
    assert (rows[0]["status"], rows[0]["reason"]) == ("finished", STOPPED) and 0 < rows[0]["output_tokens"] < 3900
    assert rows[0]["finish_ns"] == rows[0]["end_ns"] >= stop_ns[0] and rows[1]["status"] == "cancelled"


INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.replay import record
from tokentwin.realengine.models.weights import load_model_files
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.serving.workload import Workload, WorkloadRequest

if __name__ == "__main__":
    config = SchedulerConfig(max_model_len=400, num_blocks=200, max_num_seqs=4)
    deployment = Deployment(model="random:llama", dtype="float32", tensor_parallel_size=2, scheduler=config)
    engine = Engine(deployment, load_model_files("random:llama", Path()))
    requests = [WorkloadRequest(n, 0, (("", 40),), 1 if n == 0 else 300) for n in range(400)]
    ended = iter([lambda: os.killpg(0, signal.SIGINT)])
    done = record(Workload(requests, "long"), engine, sys.argv[1], progress=lambda _: next(ended, lambda: None)())
    engine.close()
    print(done.status)
"""


def test_ctrl_c_ends_a_run_on_two_ranks_with_a_recording(tmp_path: Path) -> None:
    """A terminal sends it to every rank; one that ended, or left a collective half way, would hang or fail the rest."""
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "run"],
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert done.stdout.strip() == "interrupted", done.stderr[-2000:]
    assert (tmp_path / "run" / "runs.parquet").is_file()


@pytest.mark.parametrize(
    ("deployment", "says"),
    [
        (
            {"attention": "flash"},
            r"attention.*must be auto, torch, .*, flashinfer, or your own",
        ),
        ({"attention": "triton"}, r"attention.*needs device cuda"),
        ({"attention": "hybrid", "batch_invariant": True}, r"batch_invariant.*triton or torch"),
        ({"pipeline_parallel_size": 2}, r"pipeline_parallel_size: 2: works only in the simulator"),
        ({"prefill_context_parallel_size": 2}, r"prefill_context_parallel_size: 2: works only in the simulator"),
        (
            {"scheduler": {"state_blocks": 3, "mamba_cache_mode": "align"}},
            r"scheduler.state_blocks: 3: is for models with constant states, which only the simulator runs",
        ),
        ({"engine": "sglang"}, r"engine: 'sglang': works only in the simulator"),
        ({"device": "cuda"}, r"device.*CUDA device; use cpu"),
        ({"device": "cuda", "tensor_parallel_size": 2}, r"device.*CUDA device; use cpu"),
    ],
)
def test_what_this_machine_cannot_do_is_one_line(deployment: dict[str, Any], says: str) -> None:
    if torch.cuda.is_available() and "cuda" in says:
        pytest.skip("there is a GPU here")
    with pytest.raises(UserError, match=says):
        engine_for(**deployment)
