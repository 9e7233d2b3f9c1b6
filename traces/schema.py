"""The exchange format: the columns of a recorded run.

The real engine and the simulator write the same three datasets (`runs`, `requests`, `steps`), each a Parquet file whose
fields carry a unit and a definition. Readers do not need to know which clock wrote them. All times are integer
nanoseconds from the start of the run. A time that never came is null.

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

from serving.errors import UserError
from serving.step_plan import AGGREGATES
from traces.formats.parquet import SCHEMA, arrow_reason

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
        """The Arrow field, which carries the unit and the definition."""
        return pa.field(self.name, self.type, metadata={"unit": self.unit, "definition": self.definition})


_I64, _I32, _TEXT = pa.int64(), pa.int32(), pa.string()
# A replica: its number and pool, the GPUs it occupies from `started_ns` to `ended_ns` (null: to the end of the run),
# the time when it began to take requests (null: never), and the cause of its end: `crash`, `scale-in`, or nothing.
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
# A copy into the device's memory (`reads`) or out of it, with the times when it was asked for, began and ended.
_KV_TRANSFER = pa.struct(
    [("reads", pa.bool_()), ("size_bytes", _I64), ("submitted_ns", _I64), ("began_ns", _I64), ("ended_ns", _I64)]
)
_KV_ATTEMPT = pa.struct([("plan_ns", _I64), ("loaded_ids", pa.list_(_I64)), ("released_ids", pa.list_(_I64))])

RUNS = (
    Column("run_id", _TEXT, "", "name of the run, unique within a comparison"),
    Column("clock", _TEXT, "", "`wall` for the real engine, `virtual` for the simulator"),
    Column("workload", _TEXT, "", "name of the workload offered"),
    Column("deployment", _TEXT, "", "the deployment, as JSON"),
    Column("replicas", _I32, "", "engines behind the router"),
    Column("seed", _I64, "", "seed of everything random in the run"),
    Column("version", _TEXT, "", "version of tokentwin that wrote it"),
    Column("hardware", _TEXT, "", "machine and libraries, as JSON; empty for a simulated run"),
    Column("calibration", _TEXT, "", "id of the calibration that timed the steps; empty for a real run"),
    Column("status", _TEXT, "", "`complete`, or `interrupted` with what there was"),
    Column("duration_ns", _I64, "ns", "time from the start of the run to its last event"),
    Column("num_blocks", _I64, "blocks", "KV blocks of one replica, without the null block"),
    Column("block_size", _I32, "tokens", "tokens in one KV block"),
    Column("notes", _TEXT, "", "anything else a reader should know, as JSON (canary times, backend, ...)"),
    Column("replica_lives", pa.list_(_LIFE), "", "every replica there was and when, by number; null if not kept"),
    Column("usd_per_gpu_hour", pa.map_(_TEXT, pa.float64()), "$/h", "price of a GPU of each pool; null if not known"),
)

REQUESTS = (
    Column("request_id", _I64, "", "id in the workload"),
    Column("replica", _I32, "", "replica that served it, or had it last; null if none ever had it"),
    Column("tenant", _TEXT, "", "tenant, or empty"),
    Column("slo_class", _TEXT, "", "SLO class, or empty"),
    Column("priority", _I32, "", "smaller is more urgent"),
    Column("status", _TEXT, "", "`finished`, `rejected`, `timed_out`, `cancelled`, `aborted` or `unfinished`"),
    Column("reason", _TEXT, "", "reason why it did not finish, or empty"),
    Column("prompt_tokens", _I32, "tokens", "length of the prompt"),
    Column("output_tokens", _I32, "tokens", "tokens generated"),
    Column("arrival_ns", _I64, "ns", "intended arrival"),
    Column("send_ns", _I64, "ns", "when the client sent it"),
    Column("queued_ns", _I64, "ns", "when the scheduler received it"),
    Column("scheduled_ns", _I64, "ns", "start of the first step it was part of"),
    Column("first_token_ns", _I64, "ns", "time of its first output token"),
    Column("finish_ns", _I64, "ns", "time of its last output token"),
    Column("prefix_hit_tokens", _I32, "tokens", "prompt tokens found in the prefix cache at first admission"),
    Column("preemptions", _I32, "", "times it was preempted"),
    Column("preempted_ns", _I64, "ns", "time spent preempted, inside the phase it interrupted"),
    Column("recomputed_tokens", _I32, "tokens", "tokens computed again after preemptions"),
    Column("token_times_ns", pa.list_(_I64), "ns", "times of its output tokens; null if not kept"),
    Column("attempts", _I32, "", "times it was offered to the fleet; times of scheduling and tokens are of the last"),
    Column("end_ns", _I64, "ns", "when it left, finished or not"),
    Column("session", _TEXT, "", "conversation it belongs to, or empty"),
    Column("turn", _I32, "", "number of its turn in the conversation, from 0"),
    Column("drafts", _I32, "", "steps that verified draft tokens of it; null where the real engine had none"),
    Column("draft_tokens", _I32, "tokens", "draft tokens verified; null where the real engine had none"),
    Column("accepted_tokens", _I32, "tokens", "accepted ones among them; null where the real engine had none"),
    Column("prefill_replica", _I32, "", "replica of a prefill pool that had it first; null if `replica` did all of it"),
    Column(
        "transfer_ns", _I64, "ns", "time of the transfer of its KV to the decode replica; null if none was completed"
    ),
    Column(
        "tier_hit_tokens",
        pa.map_(_TEXT, _I64),
        "tokens",
        "prompt tokens loaded from each KV tier, at first admission; null without tiers",
    ),
    Column("swapped_in_tokens", _I32, "tokens", "tokens loaded from KV tiers after preemptions; null without tiers"),
    Column("received_ns", _I64, "ns", "when the API server had the whole request; null without one"),
    Column("first_text_ns", _I64, "ns", "when its first token was text; null without an API server"),
    Column("first_sent_ns", _I64, "ns", "when that text was written to its client; null without an API server"),
    Column("last_text_ns", _I64, "ns", "when its last token was text; null without an API server"),
    Column("last_sent_ns", _I64, "ns", "when its answer was written to its client; null without an API server"),
    Column("client_id", _TEXT, "", "name that its client gave it (X-Request-Id), or empty; null without an API server"),
    Column("client_ns", _I64, "ns", "its client's E2E beyond `received_ns` to `last_sent_ns`; null where not known"),
    Column("heard_ns", _I64, "ns", "when the router of several real engines heard that it had left; else null"),
    Column("grammar_compile_ns", _I64, "ns", "time that it waited for its grammar, from `queued_ns`; null without one"),
    Column(
        "steps_before_end", _I64, "", "steps of its engine that had returned when its client wanted no more; else null"
    ),
)


def _aggregate(name: str) -> Column:
    unit, definition, wide = AGGREGATES[name]
    return Column(name, _I64 if wide else _I32, unit, definition)


STEPS = (
    Column("replica", _I32, "", "replica that ran it"),
    Column("step", _I64, "", "number of the step on its replica, from 0"),
    Column("plan_ns", _I64, "ns", "when the scheduler began to plan"),
    Column("start_ns", _I64, "ns", "when the step began to execute"),
    Column("end_ns", _I64, "ns", "when its tokens were there"),
    *[_aggregate(name) for name in AGGREGATES if name != "draft_tokens"],
    Column("running", _I32, "", "requests admitted, after planning"),
    Column("waiting", _I32, "", "requests queued, after planning"),
    Column("used_blocks", _I64, "blocks", "KV blocks referenced, after planning"),
    Column("waiting_blocks", _I64, "blocks", "KV blocks the queued requests would need"),
    Column("preempted", _I32, "", "requests preempted while planning"),
    Column("in_flight", _I32, "", "steps under way when it was planned: 0 in the plain loop, at most 1 overlapped"),
    Column("schedule_ns", _I64, "ns", "host time in the scheduler; null on the virtual clock"),
    Column("prepare_ns", _I64, "ns", "host time making the step's tensors; null on the virtual clock"),
    Column("launch_ns", _I64, "ns", "host time handing the step to an asynchronous device; null on the virtual clock"),
    Column("host_ns", _I64, "ns", "host time for the step that the overlapped loop hides; null in the plain loop"),
    Column("forward_ns", _I64, "ns", "time in the model by marks on the device; null on the virtual clock"),
    Column("sample_ns", _I64, "ns", "device time sampling; null on the virtual clock"),
    Column("graph", pa.bool_(), "", "whether the step was replayed as a graph; null on the virtual clock"),
    Column("op_ns", pa.map_(_TEXT, _I64), "ns", "device time by operation, and in collectives; null if not timed"),
    Column("row_ids", pa.list_(_I64), "", "requests in the step, in running order; null if not kept"),
    Column("row_tokens", pa.list_(_I32), "tokens", "tokens of each, drafts among them; null if not kept"),
    Column("preempted_ids", pa.list_(_I64), "", "requests preempted, in order; null if not kept"),
    Column("stopped_ids", pa.list_(_I64), "", "requests that stopped before their full output; null if not kept"),
    _aggregate("draft_tokens"),  # columns are only ever added at the end
    Column("stages_ns", pa.list_(_I64), "ns", "time that each pipeline stage worked on it; null without stages"),
    Column(
        "thread_ns",
        _I64,
        "ns",
        "CPU time of the thread that computed the step, from `start_ns` to `end_ns`; null where the CPU does not",
    ),
    Column(
        "speed",
        pa.float64(),
        "",
        "speed of the machine around the step: on the CPU, how often a fixed piece of the engine's work fits into "
        "1 ms of its thread; on a GPU, its clock over its highest; null if not looked at",
    ),
    Column(
        "masked_rows", _I32, "", "tokens, and places after draft tokens, that had to keep to a grammar; null if none"
    ),
    Column("mask_ns", _I64, "ns", "host time working out which tokens those may be, within `prepare_ns`; null if none"),
    Column(
        "experts_hit",
        pa.float64(),
        "",
        "experts that got any token of the step, of those of a layer, mean over the layers; null for dense models and "
        "on the virtual clock",
    ),
    Column(
        "expert_imbalance",
        pa.map_(_I32, pa.float64()),
        "",
        "tokens on the busiest device over the mean of all, mean over the layers, by the number of devices that share "
        "a layer's experts; null for dense models and on the virtual clock",
    ),
    Column("draft_ns", _I64, "ns", "time of the step that proposed drafts for the next; null without, or if virtual"),
    Column(
        "row_accepted",
        pa.list_(_I32),
        "tokens",
        "accepted draft tokens of each row, whose drafts are all tokens but its first; null for a row without drafts",
    ),
    Column(
        "row_proposed",
        pa.list_(_I32),
        "tokens",
        "draft tokens then proposed for each row's request to verify next; null for one that got no token, or ended",
    ),
    Column("heard_ns", _I64, "ns", "when the router of several real engines heard that it had ended; else null"),
    Column("loaded_ids", pa.list_(_I64), "", "requests whose KV came from a tier since the step before; else null"),
    Column(
        "released_ids",
        pa.list_(_I64),
        "",
        "ended requests whose blocks had all been written to a tier since the step before; else null",
    ),
    Column(
        "kv_attempts",
        pa.list_(_KV_ATTEMPT),
        "",
        "plans before it that ran nothing, while KV was on its way, and what had come since the plan before; else null",
    ),
    Column(
        "kv_transfers",
        pa.list_(_KV_TRANSFER),
        "",
        "copies between the real engine's blocks and host memory that ended since the step before; else null",
    ),
    Column("kv_attempts_in_flight", pa.list_(_I32), "", "steps under way at each of `kv_attempts`; else null"),
    Column("longest_free_blocks", _I64, "blocks", "longest run of free KV blocks, after planning; null if KV is paged"),
    Column(
        "expert_tokens",
        pa.list_(_I32),
        "tokens",
        "tokens that went to each expert, by its number, summed over the layers; null for dense models and on the "
        "virtual clock",
    ),
)

DATASETS = {"runs": RUNS, "requests": REQUESTS, "steps": STEPS}


def arrow_schema(dataset: str, metadata: dict[str, str] | None = None) -> pa.Schema:
    """Return the Arrow schema of `runs`, `requests` or `steps`; `metadata` goes into the file's schema metadata."""
    return pa.schema([column.field for column in DATASETS[dataset]], metadata=metadata)


def described(schema: pa.Schema) -> list[dict[str, str]]:
    """Return one entry a column: `name`, `type` (Arrow's), `unit` (empty for a count or a label) and `definition`."""
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
    """Return the text of `columns.json`: JSON, one line a column."""
    blocks = (
        f'  "{name}": [\n' + ",\n".join(f"    {json.dumps(column, ensure_ascii=False)}" for column in columns) + "\n  ]"
        for name, columns in datasets.items()
    )
    return "{\n" + ",\n".join(blocks) + "\n}\n"


def columns_at(path: Path) -> dict[str, list[dict[str, str]]]:
    """Return the columns of one Parquet file, or of the datasets in the directory `path`.

    Raises UserError if `path` holds no Parquet file, or if a file is damaged.
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
