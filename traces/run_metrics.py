"""The metrics of a recorded run, computed once and the same way whichever clock wrote the recording.

Works on the Arrow tables of a recording with numpy only: no Python loop over requests, tokens or steps, so a
million requests take about a second. Names and definitions are those of the registry (`serving.metrics`).

Percentiles are exact order statistics by nearest rank, never interpolated. Latencies are those of finished
requests; everything else stays in the denominator of SLO attainment.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from serving.errors import UserError
from serving.metrics import metric
from traces.replica_lives import cost_usd, gpu_hours, serving_ns

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

PERCENTILES = (50, 90, 95, 99)
REQUEST_METRICS = (
    "ttft_ms",
    "tpot_ms",
    "tpot_inclusive_ms",
    "e2e_ms",
    "queue_ms",
    "prefill_ms",
    "decode_ms",
    "preempted_ms",
    "transfer_ms",
    "send_delay_ms",
    "tok_s_user",
)
STEP_METRICS = ("step_ms", "batch_tokens", "running", "waiting", "kv_usage", "kv_pressure")
DISTRIBUTIONS = (*REQUEST_METRICS, "itl_ms", *STEP_METRICS)
SLO_METRICS = ("ttft_ms", "tpot_ms", "tpot_inclusive_ms", "e2e_ms", "queue_ms", "prefill_ms", "decode_ms")

_BINS = 16
FEWEST = 20  # requests below which nothing is said about saturation
PILING_UP = 0.1  # share of the arrivals that piles up when a run is overloaded
_GROWING = 0.02  # and when its backlog is said to grow at all: a burst near the end makes a line rise by less


class HasTables(Protocol):
    """What `RunMetrics.of` needs of a recording."""

    @property
    def run(self) -> dict[str, Any]: ...

    def table(self, dataset: str, columns: Any = None) -> pa.Table: ...
    def filled(self, dataset: str, columns: Any) -> list[str]: ...


@dataclass(frozen=True, slots=True)
class Distribution:
    """What is reported of many values. With no values, `count` is 0 and the rest is NaN."""

    mean: float
    std: float
    min: float
    max: float
    count: int
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: NDArray[Any]) -> Distribution:
        """The distribution of `values`; NaN means no value and is left out."""
        values = known(np.asarray(values, dtype=np.float64))
        if not len(values):
            nan = math.nan
            return cls(nan, nan, nan, nan, 0, nan, nan, nan, nan)
        p50, p90, p95, p99 = percentiles(values, PERCENTILES)
        return cls(
            float(values.mean()),
            float(values.std()),
            float(values.min()),
            float(values.max()),
            len(values),
            p50,
            p90,
            p95,
            p99,
        )

    def as_dict(self) -> dict[str, float | int]:
        """The statistics by name."""
        return asdict(self)


def percentiles(values: NDArray[Any], ranks: tuple[int, ...]) -> list[float]:
    """Exact nearest-rank percentiles: of n values in order, p*q* is number ceil(q n / 100), from 1."""
    at = [max(-(-q * len(values) // 100), 1) - 1 for q in ranks]
    ordered = np.partition(values, sorted(set(at)))
    return [float(ordered[i]) for i in at]


@dataclass(frozen=True, slots=True)
class Saturation:
    """Whether the run keeps up, and the slope of its backlog, in requests per second, with its 95 % interval."""

    verdict: str
    slope: float
    low: float
    high: float
    arrival_rate: float
    waiting_share: float


class RunMetrics:
    """The metrics of one run.

    `slo` bounds request metrics, e.g. `{"ttft_ms": 200, "tpot_ms": 50}`; a request must meet all. `gpus` is how many
    were provisioned. Metrics that the tables cannot tell are None (scalars) or empty (distributions).
    """

    def __init__(
        self,
        requests: pa.Table,
        steps: pa.Table | None = None,
        run: Mapping[str, Any] | None = None,
        slo: Mapping[str, float] | None = None,
        gpus: int | None = None,
        token_times: Callable[[], pa.ChunkedArray] | None = None,
    ) -> None:
        self._requests = requests
        self._steps = steps
        self._run = dict(run or {})
        self._gpus = gpus
        self._token_times = token_times
        self.slo = check_slo(slo or {})
        self._columns: dict[str, Floats] = {}
        self._distributions: dict[str, Distribution] = {}

    @classmethod
    def of(cls, recording: HasTables, slo: Mapping[str, float] | None = None, gpus: int | None = None) -> RunMetrics:
        """The metrics of a recording; list columns are read only if a metric needs them."""
        requests = recording.table("requests", _REQUEST_COLUMNS)
        steps = recording.table("steps", [*_STEP_COLUMNS, *recording.filled("steps", _RARE_STEP_COLUMNS)])

        def token_times() -> pa.ChunkedArray:
            return recording.table("requests", ["token_times_ns"]).column(0)

        return cls(requests, steps, recording.run, slo, gpus, token_times)

    # Requests

    @cached_property
    def finished(self) -> NDArray[np.bool_]:
        """Which requests finished, in the order of the table."""
        finished: NDArray[np.bool_] = np.asarray(
            pc.fill_null(pc.equal(self._requests.column("status"), "finished"), False)
        )
        return finished

    def values(self, name: str) -> Floats:
        """A metric's values: one for each request, gap or step, NaN where it has none.

        Request metrics come in the order of the requests table, step metrics in that of the steps table.
        Raises UserError when `name` is not a distribution.
        """
        if name not in DISTRIBUTIONS:
            metric(name)
            remedy = f"is not a known distribution; choose one of {', '.join(DISTRIBUTIONS)}"
            raise UserError("distribution", name, remedy)
        if name not in self._columns:
            if name in REQUEST_METRICS:
                values = np.where(self.finished, self._request_values(name), np.nan)
            elif name == "itl_ms":
                values = self._gaps()
            else:
                values = self._step_values(name)
            self._columns[name] = values
        return self._columns[name]

    def distribution(self, name: str) -> Distribution:
        """Mean, std, min, max, count and nearest-rank percentiles of a metric; step metrics count each step once."""
        if name not in self._distributions:
            self._distributions[name] = Distribution.of(self.values(name))
        return self._distributions[name]

    def distributions(self) -> dict[str, Distribution]:
        """Every distribution by name."""
        return {name: self.distribution(name) for name in DISTRIBUTIONS}

    def _request_values(self, name: str) -> Floats:
        ns = self._request
        match name:
            case "ttft_ms":
                return (ns("first_token_ns") - ns("arrival_ns")) / 1e6
            case "e2e_ms":
                return (ns("finish_ns") - ns("arrival_ns")) / 1e6
            case "tpot_ms":
                return _ratio((ns("finish_ns") - ns("first_token_ns")) / 1e6, _at_least(ns("output_tokens") - 1, 1))
            case "tok_s_user":
                return _ratio(1000.0, self.values("tpot_ms"))
            case "tpot_inclusive_ms":
                return _ratio(self._request_values("e2e_ms"), _at_least(ns("output_tokens"), 1))
            case "queue_ms":
                return (ns("scheduled_ns") - ns("arrival_ns")) / 1e6
            case "prefill_ms":
                return (ns("first_token_ns") - ns("scheduled_ns")) / 1e6
            case "decode_ms":
                return (ns("finish_ns") - ns("first_token_ns")) / 1e6
            case "preempted_ms":
                return ns("preempted_ns") / 1e6
            case "transfer_ms":
                return ns("transfer_ns") / 1e6
            case _:
                return (ns("send_ns") - ns("arrival_ns")) / 1e6

    def _gaps(self) -> Floats:
        """Every gap between consecutive tokens of finished requests, in milliseconds."""
        if "token_times_ns" in self._requests.column_names:
            times = self._requests.column("token_times_ns")
        elif self._token_times is not None:
            times = self._token_times()
        else:
            return np.empty(0)
        gaps = [np.empty(0)]
        kept = times.filter(pa.array(self.finished)).drop_null()
        for chunk in kept.chunks:
            flat = chunk.flatten().to_numpy(zero_copy_only=False)
            ends = np.cumsum(chunk.value_lengths().to_numpy(zero_copy_only=False))[:-1]
            gap = np.diff(flat)
            inside = np.ones(len(gap), dtype=bool)
            inside[ends[(ends > 0) & (ends < len(flat))] - 1] = False
            gaps.append(gap[inside] / 1e6)
        return np.concatenate(gaps)

    def _request(self, name: str) -> Floats:
        return _column(self._requests, name)

    # Steps

    @property
    def _num_blocks(self) -> float:
        return float(self._run.get("num_blocks") or math.nan)

    def _step_values(self, name: str) -> Floats:
        if self._steps is None:
            return np.empty(0)
        of = self._step
        match name:
            case "step_ms":
                taken = np.subtract(of("end_ns"), of("start_ns"), dtype=np.float64)
                return np.divide(taken, 1e6, out=taken)
            case "batch_tokens":
                tokens = np.add(of("prefill_tokens"), of("decode_rows"), dtype=np.float64)
                tokens += _known_or_zero(self._steps, "draft_tokens")
                return tokens
            case "kv_usage":
                return of("used_blocks") / self._num_blocks
            case "kv_pressure":
                demanded = np.add(of("used_blocks"), of("waiting_blocks"), dtype=np.float64)
                return np.divide(demanded, self._num_blocks, out=demanded)
            case _:
                return of(name).astype(np.float64, copy=False)

    def _step(self, name: str) -> NDArray[Any]:
        return _stored(self._steps, name)

    def step_mean(self, name: str) -> float | None:
        """A step metric's mean, each step weighing as long as it took."""
        if name not in STEP_METRICS:
            raise UserError("step metric", name, f"is not a known step metric; choose one of {', '.join(STEP_METRICS)}")
        values, weights = self.values(name), self.values("step_ms")
        filled = ~(np.isnan(values) | np.isnan(weights))
        if not filled.any():
            return None
        if not filled.all():
            values, weights = values[filled], weights[filled]
        return float(np.average(values, weights=weights if weights.sum() > 0 else None))

    # The run

    @cached_property
    def window_ns(self) -> tuple[int, int] | None:
        """First intended arrival and last finish; None when nothing finished."""
        arrivals, finishes = self._request("arrival_ns"), self._request("finish_ns")
        if not np.isfinite(arrivals).any() or not np.isfinite(finishes[self.finished]).any():
            return None
        return int(np.nanmin(arrivals)), int(np.nanmax(finishes[self.finished]))

    @property
    def window_s(self) -> float | None:
        """Length of the measurement window in seconds; None when it is empty."""
        if self.window_ns is None or self.window_ns[1] <= self.window_ns[0]:
            return None
        return (self.window_ns[1] - self.window_ns[0]) / 1e9

    def meets_slo(self) -> NDArray[np.bool_]:
        """Which requests finished and met every bound; TPOT binds only from the second token on."""
        good = self.finished.copy()
        for name, bound in self.slo.items():
            values = self.values(name)
            met = values <= bound
            if name == "tpot_ms":
                met |= np.isnan(values) & (self._request("output_tokens") < 2)
            good &= met
        return good

    def scalars(self) -> dict[str, Any]:
        """Every run metric by name, None where the recording cannot tell; saturation is its verdict."""
        return dict(self._scalars)

    @cached_property
    def _scalars(self) -> dict[str, Any]:
        seconds = self.window_s
        done = self.finished
        prompts, outputs = self._request("prompt_tokens"), self._request("output_tokens")
        prompt_tokens, output_tokens = float(np.nansum(prompts[done])), float(np.nansum(outputs[done]))
        good = int(self.meets_slo().sum()) if self.slo else None
        count = self._requests.num_rows
        input_rate, output_rate = _over(prompt_tokens, seconds), _over(output_tokens, seconds)
        total_rate = _over(prompt_tokens + output_tokens, seconds)
        usd_per_hour = _over(self._cost_usd, self._duration_ns / 3.6e12)
        return {
            "request_throughput": _over(int(done.sum()), seconds),
            "input_throughput": input_rate,
            "output_throughput": output_rate,
            "total_throughput": total_rate,
            "tok_s_gpu": _over(output_rate, self._gpus),
            "request_goodput": _over(good, seconds),
            "slo_attainment": _over(good, count),
            "jain_fairness": self.jain_fairness(),
            "concurrency": self.concurrency()[0],
            "concurrency_peak": self.concurrency()[1],
            "busy": self.busy(),
            "pipeline_bubble": self.pipeline_bubble(),
            "live_replicas": self._replicas if self._lives else None,
            "gpu_hours": gpu_hours(self._lives, self._duration_ns) if self._lives else None,
            "cost_usd": self._cost_usd,
            "usd_per_hour": usd_per_hour,
            "usd_per_mtok_out": _per_mtok(usd_per_hour, output_rate),
            "usd_per_mtok_in": _per_mtok(usd_per_hour, input_rate),
            "usd_per_mtok_total": _per_mtok(usd_per_hour, total_rate),
            "kv_usage": self.step_mean("kv_usage"),
            "kv_usage_peak": self._peak("kv_usage"),
            "kv_pressure": self.step_mean("kv_pressure"),
            "kv_pressure_peak": self._peak("kv_pressure"),
            "prefix_hit_rate": self.prefix_hit_rate(),
            "tier_hit_rate": sum(self.tier_hit_rates().values()) if self._tiered else None,
            "swapped_in_tokens": int(np.nansum(self._request("swapped_in_tokens"))) if self._tiered else None,
            "preemptions": int(np.nansum(self._request("preemptions"))),
            "recomputed_tokens": int(np.nansum(self._request("recomputed_tokens"))),
            **self.speculation(),
            "saturation": self.saturation.verdict if self.saturation else None,
        }

    def jain_fairness(self) -> float | None:
        """Jain's index of the tenants' service up to the last arrival (Jain, Chiu and Hawe 1984)."""
        if "tenant" not in self._requests.column_names:
            return None
        names = pc.fill_null(self._requests.column("tenant"), "").combine_chunks()
        tenants = pc.dictionary_encode(names)
        if len(tenants.dictionary) < 2:
            return None
        served = self.finished & (self._request("finish_ns") <= np.fmax.reduce(self._request("arrival_ns")))
        tokens = np.where(served, self._request("prompt_tokens") + self._request("output_tokens"), 0.0)
        service = np.bincount(tenants.indices.to_numpy(), weights=tokens, minlength=len(tenants.dictionary))
        return _over(float(service.sum()) ** 2, len(service) * float((service**2).sum()))

    def statuses(self) -> dict[str, int]:
        """How many requests ended in each status."""
        counts = pc.value_counts(self._requests.column("status")).to_pylist()
        return {str(c["values"]): c["counts"] for c in sorted(counts, key=lambda c: -c["counts"])}

    def busy(self) -> float | None:
        """Share of the measurement window in which a step is under way, averaged over the replicas."""
        if not len(self.values("step_ms")) or self.window_s is None:
            return None
        return float(known(self._under_way_ms).sum() / 1e3 / self.window_s / self._replicas)

    @cached_property
    def _under_way_ms(self) -> Floats:
        """Of each step, the time in which no step before it on its replica was under way still.

        Steps of a replica start and end in order; only in a pipeline do they overlap.
        """
        if self._stages_ns is None:
            return self.values("step_ms")
        start, end = self._step("start_ns"), self._step("end_ns")
        order = np.lexsort((start, self._step("replica")))
        follows = np.diff(self._step("replica")[order], prepend=np.nan) == 0
        before = np.where(follows, np.concatenate(([0.0], end[order][:-1])), 0.0)
        own = np.empty(len(start))
        own[order] = end[order] - np.maximum(start[order], before)
        return own / 1e6

    @cached_property
    def _stages_ns(self) -> pa.ChunkedArray | None:
        """Each step's time on each stage; None where no step was on several."""
        if self._steps is None or "stages_ns" not in self._steps.column_names:
            return None
        column = self._steps.column("stages_ns")
        return column if column.null_count < len(column) else None

    def pipeline_bubble(self) -> float | None:
        """Idle share of stage time while a step is under way (Huang et al., "GPipe", 2019); None without stages."""
        if self._stages_ns is None:
            return None
        stages = pc.cast(pc.list_value_length(self._stages_ns), pa.float64()).to_numpy()
        worked = pc.sum(pc.list_flatten(self._stages_ns)).as_py()
        return 1.0 - worked / 1e6 / float(np.nansum(stages * self._under_way_ms))

    def prefix_hit_rate(self) -> float | None:
        """Hit tokens over the prompt tokens of every request that was admitted."""
        admitted = np.isfinite(self._request("scheduled_ns"))
        looked_up = np.nansum(self._request("prompt_tokens")[admitted])
        return _over(float(np.nansum(self._request("prefix_hit_tokens")[admitted])), float(looked_up))

    def speculation(self) -> dict[str, Any]:
        """What drafts were good for, None where no draft token was verified; every request counts, finished or not."""
        drafts, proposed, accepted = (
            int(_known_or_zero(self._requests, name).sum()) for name in ("drafts", "draft_tokens", "accepted_tokens")
        )
        return {
            "acceptance_length": 1 + accepted / drafts if drafts else None,
            "draft_acceptance_rate": accepted / proposed if proposed else None,
            "rejected_draft_tokens": proposed - accepted if proposed else None,
        }

    def tier_hit_rates(self) -> dict[str, float]:
        """Tokens loaded from each KV tier over the prompt tokens of every request that was admitted; none, no tiers."""
        if not self._tiered:
            return {}
        admitted = np.isfinite(self._request("scheduled_ns"))
        looked_up = float(np.nansum(self._request("prompt_tokens")[admitted]))
        hits: dict[str, int] = {}
        for chunk in self._requests.column("tier_hit_tokens").filter(pa.array(admitted)).drop_null().chunks:
            found = pa.table({"tier": chunk.keys, "tokens": chunk.items})
            for row in found.group_by("tier").aggregate([("tokens", "sum")]).to_pylist():
                hits[row["tier"]] = hits.get(row["tier"], 0) + row["tokens_sum"]
        return {tier: tokens / looked_up for tier, tokens in sorted(hits.items())}

    @cached_property
    def _tiered(self) -> bool:
        """Whether some replica had KV tiers."""
        name = "tier_hit_tokens"
        return name in self._requests.column_names and self._requests.column(name).null_count < self._requests.num_rows

    def _peak(self, name: str) -> float | None:
        values = self.values(name)
        return float(np.nanmax(values)) if np.isfinite(values).any() else None

    @cached_property
    def _outstanding(self) -> tuple[Floats, Floats]:
        """Arrivals and ends, each in order, of every request that was in the system.

        An unfinished request stays to the end of the window; one that left without its last token counts up to when it
        left, if that is recorded.
        """
        arrivals, ends = self._stays
        inside = np.isfinite(arrivals) & np.isfinite(ends)
        return np.sort(arrivals[inside]), np.sort(ends[inside])

    @cached_property
    def _stays(self) -> tuple[Floats, Floats]:
        """When each request came and left, NaN where that is not known."""
        arrivals, ends = self._request("arrival_ns"), self._request("finish_ns")
        if "end_ns" in self._requests.column_names:
            ends = np.where(np.isnan(ends), self._request("end_ns"), ends)
        unfinished = np.asarray(pc.fill_null(pc.equal(self._requests.column("status"), "unfinished"), False))
        if self.window_ns is not None:
            last = float(self.window_ns[1])
            ends = np.where(unfinished, np.fmax(np.where(np.isnan(ends), last, ends), arrivals), ends)
        return arrivals, ends

    def outstanding(self) -> tuple[Floats, Floats]:
        """Arrivals and ends in nanoseconds, each in order, of every request that was in the system."""
        return self._outstanding

    def concurrency(self) -> tuple[float | None, int | None]:
        """Requests outstanding: time-weighted mean over the measurement window, and peak."""
        arrivals, ends = self._outstanding
        if self.window_ns is None or not len(arrivals):
            return None, None
        started = np.searchsorted(arrivals, arrivals, side="right")
        ended = np.searchsorted(ends, arrivals, side="right")  # a request that ends as one arrives is gone
        peak = int((started - ended).max())
        first, last = self.window_ns
        if last <= first:
            return None, peak
        return float((ends.sum() - arrivals.sum()) / (last - first)), peak

    @cached_property
    def saturation(self) -> Saturation | None:
        """Whether the run keeps up with its arrivals; None when too few arrive to tell. The rule is the glossary's."""
        arrivals, ends = self._outstanding
        if len(arrivals) < FEWEST or arrivals[-1] <= arrivals[0]:
            return None
        first, last = arrivals[0], arrivals[-1]
        slope, low, high = growth(arrivals, ends)
        rate = (len(arrivals) - 1) / ((last - first) / 1e9)
        waiting = self._waiting_share(_filled(first, last), last)
        if low > 0 and slope >= PILING_UP * rate:
            verdict = "OVERLOADED"
        elif (low > 0 and slope >= _GROWING * rate) or waiting > 0.5:
            verdict = "BACKLOGGED"
        else:
            verdict = "STABLE"
        return Saturation(verdict, slope, low, high, float(rate), waiting)

    def _waiting_share(self, begin: float, end: float) -> float:
        """Share of their time that requests arriving between `begin` and `end` wait for their first step."""
        arrivals, ends = self._stays
        inside = (arrivals >= begin) & (arrivals < end) & np.isfinite(ends)
        waits = np.fmin(self._request("scheduled_ns"), ends) - arrivals
        stays = float((ends - arrivals)[inside].sum())
        return float(waits[inside].sum()) / stays if stays > 0 else 0.0

    # The fleet

    @property
    def _lives(self) -> list[dict[str, Any]]:
        return self._run.get("replica_lives") or []

    @property
    def _duration_ns(self) -> int:
        return int(self._run.get("duration_ns") or 0)

    @cached_property
    def _cost_usd(self) -> float | None:
        prices = self._run.get("usd_per_gpu_hour")
        return cost_usd(self._lives, self._duration_ns, dict(prices)) if self._lives and prices else None

    @cached_property
    def _replicas(self) -> float:
        """How many there were: the mean over the run where it is known when each was there."""
        if self._lives and self._duration_ns:
            return serving_ns(self._lives, self._duration_ns) / self._duration_ns
        return float(self._run.get("replicas") or 1)


