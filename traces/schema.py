"""The columns of a recorded run, which are the exchange format of this project.

The real engine and the simulator write the same three datasets (`runs`, `requests`, `steps`). Each one is a Parquet
file with the unit and the definition of every field. Readers do not need to know whether a run was real or simulated.
All times are integer nanoseconds from the start of the run. The time of an event that did not happen is null.

Names, types, units and definitions are also written as `columns.json` beside each dataset, for tools that do not read
the metadata of Arrow fields.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from tokentwin.serving.errors import UserError
from tokentwin.serving.step_plan import AGGREGATES
from tokentwin.traces.formats.parquet import arrow_reason
from tokentwin.traces.formats.request_table import SCHEMA

COLUMNS_FILE = "columns.json"
_NAMES_INSIDE = re.compile(r" \('\w+'\)")  # Parquet gives these names to the fields of a map


class Column(NamedTuple):
    """A field of a dataset: its Arrow type, unit (empty for a count or a label) and definition."""

    name: str
    type: pa.DataType
    unit: str
    definition: str

    @property
    def field(self) -> pa.Field:
        """The Arrow field, with the unit and the definition as metadata."""
        return pa.field(self.name, self.type, metadata={"unit": self.unit, "definition": self.definition})


_I64, _I32, _TEXT = pa.int64(), pa.int32(), pa.string()
# A replica: its number and pool, the GPUs it occupies from `started_ns` to `ended_ns` (null: to the end of the run),
# the time when it began to take requests (null: never), and the cause of its end: `crash`,
# `interruption`, `scale-in`, or nothing.
_LIFE = pa.struct(
    [
        ("replica", _I32),
        ("pool", _TEXT),
        ("gpus", _I32),
        ("started_ns", _I64),
        ("ready_ns", _I64),
        ("ended_ns", _I64),
        ("ended_by", _TEXT),
    ]
)
# A copy into the device's memory (`reads`) or out of it, with the times at which it was submitted, began and ended.
_KV_TRANSFER = pa.struct(
    [("reads", pa.bool_()), ("size_bytes", _I64), ("submitted_ns", _I64), ("began_ns", _I64), ("ended_ns", _I64)]
)
_KV_ATTEMPT = pa.struct([("plan_ns", _I64), ("loaded_ids", pa.list_(_I64)), ("released_ids", pa.list_(_I64))])
# A step's LoRA adapters: their number and number of tokens; how many were loaded from disk into host memory before the
# step, and the host time of that; how many were copied into slots, and the device time of that.
_ADAPTERS = pa.struct(
    [("adapters", _I32), ("tokens", _I32), ("loads", _I32), ("load_ns", _I64), ("copies", _I32), ("copy_ns", _I64)]
)

RUNS = (
    Column("run_id", _TEXT, "", "name of the run, unique within a comparison"),
    Column("clock", _TEXT, "", "`wall` for the real engine, `virtual` for the simulator"),
    Column("workload", _TEXT, "", "name of the workload"),
    Column("deployment", _TEXT, "", "the deployment, as JSON"),
    Column("replicas", _I32, "", "engines behind the router"),
    Column("seed", _I64, "", "seed of all random numbers of the run"),
    Column("version", _TEXT, "", "version of tokentwin that wrote it"),
    Column("hardware", _TEXT, "", "machine and libraries, as JSON; empty for a simulated run"),
    Column("calibration", _TEXT, "", "id of the calibration that timed the steps; empty for a real run"),
    Column("status", _TEXT, "", "`complete`, or `interrupted` if the recording ends before the run"),
    Column("duration_ns", _I64, "ns", "time from the start of the run to its last event"),
    Column("num_blocks", _I64, "blocks", "KV blocks of one replica, without the null block"),
    Column("block_size", _I32, "tokens", "tokens in one KV block"),
    Column("notes", _TEXT, "", "further facts about the run, as JSON (canary times, backend, ...)"),
    Column(
        "replica_lives",
        pa.list_(_LIFE),
        "",
        "every replica of the run with the times of its life, by number; null if not recorded",
    ),
    Column("usd_per_gpu_hour", pa.map_(_TEXT, pa.float64()), "$/h", "price of a GPU of each pool; null if not known"),
)

REQUESTS = (
    Column("request_id", _I64, "", "id of the request in the workload"),
    Column(
        "replica",
        _I32,
        "",
        "replica that served the request, or the last replica that had it; null if no replica had it",
    ),
    Column("tenant", _TEXT, "", "tenant, or empty"),
    Column("slo_class", _TEXT, "", "SLO class, or empty"),
    Column("priority", _I32, "", "priority of the request; smaller is more urgent"),
    Column("status", _TEXT, "", "`finished`, `rejected`, `timed_out`, `cancelled`, `aborted` or `unfinished`"),
    Column("reason", _TEXT, "", "reason why the request did not finish, or empty"),
    Column("prompt_tokens", _I32, "tokens", "length of the prompt"),
    Column("output_tokens", _I32, "tokens", "number of generated tokens"),
    Column("arrival_ns", _I64, "ns", "time of arrival in the workload"),
    Column("send_ns", _I64, "ns", "time when the client sent the request"),
    Column("queued_ns", _I64, "ns", "time when the scheduler received the request"),
    Column("scheduled_ns", _I64, "ns", "start of the first step with the request"),
    Column("first_token_ns", _I64, "ns", "time of the request's first output token"),
    Column("finish_ns", _I64, "ns", "time of the request's last output token"),
    Column("prefix_hit_tokens", _I32, "tokens", "prompt tokens found in the prefix cache at first admission"),
    Column("preemptions", _I32, "", "number of preemptions of the request"),
    Column(
        "preempted_ns",
        _I64,
        "ns",
        "time that the request spent preempted, as a part of the phase (prefill or decode) that was interrupted",
    ),
    Column("recomputed_tokens", _I32, "tokens", "tokens that were computed again after preemptions"),
    Column("token_times_ns", pa.list_(_I64), "ns", "times of the request's output tokens; null if not recorded"),
    Column(
        "attempts",
        _I32,
        "",
        "number of attempts (first try and retries); times of scheduling and of tokens are those of the last attempt",
    ),
    Column("end_ns", _I64, "ns", "time when the request left, finished or not"),
    Column("session", _TEXT, "", "conversation that the request belongs to, or empty"),
    Column("turn", _I32, "", "number of the request's turn in the conversation, from 0"),
    Column(
        "drafts",
        _I32,
        "",
        "number of steps that verified draft tokens of the request; null if the real engine had no drafts",
    ),
    Column("draft_tokens", _I32, "tokens", "number of verified draft tokens; null if the real engine had no drafts"),
    Column("accepted_tokens", _I32, "tokens", "number of accepted draft tokens; null if the real engine had no drafts"),
    Column(
        "prefill_replica",
        _I32,
        "",
        "replica of a prefill pool that computed the prompt; null if `replica` computed everything",
    ),
    Column(
        "transfer_ns",
        _I64,
        "ns",
        "duration of the KV transfer to the decode replica; null if no transfer was completed",
    ),
    Column(
        "tier_hit_tokens",
        pa.map_(_TEXT, _I64),
        "tokens",
        "prompt tokens loaded from each KV tier at first admission; null without tiers",
    ),
    Column("swapped_in_tokens", _I32, "tokens", "tokens loaded from KV tiers after preemptions; null without tiers"),
    Column("received_ns", _I64, "ns", "time when the API server had the complete request; null without an API server"),
    Column("first_text_ns", _I64, "ns", "time when the first token was text; null without an API server"),
    Column(
        "first_sent_ns", _I64, "ns", "time when the first text was written to the client; null without an API server"
    ),
    Column("last_text_ns", _I64, "ns", "time when the last token was text; null without an API server"),
    Column(
        "last_sent_ns",
        _I64,
        "ns",
        "time when the complete answer was written to the client; null without an API server",
    ),
    Column(
        "client_id", _TEXT, "", "the client's id of the request (X-Request-Id), or empty; null without an API server"
    ),
    Column(
        "client_ns",
        _I64,
        "ns",
        "the client's E2E minus the time from `received_ns` to `last_sent_ns`; null if not known",
    ),
    Column(
        "heard_ns",
        _I64,
        "ns",
        "time when the router of several real engines learned that the request had left; else null",
    ),
    Column(
        "grammar_compile_ns",
        _I64,
        "ns",
        "time from `queued_ns` until the request's grammar was compiled; null without a grammar",
    ),
    Column(
        "steps_before_end",
        _I64,
        "",
        "number of steps that the engine had completed when the client cancelled the request; else null",
    ),
)


def _aggregate(name: str) -> Column:
    unit, definition, wide = AGGREGATES[name]
    return Column(name, _I64 if wide else _I32, unit, definition)


STEPS = (
    Column("replica", _I32, "", "replica that ran the step"),
    Column("step", _I64, "", "number of the step on its replica, from 0"),
    Column("plan_ns", _I64, "ns", "time when the scheduler began to plan the step"),
    Column("start_ns", _I64, "ns", "time when the step began to execute"),
    Column("end_ns", _I64, "ns", "time when the step's tokens were available"),
    *[_aggregate(name) for name in AGGREGATES if name != "draft_tokens"],
    Column("running", _I32, "", "number of admitted requests, after planning"),
    Column("waiting", _I32, "", "number of queued requests, after planning"),
    Column("used_blocks", _I64, "blocks", "number of KV blocks in use, after planning"),
    Column("waiting_blocks", _I64, "blocks", "number of KV blocks that the queued requests would need"),
    Column("preempted", _I32, "", "number of requests preempted while the step was planned"),
    Column(
        "in_flight",
        _I32,
        "",
        "unfinished steps when the step was planned: 0 in the plain loop, at most 1 in the overlapped loop",
    ),
    Column("schedule_ns", _I64, "ns", "CPU time of the scheduler; null on the virtual clock"),
    Column("prepare_ns", _I64, "ns", "CPU time to make the step's tensors; null on the virtual clock"),
    Column("launch_ns", _I64, "ns", "CPU time to launch the step on an asynchronous device; null on the virtual clock"),
    Column("host_ns", _I64, "ns", "CPU time of the step that the overlapped loop hides; null in the plain loop"),
    Column("forward_ns", _I64, "ns", "device time of the model; null on the virtual clock"),
    Column("sample_ns", _I64, "ns", "device time of sampling; null on the virtual clock"),
    Column("graph", pa.bool_(), "", "whether the step ran as a CUDA graph; null on the virtual clock"),
    Column("op_ns", pa.map_(_TEXT, _I64), "ns", "device time of each operation and of collectives; null if not timed"),
    Column("row_ids", pa.list_(_I64), "", "ids of the requests in the step, in running order; null if not recorded"),
    Column(
        "row_tokens",
        pa.list_(_I32),
        "tokens",
        "tokens of each request in `row_ids`, with draft tokens; null if not recorded",
    ),
    Column("preempted_ids", pa.list_(_I64), "", "ids of the preempted requests, in order; null if not recorded"),
    Column(
        "stopped_ids", pa.list_(_I64), "", "ids of requests that stopped before their full output; null if not recorded"
    ),
    _aggregate("draft_tokens"),  # columns are only ever added at the end
    Column("stages_ns", pa.list_(_I64), "ns", "time that each pipeline stage worked on the step; null without stages"),
    Column(
        "thread_ns",
        _I64,
        "ns",
        "CPU time of the thread that computed the step, from `start_ns` to `end_ns`; null if the device is not the CPU",
    ),
    Column(
        "speed",
        pa.float64(),
        "",
        "speed of the machine around the step: on a CPU, how often a fixed piece of the engine's work fits into "
        "1 ms of the thread's CPU time; on a GPU, the clock over the highest clock; null if not measured",
    ),
    Column(
        "masked_rows",
        _I32,
        "",
        "number of sampled positions (tokens, and places after draft tokens) under a grammar; null if none",
    ),
    Column(
        "mask_ns",
        _I64,
        "ns",
        "CPU time to compute the tokens that grammars allow, a part of `prepare_ns`; null without a grammar",
    ),
    Column(
        "experts_hit",
        pa.float64(),
        "",
        "number of experts of a layer that got a token of the step, mean over the layers; null for dense models and on "
        "the virtual clock",
    ),
    Column(
        "expert_imbalance",
        pa.map_(_I32, pa.float64()),
        "",
        "tokens on the busiest device over the mean of all devices (mean over the layers), for each number of devices "
        "that could share a layer's experts; null for dense models and on the virtual clock",
    ),
    Column(
        "draft_ns",
        _I64,
        "ns",
        "part of the step's time that proposed drafts for the next step; null without drafts and on the virtual clock",
    ),
    Column(
        "row_accepted",
        pa.list_(_I32),
        "tokens",
        "accepted draft tokens of each row (all tokens of a row but the first are drafts); null for a row without "
        "drafts",
    ),
    Column(
        "row_proposed",
        pa.list_(_I32),
        "tokens",
        "draft tokens that were then proposed for each row's request; null if the request got no token, or ended",
    ),
    Column(
        "heard_ns",
        _I64,
        "ns",
        "time when the router of several real engines learned that the step had ended; else null",
    ),
    Column(
        "loaded_ids",
        pa.list_(_I64),
        "",
        "ids of requests whose KV was loaded from a tier since the step before; else null",
    ),
    Column(
        "released_ids",
        pa.list_(_I64),
        "",
        "ids of ended requests whose last blocks were written to a tier since the step before; else null",
    ),
    Column(
        "kv_attempts",
        pa.list_(_KV_ATTEMPT),
        "",
        "plans before the step that ran nothing because KV was being loaded, each with the KV that had come; else null",
    ),
    Column(
        "kv_transfers",
        pa.list_(_KV_TRANSFER),
        "",
        "copies between the real engine's blocks and host memory that ended since the step before; else null",
    ),
    Column("kv_attempts_in_flight", pa.list_(_I32), "", "unfinished steps at each of `kv_attempts`; else null"),
    Column(
        "longest_free_blocks",
        _I64,
        "blocks",
        "number of blocks in the longest contiguous run of free KV blocks, after planning; null if KV is paged",
    ),
    Column(
        "expert_tokens",
        pa.list_(_I32),
        "tokens",
        "tokens that each expert got, in order of the experts' numbers, summed over the layers; null for dense models "
        "and on the virtual clock",
    ),
    Column(
        "adapters",
        _ADAPTERS,
        "",
        "number of LoRA adapters in the step and of their tokens; number and time of loads from disk (in `prepare_ns`) "
        "and of copies into slots (before `start_ns`); null without adapters and on the virtual clock",
    ),
)

DATASETS = {"runs": RUNS, "requests": REQUESTS, "steps": STEPS}


def arrow_schema(dataset: str, metadata: dict[str, str] | None = None) -> pa.Schema:
    """Return the Arrow schema of `runs`, `requests` or `steps`; `metadata` goes into the file's schema metadata."""
    return pa.schema([column.field for column in DATASETS[dataset]], metadata=metadata)


