"""The metric registry: one definition of each number, and what other tools call it.

Column metadata, `--help`, tooltips and the glossary (`docs/metrics.md`) all come from
here; nothing else may define a metric. Tools disagree on TPOT, ITL and "throughput"; this table decides.
`python -m serving.metrics` prints the glossary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from serving.errors import UserError

Direction = Literal["lower", "higher"]
Tool = Literal["vllm", "aiperf", "guidellm", "prometheus"]

TOOLS: dict[Tool, str] = {"vllm": "vLLM", "aiperf": "AIPerf", "guidellm": "GuideLLM", "prometheus": "Prometheus"}

STATISTICS: dict[str, str] = {
    "mean": "sum / count",
    "std": "population standard deviation (divisor: count)",
    "min": "smallest value",
    "max": "largest value",
    "count": "how many values there are",
    "p50": "nearest-rank 50th percentile",
    "p90": "nearest-rank 90th percentile",
    "p95": "nearest-rank 95th percentile",
    "p99": "nearest-rank 99th percentile",
}


@dataclass(frozen=True, slots=True)
class Metric:
    """One number: `name` (with its unit where it has one), how people say it, what it is, which way is better.

    `scope` says what one value belongs to: a request, a token gap, a step, or the whole run. `vllm`, `aiperf`,
    `guidellm` and `prometheus` are its names there, empty where the tool has no equal.
    """

    name: str
    label: str
    unit: str
    scope: Literal["request", "token", "step", "run"]
    better: Direction | None
    definition: str
    vllm: tuple[str, ...] = ()
    aiperf: tuple[str, ...] = ()
    guidellm: tuple[str, ...] = ()
    prometheus: tuple[str, ...] = ()

    @property
    def axis(self) -> str:
        """Title of an axis: the label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def read_unit(self) -> str:
        """The unit in which people read it: a fraction in percent."""
        return "%" if self.unit == "fraction" else self.unit

    def read(self, value: Any) -> Any:
        """A value in that unit; what is no number as it is."""
        return 100 * value if self.unit == "fraction" and value is not None else value

    @property
    def read_as(self) -> str:
        """The label with that unit."""
        return f"{self.label} ({self.read_unit})" if self.unit else self.label

    @property
    def help(self) -> str:
        """One paragraph for `--help` and tooltips."""
        better = f" {self.better.capitalize()} is better." if self.better else ""
        return f"{self.axis}: {self.definition}.{better}"

    def names_in(self, tool: Tool) -> tuple[str, ...]:
        """What `tool` calls it."""
        return getattr(self, tool)


