"""Small scenarios, one for each pair of capabilities, and digests of what their runs record.

    python -m tests.sim.frozen_scenarios          # which scenarios record something else than the file says
    python -m tests.sim.frozen_scenarios --write "why they may"

A scenario takes the traffic and the deployment of two capabilities at once. The file has the columns of each table and
a digest of their values; a column that comes later is not in it. A refused pair has the field of the refusal.
"""

import argparse
import hashlib
import json
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa

import tokentwin
from tokentwin.serving.errors import UserError
from tokentwin.serving.workload import Workload, WorkloadRequest
from tokentwin.traces.synth import parse_spec, synthesise

TABLES = ("requests", "steps")
FILE = Path(__file__).parents[1] / "data" / "frozen_scenarios.json"
Change = dict[str, Any]
Requests = Callable[[WorkloadRequest], WorkloadRequest]

_TRAFFIC: Change = {
    "requests": 24,
    "seed": 7,
    "arrivals": {"kind": "poisson", "rate": 60},
    "prompt": {"kind": "lognormal", "mean": 300, "sigma": 1, "max": 1200},
    "output": {"kind": "lognormal", "mean": 50, "sigma": 0.9, "max": 300},
}
_DEPLOYMENT: Change = {
    "model": "Llama-3.1-8B",
    "device": "cuda",
    "scheduler": {"num_blocks": 700, "max_num_seqs": 8, "max_num_batched_tokens": 512, "max_model_len": 1536},
}


def _scheduler(**settings: Any) -> Change:
    return {"deployment": {"scheduler": settings}}


def _fleet(**fleet: Any) -> Change:
    return {"deployment": {"fleet": fleet}}


_DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "acceptance_rate": 0.6, "draft_us": 90}
_HOST = {"name": "cpu", "capacity_gib": 1, "read_gb_s": 50, "write_gb_s": 50}
_TWO = [{"name": "a", "replicas": 2}]
CAPABILITIES: dict[str, Change] = {
    "overlapped": _scheduler(async_scheduling=True),
    "adapters": {"traffic": {"adapters": 5}, "deployment": {"lora": {"max_loras": 2, "max_cpu_loras": 3}}},
    "drafts": _scheduler(speculative=_DRAFTS),
    "images": {"traffic": {"images": 300}, "deployment": {"model": "Qwen2.5-VL-7B", "multimodal": {}}},
    "tiers": {"deployment": {"kv_tiers": {"tiers": [_HOST]}}},
    "sessions": {"traffic": {"sessions": {"turns": 3, "think_ms": 50}}},
    "users": {"traffic": {"arrivals": {"kind": "users", "users": 6, "think_ms": 100}}},
    "little KV": _scheduler(num_blocks=98),
    "priorities": {"deployment": {"scheduler": {"policy": "priority", "num_blocks": 110}}, "requests": "priorities"},
    "hang-ups": {"requests": "hang-ups"},
    "structured": {"traffic": {"structured": 0.5, "grammar_compile_ms": 30}},
    "logits": {"traffic": {"changes_logits": 0.5, "scores_prompt": 0.3}},
    "sglang": {"deployment": {"policy": "sglang"}},
    "fair": {"deployment": {"policy": "fair"}, "requests": "tenants"},
    "tensor parallel": {"deployment": {"tensor_parallel_size": 2}},
    "stages": {"deployment": {"pipeline_parallel_size": 2}},
    "experts": {
        "deployment": {"model": "Qwen3-30B-A3B", "data_parallel_size": 2, "enable_expert_parallel": True}
    },
    "windows": {"deployment": {"model": "gpt-oss-20b", "scheduler": {"max_num_batched_tokens": 640}}},
    "states": {"deployment": {"model": "Granite-4.0-H-Tiny"}},
    "disaggregated": _fleet(
        pools=[{"name": "p", "role": "prefill"}, {"name": "d", "role": "decode"}], links={"nic_gb_s": 25}
    ),
    "crashes": _fleet(
        pools=_TWO, router={"name": "least-requests"}, failures={"crashes": [{"at_s": 0.2, "recovery_s": 0.3}]}
    ),
    "admission": _fleet(
        pools=_TWO, admission={"max_queued_per_replica": 2, "patience": {"mean_s": 0.5}, "retry": {"max_attempts": 3}}
    ),
}  # fmt: skip