def described(schema: pa.Schema) -> list[dict[str, str]]:
    """Return an entry per column: `name`, Arrow `type`, `unit` (empty for a count or a label) and `definition`."""
    return [
        {
            "name": field.name,
            "type": _NAMES_INSIDE.sub("", str(field.type).replace("<element: ", "<item: ")),
            "unit": _said(field, b"unit"),
            "definition": _said(field, b"definition"),
        }
        for field in schema
    ]


def recording_columns() -> dict[str, list[dict[str, str]]]:
    """Return the columns of every dataset of a recording, by dataset."""
    return {"workload": described(SCHEMA), **{name: described(arrow_schema(name)) for name in DATASETS}}


def columns_text(datasets: Mapping[str, list[dict[str, str]]]) -> str:
    """Return the text of `columns.json`, which is JSON with one line per column."""
    blocks = (
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(column, ensure_ascii=False)}" for column in columns) + "\n  ]"
        for name, columns in datasets.items()
    )
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def columns_at(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the columns of one Parquet file, or of the datasets in the directory `path`.

    Raises UserError if there is no Parquet file at `path`, or if a file is damaged.
    """
    if path.is_dir():
        beside = path / COLUMNS_FILE
        if beside.is_file():
            try:
                columns: dict[str, list[dict[str, str]]] = json.loads(beside.read_text(encoding="utf-8"))
            except ValueError:
                raise UserError("columns", str(beside), "is damaged; remove it to read the Parquet files") from None
            return columns
        files = sorted(path.glob("*.parquet"))
        if not files:
            raise UserError("columns", str(path), "holds no Parquet file; give a Parquet file, a recording or a sweep")
    else:
        files = [path]
    return {file.stem: described(_schema(file)) for file in files}


def _schema(file: Path) -> pa.Schema:
    try:
        return pq.read_schema(file)
    except FileNotFoundError:
        raise UserError("columns", str(file), "does not exist") from None
    except (pa.ArrowException, OSError) as error:
        raise UserError("columns", str(file), f"is not a Parquet file: {arrow_reason(error)}") from None


def _said(field: pa.Field, key: bytes) -> str:
    return (field.metadata or {}).get(key, b"").decode()
