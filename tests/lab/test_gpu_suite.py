"""The GPU suite without a GPU: a dry run goes all the way, and the page says nothing that was not measured."""

import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch", reason="the engine extra is not installed")

from lab.gpu_suite.__main__ import _commit, main
from lab.gpu_suite.engine_benchmark import decode_weight_bytes, idle_share, prefill_flops, usual_workload
from lab.gpu_suite.page import TARGETS, UNMEASURED, faults, lines, page, table, undone, verdict
from lab.gpu_suite.phases import GROUPS, PHASES, chosen
from lab.gpu_suite.recorded_runs import Pace, RunSizes, pace_of, recordings, scenarios
from lab.gpu_suite.results import Results, load, progress_of
from lab.gpu_suite.sizes import dry_sizes, gpu_sizes
from lab.gpu_suite.units import OutOfTime
from lab.gpu_suite.vllm_kernels import decode_step_ns, prompt_step_ns
from tokentwin.realengine.devices.machine import _driver
from tokentwin.realengine.engine import Engine
from tokentwin.realengine.models.weights import load_model_files, random_spec
from tokentwin.traces.recording import Recording

pytestmark = pytest.mark.engine
ROOT = Path(__file__).parents[2]
ENGINES = ("large", "small", "mixture", "fp8", "int4")
RESULT_PAGES = ROOT / "lab" / "results"