def _priorities(request: WorkloadRequest) -> WorkloadRequest:
    return replace(request, priority=request.id % 3)


def _hang_ups(request: WorkloadRequest) -> WorkloadRequest:
    return replace(request, cancel_ns=150_000_000) if request.id % 4 == 1 else request


def _tenants(request: WorkloadRequest) -> WorkloadRequest:
    return replace(request, tenant=f"tenant {request.id % 3}")


_REQUESTS: dict[str, Requests] = {"priorities": _priorities, "hang-ups": _hang_ups, "tenants": _tenants}


def pairs() -> Iterator[tuple[str, ...]]:
    """Yield each capability alone, then each pair of them."""
    yield from ((name,) for name in CAPABILITIES)
    yield from combinations(CAPABILITIES, 2)


def described(names: tuple[str, ...]) -> tuple[Workload, Change]:
    """Return the traffic and the deployment of these capabilities."""
    changes = [CAPABILITIES[name] for name in names]
    traffic, deployment = _TRAFFIC, _DEPLOYMENT
    for change in changes:
        traffic = _merged(traffic, change.get("traffic", {}))
        deployment = _merged(deployment, change.get("deployment", {}))
    workload = synthesise(parse_spec(traffic))
    for change in changes:
        if "requests" in change:
            workload = replace(workload, requests=tuple(map(_REQUESTS[change["requests"]], workload.requests)))
    return workload, deployment


def _merged(base: Change, change: Change) -> Change:
    inner = {name: _merged(base[name], value) for name, value in change.items()
             if isinstance(value, dict) and isinstance(base.get(name), dict) and "kind" not in value}  # fmt: skip
    return {**base, **change, **inner}


def tables(names: tuple[str, ...], folder: Path) -> dict[str, pa.Table] | str:
    """Return the tables of the scenario's run, or the field for which it is refused."""
    try:
        workload, deployment = described(names)
        run = tokentwin.simulate(workload, deployment, gpu="H100", out=folder / "+".join(names), band=False)
    except UserError as error:
        return error.field
    return {name: run.to_arrow(name) for name in TABLES}


def digest(table: pa.Table, columns: list[str]) -> str:
    """Return a digest of the values of `columns`; a column that the table lacks has none."""
    found = hashlib.blake2b(digest_size=8)
    for name in columns:
        found.update(json.dumps([name, table[name].to_pylist() if name in table.column_names else None]).encode())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", metavar="WHY", help="freeze what they record now, for this reason")
    why = parser.parse_args().write
    before = json.loads(FILE.read_text()) if FILE.exists() else {"columns": {}, "scenarios": {}, "changes": []}
    with tempfile.TemporaryDirectory() as folder:
        runs = {" + ".join(names): tables(names, Path(folder)) for names in pairs()}
    columns = before["columns"]
    if why is not None:
        columns = {name: sorted({column for run in runs.values() if not isinstance(run, str) for column in
                                 run[name].column_names}) for name in TABLES}  # fmt: skip
    scenarios = {name: run if isinstance(run, str) else [digest(run[table], columns[table]) for table in TABLES]
                 for name, run in runs.items()}  # fmt: skip
    different = [name for name, outcome in scenarios.items() if before["scenarios"].get(name) != outcome]
    print(f"{len(different)} of {len(scenarios)} differ", *different, sep="\n")
    if why is not None:
        changes = [*before["changes"], {"why": why, "scenarios": len(different)}]
        FILE.write_text(json.dumps({"changes": changes, "columns": columns, "scenarios": scenarios}, indent=0) + "\n")


if __name__ == "__main__":
    main()