def check_slo(slo: Mapping[str, float]) -> dict[str, float]:
    """Bounds on request metrics, checked. Raises UserError for a metric that has none or a bound not above 0."""
    for name, bound in slo.items():
        if name not in SLO_METRICS:
            raise UserError("slo", name, f"is not a known latency; choose one of {', '.join(SLO_METRICS)}")
        if isinstance(bound, bool) or not isinstance(bound, int | float) or not 0 < bound < math.inf:
            raise UserError(f"slo {name}", bound, "must be a number of milliseconds above 0")
    return {name: float(bound) for name, bound in slo.items()}


def parse_slo(text: str) -> dict[str, float]:
    """SLOs as vLLM's `--goodput` writes them: `ttft:200 tpot:50`, in milliseconds; names of ours work too."""
    slo: dict[str, float] = {}
    for pair in re.split(r"[\s,]+", text.strip()):
        name, colon, bound = pair.partition(":")
        if not colon:
            raise UserError("slo", pair or text, "must be METRIC:MILLISECONDS, e.g. ttft:200 tpot:50")
        name = "e2e_ms" if name == "e2el" else name if name.endswith("_ms") else f"{name}_ms"
        if name in slo:
            raise UserError("slo", text, f"bounds {name} twice; give each latency one bound")
        try:
            slo[name] = float(bound)
        except ValueError:
            raise UserError(f"slo {name}", bound, "must be a number of milliseconds above 0") from None
    return check_slo(slo)


