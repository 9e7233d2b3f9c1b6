"""Other simulators of LLM serving, each run as its users run it: one process, one engine, Llama 3 8B on an H100.

A peer gets a workload and returns the one that it ran, since not all of them read a trace. It also names its handicaps:
reasons for being faster or slower than our simulator that say nothing about its quality. CPU time is the operating
system's figure for the finished process, so an adapter does not need a peer's output for it.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Protocol

import numpy as np

from tokentwin.serving.deployments.config import SchedulerConfig
from tokentwin.serving.workload import PRIVATE, Workload, WorkloadRequest
from tokentwin.traces.formats.mooncake import write_mooncake

DRIVER = Path(__file__).with_name("inference_lab.mjs")
PACKAGE = "@doublewordai/inference-lab"
LLAMA_3_8B = {
    "name": "Llama-3-8B",
    "num_parameters": 8_030_261_248,
    "num_layers": 32,
    "hidden_dim": 4096,
    "num_heads": 32,
    "num_kv_heads": 8,
}
KV_BYTES_PER_TOKEN = 2 * 2 * 8 * 128 * 32  # keys and values, two bytes each, 8 heads of 128, 32 layers
H100 = {"name": "H100", "compute_flops": 989e12, "memory_bandwidth": 3.35e12, "memory_capacity": 80_000_000_000}


@dataclass(frozen=True)
class PeerRun:
    """CPU seconds of the process and of the simulation alone (if the peer prints them), and the workload that it ran.

    `simulated_s` is the simulated time at which the last request ends, if the peer prints this time.
    """

    process_cpu_s: float
    simulation_cpu_s: float | None
    workload: Workload
    simulated_s: float | None = None


class Peer(Protocol):
    """A simulator by somebody else.

    Attributes:
        name: its name, with its version or place
        handicaps: reasons why this peer and our simulator do different work, one line for each reason
        tried: whether this adapter has been run with the real simulator
        replicas: number of engines that it simulates, behind a round-robin router
    """

    name: str
    handicaps: Sequence[str]
    tried: bool
    replicas: int

    def run(self, workload: Workload, limits: SchedulerConfig) -> PeerRun:
        """Simulate `workload`, or a similar one; raise PeerFailed if the peer fails."""


class PeerFailed(Exception):
    """Raised when the peer ended with an error; the message is its last line."""


def timed(
    command: Sequence[str], *, given: str = "", cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> tuple[str, float]:
    """Run `command` to its end; return its output and its CPU seconds, those of its child processes included."""
    with TemporaryFile("w+") as given_file, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
        given_file.write(given)
        given_file.seek(0)
        full = {**os.environ, **(env or {})}
        process = subprocess.Popen(command, stdin=given_file, stdout=out, stderr=err, cwd=cwd, env=full)
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        err.seek(0)
        if process.returncode:
            said = (err.read() or out.read()).strip().splitlines() or ["it said nothing"]
            raise PeerFailed(f"{Path(command[0]).name} ended with {process.returncode}: {said[-1]}")
        return out.read(), used.ru_utime + used.ru_stime


class InferenceLab:
    """The peer inference-lab: Rust, compiled to WebAssembly, run by node.

    It generates random requests and reads no trace. So it gets Poisson arrivals and lognormal lengths that are fitted
    to the workload. Its requests are then read from its result, where end-to-end times give the arrivals.
    """

    handicaps: Sequence[str] = (
        "slower: WebAssembly in one thread, not native code",
        "slower: keeps the time between every two tokens, all of which it hands over (ours does so in `tokens`)",
        "faster: a step is priced by one roofline of FLOPs and bytes, no tables of kernels; no router, no fleet",
        "faster: no identities of KV blocks, no overlapped scheduling, no recording on disk",
    )
    tried = True
    replicas = 1

    def __init__(self, package: Path, node: str = "node") -> None:
        self._package = package
        self._node = node
        version = json.loads((package / "package.json").read_text())["version"]
        self.name = f"inference-lab {version}"

    def run(self, workload: Workload, limits: SchedulerConfig) -> PeerRun:
        config = json.dumps(inference_lab_config(list(workload.requests), limits))
        out, cpu_s = timed([self._node, str(DRIVER), str(self._package)], given=config)
        result = json.loads(out)
        drawn = zip(result["arrivals_s"], result["prompts"], result["outputs"], strict=True)
        requests = [
            WorkloadRequest(id, round(1e9 * arrival_s), ((PRIVATE, prompt),), output)
            for id, (arrival_s, prompt, output) in enumerate(sorted(drawn))
        ]
        ran = Workload(requests, name="drawn by inference-lab", shares_prefixes=False)
        return PeerRun(cpu_s, result["simulation_cpu_s"], ran, result["simulated_s"])


def inference_lab_config(requests: Sequence[WorkloadRequest], limits: SchedulerConfig) -> dict[str, dict[str, object]]:
    """Return the configuration of a run with the same number and rate of requests, and similar lengths."""
    kv_tokens = limits.num_blocks * limits.block_size
    span_s = (requests[-1].arrival_ns - requests[0].arrival_ns) / 1e9
    return {
        "hardware": {**H100, "bytes_per_param": 2, "kv_cache_capacity": kv_tokens * KV_BYTES_PER_TOKEN},
        "model": {**LLAMA_3_8B, "max_seq_len": limits.max_model_len},
        "scheduler": {
            "max_num_batched_tokens": limits.max_num_batched_tokens,
            "max_num_seqs": limits.max_num_seqs,
            "policy": "fcfs",
            "enable_chunked_prefill": True,
            "block_size": limits.block_size,
        },
        "workload": {
            "arrival_pattern": "poisson",
            "arrival_rate": (len(requests) - 1) / span_s,
            "input_len_dist": _lognormal([request.prompt_len for request in requests]),
            "output_len_dist": _lognormal([request.output_len for request in requests]),
            "num_requests": len(requests),
            "seed": 0,
        },
        "simulation": {"log_interval": 1_000_000},
    }


def _lognormal(lengths: Sequence[int]) -> dict[str, object]:
    logs = np.log(lengths)
    return {"type": "lognormal", "mean": float(logs.mean()), "std_dev": float(logs.std())}


class DynoSim:
    """The peer DynoSim (Rust, in the wheels of ai-dynamo): `python` belongs to an environment that has them."""

    handicaps: Sequence[str] = (
        "faster: native code; a step is priced by built-in polynomials, no tables of kernels",
        "faster: nothing on disk",
        "slower: reads the trace as JSON within its CPU time of a simulation",
    )
    tried = True

    def __init__(self, python: Path, replicas: int) -> None:
        self.name = f"DynoSim, {replicas} workers"
        self.replicas = replicas
        self._python = python

    def run(self, workload: Workload, limits: SchedulerConfig) -> PeerRun:
        names = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens")
        numbers = [self.replicas, *(getattr(limits, name) for name in names)]
        with TemporaryDirectory() as scratch:
            trace = Path(scratch) / "trace.jsonl"
            write_mooncake(workload, trace)
            driver = str(Path(__file__).with_name("dynosim.py"))
            out, cpu_s = timed([str(self._python), driver, str(trace), *map(str, numbers)])
        done = json.loads(out.splitlines()[-1])
        if done["requests"] != sum(1 for _ in workload.requests):
            raise PeerFailed(f"DynoSim finished {done['requests']} requests only")
        return PeerRun(cpu_s, done["simulation_cpu_s"], workload)


class Vidur:
    """The peer Vidur (Python, microsoft/vidur): `checkout` has its kernel profiles, `python` its dependencies.

    The adapter follows its README and configuration classes. The package of that name on PyPI has other flags and no
    profiles.
    """

    tried = False
    replicas = 1
    handicaps: Sequence[str] = (
        "slower: reads each time from a table that random forests filled; its first run trains them, so run it before",
        "slower: writes its metrics as CSV files (plots and traces are switched off)",
        "faster: its sarathi scheduler has no prefix cache and no identities of KV blocks",
        "cuts prompts so that no request is over 16,384 tokens, where its profiles end",
    )

    def __init__(self, checkout: Path, python: str) -> None:
        self.name = f"Vidur in {checkout.name}"
        self._checkout = checkout
        self._python = python

    def run(self, workload: Workload, limits: SchedulerConfig) -> PeerRun:
        with TemporaryDirectory() as scratch:
            trace = Path(scratch) / "trace.csv"
            rows = ((r.arrival_ns / 1e9, r.prompt_len, r.output_len) for r in workload.requests)
            write_csv(trace, ("arrived_at", "num_prefill_tokens", "num_decode_tokens"), rows)
            command = [self._python, "-m", "vidur.main", *vidur_flags(trace, scratch, limits)]
            _, cpu_s = timed(command, cwd=self._checkout, env={"WANDB_MODE": "disabled"})
        return PeerRun(cpu_s, None, workload)


def vidur_flags(trace: Path, out: str, limits: SchedulerConfig) -> list[str]:
    """Return the command line after `python -m vidur.main`."""
    settings = {
        "replica_config_model_name": "meta-llama/Meta-Llama-3-8B",
        "replica_config_device": "h100",
        "replica_config_network_device": "h100_dgx",
        "replica_config_tensor_parallel_size": 1,
        "replica_config_num_pipeline_stages": 1,
        "cluster_config_num_replicas": 1,
        "request_generator_config_type": "trace_replay",
        "trace_request_generator_config_trace_file": trace,
        "trace_request_generator_config_prefill_scale_factor": 1,
        "trace_request_generator_config_decode_scale_factor": 1,
        "trace_request_generator_config_time_scale_factor": 1,
        "trace_request_generator_config_max_tokens": 16_384,
        "random_forrest_execution_time_predictor_config_prediction_max_tokens_per_request": 16_384,
        "random_forrest_execution_time_predictor_config_prediction_max_batch_size": limits.max_num_seqs,
        "replica_scheduler_config_type": "sarathi",
        "sarathi_scheduler_config_chunk_size": limits.max_num_batched_tokens,
        "sarathi_scheduler_config_batch_size_cap": limits.max_num_seqs,
        "sarathi_scheduler_config_block_size": limits.block_size,
        "sarathi_scheduler_config_num_blocks": limits.num_blocks,
        "metrics_config_output_dir": out,
    }
    off = ("store_plots", "enable_chrome_trace", "write_json_trace")
    return [
        *(text for name, value in settings.items() for text in (f"--{name}", str(value))),
        *(f"--no-metrics_config_{name}" for name in off),
    ]


class Blis:
    """The peer BLIS (Go, inference-sim): a built binary, in the checkout whose tables it reads.

    It replays a trace (TraceV2). The adapter follows its README and the code that reads such traces.
    """

    tried = False
    replicas = 1
    handicaps: Sequence[str] = (
        "faster: native code; a step is priced by a formula with fitted coefficients",
        "slower: makes a token of every token of every prompt, for its prefix cache",
    )
    COLUMNS = (
        *("request_id", "client_id", "tenant_id", "slo_class", "session_id", "round_index", "prefix_group"),
        *("prefix_length", "streaming", "input_tokens", "output_tokens", "text_tokens", "image_tokens"),
        *("audio_tokens", "video_tokens", "reason_ratio", "model", "deadline_us", "server_input_tokens"),
        *("arrival_time_us", "send_time_us", "first_chunk_time_us", "last_chunk_time_us", "num_chunks", "status"),
        *("error_message", "finish_reason"),
    )

    def __init__(self, binary: Path) -> None:
        self.name = f"BLIS in {binary.parent.name}"
        self._binary = binary

    def run(self, workload: Workload, limits: SchedulerConfig) -> PeerRun:
        with TemporaryDirectory() as scratch:
            header, data = Path(scratch) / "trace.yaml", Path(scratch) / "trace.csv"
            header.write_text("trace_version: 2\ntime_unit: microseconds\nmode: generated\nwarm_up_requests: 0\n")
            write_csv(data, self.COLUMNS, map(blis_row, workload.requests))
            command = [str(self._binary), "replay", *blis_flags(header, data, limits)]
            _, cpu_s = timed(command, cwd=self._binary.parent)
        return PeerRun(cpu_s, None, workload)


def blis_row(request: WorkloadRequest) -> tuple[object, ...]:
    """Return a request as a row of `Blis.COLUMNS`; an unknown value is empty or 0."""
    at_us = request.arrival_ns // 1000
    lengths = (request.prompt_len, request.output_len, request.prompt_len)
    return (
        *(request.id, "", "", "", "", 0, "", 0, "false", *lengths, 0, 0, 0, 0, "", 0, 0),
        *(at_us, at_us, 0, 0, 0, "ok", "", ""),
    )


def blis_flags(header: Path, data: Path, limits: SchedulerConfig) -> list[str]:
    """Return the command line after `blis replay`. The horizon is one day, so that every request ends."""
    settings = {
        "trace-header": header,
        "trace-data": data,
        "model": "meta-llama/llama-3.1-8b-instruct",
        "hardware": "H100",
        "tp": 1,
        "max-num-running-reqs": limits.max_num_seqs,
        "max-num-scheduled-tokens": limits.max_num_batched_tokens,
        "max-model-len": limits.max_model_len,
        "block-size-in-tokens": limits.block_size,
        "total-kv-blocks": limits.num_blocks,
        "horizon": 86_400_000_000,
    }
    return [text for name, value in settings.items() for text in (f"--{name}", str(value))]


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(columns)
        writer.writerows(rows)
