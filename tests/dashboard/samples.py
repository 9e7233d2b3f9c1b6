"""Small recordings and a validation report, made by a toy engine, for the tests of the dashboard."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tokentwin.dashboard.bundled import ANSWERS
from tokentwin.planning.plan.most_clients import Borne, MostClientsDocument
from tokentwin.traces.recording_writer import RecordingWriter

MS = 1_000_000
BLOCKS, BLOCK = 140, 16
REGIMES = ("prefill", "decode", "mixed")


def toy_run(path: Path, clock: str, seed: int, count: int = 160, noise: float = 0.0, bias: float = 1.0) -> None:
    """Write a run of a small continuous-batching engine; arrivals are fixed, and the seed only adds noise."""
    shape, jitter = random.Random(0), random.Random(seed)
    arrival = 0
    todo: list[dict[str, Any]] = []
    for i in range(count):
        arrival += int(shape.expovariate(1 / 38) * MS)
        todo.append(
            {"id": i, "arrival": arrival, "prompt": shape.randint(30, 400), "out": 1 + int(shape.expovariate(1 / 40))}
        )
    waiting: list[dict[str, Any]] = []
    running: list[dict[str, Any]] = []
    now = step = 0
    run = {
        "run_id": path.name,
        "clock": clock,
        "workload": "toy-poisson",
        "deployment": json.dumps({"model": "smollm2", "scheduler": {"num_blocks": BLOCKS + 1}}),
        "replicas": 1,
        "seed": seed,
        "hardware": json.dumps({"cpu": "two cores"}) if clock == "wall" else "",
        "calibration": "" if clock == "wall" else "toy",
        "num_blocks": BLOCKS,
        "block_size": BLOCK,
        "notes": "",
    }
    with RecordingWriter(path, run) as writer:
        while todo or waiting or running:
            if not waiting and not running:
                now = max(now, todo[0]["arrival"])
            while todo and todo[0]["arrival"] <= now:
                waiting.append({**todo.pop(0), "done": 0, "times": [], "preemptions": 0, "lost": 0})
            need = lambda r: -(-(r["prompt"] + len(r["times"]) + 1) // BLOCK)  # noqa: E731
            out = []
            while running and sum(map(need, running)) > BLOCKS:
                victim = running.pop()
                victim.update(done=0, preemptions=victim["preemptions"] + 1, since=now)
                waiting.insert(0, victim)
                out.append(victim["id"])
            while waiting and len(running) < 16 and sum(map(need, running)) + need(waiting[0]) <= BLOCKS and not out:
                request = waiting.pop(0)
                request.setdefault("scheduled", now)
                request["lost"] += now - request.pop("since", now)
                running.append(request)
            budget, rows = 256, []
            for request in running:
                chunk = min(request["prompt"] + len(request["times"]) - request["done"], budget) or 0
                budget -= chunk
                if chunk:
                    rows.append((request, chunk))
            prefill = sum(n for _, n in rows if n > 1)
            decode = sum(n == 1 for _, n in rows)
            took = (3.0 + 0.06 * prefill + 0.25 * decode) * bias * (1 + noise * abs(jitter.gauss(0, 1)))
            end = now + int(took * MS)
            writer.add_step(
                replica=0,
                step=step,
                plan_ns=now,
                start_ns=now,
                end_ns=end,
                prefill_rows=sum(n > 1 for _, n in rows),
                prefill_tokens=prefill,
                decode_rows=decode,
                running=len(running),
                waiting=len(waiting),
                used_blocks=sum(map(need, running)),
                waiting_blocks=sum(map(need, waiting)),
                preempted=len(out),
                row_ids=[r["id"] for r, _ in rows],
                row_tokens=[n for _, n in rows],
                preempted_ids=out,
            )
            now, step = end, step + 1
            for request, chunk in rows:
                request["done"] += chunk
                if request["done"] == request["prompt"] + len(request["times"]):
                    request["times"].append(now)
                if len(request["times"]) == request["out"]:
                    running.remove(request)
                    _add(writer, request)
        writer.add_request(
            request_id=count, replica=0, status="rejected", reason="prompt of 9000 tokens never fits",
            prompt_tokens=9000, output_tokens=0, arrival_ns=now // 2, tenant="", slo_class="", priority=0,
        )  # fmt: skip


def _add(writer: RecordingWriter, request: dict[str, Any]) -> None:
    writer.add_request(
        request_id=request["id"],
        replica=0,
        tenant="",
        slo_class="",
        priority=0,
        status="finished",
        reason="",
        prompt_tokens=request["prompt"],
        output_tokens=request["out"],
        arrival_ns=request["arrival"],
        send_ns=request["arrival"] + MS // 10,
        queued_ns=request["arrival"] + MS // 5,
        scheduled_ns=request["scheduled"],
        first_token_ns=request["times"][0],
        finish_ns=request["times"][-1],
        prefix_hit_tokens=16 if request["id"] % 3 == 0 else 0,
        preemptions=request["preemptions"],
        preempted_ns=request["lost"],
        recomputed_tokens=request["preemptions"] * request["prompt"],
        token_times_ns=request["times"],
    )


def report(runs: Path, disturbed: bool = False) -> dict:
    """Return a report over `runs/real-*` and `runs/simulated`."""
    rows = [
        ("ttft_ms", "mean", 210.0, 203.9, -2.9, 2.4), ("ttft_ms", "p50", 143.0, 138.6, -3.1, 2.4),
        ("ttft_ms", "p90", 512.0, 531.0, 3.7, 4.9), ("ttft_ms", "p99", 931.0, 1010.0, 8.5, 5.8),
        ("tpot_ms", "mean", 14.1, 14.3, 1.4, 1.1), ("tpot_ms", "p50", 13.8, 13.9, 0.7, 1.0),
        ("tpot_ms", "p90", 19.4, 19.2, -1.0, 2.3), ("tpot_ms", "p99", 26.0, 24.7, -5.0, 4.1),
        ("e2e_ms", "mean", 840.0, 833.0, -0.8, 1.9), ("e2e_ms", "p50", 655.0, 660.0, 0.8, 1.6),
        ("e2e_ms", "p90", 1830.0, 1790.0, -2.2, 3.0), ("e2e_ms", "p99", 2900.0, 3016.0, 4.0, 5.2),
        ("request_throughput", "value", 15.9, 15.9, -0.1, 0.2),
        ("output_throughput", "value", 601.0, 600.2, -0.1, 0.2),
    ]  # fmt: skip
    return {
        "verdict": "TTFT p50 -3.1 % (floor 2.4 %), E2E p99 +4.0 % (floor 5.2 %)",
        "created": "2026-01-31T12:00:00+00:00",
        "disturbed": disturbed,
        "disturbance": "canary steps drifted by 31 % in real-1" if disturbed else "",
        "hardware": {"cpu": "two cores", "torch": "2.11"},
        "workload": "toy-poisson",
        "rungs": {
            "replay": {"steps": 1234, "identical": 1234, "requests": 160, "first_difference": None},
            "step": {
                "regimes": {
                    "prefill": {"steps": 80, "median_error_pct": 2.2, "p95_error_pct": 7.9, "bias_pct": -0.4},
                    "decode": {"steps": 700, "median_error_pct": 3.1, "p95_error_pct": 9.4, "bias_pct": 0.6},
                    "mixed": {"steps": 454, "median_error_pct": 4.0, "p95_error_pct": 11.2, "bias_pct": float("nan")},
                }
            },
            "run": {
                "rows": [
                    {"metric": m, "stat": s, "real": r, "simulated": p, "error_pct": e, "floor_pct": f}
                    for m, s, r, p, e, f in rows
                ]
            },
        },
        "recordings": {"real": ["../real-1", "../real-2", "../real-3"], "simulated": str(runs / "simulated")},
    }


def write_report(directory: Path, content: dict) -> None:
    directory.mkdir()
    (directory / "report.json").write_text(json.dumps(content), encoding="utf-8")
    rng = random.Random(1)
    columns: dict[str, list[Any]] = {
        "regime": [],
        "measured_ns": [],
        "predicted_ns": [],
        "decode_rows": [],
        "prefill_tokens": [],
    }
    for name, count, low, high in (("prefill", 80, 8, 60), ("decode", 700, 3, 9), ("mixed", 454, 6, 40)):
        for _ in range(count):
            measured = rng.uniform(low, high) * MS
            columns["regime"].append(name)
            columns["measured_ns"].append(int(measured))
            columns["predicted_ns"].append(int(measured * rng.gauss(1.0, 0.04)))
            columns["decode_rows"].append(4)
            columns["prefill_tokens"].append(0)
    table = pa.table({**columns, "decode_context": [0] * len(columns["regime"])})
    pq.write_table(table, directory / "step_residuals.parquet")


def write_samples(runs: Path) -> Path:
    """Write a runs directory: three real repeats, a simulation of them, and a report."""
    runs.mkdir(parents=True, exist_ok=True)
    for i in (1, 2, 3):
        toy_run(runs / f"real-{i}", "wall", seed=i, noise=0.06)
    toy_run(runs / "simulated", "virtual", seed=0, bias=1.04)
    write_report(runs / "validation", report(runs))
    return runs


def plan_example() -> dict[str, Any]:
    """Return the `settings` and the `answer` of the bundled plan."""
    example: dict[str, Any] = json.loads(ANSWERS.read_text(encoding="utf-8"))[0]
    return example


def one_line(app: Any) -> str:
    """Return a page's only error as it is read, which must be one line and look like no traceback."""
    assert not app.exception
    (error,) = app.error
    assert "\n" not in error.value and "Traceback" not in error.value
    return re.sub(r"\\(.)", r"\1", error.value)


def borne() -> MostClientsDocument:
    """Return an answer to how many users a fleet bears: that of docs/plan.md."""
    fleet = Borne(
        engine="TP1 H100",
        replicas=1,
        gpus=1,
        usd_per_hour=2.69,
        clients=154,
        as_predicted=188,
        if_slow=144,
        if_fast=297,
        seen={"tpot_ms p95<=20": "19.6 ms"},
        breaks="tpot_ms p95<=20",
        level="interpolated",
        reason="all kernels of the steps are within measured shapes",
    )
    return MostClientsDocument(
        answer="154 users: so many does 1 replica x TP1 H100 ($2.69/h) bear within the SLOs.",
        objectives=("ttft_ms p95<=500", "tpot_ms p95<=20"),
        risk=0.1,
        fleets=(fleet,),
        inputs={"command": "tokentwin plan --prompt 1500 --output 300 --users 100 --replicas 1 --gpu H100"},
    )