def _column(table: pa.Table, name: str) -> Floats:
    """A numeric column as float64, NaN for null. Exact up to 2**53 ns, a hundred days."""
    column = table.column(name)
    values: Floats = pc.cast(column, pa.float64(), safe=False).to_numpy()
    return values


def _stored(table: pa.Table, name: str) -> NDArray[Any]:
    """A numeric column as it is stored, as float64 if it has nulls: of millions of steps, a copy takes longer."""
    column = table.column(name)
    return _column(table, name) if column.null_count else column.to_numpy()


def known(values: Floats) -> Floats:
    """The values that are no NaN; a copy only if there is one."""
    missing = np.isnan(values)
    return values[~missing] if missing.any() else values


def _known_or_zero(table: pa.Table, name: str) -> Floats:
    """A column that older recordings and other engines do not have, 0 where nothing is known; one 0 if nowhere."""
    if name not in table.column_names or table.column(name).null_count == table.num_rows:
        return np.zeros(1)
    return np.nan_to_num(_column(table, name))


def _ratio(numerator: Floats | float, denominator: Floats) -> Floats:
    out: Floats = np.full(len(denominator), np.nan)
    np.divide(numerator, denominator, out=out, where=denominator > 0)
    return out


def _at_least(values: Floats, least: float) -> Floats:
    return np.where(values >= least, values, np.nan)


