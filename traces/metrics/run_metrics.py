"""The metrics of a recorded run, computed in the same way for real and for simulated runs.

Metrics are computed from Arrow columns with numpy. No Python loop runs over requests, tokens or steps, so a million
requests take about a second. Columns of a recording are read when they are needed, and few of them are kept in memory.
Names and definitions of metrics are in the registry (`tokentwin.serving.metrics`).

Percentiles are exact order statistics by nearest rank and are never interpolated. Latencies are those of finished
requests; all other requests still count in the denominator of SLO attainment.

A replica occupies its GPUs from its start to its end, so cold starts, drains and recoveries are paid for. It takes
requests from the time when it is ready. These times are in the column `replica_lives` of `runs`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from tokentwin.serving.deployments.config import SchedulerConfig, parse
from tokentwin.serving.deployments.gpu_spec import GpuSpec
from tokentwin.serving.errors import UserError
from tokentwin.serving.metrics import METRICS, check_slo, metric
from tokentwin.traces.metrics.saturation import Saturation, TimesInSystem, saturation_of
from tokentwin.traces.metrics.step_metrics import STEP_METRICS, StepMetrics, StepWork
from tokentwin.traces.recording import Recording, notes_of
from tokentwin.traces.schema import DATASETS
from tokentwin.traces.tables import Datasets, Distribution, Floats, MemoryTables, gaps_ms, known, numbers, over, ratio

REQUEST_METRICS = tuple(m.name for m in METRICS.values() if m.scope == "request")
SERVED_METRICS = ("tokenise_ms", "detokenise_ms", "stream_ms", "client_ms")  # metrics of an API server and its clients
DISTRIBUTIONS = (*REQUEST_METRICS, "itl_ms", *STEP_METRICS)

_SPANS = {  # start and end of each metric, as times of a request
    "ttft_ms": ("arrival_ns", "first_token_ns"),
    "e2e_ms": ("arrival_ns", "finish_ns"),
    "queue_ms": ("arrival_ns", "scheduled_ns"),
    "prefill_ms": ("scheduled_ns", "first_token_ns"),
    "decode_ms": ("first_token_ns", "finish_ns"),
    "send_delay_ms": ("arrival_ns", "send_ns"),
    "tokenise_ms": ("received_ns", "arrival_ns"),
    "detokenise_ms": ("finish_ns", "last_text_ns"),
    "stream_ms": ("last_text_ns", "last_sent_ns"),
}
_PIECE = 1 << 12  # number of requests whose token times are read at once
_AT_ONCE = 1 << 16  # a recording with at most this number of requests and steps is read completely, which is faster
# number of requests per piece: temporary arrays of a million requests take longer to clear than to use
_SUMMED = 1 << 16
_READ = {
    name: [column.name for column in columns if column.name not in ("row_ids", "row_tokens")]
    for name, columns in DATASETS.items()
    if name != "runs"
}


class RunMetrics:
    """The metrics of one run, from its tables `requests` and (if there is one) `steps`, or from a recording.

    `slo` has upper bounds of request metrics, for example `{"ttft_ms": 200, "tpot_ms": 50}`; a request must meet all
    bounds. `gpus` is the number of provisioned GPUs, and `work` is the work (FLOPs and bytes) of a step on these GPUs.
    Metrics that are not known are None (scalars) or empty (distributions).
    """

    def __init__(
        self,
        requests: pa.Table | Recording,
        steps: pa.Table | None = None,
        run: Mapping[str, Any] | None = None,
        slo: Mapping[str, float] | None = None,
        gpus: int | None = None,
        work: StepWork | None = None,
    ) -> None:
        tables = {"requests": requests, **({} if steps is None else {"steps": steps})}
        self._datasets: Datasets = requests if isinstance(requests, Recording) else MemoryTables(**tables)
        self._run = dict(run or {})
        self._steps = StepMetrics(self._datasets, self._run.get("num_blocks"), work)
        self._replica_lives: list[dict[str, Any]] = self._run.get("replica_lives") or []
        self._duration_ns = int(self._run.get("duration_ns") or 0)
        self._gpus = gpus
        self.slo = check_slo(slo or {})
        self._columns: dict[str, Floats] = {}
        self._numbers: dict[str, Floats] = {}
        self._distributions: dict[str, Distribution] = {}

    @classmethod
    def from_recording(
        cls,
        recording: Recording,
        slo: Mapping[str, float] | None = None,
        peak: GpuSpec | None = None,
        notes: Mapping[str, Any] | None = None,
    ) -> RunMetrics:
        """Return the metrics of a recording. MFU and MBU are relative to `peak`, or else to the GPU of the run.

        `notes` are notes of the run that are not written yet.
        """
        run, work = recording.run, StepWork.from_run(recording.run, peak)
        if notes:
            run = {**run, "notes": json.dumps({**notes_of(run), **notes})}
        if any(recording.rows(dataset) > _AT_ONCE for dataset in _READ):
            return cls(recording, None, run, slo, None, work)
        requests, steps = (recording.table(name, recording.filled(name, columns)) for name, columns in _READ.items())
        return cls(requests, steps, run, slo, None, work)

    # Requests

    @cached_property
    def finished(self) -> NDArray[np.bool_]:
        """A mask of the requests that finished, in the order of the table."""
        return self._with_status("finished")

    def of_class(self, name: str) -> NDArray[np.bool_]:
        """Return a mask of the requests with this SLO class, in the order of the table."""
        return np.asarray(pc.fill_null(pc.equal(self._column("slo_class"), name), False))

    def _with_status(self, status: str) -> NDArray[np.bool_]:
        return np.asarray(pc.fill_null(pc.equal(self._column("status"), status), False))

    @property
    def _count(self) -> int:
        return self._datasets.rows("requests")

    def _column(self, name: str) -> pa.ChunkedArray:
        return self._datasets.table("requests", [name]).column(0)

    def values(self, name: str) -> Floats:
        """Return a metric's values, one for each request, gap or step; a missing value is NaN.

        Values of request metrics are in the order of the table `requests`, and values of step metrics in that of the
        table `steps`. Raises UserError if `name` is not a distribution.
        """
        if name not in DISTRIBUTIONS:
            metric(name)
            remedy = f"is not a known distribution; choose one of {', '.join(DISTRIBUTIONS)}"
            raise UserError("distribution", name, remedy)
        if name not in self._columns:
            self._columns[name] = self._steps.values(name) if name in STEP_METRICS else self._made(name)
        return self._columns[name]

    def _made(self, name: str) -> Floats:
        """Return the values of a request metric in a new array."""
        return self._gaps() if name == "itl_ms" else np.where(self.finished, self._request_values(name), np.nan)

    def distribution(self, name: str) -> Distribution:
        """Return mean, std, min, max, count and nearest-rank percentiles of a metric; every step counts once.

        Values are kept only if `values` has returned them.
        """
        if name in STEP_METRICS:
            return self._steps.summary(name, self._columns.get(name)).distribution
        if name not in self._distributions:
            kept = name in self._columns or name not in DISTRIBUTIONS
            made = self.values(name) if kept else self._made(name)
            self._distributions[name] = Distribution.from_values(made, spent=not kept)
        return self._distributions[name]

    def distributions(self) -> dict[str, Distribution]:
        return {name: self.distribution(name) for name in DISTRIBUTIONS}

    def _request_values(self, name: str) -> Floats:
        ns = self._request
        if name in _SPANS:
            start, end = _SPANS[name]
            return (ns(end) - ns(start)) / 1e6
        match name:
            case "tpot_ms":
                return ratio(self._request_values("decode_ms"), ns("output_tokens") - 1)
            case "tpot_inclusive_ms":
                return ratio(self._request_values("e2e_ms"), ns("output_tokens"))
            case "tok_s_user":
                return ratio(1000.0, self._request_values("tpot_ms"))
            case _:  # metrics that are columns: preempted_ms, transfer_ms, client_ms
                return self._numbers_of(f"{name.removesuffix('_ms')}_ns") / 1e6

    def _gaps(self) -> Floats:
        """Return every gap between consecutive tokens of finished requests, in milliseconds."""
        if not self._datasets.filled("requests", ["token_times_ns"]):
            return np.empty(0)
        gaps, row, at = np.empty(self._datasets.most_items("requests", "token_times_ns")), 0, 0
        for piece in self._datasets.pieces("requests", ["token_times_ns"], _PIECE):
            finished = pa.array(self.finished[row : row + piece.num_rows])
            piece_gaps = gaps_ms(piece.column(0).filter(finished).drop_null())
            gaps[at : at + len(piece_gaps)] = piece_gaps
            row, at = row + piece.num_rows, at + len(piece_gaps)
        return gaps[:at]

    def _request(self, name: str) -> Floats:
        if name not in self._numbers:
            self._numbers[name] = self._numbers_of(name)
        return self._numbers[name]

    def _numbers_of(self, name: str) -> Floats:
        """Return a column of the requests as floats without keeping it, because it is needed only once."""
        if not self._datasets.filled("requests", [name]):
            return np.full(self._count, np.nan)
        return numbers(self._datasets.table("requests", [name]), name)

    # Steps

    def at_steps(self, rows: NDArray[np.int64]) -> StepMetrics:
        """Return the metrics of the steps in some `rows` of the steps table, without MFU and MBU."""
        return self._steps.at_rows(rows)

    def step_mean(self, name: str, weigh: bool = True) -> float | None:
        """Return a step metric's mean, weighted by the duration of the steps if `weigh` is True."""
        if name not in STEP_METRICS:
            raise UserError("step metric", name, f"is not a known step metric; choose one of {', '.join(STEP_METRICS)}")
        summary = self._steps.summary(name, self._columns.get(name))
        return summary.by_time if weigh or summary.by_time is None else summary.distribution.mean

    def _step_peak(self, name: str) -> float | None:
        distribution = self.distribution(name)
        return distribution.max if distribution.count else None

    # The run

    @cached_property
    def window_ns(self) -> tuple[int, int] | None:
        """First intended arrival and last finish; None if no request finished."""
        arrivals, finishes = self._request("arrival_ns"), self._request("finish_ns")
        if not np.isfinite(arrivals).any() or not np.isfinite(finishes[self.finished]).any():
            return None
        return int(np.nanmin(arrivals)), int(np.nanmax(finishes[self.finished]))

    @property
    def window_s(self) -> float | None:
        """Length of the measurement window in seconds; None if it is empty."""
        first, last = self.window_ns or (0, 0)
        return (last - first) / 1e9 if last > first else None

    def meets_slo(self) -> NDArray[np.bool_]:
        """Return a mask of the requests that finished and met every bound.

        A single token meets any bound of TPOT, and a pooling request any bound of a metric of tokens.
        """
        good = self.finished.copy()
        for name, bound in self.slo.items():
            values = self.values(name)
            met = values <= bound
            met |= np.isnan(values) & (self._request("output_tokens") < (2 if name == "tpot_ms" else 1))
            good &= met
        return good

    def scalars(self) -> dict[str, Any]:
        """Return every run metric by name; None if the recording does not have it. Saturation is the verdict's word."""
        return dict(self._scalars)

    @cached_property
    def _scalars(self) -> dict[str, Any]:
        seconds = self.window_s
        done = self.finished
        prompts, outputs = self._request("prompt_tokens"), self._request("output_tokens")
        prompt_tokens, output_tokens = float(np.nansum(prompts[done])), float(np.nansum(outputs[done]))
        good = int(self.meets_slo().sum()) if self.slo else None
        count = self._count
        tokens = {"out": output_tokens, "in": prompt_tokens, "total": prompt_tokens + output_tokens}
        rates = {kind: over(count, seconds) for kind, count in tokens.items()}
        usd_per_hour = over(self._cost_usd, self._duration_ns / 3.6e12)
        concurrency, concurrency_peak = self.concurrency()
        return {
            "request_throughput": over(int(done.sum()), seconds),
            "input_throughput": rates["in"],
            "output_throughput": rates["out"],
            "total_throughput": rates["total"],
            "tok_s_gpu": over(rates["out"], self._gpus),
            "request_goodput": over(good, seconds),
            "slo_attainment": over(good, count),
            "jain_fairness": self.jain_fairness(),
            "concurrency": concurrency,
            "concurrency_peak": concurrency_peak,
            "busy": self.busy(),
            "pipeline_bubble": self._steps.pipeline_bubble(),
            "mfu": self._used("mfu"),
            "mbu": self._used("mbu"),
            "live_replicas": self._replicas if self._replica_lives else None,
            "gpu_hours": gpu_hours(self._replica_lives, self._duration_ns) if self._replica_lives else None,
            "cost_usd": self._cost_usd,
            "usd_per_hour": usd_per_hour,
            **{f"usd_per_mtok_{kind}": over(usd_per_hour, rate and rate * 3600 / 1e6) for kind, rate in rates.items()},
            **self._energy(output_tokens),
            "kv_usage": self.step_mean("kv_usage"),
            "kv_usage_peak": self._step_peak("kv_usage"),
            "kv_pressure": self.step_mean("kv_pressure"),
            "kv_pressure_peak": self._step_peak("kv_pressure"),
            "kv_internal_fragmentation": self.internal_fragmentation(),
            "kv_external_fragmentation": self._steps.external_fragmentation(),
            "prefix_hit_rate": self.prefix_hit_rate(),
            "tier_hit_rate": sum(self.tier_hit_rates().values()) if self._tiered else None,
            "swapped_in_tokens": self._sum("swapped_in_tokens") if self._tiered else None,
            "preemptions": self._sum("preemptions"),
            "recomputed_tokens": self._sum("recomputed_tokens"),
            **self.speculation(),
            "saturation": self.saturation.verdict if self.saturation else None,
        }

    def _sum(self, name: str) -> int | None:
        """Return the sum over all requests; None if there are requests and the column is unknown for all of them."""
        values = self._numbers_of(name)
        return None if len(values) and np.isnan(values).all() else int(np.nansum(values))

    @cached_property
    def _tiered(self) -> bool:
        return bool(self._datasets.filled("requests", ["tier_hit_tokens"]))

    def jain_fairness(self) -> float | None:
        """Return Jain's index of the service that tenants got until the last arrival."""
        if not self._count:
            return None
        served = self.finished & (self._request("finish_ns") <= np.fmax.reduce(self._request("arrival_ns")))
        tokens = np.where(served, self._request("prompt_tokens") + self._request("output_tokens"), 0.0)
        return _jain_index(pc.fill_null(self._column("tenant"), ""), tokens)

    def statuses(self) -> dict[str, int]:
        """Return the number of requests by their final status."""
        counts = pc.value_counts(self._column("status")).to_pylist()
        return {str(c["values"]): c["counts"] for c in sorted(counts, key=lambda c: -c["counts"])}

    def busy(self) -> float | None:
        """Return the share of the measurement window in which a step was running, averaged over the replicas."""
        if not self._steps.count or self.window_s is None:
            return None
        return float(known(self._steps.under_way_ms).sum() / 1e3 / self.window_s / self._replicas)

    def _used(self, name: str) -> float | None:
        """Return MFU or MBU over the measurement window and all GPUs, including idle time."""
        return over(self._steps.used_s(name), self.window_s and self.window_s * self._replicas)

    def internal_fragmentation(self) -> float | None:
        """Return the share of the reserved KV memory that holds no token; None if the deployment is not recorded."""
        if not self._run.get("deployment"):
            return None
        scheduler = json.loads(self._run["deployment"]).get("scheduler", {})
        names = ("prompt_tokens", "output_tokens", "scheduled_ns", "first_token_ns", "finish_ns")
        config = parse(SchedulerConfig, scheduler, "scheduler")
        return _empty_share({name: self._request(name) for name in names}, config)

    @cached_property
    def _admitted(self) -> NDArray[np.bool_]:
        return np.isfinite(self._request("scheduled_ns"))

    @property
    def looked_up_tokens(self) -> float:
        """Number of prompt tokens of all admitted requests."""
        return float(np.nansum(self._request("prompt_tokens")[self._admitted]))

    def prefix_hit_rate(self) -> float | None:
        """Return the ratio of prefix-hit tokens to prompt tokens, over all admitted requests."""
        hits = self._numbers_of("prefix_hit_tokens")[self._admitted]
        return over(float(np.nansum(hits)), self.looked_up_tokens)

    def speculation(self) -> dict[str, Any]:
        """Return the figures of speculative decoding; they are None if no draft token was verified.

        Finished and unfinished requests count.
        """
        drafts, proposed, accepted = (
            int(np.nansum(self._numbers_of(name))) for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return {
            "acceptance_length": 1 + accepted / drafts if drafts else None,
            "draft_acceptance_rate": accepted / proposed if proposed else None,
            "rejected_draft_tokens": proposed - accepted if proposed else None,
        }

    def tier_hit_rates(self) -> dict[str, float]:
        """Return loaded tokens / prompt tokens of admitted requests for each KV tier; empty without tiers."""
        if not self._tiered:
            return {}
        hits = self._column("tier_hit_tokens").filter(pa.array(self._admitted)).drop_null().combine_chunks()
        tokens = pa.table({"tier": hits.keys, "tokens": hits.items}).group_by("tier").aggregate([("tokens", "sum")])
        return {row["tier"]: row["tokens_sum"] / self.looked_up_tokens for row in tokens.sort_by("tier").to_pylist()}

    @cached_property
    def _in_system(self) -> TimesInSystem:
        """The time that each request spent in the system.

        An unfinished request stays until the end of the window. A request that left early stays until the recorded time
        at which it left.
        """
        arrivals, ends = self._request("arrival_ns"), self._request("finish_ns")
        ends = np.where(np.isnan(ends), self._numbers_of("end_ns"), ends)
        if self.window_ns is not None:
            last = float(self.window_ns[1])
            ends = np.where(
                self._with_status("unfinished"), np.fmax(np.where(np.isnan(ends), last, ends), arrivals), ends
            )
        return TimesInSystem(arrivals, ends)

    @property
    def outstanding(self) -> tuple[Floats, Floats]:
        """Sorted arrival times and sorted end times, in nanoseconds, of all requests that were in the system."""
        return self._in_system.outstanding

    def concurrency(self) -> tuple[float | None, int | None]:
        """Return the mean number of outstanding requests over the measurement window, and the maximum."""
        return self._in_system.concurrency(self.window_ns)

    @cached_property
    def saturation(self) -> Saturation | None:
        """The verdict whether the run keeps up with its arrivals (rule in the glossary); None for too few arrivals."""
        scheduled = self._request("scheduled_ns")
        counted = np.isfinite(scheduled) | ~self.finished  # recordings of clients lack scheduling times
        return saturation_of(*self.outstanding, partial(self._in_system.waiting_share, scheduled, counted))

    @cached_property
    def _cost_usd(self) -> float | None:
        prices = self._run.get("usd_per_gpu_hour")
        return (
            cost_usd(self._replica_lives, self._duration_ns, dict(prices)) if self._replica_lives and prices else None
        )

    def _energy(self, output_tokens: float) -> dict[str, float | None]:
        """Return the power, energy and carbon of all GPUs, from the start to the end of the run; None if not known."""
        seconds = self._duration_ns / 1e9
        gpu_seconds = self._replicas * self._steps.gpus * seconds
        if self._replica_lives:
            gpu_seconds = 3600 * gpu_hours(self._replica_lives, self._duration_ns)
        site = notes_of(self._run).get("site", {})
        joules, grid = self._steps.joules(gpu_seconds), site.get("grid_gco2_per_kwh")
        if joules is not None:
            joules *= site.get("pue") or 1.0
        carbon = None if joules is None or grid is None else joules / 3.6e6 * grid
        return {
            "power_w": over(joules, seconds),
            "energy_kwh": over(joules, 3.6e6),
            "joules_per_token": over(joules, output_tokens),
            "tokens_per_joule": over(output_tokens, joules),
            "co2_g": carbon,
            "co2_g_per_mtok_out": over(carbon, output_tokens / 1e6),
        }

    @cached_property
    def _replicas(self) -> float:
        """The number of replicas; the mean over the run if their start and end times are recorded."""
        if self._replica_lives and self._duration_ns:
            return serving_ns(self._replica_lives, self._duration_ns) / self._duration_ns
        return float(self._run.get("replicas") or 1)


def _jain_index(tenants: pa.ChunkedArray, tokens: Floats) -> float | None:
    """Return Jain's fairness index of the tenants' service, from the `tokens` of each request.

    The source is Jain, Chiu and Hawe 1984. The result is None if there are fewer than two tenants.
    """
    names = pc.dictionary_encode(tenants.combine_chunks())
    if len(names.dictionary) < 2:
        return None
    service = np.bincount(names.indices.to_numpy(), weights=tokens, minlength=len(names.dictionary))
    return over(float(service.sum()) ** 2, len(service) * float((service**2).sum()))


def _empty_share(requests: dict[str, Floats], config: SchedulerConfig) -> float | None:
    """Return the share of reserved KV memory that holds no token, averaged over memory and time.

    The share is computed from the times and lengths of requests. Tokens are assumed to be stored evenly over time:
    those of the prompt between the request's first step and its first token, and those of the output from there to the
    last token. With paged KV, (block size - 1) / 2 tokens of a request's last block are then empty on average. In a
    contiguous reservation, all space beyond the tokens is empty.

    `requests` has the columns `prompt_tokens`, `output_tokens`, `scheduled_ns`, `first_token_ns` and `finish_ns`. A
    request that lacks one of them does not count. The result is None if no request has all of them, and for models in
    which some layers do not keep every token.
    """
    if config.kv_groups or config.state_blocks or config.kv_reservation == "none":
        return None
    used = reserved = 0.0
    for first in range(0, len(requests["prompt_tokens"]), _SUMMED):
        columns = np.stack([column[first : first + _SUMMED] for column in requests.values()])
        times = _token_time(columns[:, np.isfinite(columns).all(axis=0)], config)
        used, reserved = used + times[0], reserved + times[1]
    return 1.0 - used / reserved if reserved > 0 else None


def _token_time(columns: Floats, config: SchedulerConfig) -> tuple[float, float]:
    """Return the used and the reserved KV memory of requests, in tokens times nanoseconds."""
    prompts, outputs, scheduled, first, last = columns
    prefill, decode = first - scheduled, last - first
    used = prompts / 2 * prefill + (prompts + (outputs - 1) / 2) * decode
    if config.kv_reservation == "paged":
        reserved = used + (config.block_size - 1) / 2 * (prefill + decode)
    else:
        tokens = np.full_like(prompts, config.max_model_len)
        if config.kv_reservation == "max_tokens":
            tokens = np.minimum(tokens, prompts + np.maximum(outputs, config.kv_reserved_max_tokens))
        reserved = np.ceil(tokens / config.block_size) * config.block_size * (prefill + decode)
    return float(used.sum()), float(reserved.sum())


ReplicaLives = Sequence[Mapping[str, Any]]


def gpu_hours(replica_lives: ReplicaLives, duration_ns: int) -> float:
    """Return the GPU hours that all replicas were paid for until the end of the run."""
    return sum(_ns_to_end(life, duration_ns, life["started_ns"]) * life["gpus"] for life in replica_lives) / 3.6e12


def cost_usd(
    replica_lives: ReplicaLives, duration_ns: int, usd_per_gpu_hour: Mapping[str, float | None]
) -> float | None:
    """Return the cost in dollars of the GPU hours of `replica_lives`, at the prices of their pools.

    The result is None if a pool with a replica has no price.
    """
    usd = 0.0
    for pool in dict.fromkeys(life["pool"] for life in replica_lives):
        price = usd_per_gpu_hour.get(pool)
        if price is None:
            return None
        usd += price * gpu_hours([life for life in replica_lives if life["pool"] == pool], duration_ns)
    return usd


def serving_ns(replica_lives: ReplicaLives, duration_ns: int) -> int:
    """Return the nanoseconds during which replicas were ready, summed over the replicas."""
    return sum(
        _ns_to_end(life, duration_ns, life["ready_ns"]) for life in replica_lives if life["ready_ns"] is not None
    )


def unserved_ns(replica_lives: ReplicaLives, duration_ns: int) -> int:
    """Return the nanoseconds without a ready replica after the first one was ready; `replica_lives` is for one pool."""
    timeline = [change for change in replica_counts(replica_lives) if change["time_ns"] < duration_ns]
    began = next((at for at, change in enumerate(timeline) if change["ready"]), len(timeline))
    times = [*(change["time_ns"] for change in timeline), duration_ns]
    return sum(times[at + 1] - times[at] for at in range(began, len(timeline)) if not timeline[at]["ready"])


def replica_counts(replica_lives: ReplicaLives) -> list[dict[str, Any]]:
    """Return a row for each change: `time_ns`, `pool`, and the pool's new numbers of `paid` and `ready` replicas."""
    changes: dict[tuple[int, str], list[int]] = {}
    for life in replica_lives:
        for name, paid, ready in (("started_ns", 1, 0), ("ready_ns", 0, 1)):
            if life[name] is not None:
                _change(changes, life[name], life["pool"], paid, ready)
        if life["ended_ns"] is not None:
            _change(changes, life["ended_ns"], life["pool"], -1, -(life["ready_ns"] is not None))
    counts: dict[str, list[int]] = {}
    timeline = []
    for (time_ns, pool), (paid, ready) in sorted(changes.items()):
        count = counts.setdefault(pool, [0, 0])
        count[0] += paid
        count[1] += ready
        timeline.append({"time_ns": time_ns, "pool": pool, "paid": count[0], "ready": count[1]})
    return timeline


def _change(changes: dict[tuple[int, str], list[int]], time_ns: int, pool: str, paid: int, ready: int) -> None:
    change = changes.setdefault((time_ns, pool), [0, 0])
    change[0] += paid
    change[1] += ready


def _ns_to_end(life: Mapping[str, Any], duration_ns: int, from_ns: int) -> int:
    """Return the nanoseconds from `from_ns` to the end of the replica or of the run."""
    return int((duration_ns if life["ended_ns"] is None else life["ended_ns"]) - from_ns)
