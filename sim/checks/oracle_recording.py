"""Recordings of vLLM's or SGLang's own scheduler: a workload, a linear cost, and its decisions on a virtual clock.

The tables here list every field of `config` and `requests` that a recording may have, and what it means for our
scheduler. A recording with any other is refused, because it could not be reproduced. Unknown columns of `steps` and
`results`, such as KV events, change no decision and are not compared. A recording may also state how much KV of each
request can be loaded from outside the engine, and how long loads take; `RecordedConnector` loads it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simpy.events import ProcessGenerator

from tokentwin.serving.cost_model import TokenCost
from tokentwin.serving.data_file import parse_json
from tokentwin.serving.deployments.config import Deployment, SchedulerConfig, parse
from tokentwin.serving.errors import UserError
from tokentwin.serving.request import Request
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import Item, Workload, WorkloadRequest, shares_prefixes
from tokentwin.sim.clock import TRANSFER_ENDS, VirtualClock
from tokentwin.sim.replica import Replica
from tokentwin.traces.formats.rows import read_head


@dataclass(frozen=True)
class Outside:
    """The KV outside the engine.

    Attributes:
        tokens: number of tokens with KV outside the engine, by request id
        failing: ids of the requests of which the first load fails
        base_ns: time of a load in addition to the time of its tokens
        per_token_ns: time of a load for each token
        sync: True if the step that admits a request loads its KV, in no time
        whole: True if all known tokens of a request can be loaded; otherwise all but the last
    """

    tokens: Mapping[int, int]
    failing: Collection[int]
    base_ns: int = 0
    per_token_ns: int = 0
    sync: bool = False
    whole: bool = False


class RecordedConnector:
    """The `tokentwin.serving.kv.external.ExternalKv` of `replica`, which offers the KV of `outside`.

    It writes to `hits`, by request id, how many tokens were cached or loaded at the first admission.
    """

    def __init__(self, clock: VirtualClock, replica: Replica, outside: Outside, hits: dict[int, int]) -> None:
        self._hits = hits
        self.synchronous = outside.sync
        self._clock = clock
        self._replica = replica
        self._outside = outside
        self._failed: set[int] = set()

    def matched(self, request: Request, cached_tokens: int) -> int:
        if request.id in self._failed:
            return 0
        most = request.known if self._outside.whole else request.known - 1
        return max(min(self._outside.tokens[request.id], most) - cached_tokens, 0)

    def load(self, request: Request, start: int, tokens: int) -> None:
        if not self.synchronous:
            self._clock.start(self._load(request, self._outside.base_ns + self._outside.per_token_ns * tokens))

    def _load(self, request: Request, ns: int) -> ProcessGenerator:
        yield self._clock.until(self._clock.now_ns + ns, TRANSFER_ENDS)
        if request.id in self._outside.failing:
            self._failed.add(request.id)
            self._replica.load_failed(request)
        else:
            self._replica.loaded(request)

    def admitted(self, request: Request) -> None:
        self._hits.setdefault(request.id, request.cached)

    def keeps(self, request: Request) -> bool:
        return False


_LARGEST_BYTES = 1 << 30
_WORD = re.compile(r"[-_ ]")


def _drafting(drafts: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the settings of speculative decoding, with a cost of 0: the recording's linear cost gives all times."""
    if not drafts:
        return {}
    costs: dict[str, Any] = {"model": "any"} if drafts.get("method") == "draft_model" else {"draft_us": 0}
    return {"speculative": {"method": "ngram", **costs, **drafts}}