def _over(numerator: float | None, denominator: float | None) -> float | None:
    if numerator is None or not denominator or not math.isfinite(denominator):
        return None
    return float(numerator / denominator)


def _per_mtok(usd_per_hour: float | None, tokens_per_s: float | None) -> float | None:
    """Dollars per million tokens."""
    return _over(usd_per_hour, tokens_per_s and tokens_per_s * 3600 / 1e6)


def growth(arrivals: Floats, leaves: Floats) -> tuple[float, float, float]:
    """How fast those that came and have not left become more, per second, with the 95 % interval of that.

    `arrivals` and `leaves` are in nanoseconds and in order. Looks at the arrival period without its first quarter; the
    rule is the glossary's, of saturation.
    """
    first, last = arrivals[0], arrivals[-1]
    edges = np.linspace(_filled(first, last), last, _BINS + 1)
    backlog = np.diff(_integral(arrivals, edges) - _integral(leaves, edges)) / np.diff(edges)
    return _trend((edges[:-1] + edges[1:]) / 2e9, backlog)


def _filled(first: float, last: float) -> float:
    """When an empty system counts as filled."""
    return first + (last - first) / 4


def _integral(times: Floats, until: Floats) -> Floats:
    """For each t of `until`, the integral up to t of the number of `times` (in order) that have passed."""
    origin = until[0]
    shifted = times - origin
    sums = np.concatenate([[0.0], np.cumsum(shifted)])
    passed = np.searchsorted(times, until, side="right")
    integral: Floats = passed * (until - origin) - sums[passed]
    return integral