_METRICS = (
    Metric("ttft_ms", "TTFT", "ms", "request", "lower",
        "first output token minus intended arrival; clients that start the clock when they send understate it under "
        "load",
        vllm=("ttft",), aiperf=("time_to_first_token",), guidellm=("time_to_first_token_ms",),
        prometheus=("vllm:time_to_first_token_seconds",)),
    Metric("tpot_ms", "TPOT", "ms", "request", "lower",
        "per request, (E2E - TTFT) / (output tokens - 1); null with fewer than two output tokens",
        vllm=("tpot",), aiperf=("inter_token_latency",), guidellm=("inter_token_latency_ms",),
        prometheus=("vllm:request_time_per_output_token_seconds",)),
    Metric("itl_ms", "ITL", "ms", "token", "lower",
        "every gap between consecutive output tokens of a request, pooled over the requests; tokens that one step "
        "brings, as with speculative decoding, come together, with gaps of 0 between them",
        vllm=("itl",), prometheus=("vllm:inter_token_latency_seconds",)),
    Metric("tpot_inclusive_ms", "inclusive TPOT", "ms", "request", "lower",
        "per request, E2E / output tokens: the first token's wait is spread over all (inference-perf: NTPOT)",
        guidellm=("time_per_output_token_ms",)),
    Metric("e2e_ms", "E2E", "ms", "request", "lower",
        "last output token minus intended arrival",
        vllm=("e2el",), aiperf=("request_latency",), guidellm=("request_latency",),
        prometheus=("vllm:e2e_request_latency_seconds",)),
    Metric("queue_ms", "queue time", "ms", "request", "lower",
        "intended arrival to the start of the first step the request was part of; queue + prefill + decode = E2E",
        prometheus=("vllm:request_queue_time_seconds",)),
    Metric("prefill_ms", "prefill time", "ms", "request", "lower",
        "start of the request's first step to its first output token",
        prometheus=("vllm:request_prefill_time_seconds",)),
    Metric("decode_ms", "decode time", "ms", "request", "lower",
        "first output token to last output token",
        prometheus=("vllm:request_decode_time_seconds",)),
    Metric("preempted_ms", "preempted time", "ms", "request", "lower",
        "time spent preempted; part of the prefill or decode time it interrupted, not added to them"),
    Metric("transfer_ms", "KV transfer time", "ms", "request", "lower",
        "KV on its way from a prefill to a decode replica, once blocks were there for it; part of the decode time"),
    Metric("send_delay_ms", "send delay", "ms", "request", "lower",
        "when the client sent the request minus intended arrival: the client's lateness, not the engine's"),
    Metric("tokenise_ms", "tokenising", "ms", "request", "lower",
        "the API server has the whole request until the engine has it: template, tokeniser and the way between their "
        "processes; null without an API server"),
    Metric("detokenise_ms", "detokenising", "ms", "request", "lower",
        "last output token until it is text in the API server; null without an API server"),
    Metric("stream_ms", "streaming", "ms", "request", "lower",
        "last text until the whole answer is written to its client; null without an API server"),
    Metric("client_ms", "client time", "ms", "request", "lower",
        "E2E as the client saw it, less the time from the request's receipt to its answer's last byte: the client's "
        "own lateness and the network; tokenising + queue + prefill + decode + detokenising + streaming + this = the "
        "client's E2E; null unless a client was recorded, too"),
    Metric("tok_s_user", "tokens/s/user", "tokens/s", "request", "higher",
        "1000 / TPOT: the speed at which one user sees tokens appear",
        aiperf=("output_token_throughput_per_user",)),
    Metric("request_throughput", "request throughput", "requests/s", "run", "higher",
        "finished requests / measurement window",
        vllm=("request_throughput",), aiperf=("request_throughput",), guidellm=("requests_per_second",)),
    Metric("input_throughput", "input throughput", "tokens/s", "run", "higher",
        "prompt tokens of finished requests / measurement window; prefix-cache hits count",
        vllm=("input_throughput",), guidellm=("prompt_tokens_per_second",), prometheus=("vllm:prompt_tokens_total",)),
    Metric("output_throughput", "output throughput", "tokens/s", "run", "higher",
        "output tokens of finished requests / measurement window",
        vllm=("output_throughput",), aiperf=("output_token_throughput",), guidellm=("output_tokens_per_second",),
        prometheus=("vllm:generation_tokens_total",)),
    Metric("total_throughput", "total throughput", "tokens/s", "run", "higher",
        "prompt and output tokens of finished requests / measurement window",
        vllm=("total_token_throughput",), aiperf=("total_token_throughput",), guidellm=("tokens_per_second",)),
    Metric("tok_s_gpu", "tokens/s/GPU", "tokens/s", "run", "higher",
        "output throughput / provisioned GPUs"),
    Metric("request_goodput", "goodput", "requests/s", "run", "higher",
        "requests that finished and met all their SLOs / measurement window",
        vllm=("request_goodput",), aiperf=("goodput",)),
    Metric("slo_attainment", "SLO attainment", "fraction", "run", "higher",
        "requests that finished and met all their SLOs / all requests; rejected, aborted and unfinished requests "
        "stay in the denominator"),
    Metric("jain_fairness", "Jain's fairness index", "fraction", "run", "higher",
        "(sum of x)^2 / (n * sum of x^2) over the n tenants, x being the prompt and output tokens of a tenant's "
        "requests that finished by the last intended arrival, so while there was load to share; 1 is equal service, "
        "1/n is all for one; null with one tenant, or when nothing finished by then"),
    Metric("concurrency", "concurrency", "requests", "run", None,
        "requests outstanding, from intended arrival to last token: time-weighted mean over the measurement window, "
        "and peak by sweep line (a request that ends as another arrives does not overlap it)",
        vllm=("max_concurrent_requests",), guidellm=("request_concurrency",)),
    Metric("running", "running", "requests", "step", None,
        "requests admitted by the scheduler, after planning the step",
        prometheus=("vllm:num_requests_running",)),
    Metric("waiting", "waiting", "requests", "step", "lower",
        "requests queued at the scheduler, after planning the step",
        prometheus=("vllm:num_requests_waiting",)),
    Metric("batch_tokens", "batch tokens", "tokens", "step", None,
        "tokens computed in one step: those of prefill rows, one for each decode row, and the draft tokens it "
        "verifies",
        prometheus=("vllm:iteration_tokens_total",)),
    Metric("step_ms", "step time", "ms", "step", "lower",
        "start of a step's execution to its tokens being there"),
    Metric("busy", "busy", "fraction", "run", None,
        "time with a step under way / measurement window, averaged over the replicas"),
    Metric("pipeline_bubble", "pipeline bubble", "fraction", "run", "lower",
        "of the time with a step under way, the share that a pipeline stage is idle, averaged over the stages"),
    Metric("live_replicas", "live replicas", "", "run", None,
        "replicas that could take requests or still had some, mean over the run"),
    Metric("gpu_hours", "GPU hours", "h", "run", "lower",
        "GPUs of each replica times the time from its start to its end, summed; cold starts and drains count"),
    Metric("cost_usd", "cost", "$", "run", "lower",
        "GPU hours of each pool times its price; null where a price is not known"),
    Metric("usd_per_hour", "cost per hour", "$/h", "run", "lower",
        "cost / duration of the run"),
    Metric("kv_usage", "KV usage", "fraction", "step", None,
        "KV blocks referenced / KV blocks, of the step's replica; the mean weighs each step by its duration",
        prometheus=("vllm:kv_cache_usage_perc",)),
    Metric("kv_pressure", "KV pressure", "fraction", "step", "lower",
        "KV blocks that running and waiting requests demand / KV blocks, of the step's replica; where it is more "
        "than all, some of them must wait"),
    Metric("prefix_hit_rate", "prefix hit rate", "fraction", "run", "higher",
        "prompt tokens found in the prefix cache / prompt tokens looked up, at first admission",
        prometheus=("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")),
    Metric("tier_hit_rate", "KV tier hit rate", "fraction", "run", "higher",
        "prompt tokens loaded from KV tiers / prompt tokens looked up, at first admission; null without tiers",
        prometheus=("vllm:external_prefix_cache_hits_total", "vllm:external_prefix_cache_queries_total")),
    Metric("swapped_in_tokens", "swapped-in tokens", "tokens", "run", None,
        "tokens loaded from KV tiers after preemptions, not computed again; null without tiers"),
    Metric("preemptions", "preemptions", "", "run", "lower",
        "times a running request lost its KV blocks to another",
        prometheus=("vllm:num_preemptions_total",)),
    Metric("recomputed_tokens", "recomputed tokens", "tokens", "run", "lower",
        "tokens computed again after preemptions"),
    Metric("acceptance_length", "acceptance length", "tokens", "run", "higher",
        "1 + accepted draft tokens / drafts verified: tokens that a request gets from a step that verifies a draft",
        prometheus=("vllm:spec_decode_num_drafts_total",)),
    Metric("draft_acceptance_rate", "draft acceptance rate", "fraction", "run", "higher",
        "accepted draft tokens / draft tokens verified",
        prometheus=("vllm:spec_decode_num_accepted_tokens_total",)),
    Metric("rejected_draft_tokens", "rejected draft tokens", "tokens", "run", "lower",
        "draft tokens that were verified for nothing",
        prometheus=("vllm:spec_decode_num_draft_tokens_total",)),
    Metric("mfu", "MFU", "fraction", "run", "higher",
        "achieved FLOP/s / the measured ceiling of the device (not the data sheet's)"),
    Metric("mbu", "MBU", "fraction", "run", "higher",
        "achieved memory bytes/s / the measured ceiling of the device (not the data sheet's)"),
    Metric("usd_per_mtok_out", "cost per output token", "$/Mtok", "run", "lower",
        "cost per hour / (output tokens/s x 3600) x 1e6, over the whole run, as it fills and empties; a plan's is of "
        "steady operation"),
    Metric("usd_per_mtok_in", "cost per input token", "$/Mtok", "run", "lower",
        "cost per hour / (input tokens/s x 3600) x 1e6, over the whole run, as it fills and empties; a plan's is of "
        "steady operation"),
    Metric("usd_per_mtok_total", "cost per token", "$/Mtok", "run", "lower",
        "cost per hour / (total tokens/s x 3600) x 1e6, over the whole run, as it fills and empties; a plan's is of "
        "steady operation"),
    Metric("saturation", "saturation", "", "run", None,
        "STABLE, BACKLOGGED or OVERLOADED, from the slope of the backlog and its 95 % interval: OVERLOADED when the "
        "interval lies above zero and at least a tenth of what arrives piles up; BACKLOGGED when the interval lies "
        "above zero and at least a fiftieth does, or requests wait for their first step during more than half of "
        "their time; null when too few requests arrive to tell"),
)  # fmt: skip