def _compiling(ready_ns: int | None, row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the time of compiling a grammar. Requests are not `structured`, because recordings have no masks."""
    return {"grammar_compile_ns": ready_ns - row["arrival_ns"]} if ready_ns else {}


def _prompt(prompt: Sequence[Sequence[Any]], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the prompt. A salt renames its first segment, so that prompts with other salts share no prefix."""
    segments = [(str(name), int(tokens)) for name, tokens in prompt]
    if segments and row.get("salt"):
        name, tokens = segments[0]
        segments[0] = f"salt {row['salt']}: {name}", tokens
    return {"prompt": tuple(segments)}


def _encoding(encoder: Sequence[int]) -> dict[str, Any]:
    return {"max_num_encoder_input_tokens": encoder[0], "encoder_cache_size": encoder[1]}


# Keys of `config` that are not settings of a scheduler, with functions that return the settings for their values.
_CONFIG: dict[str, Callable[[Any], dict[str, Any]]] = {
    "speculative": _drafting,
    "vllm": dict,  # rarer settings of vLLM's SchedulerConfig, which have the same names here
    "pp": lambda stages: {},  # number of pipeline stages, which is a setting of the deployment and not of the scheduler
    "v2": lambda runs: {},  # vLLM's V2 model runner, which stages need in the overlapped loop
    "connector": lambda connector: {},  # see `_outside`
    "encoder": _encoding,  # tokens that a step may encode, and size of the encoder cache
    "kv_events_config": lambda events: {},  # whether the engine tells others what is cached
}

# Keys of each row of `requests`, with functions of value and row that return fields of a `WorkloadRequest`.
_REQUEST: dict[str, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    "id": lambda id, row: {"id": id},
    "arrival_ns": lambda at_ns, row: {"arrival_ns": at_ns},
    "prompt": _prompt,
    "output_len": lambda tokens, row: {"output_len": tokens},
    "priority": lambda priority, row: {"priority": priority},
    "max_tokens": lambda tokens, row: {"max_tokens": tokens},
    "abort_ns": lambda at_ns, row: {"cancel_ns": at_ns},
    "grammar_ns": _compiling,
    "skip_cache": lambda skips, row: {"skip_reading_prefix_cache": skips},
    "salt": lambda salt, row: {},  # see `_prompt`
    "lora": lambda number, row: {"adapter": f"lora {number}"} if number else {},  # 0: the base model
    "mm": lambda items, row: {"items": tuple(Item(*item) for item in items)},
    "ext": lambda tokens, row: {},  # see `_outside`
    "ext_fails": lambda fails, row: {},  # see `_outside`
}

# Keys of each row of `steps` and `results` that are compared
_STEP = ("t", "dt", "n", "pre", "s", "enc", "drafts", "got", "waste")
_RESULT = ("id", "first_token_ns", "finish_ns", "prefix_hit_tokens", "tokens", "finish")


class RecordedStages(TokenCost):
    """The `PipelinedCost` of an engine with pipeline stages. Each stage takes a stated permille of a step's time.

    By default the first stage takes all of it, so that steps run one after another.
    """

    def __init__(self, stages: int, stages_permille: Sequence[int] = (), transfer_ns: int = 0, **prices: int) -> None:
        super().__init__(**prices)
        self._permille = tuple(stages_permille) or (1000, *[0] * (stages - 1))
        self._transfer_ns = transfer_ns
        if len(self._permille) != stages:
            raise ValueError(f"stages_permille has {len(self._permille)} numbers for {stages} stages")

    def stages_ns(self, plan: StepPlan) -> list[int]:
        step_ns = self.step_ns(plan)
        return [step_ns * permille // 1000 for permille in self._permille]

    def transfers_ns(self, plan: StepPlan) -> list[int]:
        return [self._transfer_ns] * (len(self._permille) - 1)


@dataclass(frozen=True)
class OracleRecording:
    """A recording of `engine`, vLLM or SGLang. `steps`, and `results` by request id, have the fields that are compared.

    All requests have left at `ends_ns`. Steps that end later are left out: they were planned for a request that stopped
    early, accepted more drafts than it needed, or was cancelled. A plan that preempts and schedules nothing is not a
    step.

    Attributes:
        feature: engine, and what the recording is about: by default the first word of its name
        outside: None if there was no KV connector
        columns: names of the columns of `steps`
        not_compared: names of other columns of steps and results
    """

    name: str
    feature: str
    deployment: Deployment
    cost: TokenCost
    workload: Workload
    steps: list[dict[str, Any]]
    results: dict[int, dict[str, Any]]
    columns: Collection[str]
    not_compared: Collection[str]
    ends_ns: int
    outside: Outside | None
    engine: str


def read_oracle_recording(path: Path, policy: str | None) -> OracleRecording:
    """Read the recording at `path`, for `policy` or that of its engine.

    Raises UserError for an unknown field or another kind of file.
    """
    recording = _read(path)
    engine = "SGLang" if "sglang" in recording else "vLLM"
    try:
        empty = [key for key in ("requests", "steps", "results") if not isinstance(recording[key], list)]
        for number, row in enumerate(recording["requests"]):
            _refuse_unknown(row, _REQUEST, f"{path}: requests[{number}]")
        config = recording["config"]
        _refuse_unknown(config, _CONFIG.keys() | SchedulerConfig.model_fields.keys(), f"{path}: config")
        settings: dict[str, Any] = {"cut_at_max_model_len": True}  # as vLLM's scheduler does
        for name, value in config.items():
            settings |= _CONFIG[name](value) if name in _CONFIG else {name: value}
        scheduler = parse(SchedulerConfig, settings, where="config")
        stages = config.get("pp", 1)
        cost = TokenCost(**recording["cost"]) if stages == 1 else RecordedStages(stages, **recording["cost"])
        stated = Deployment(policy=policy or engine.lower(), pipeline_parallel_size=stages)
        deployment = stated.model_copy(update={"scheduler": scheduler})
        outside = _outside(config.get("connector"), recording["requests"], f"{path}: config.connector")
        workload = _workload(recording["requests"])
        results = {row["id"]: {name: row[name] for name in row if name in _RESULT} for row in recording["results"]}
        if len(results) < len(recording["results"]) or results.keys() - {one.id for one in workload.requests}:
            remedy = "is not an oracle recording: a request has two results, or a result has no request"
            raise UserError("recording", str(path), remedy)
        empty += [key for key in ("requests", "steps", "results") if not recording[key]]
        if empty:
            raise UserError("recording", str(path), f"is not an oracle recording: it has no {', '.join(empty)}")
        ends_ns = max(row["finish_ns"] for row in recording["results"])
        recorded = {name for step in recording["steps"] for name in step}
        columns = [name for name in _STEP if name in recorded]
        steps = [
            {name: sorted(step["pre"]) if name == "pre" else step.get(name, []) for name in columns}
            for step in recording["steps"]
            if step["n"] and step.get("s", step["t"]) + step["dt"] <= ends_ns
        ]
        more = (recorded - {*_STEP}) | ({name for row in recording["results"] for name in row} - {*_RESULT})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError("recording", str(path), f"is not an oracle recording: {error!r}") from None
    name = str(recording.get("name") or path.name.split(".")[0])
    feature = f"{engine} {recording.get('feature') or _WORD.split(name)[0]}"
    return OracleRecording(
        name, feature, deployment, cost, workload, steps, results, columns, sorted(more), ends_ns, outside, engine
    )


def _refuse_unknown(row: Mapping[str, Any], known: Collection[str], where: str) -> None:
    for name, value in row.items():
        if name not in known:
            remedy = "is a field that conformance does not know; record a scenario without it"
            raise UserError(f"{where}.{name}", value, remedy)


def _outside(connector: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]], where: str) -> Outside | None:
    if connector is None:
        return None
    _refuse_unknown(connector, {"base_ns", "per_token_ns", "sync", "whole"}, where)
    failing = {row["id"] for row in rows if row.get("ext_fails")}
    return Outside({row["id"]: row.get("ext", 0) for row in rows}, failing, **connector)


def _workload(rows: Sequence[Mapping[str, Any]]) -> Workload:
    requests = []
    for row in rows:
        given: dict[str, Any] = {}
        for name, value in row.items():
            given |= _REQUEST[name](value, row)
        requests.append(WorkloadRequest(**given))
    requests.sort(key=lambda request: (request.arrival_ns, request.id))
    return Workload(requests, shares_prefixes=shares_prefixes(requests))


def _read(path: Path) -> dict[str, Any]:
    try:
        recording = parse_json(read_head(path, _LARGEST_BYTES, "recording"))
    except ValueError as error:
        raise UserError("recording", str(path), f"{error}; it must be JSON, plain or gzipped") from None
    missing = [
        key
        for key in ("config", "cost", "requests", "steps", "results")
        if not isinstance(recording, dict) or key not in recording
    ]
    if missing:
        raise UserError("recording", str(path), f"is not an oracle recording: it has no {', '.join(missing)}")
    return dict(recording)