def _trend(x: Floats, y: Floats) -> tuple[float, float, float]:
    """Least-squares slope and its 95 % interval, with fewer degrees of freedom for correlated residuals.

    Residuals of a fitted line look less correlated than they are, by (2 + 4 r) / n (Kendall 1954 for a mean; a line
    takes one degree of freedom more).
    """
    from scipy.special import stdtrit  # imports slowly, and most metrics do without

    n = len(x)
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    residuals = y - y.mean() - slope * centred
    total = float(residuals @ residuals)
    if total <= 1e-12 * max(float(y @ y), 1.0):
        return slope, slope, slope
    seen = float(residuals[1:] @ residuals[:-1]) / total
    correlation = min(max(seen + (2 + 4 * seen) / n, 0.0), 0.9)
    effective = max(n * (1 - correlation) / (1 + correlation), 4.0)
    error = math.sqrt(total / (effective - 2) / spread)
    half = float(stdtrit(effective - 2, 0.975)) * error  # Student's t
    return slope, slope - half, slope + half


_REQUEST_COLUMNS = [
    "tenant",
    "status",
    "prompt_tokens",
    "output_tokens",
    "arrival_ns",
    "send_ns",
    "scheduled_ns",
    "first_token_ns",
    "finish_ns",
    "prefix_hit_tokens",
    "preemptions",
    "preempted_ns",
    "recomputed_tokens",
    "tier_hit_tokens",
    "swapped_in_tokens",
    "transfer_ns",
    "end_ns",
    "drafts",
    "draft_tokens",
    "accepted_tokens",
]
_STEP_COLUMNS = [
    "replica",
    "start_ns",
    "end_ns",
    "prefill_tokens",
    "decode_rows",
    "running",
    "waiting",
    "used_blocks",
    "waiting_blocks",
]
_RARE_STEP_COLUMNS = ["stages_ns", "draft_tokens"]  # of most runs null throughout
