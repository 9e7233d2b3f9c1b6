"""A comparison of our scheduler with that of an installed vLLM or SGLang on random scenarios.

Scenarios are small workloads with configurations that give them little room. A scenario is an oracle recording without
`steps` and `results`. Scenarios are grouped in families: settings that some releases lack or treat differently have
their own families. This file has those of vLLM; `sglang_scenarios.py` has SGLang's.

The engine runs in a process of its own Python, which does not import our packages. It reads scenarios from JSON files
and writes recordings beside them (`vllm_clock.py`, `sglang_clock.py`). Only its scheduler runs,
without a model or a GPU. `live_engines.py` finds it.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from tokentwin.serving.data_file import parse_json
from tokentwin.serving.deployments.engines import release_settings
from tokentwin.serving.errors import UserError, one_line, shortened
from tokentwin.serving.python_process import HOME
from tokentwin.sim.checks.conformance import FeatureResult, conform
from tokentwin.traces.formats.rows import read_head

COST = {"base_ns": 1000, "per_token_ns": 70, "per_pair_ps": 900}
FAMILIES = (
    "plain loop", "overlapped loop", "priorities", "drafts", "drafts by batch size", "sliding windows", "hybrid models",
    "long-prefill threshold", "watermark", "rarer settings", "adapters", "pooling requests",
    "images",
)  # fmt: skip


def scenario(family: str, seed: int) -> dict[str, Any]:
    """Return the scenario of a family with this seed.

    The first two families use one loop; the others use the plain or the overlapped loop at random. All families but
    `priorities` and some hybrid models are first come, first served.
    """
    chance = Random(f"{family} {seed}")
    overlapped = chance.random() < 0.5 if family != "plain loop" else False
    overlapped = overlapped or family == "overlapped loop"
    recording = random_recording(chance, "priority" if family == "priorities" else "fcfs", overlapped, sharing=True)
    config = recording["config"]
    config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_num_seqs"])
    config["long_prefill_token_threshold"] = chance.choice([1, 4, 9]) if family == "long-prefill threshold" else 0
    config["watermark"] = chance.choice([0.1, 0.5]) if family == "watermark" else 0.0
    if family.startswith("drafts"):
        tokens = chance.choice([1, 2, 4])
        config["speculative"] = {
            "method": chance.choice(["ngram", "draft_model", "eagle"]),
            "num_speculative_tokens": tokens,
            "acceptance_rate": chance.choice([0.0, 0.4, 0.9, 1.0]),
        }
        config["max_num_batched_tokens"] += (tokens + 1) * config["max_num_seqs"]
        config["num_blocks"] += 2 * tokens  # with fewer we reject requests that accepted drafts may bring to an end
        if family == "drafts by batch size":
            ends = sorted(chance.sample(range(1, 12), chance.randint(1, 3)))
            ranges = zip([1, *(end + 1 for end in ends)], ends, strict=False)
            config["speculative"]["num_speculative_tokens_per_batch_size"] = [
                [first, last, chance.randint(0, tokens)] for first, last in ranges
            ]
    if family == "sliding windows":
        config |= with_windows(config, chance)
    if family == "hybrid models":
        config |= with_states(config, chance)
    if family == "rarer settings":
        config["long_prefill_token_threshold"] = chance.choice([0, 4, 9])
        config["vllm"] = rarer_settings(config, chance)
        for request in recording["requests"]:
            request["skip_cache"] = chance.random() < 0.2
    if family == "adapters":
        config["max_loras"] = chance.choice([1, 1, 2, 3])
        for request in recording["requests"]:
            request["lora"] = chance.choice([0, 1, 2, 3, 4])
    if family == "images":
        with_images(recording, chance)
    if family == "pooling requests":
        recording = pooling(recording, chance)
    return {"name": f"{family} {seed}", **recording}


def random_recording(chance: Random, policy: str, overlapped: bool, sharing: bool) -> dict[str, Any]:
    """Return a random small workload, and a configuration with little room for it."""
    size = chance.choice([1, 2, 3, 4, 7, 8, 16, 32])
    gaps = chance.choice([[0], [0, 0, 1, 1500], [0, 0, 1, 1500, 8000, 40000], [1, 700, 2500]])
    most_own, most_output = chance.choice([8, 20, 40, 70]), chance.choice([1, 6, 24, 60])
    requests: list[dict[str, Any]] = []
    arrival = 0
    for id in range(chance.randint(1, chance.choice([4, 14, 24]))):
        arrival += chance.choice(gaps)
        prompt: list[list[Any]] = []
        kind = chance.choice(["alone", "system", "turn", "turn", "again"]) if sharing else "alone"
        if kind == "system":
            prompt = [[f"sys{chance.randint(0, 1)}", chance.choice([size, 2 * size, 2 * size + 1, 3 * size - 1])]]
        elif kind != "alone" and requests:
            before = chance.choice(requests[-4:])
            prompt = before["prompt"]
            if kind == "turn":  # the turn may come before the previous answer has ended, or quote only its beginning
                prompt = [*prompt, [f"out:{before['id']}", chance.randint(1, before["output_len"])]]
        own = chance.randint(0 if prompt else 1, most_own)
        if chance.random() < 0.3:
            own = size * chance.randint(1, max(1, most_own // size))
        if own:
            prompt = [*prompt, [f"u{id}", own]]
        request: dict[str, Any] = {"id": id, "arrival_ns": arrival, "prompt": prompt}
        request |= {"output_len": chance.randint(1, most_output), "priority": chance.randint(0, 2)}
        requests.append(request)
    if chance.random() < 0.4:  # stop tokens
        for request in requests:
            request["max_tokens"] = request["output_len"] + chance.choice([0, 0, 1, 2, 30])
    longest = max(sum(n for _, n in r["prompt"]) + r.get("max_tokens", r["output_len"]) for r in requests)
    max_model_len = longest + chance.choice([0, 0, 1, 20])
    chunked = chance.random() < 0.8
    need = -(-longest // size)
    config = {
        "max_num_seqs": chance.choice([1, 2, 4, 16, 16]),
        "max_num_batched_tokens": chance.choice([1, 2, 5, 9, 16, 40]) if chunked else max_model_len,
        "max_model_len": max_model_len,
        "block_size": size,
        "num_blocks": 1 + need + chance.choice([0, 1, need // 2, need, 3 * need]),
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": chance.random() < 0.8,
        "long_prefill_token_threshold": chance.choice([0, 0, 1, 4, 9]),
        "scheduler_reserve_full_isl": chance.random() < 0.4,
        "watermark": chance.choice([0.0, 0.0, 0.0, 0.1, 0.5]),
        "policy": policy,
        "async_scheduling": overlapped,
    }
    return {"config": config, "cost": COST, "requests": requests}


def with_images(recording: dict[str, Any], chance: Random) -> None:
    """Give some requests of the recording images, which others share, and a budget and a cache that are tight."""
    config, requests = recording["config"], recording["requests"]
    sizes = {f"image {number}": chance.choice([1, 2, 3, 5, 9, 20]) for number in range(chance.choice([2, 5, 12]))}
    items: dict[int, list[list[Any]]] = {}
    for request in requests:
        length = sum(tokens for _, tokens in request["prompt"])
        mm = [list(item) for item in items.get(_turn_before(request), ())]
        at = max([item[0] + item[1] for item in mm], default=0) + chance.choice([0, 0, 1, 7])
        while len(mm) < 6 and chance.random() < 0.8:
            name = chance.choice(sorted(sizes))
            if at + sizes[name] > length:
                break
            mm.append([at, sizes[name], name])
            at += sizes[name] + chance.choice([0, 1, 1, 12])
        items[request["id"]] = mm
        if mm:
            request["mm"] = mm
    largest = max([tokens for mm in items.values() for _, tokens, _ in mm], default=1)
    config["encoder"] = [largest + chance.choice([0, 1, 10, 100]), largest + chance.choice([0, 0, 3, 20, 200])]
    config["policy"] = chance.choice(["fcfs", "priority"])
    config["long_prefill_token_threshold"] = chance.choice([0, 0, 4, 9])
    if chance.random() < 0.3:
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], largest)
        config["vllm"] = {"disable_chunked_mm_input": True}


def _turn_before(request: dict[str, Any]) -> int:
    """Return the id of the turn before the request, if its prompt ends with an answer and tokens of its own."""
    answers = [int(name.removeprefix("out:")) for name, _ in request["prompt"] if name.startswith("out:")]
    return answers[-1] if answers else -1


def pooling(recording: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Return the recording with pooling requests, for a decoder with a prefix cache or for an encoder without KV."""
    requests = [
        {
            **{name: value for name, value in request.items() if name != "max_tokens"},
            "prompt": [segment for segment in request["prompt"] if not segment[0].startswith("out:")],
            "output_len": 0,
        }
        for request in recording["requests"]
    ]
    config = dict(recording["config"])
    longest = max(sum(tokens for _, tokens in request["prompt"]) for request in requests)
    config["max_model_len"] = longest + chance.choice([0, 0, 1, 20])
    need = -(-longest // config["block_size"])
    config["num_blocks"] = 1 + need + chance.choice([0, 1, need // 2, need, 3 * need])
    if chance.random() < 0.3:
        config |= {"kv_reservation": "none", "enable_chunked_prefill": False, "enable_prefix_caching": False}
        config |= {"num_blocks": 2}
    if not config["enable_chunked_prefill"]:
        config["max_num_batched_tokens"] = max(config["max_model_len"], config["max_num_seqs"])
    return {**recording, "config": config, "requests": requests}


def with_windows(config: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Return `config` for a model that has some or only layers with a sliding window."""
    size = config["block_size"]
    groups = [chance.randint(2, 3 * size + 2)] * chance.choice([1, 3]) + [0] * chance.randint(0, 2)
    return config | {
        "kv_groups": groups,
        "num_blocks": 1 + (config["num_blocks"] - 1) * len(groups),
        "prefix_cache_retention_interval": chance.choice([0, 0, size, 4 * size, None]),
    }


def with_states(config: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Return `config` for a model with layers that have a constant state, and a cache of these states."""
    size, states = config["block_size"], chance.choice([1, 1, 2, 3])
    budget = max(chance.choice([config["max_num_batched_tokens"], size, 3 * size + 1]), config["max_num_seqs"])
    need = -(-config["max_model_len"] // size)
    return config | {
        "policy": chance.choice(["fcfs", "fcfs", "priority"]),
        "state_blocks": states,
        "mamba_cache_mode": "align",
        "num_prefill_checkpoint_blocks": chance.choice([0, 0, 1]),
        "enable_prefix_caching": True,
        "enable_chunked_prefill": True,
        "max_num_batched_tokens": budget,
        "long_prefill_token_threshold": min(chance.choice([0, 0, 0, 4, size + 1]), config["max_model_len"]),
        "watermark": chance.choice([0.0, 0.0, 0.1]),
        "num_blocks": 1 + need + 4 * states + chance.choice([0, 1, need // 2, need, (1 + states) * need]),
        "prefix_cache_retention_interval": chance.choice([0, 0, 0, size, 4 * size, None]),
    }


def rarer_settings(config: dict[str, Any], chance: Random) -> dict[str, Any]:
    """Return a random choice of the rarer settings of vLLM's scheduler."""
    settings = {
        "max_num_active_seqs": chance.randint(1, config["max_num_seqs"]),
        "prefill_schedule_interval": chance.choice([2, 3, 8]),
        "long_prefill_token_threshold_adaptive": True,
    }
    if config.get("enable_chunked_prefill", True):
        settings["max_num_scheduled_tokens"] = chance.randint(1, config["max_num_batched_tokens"])
    return {name: value for name, value in settings.items() if chance.random() < 0.5}


_LARGEST_BYTES = 1 << 28
_QUIET = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
    "PYTHONWARNINGS": "ignore",
}  # fmt: skip


@dataclass(frozen=True)
class EngineOracle:
    """An engine whose scheduler can be asked.

    Attributes:
        name: its name in recordings
        title: its name in messages
        program: the file that runs its scheduler on a virtual clock
        families: the families of scenarios
        scenario: returns the scenario of a family with a seed
        distributions: the names of its package in an environment
    """

    name: str
    title: str
    program: Path
    families: Sequence[str]
    scenario: Callable[[str, int], dict[str, Any]]
    distributions: Sequence[str]

    @property
    def environment(self) -> str:
        """The folder of the environment that `make` installs it into."""
        return f".venv-{self.name}"


@dataclass(frozen=True)
class LiveEngine:
    """An installation of an engine: the Python that runs it, and the folder to search for modules first, if any."""

    engine: EngineOracle
    python: Path
    folder: Path | None = None

    def command(self, *arguments: str) -> list[str]:
        return [str(self.python), *arguments]

    @property
    def environment(self) -> dict[str, str]:
        given = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | _QUIET
        places = [str(self.folder)] if self.folder else []
        return given | {"PYTHONPATH": os.pathsep.join([*places, *_python_path()])}


def _python_path() -> list[str]:
    """Return the caller's PYTHONPATH without our directory, so that our packages do not hide others."""
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return [place for place in places if place and Path(place).resolve() != HOME]


@dataclass(frozen=True)
class LiveConformance:
    """The engine, its release as it names itself, and the results of each family of scenarios."""

    engine: EngineOracle
    version: str
    families: Sequence[FeatureResult]


def conform_live(live: LiveEngine, scenarios: int, seed: int = 0, policy: str | None = None) -> LiveConformance:
    """Compare `scenarios` scenarios of each family, from seed `seed` on. `policy` is by default that of the engine.

    Raises UserError if the engine cannot be run.
    """
    engine = live.engine
    with tempfile.TemporaryDirectory() as folder:
        paths = {
            family: [Path(folder, f"{family.replace(' ', '_')}_{seed + number}.json") for number in range(scenarios)]
            for family in engine.families
        }
        for family, of_family in paths.items():
            for number, path in enumerate(of_family):
                path.write_text(json.dumps(engine.scenario(family, seed + number)))
        every = [str(path) for of_family in paths.values() for path in of_family]
        done = subprocess.run(
            live.command("-P", str(engine.program), *every),
            env=live.environment,
            cwd=folder,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
            raise UserError("engine", str(live.folder or live.python), f"{engine.title} cannot be run there: {last}")
        version = _answer(paths[engine.families[0]][0])[engine.name]
        results = [_family(engine, family, of_family, policy, version) for family, of_family in paths.items()]
        return LiveConformance(engine, version, results)


def _answer(path: str | Path) -> dict[str, Any]:
    """Return what the engine answered about the scenario at `path`."""
    answer = parse_json(read_head(_recording(Path(path)), _LARGEST_BYTES, "recording"))
    assert isinstance(answer, dict)
    return answer


def _recording(path: Path) -> Path:
    return path.with_suffix(".rec.json.gz")


def _family(
    engine: EngineOracle, family: str, paths: Sequence[Path], policy: str | None, version: str
) -> FeatureResult:
    """Compare the scenarios that the engine decided. It may lack a setting of others, refuse them, or never end."""
    lacks, stuck, decided, remarks = [], [], [], []
    for path in paths:
        answer = _answer(path)
        if "lacks" in answer:
            lacks.append(answer["lacks"])
        elif "stuck" in answer:
            stuck.append(answer["stuck"])
        else:
            config = answer["config"]
            if engine.name == "vllm":
                config |= release_settings(version, adapters="max_loras" in config, images="encoder" in config)
                _recording(path).write_bytes(gzip.compress(json.dumps(answer).encode()))
            decided.append(conform(_recording(path), policy))
    if lacks:
        remarks.append(f"{len(lacks)} not asked: no {', '.join(sorted(set(lacks)))}")
    if stuck:
        remarks.append(f"{len(stuck)} that {engine.title} refused or did not end: {one_line(shortened(stuck[0], 150))}")
    return FeatureResult(family, decided, remarks)