METRICS: dict[str, Metric] = {m.name: m for m in _METRICS}


def metric(name: str) -> Metric:
    """The metric called `name` here. Raises UserError that names the known ones."""
    if name not in METRICS:
        raise UserError("metric", name, f"is not a known metric; choose one of {', '.join(METRICS)}")
    return METRICS[name]


def label_of(name: str) -> str:
    """A metric's label; of what the registry does not have, which a document may name, the name itself."""
    return METRICS[name].label if name in METRICS else name


def axis_of(name: str) -> str:
    """A metric's label with its unit, likewise."""
    return METRICS[name].axis if name in METRICS else name


def glossary() -> str:
    """The glossary as Markdown: definitions, statistics, and the names elsewhere."""
    lines = [
        "# Metrics",
        "",
        "<!-- Generated by `python -m serving.metrics`; edit serving/metrics.py instead. -->",
        "",
        "```",
        "tokentwin columns  # what every column of a recording means",
        "```",
        "Each metric has one definition, for real and for simulated runs.",
        "",
        "## Definitions",
        "",
        "| name | unit | of | better | definition |",
        "|---|---|---|---|---|",
    ]
    for m in _METRICS:
        better = m.better or ""
        lines.append(f"| `{m.name}` | {m.unit} | {m.scope} | {better} | {m.label}: {m.definition} |")
    lines += [
        "",
        "## Rules",
        "",
        "- **Measurement window**: first intended arrival to last finish. Throughputs divide by it. A plan's",
        "  throughputs and costs are those of [steady operation](plan.md#steady-operation) instead.",
        "- **Latencies** are those of finished requests. Rejected, aborted and unfinished requests have none, but",
        "  count in the denominator of SLO attainment.",
        "- **Percentiles** are exact order statistics by nearest rank: with n values in order, p*q* is number",
        "  ceil(q n / 100). They are always a value that occurred.",
        "- **SLO**: a request with fewer than two output tokens meets a TPOT bound.",
        "- **Saturation** counts the requests outstanding in sixteen equal bins of the arrival period, without its",
        "  first quarter, in which an empty system fills. It fits a line with a Student's t interval. The bins count",
        "  as fewer for their lag-1 autocorrelation, corrected for its bias. Under 20 requests nothing is said.",
        "",
        "## Statistics",
        "",
        "| name | definition |",
        "|---|---|",
        *(f"| `{name}` | {text} |" for name, text in STATISTICS.items()),
        "",
        "## Names elsewhere",
        "",
        "Names on one row measure the same thing. Prometheus has seconds, or counters to take rates or ratios of.",
        "The same word on another row means something else: AIPerf's and GuideLLM's *inter-token latency* is our TPOT,",
        "and GuideLLM's *time per output token* is our inclusive TPOT.",
        "",
        "| name | " + " | ".join(TOOLS.values()) + " |",
        "|---|" + "---|" * len(TOOLS),
    ]
    for m in _METRICS:
        if any(m.names_in(tool) for tool in TOOLS):
            cells = (", ".join(f"`{n}`" for n in m.names_in(tool)) for tool in TOOLS)
            lines.append(f"| `{m.name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(glossary(), end="")
