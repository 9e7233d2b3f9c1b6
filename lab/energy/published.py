"""Published power of serving engines, and the power that the model gives for the same work.

`runs.csv` has runs of the ML.ENERGY Benchmark (Chung et al., NeurIPS Datasets and Benchmarks 2025), under Apache 2.0.
Source `v3` is github.com/ml-energy/leaderboard at 0cd52dab (vLLM 0.11.1, December 2025), and `v2` is
github.com/ml-energy/leaderboard-v2 at c3af7f31 (vLLM 0.5.4, September 2024; power from energy per request). A row has
the mean batch, the mean length of the outputs, half of the length that a running request has in the mean (`half`),
output tokens per second (`tput`), and the power of all GPUs in watts. The lengths of prompts are not published;
`_PROMPTS` assumes them.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from scipy.optimize import least_squares

from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.deployments.gpu_spec import GpuSpec, find_gpu
from tokentwin.traces.metrics.power import IDLE, Coefficients, GpuPower
from tokentwin.traces.metrics.step_metrics import BYTES_OF, FLOPS_OF, StepWork

# Tokens. `v2` has prompts of ShareGPT in a public file. Chats of `v3` have the length with which the throughput that
# the simulator predicts fits best.
_PROMPTS = {("v2", "chat"): 100, ("v3", "chat"): 500, ("v3", "gpqa"): 200}
_ENGINES = {"v2": "vllm 0.5.4", "v3": "vllm 0.11.1"}
_QUANTIZED = {"bfloat16": "none", "fp8": "fp8", "mxfp4": "none"}  # a catalogue's gpt-oss is in mxfp4 as published


@dataclass(frozen=True)
class PublishedRun:
    """A measured run in a closed loop, in steady state."""

    source: str
    gpu: str
    model: str
    precision: str
    task: str
    gpus: int
    expert_parallel: bool
    max_num_seqs: int
    batch: float
    output: float
    half: float
    tokens_per_s: float
    power_w: float

    @property
    def prompt(self) -> int:
        return _PROMPTS[self.source, self.task]

    @property
    def spec(self) -> GpuSpec:
        return find_gpu(self.gpu)

    @property
    def joules_per_token(self) -> float:
        return self.power_w / self.tokens_per_s

    @property
    def deployment(self) -> Deployment:
        """The engine. All GPUs share each layer, whichever way they did."""
        return Deployment(
            model=self.model,
            device="cuda",
            engine=_ENGINES[self.source],
            quantization=_QUANTIZED[self.precision],
            tensor_parallel_size=self.gpus,
            enable_expert_parallel=self.expert_parallel,
        )

    @property
    def used(self) -> tuple[float, float]:
        """The mean step's shares of the 16-bit peak rate and of the bandwidth, from measured throughput and batch."""
        work = StepWork.on(self.deployment, self.spec)
        assert work is not None
        admitted = self.batch / self.output  # prompts of a step
        sizes = dict.fromkeys((*FLOPS_OF, *BYTES_OF), 0.0) | {
            "prefill_rows": admitted,
            "prefill_tokens": admitted * self.prompt,
            "prefill_pairs": admitted * self.prompt * (self.prompt + 1) / 2,
            "decode_rows": self.batch,
            "decode_context": self.batch * (self.prompt + self.half),
            "sampled_rows": self.batch,
        }
        step, seconds = pa.table({name: [float(size)] for name, size in sizes.items()}), self.batch / self.tokens_per_s
        flops, moved = float(work.flops(step)[0]), float(work.moved_bytes(step)[0])
        return flops / seconds / (self.gpus * self.spec.bf16_flop_per_s), moved / seconds / work.bytes_per_s


def published_runs() -> list[PublishedRun]:
    """Return the runs of `runs.csv`."""
    with Path(__file__).with_name("runs.csv").open(encoding="utf-8") as file:
        return [
            PublishedRun(
                source=row["source"],
                gpu=row["gpu"],
                model=row["model"],
                precision=row["precision"],
                task=row["task"],
                gpus=int(row["gpus"]),
                expert_parallel=int(row["ep"]) > 1,
                max_num_seqs=int(row["max_num_seqs"]),
                batch=float(row["batch"]),
                output=float(row["output"]),
                half=float(row["half"]),
                tokens_per_s=float(row["tput"]),
                power_w=float(row["power_w"]),
            )
            for row in csv.DictReader(file)
        ]


def fit(runs: Sequence[PublishedRun]) -> Coefficients:
    """Return the coefficients that fit the runs best. Every GPU has the same weight.

    The squares of log errors are minimised, with Huber's loss.
    """
    used, measured = np.array([run.used for run in runs]), shares(runs)
    weights = np.array([1.0 / sum(run.gpu == other.gpu for other in runs) for run in runs])

    def misses(at: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.asarray(np.sqrt(weights) * np.log(modelled(used, Coefficients(*at)) / measured))

    bounds = [IDLE, 0.0, 0.0], [0.5, 3.0, 10.0]
    return Coefficients(*least_squares(misses, (0.15, 0.7, 2.5), bounds=bounds, loss="huber", f_scale=0.02).x.tolist())


def shares(runs: Sequence[PublishedRun]) -> NDArray[np.float64]:
    """Return the measured power of a GPU as a share of its board's limit."""
    return np.array([run.power_w / run.gpus / (run.spec.power_w or np.nan) for run in runs])


def modelled(used: NDArray[np.float64], coefficients: Coefficients) -> NDArray[np.float64]:
    """Return the power of a GPU as a share of its board's limit, by `used` (`[runs, 2]`)."""
    return np.asarray(GpuPower(1.0, 1.0, coefficients).watts(used[:, 0], used[:, 1]))