def suite(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "lab.gpu_suite", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


# Validation starts a process for each of eleven commands, most of which is imports: here for the first of each verb,
# and of two scenarios of the five. Each of its bands takes 39 simulated runs: here five, where they are not in a
# process of their own.
FEWER_PROCESSES = """
import sys
from tokentwin.calibration.validation import known_speed
from lab.gpu_suite import phases
from lab.gpu_suite.__main__ import main
from tests.command import tokentwin

known_speed._DRAWS = 5
apart, started, all_of_them = phases._tokentwin, set(), phases.validations
phases.validations = lambda *about: all_of_them(*about)[:2]

def once_apart(verb, *arguments):
    if verb not in started:
        started.add(verb)
        return apart(verb, *arguments)
    done = tokentwin(verb, *arguments)
    return None if done.returncode == 0 else done.stderr

phases._tokentwin = once_apart
sys.exit(main())
"""


@pytest.fixture(scope="module")
def dry(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    out = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-c", FEWER_PROCESSES, "--out", out, "--minutes", "600", "--dry-run"]
    return out, subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.deep
def test_a_dry_run_goes_through_every_phase(dry: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    out, done = dry
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    results = load(out)
    for name in ("environment", "correctness", "end_to_end", "kernels", "runs", *map("engine_{}".format, ENGINES)):
        assert results[name], name
    assert all(f"{phase.name}_seconds" in results for phase in PHASES)
    counts = [progress_of(results, phase.name) for phase in PHASES]
    assert all(progress.done == progress.planned > 0 for progress in counts)
    assert "All checks held, and everything that was planned was done." in done.stdout
    assert results["environment"]["dry_run"] is True
    assert all(row["ok"] for row in results["correctness"] + results["end_to_end"])
    assert {row["ceiling"] for row in results["ceilings"]} >= {"copy_bytes_per_s", "gemm_flops_per_s"}
    assert "of a stand-in" not in done.stdout
    assert {row["kind"] for row in results["engine_large"]} == {"decode", "prefill", "mixed", "throughput", "timing"}
    heats = [row["temperature"] for row in results["engine_small"] if row["kind"] == "throughput"]
    assert heats == [0.6, 0.0]  # as nano-vllm measures, and greedy
    assert pq.read_table(out / "kernels.parquet").num_rows == len(results["kernels"]) > 10
    assert len(results["runs"]) == 10
    assert [row["decisions_identical"] == row["decisions"] > 0 for row in results["validation"]] == [True] * 2
    files = list(out.iterdir())
    assert len(files) <= 8
    assert all(file.stat().st_size < 16e6 for file in files)
    assert "FAULT" not in done.stdout
    assert done.stdout.startswith("figure")


@pytest.mark.deep
def test_its_scenarios_are_what_they_are_called(dry, tmp_path):
    for archive in dry[0].glob("recordings-*.tar"):
        with tarfile.open(archive) as packed:
            packed.extractall(tmp_path, filter="data")
    runs = {path.name: Recording.load(path) for path in tmp_path.iterdir()}
    assert len(runs) == 10
    totals: dict[str, dict[str, int]] = {
        name: {c: sum(run.requests[c].to_pylist()) for c in ("preemptions", "prefix_hit_tokens", "prompt_tokens")}
        for name, run in runs.items()
    }
    assert totals["kv-tight-1"]["preemptions"] > 0
    assert totals["shared-prefix-1"]["prefix_hit_tokens"] > totals["shared-prefix-1"]["prompt_tokens"] / 10
    assert not totals["roomy-1"]["preemptions"] and not totals["roomy-1"]["prefix_hit_tokens"]
    mean = {name: total["prompt_tokens"] / runs[name].requests.num_rows for name, total in totals.items()}
    assert mean["long-prompts-1"] > 2 * mean["roomy-1"]


@pytest.mark.deep
def test_a_dry_run_is_no_measurement(dry: tuple[Path, subprocess.CompletedProcess[str]]) -> None:
    results = load(dry[0])
    assert page(results) == page({})
    assert UNMEASURED not in lines(results)[-1].measured  # the table of the run itself has its figures
    assert all(line.met is None for line in lines(results))


@pytest.mark.parametrize(("name", "folder"), [("gpu.md", "h200"), ("gpu-h100.md", "h100")])
def test_a_page_of_results_is_what_the_measurements_make(name: str, folder: str) -> None:
    measured = Results(RESULT_PAGES / "gpu" / folder).values
    assert (RESULT_PAGES / name).read_text(encoding="utf-8") == page(measured)
    assert not faults(measured)


def test_a_page_without_measurements_claims_none() -> None:
    assert all(line.measured == UNMEASURED and line.met is None for line in lines({}))
    assert page({}).count(UNMEASURED) == len(TARGETS)


RESULTS: dict[str, Any] = {
    "environment": {"gpu": "a GPU", "date": "2030-01-01"},
    "ceilings": [{"ceiling": "copy_bytes_per_s", "value": 4e12, "spread_pct": 0.5}],
    "engine_large": [
        {"kind": "decode", "model": "m", "rows": 1, "roofline_share": 0.81, "idle_share": 0.2},
        {"kind": "decode", "model": "m", "rows": 64, "roofline_share": 0.7, "idle_share": 0.01},
    ],
    "end_to_end": [{"kernel": "engine", "case": "float32: logits", "error": 1e-6, "limit": 1e-3, "ok": True}],
    "validation": [
        {
            "scenario": "s",
            "failed": None,
            "verdict": "v",
            "decisions": 10,
            "decisions_identical": 10,
            "rows": [
                {"metric": "ttft_ms", "stat": "mean", "error_pct": -4.0},
                {"metric": "ttft_ms", "stat": "p99", "error_pct": 1.0},
            ],
        }
    ],
}


def test_figures_are_held_to_their_targets() -> None:
    by_name = {line.name: line for line in lines(RESULTS)}
    met = {name.split(",")[1]: line.met for name, line in by_name.items() if name.endswith("of the roofline")}
    assert met == {" batch 1": True, " batch 8": None, " batch 64": False}
    assert by_name["GPU idle in decode, batch 64"].met is True
    (unseen,) = (line for name, line in by_name.items() if name.startswith("mean TTFT, TPOT, E2E"))
    assert unseen.measured == "4.00 %" and unseen.met is False
    assert "| a GPU |" in page(RESULTS) and "NO" in table(RESULTS)
    assert "1 of 1 checks" in page(RESULTS)
    assert faults(RESULTS) == []


def test_steps_are_held_to_the_kernels_of_vllm() -> None:
    """A step of twice the time of vLLM's kernels runs at half their speed; without tables there is no figure."""
    model, gpu = "qwen3-0.6b", "NVIDIA H200"
    decode, prompt = decode_step_ns(gpu, model, 8, 1024), prompt_step_ns(gpu, model, 8192)
    assert decode is not None and prompt is not None
    rows = [
        {"kind": "decode", "model": model, "rows": 1, "failed": "not all rows were running at once"},
        {"kind": "decode", "model": model, "rows": 8, "context": 1024, "median_step_ns": 2 * decode},
        {"kind": "prefill", "model": model, "tokens": 8192, "median_ns": prompt / 1.25},
    ]
    measured = {"environment": {"gpu": gpu}, "engine_large": rows}
    of_kernels = {line.name: line for line in lines(measured) if "vLLM's kernels" in line.name}
    shown = {name.split(", context")[0]: (line.measured, line.met) for name, line in of_kernels.items()}
    assert shown["decode step, batch 8"] == ("50.00 %", False)
    assert shown["decode step, batch 1"] == shown["decode step, batch 64"] == (UNMEASURED, None)
    assert of_kernels["prefill of 8k tokens, of the speed of vLLM's kernels alone"].measured == "125.00 %"
    elsewhere = lines(measured | {"environment": {"gpu": "a GPU"}})
    assert all(line.met is None for line in elsewhere if "vLLM's kernels" in line.name)
    assert "engine_large: 1 of 3 rows failed (not all rows were running at once)" in undone(measured)
    shown_page = page(measured)
    assert (
        "| rows | failed | context | median step, us |" in shown_page
        and f"| 8 | - | 1024 | {2 * decode / 1e3:,.4g} |" in shown_page
    )


def test_a_share_of_a_ceiling_that_was_not_measured_says_so() -> None:
    without = {name: value for name, value in RESULTS.items() if name != "ceilings"}
    decode = "decode step, batch 1, context 1k, of the roofline"
    shown = {line.name: line.measured for line in lines(without)}
    assert shown[decode] == "81.00 % (of a stand-in)" and "stand-in" not in table(RESULTS)
    assert shown["GPU idle in decode, batch 64"] == "1.00 %"
    assert "| copy, TB/s | 4.3 | a stand-in: another H200 |" in page(without)
    assert "| gemm, TFLOP/s | 788 | a stand-in: another H200 |" in page(RESULTS)


def test_faults_are_named() -> None:
    wrong = {
        "correctness": [{"kernel": "k", "case": "c", "ok": False, "error": 0.5}, {"kernel": "k", "ok": True}],
        "failures": [{"phase": "runs", "unit": 3, "error": "OutOfMemoryError: x"}],
        "end_to_end": [{"kernel": "engine", "case": "float32: logits", "error": 1.4, "limit": 1e-3, "ok": False}],
        "precompile": [{"kernel": "k", "seconds": 1.0}, {"failed": "TypeError: x"}],
        "validation": [{"scenario": "s", "failed": None, "decisions": 10, "decisions_identical": 9, "rows": []}],
    }
    assert len(faults(wrong)) == 5
    assert any("only 90.000 %" in fault for fault in faults(wrong))
    assert "runs, unit 3: OutOfMemoryError: x" in faults(wrong)


def test_all_checks_held_only_if_all_that_was_planned_was_done() -> None:
    """Nothing is said of results that did not count."""
    counted = {"units": 7, "begun": 5, "planned": 7, "done": 5, "clock": 0.52, "slow": 2}
    results = RESULTS | {"end_to_end_progress": counted, "end_to_end_seconds": 30.0}
    assert "All checks held" not in verdict(results) and "All checks held" not in page(results)
    assert undone(results) == [
        "end_to_end: 5 of 7 done",
        "end_to_end: 2 of 5 measured at a clock below 60% of the highest",
    ]
    assert "end_to_end: 5 of 7 done" in page(results) and "| end_to_end | 7 | 5 | 30 | 52% |" in page(results)
    whole = RESULTS | {"end_to_end_progress": counted | {"done": 7, "slow": 0, "clock": None}}
    assert verdict(whole).startswith("All checks held") and "not known" in page(whole)
    assert "All checks held" not in verdict(whole | {"failures": [{"phase": "runs", "unit": 1, "error": "x"}]})
    assert "All checks held" not in verdict(RESULTS)


def test_the_workload_is_the_one_engines_are_compared_on() -> None:
    workload = usual_workload()
    assert len(workload) == 256
    assert sum(output for _, output in workload) == 133_966
    assert all(100 <= len(prompt) <= 1024 and 100 <= output <= 1024 for prompt, output in workload)


def test_the_rooflines_are_those_of_the_papers() -> None:
    """15.0 GB of weights and 131,072 KV bytes a token for Llama-3.1-8B in bf16."""
    llama = random_spec("random:llama-3.1-8b")
    assert decode_weight_bytes(llama, 2) == pytest.approx(15.0e9, rel=0.002)
    assert llama.kv_bytes_per_token(2) == 131_072
    assert prefill_flops(llama, 1) == pytest.approx(decode_weight_bytes(llama, 1) * 2, rel=0.001)
    embedding = 2 * llama.vocab_size * llama.hidden_size
    of_token = prefill_flops(llama, 1) - embedding - 4 * 4096 * 32  # GEMMs of a token, less its one query-key pair
    assert prefill_flops(llama, 8192) == embedding + 8192 * of_token + 4 * (8192 * 8193 // 2) * 4096 * 32


def test_idle_is_the_time_between_steps_and_that_of_late_launches() -> None:
    def took(start_ns: int, end_ns: int, launching_ns: int = 0) -> Any:
        return SimpleNamespace(start_ns=start_ns, end_ns=end_ns, launching_ns=launching_ns)

    assert idle_share([took(0, 40), took(50, 90), took(90, 100)]) == 0.1
    assert idle_share([took(0, 40), took(50, 90, 15), took(90, 100)]) == 0.25
    assert idle_share([]) is None


def test_smoke_is_a_part_of_the_phases() -> None:
    assert [phase.name for phase in chosen("smoke", "")] == list(GROUPS["smoke"])
    assert sum(phase.minutes for phase in chosen("smoke", "")) <= 3
    assert sum(phase.minutes for phase in PHASES) == pytest.approx(10)
    assert [phase.name for phase in chosen("validation,smoke", "end_to_end,decode,ceilings")] == [
        "environment", "precompile", "correctness", "validation",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--minutes", "0", "--dry-run"), "minutes 0.0"),
        (("--minutes", "nan", "--dry-run"), "minutes nan"),
        (("--minutes", "8"), "no CUDA device"),
        (("--dry-run", "--only", "smoke,decoding"), "phase decoding: does not exist; choose from smoke, environment"),
        (("--dry-run", "--skip", "nothing"), "phase nothing: does not exist"),
        (("--dry-run", "--only", "runs", "--skip", "runs"), "no phase is left"),
    ],
)
def test_bad_input_is_one_line(arguments, says, tmp_path, monkeypatch, capsys):
    if says == "no CUDA device":
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["suite", "--out", str(tmp_path / "out"), *arguments])
    assert main() == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_scenarios_fit_into_their_minutes() -> None:
    """At the pace of an 8B model on an H200 near its roofline: enough requests, and answers soon done after the last.

    Each of the ten runs must be over in 15 s, or five scenarios and their repeats do not fit into a third of 8 minutes.
    """
    sizes = gpu_sizes()
    pace = Pace(decode_step_ns=10_000_000, prompt_token_ns=30_000)
    config = sizes.deployments["large"].scheduler.model_copy(update={"num_blocks": 50_000})
    for workload, limits in scenarios(config, pace, sizes.run_seconds, sizes.run_longest):
        requests = list(workload.requests)
        assert len(requests) > 50, workload.name
        assert max(r.output_len for r in requests) * pace.decode_step_ns / 1e9 < 15 - sizes.run_seconds
        assert max(r.prompt_len + r.output_len for r in requests) <= sizes.run_longest
        assert limits.get("num_blocks", config.num_blocks) > 4224 // config.block_size
        if limits:
            assert 500 < limits["num_blocks"] < 5000


def test_the_pace_is_that_of_real_contexts() -> None:
    """Decode steps of half the batch are timed at the prompts' lengths, not over next to no KV."""
    sizes = dry_sizes()
    engine = Engine(sizes.deployments["large"], load_model_files(sizes.deployments["large"].model, Path()))
    steps: list[tuple[int, int]] = []
    finish = engine.finish

    def noted() -> Any:
        step = finish()
        if step is not None and not step.plan.prefill_rows:
            steps.append((step.plan.decode_rows, step.plan.decode_context))
        return step

    engine.finish = noted  # type: ignore[method-assign]
    pace = pace_of(engine, 24, 8)
    rows = sizes.deployments["large"].scheduler.max_num_seqs // 2
    assert max(context / rows for count, context in steps if count == rows) > 24
    assert pace.decode_step_ns > pace.prompt_token_ns > 0
    engine.close()


def test_recordings_that_go_on_in_another_process_keep_the_pace(tmp_path: Path) -> None:
    """And a run keeps its few blocks to itself."""
    sizes = dry_sizes()
    large = sizes.deployments["large"]
    engine = Engine(large, load_model_files(large.model, Path()))
    whole, runs = engine.deployment.scheduler, RunSizes(0.2, sizes.run_longest)
    first, *_ = recordings(lambda: engine, tmp_path, runs, None, lambda: 100.0)
    pace, row = first()
    assert row["run"] == "roomy-1" and set(pace) == {"pace"}
    *_, kv_tight, _, _, _, _, _, _, _ = recordings(lambda: engine, tmp_path, runs, Pace(**pace["pace"]), lambda: 100.0)
    assert [row["run"] for row in kv_tight()] == ["kv-tight-1"]
    assert engine.deployment.scheduler == whole
    engine.close()
    with pytest.raises(OutOfTime):
        list(recordings(lambda: engine, tmp_path, runs, None, lambda: 0.1)[0]())


def test_the_commit_is_unknown_without_git(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert _commit() == "unknown"


@pytest.mark.parametrize(
    ("said", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023", "535.104.05"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build", "570.86.15"),
        ("nothing of the kind", ""),
    ],
)
def test_the_driver_is_named(said: str, driver: str, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(said, encoding="utf-8")
    assert _driver(tmp_path / "version") == driver
    assert _driver(tmp_path / "absent") == ""


def test_an_output_that_is_a_file_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    done = suite("--out", tmp_path / "file", "--dry-run")
    assert done.returncode == 2 and "is not a directory" in done.stderr
    assert (tmp_path / "file").read_text(encoding="utf-8") == "mine"
