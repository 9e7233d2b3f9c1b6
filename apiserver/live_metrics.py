"""The metrics of a running server; as in vLLM, they change with every step, not only when a request ends.

As in vLLM, gauges show the state of each scheduler at the end of its last step. Times are times of the run: a twin at
ten times real speed counts simulated seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from time import time
from typing import Any, NamedTuple

from tokentwin.apiserver.engine_messages import Admitted, StepEnd
from tokentwin.apiserver.exposition import Family, Series, exposition
from tokentwin.apiserver.families import (
    CACHE_CONFIG,
    HTTP_REQUESTS,
    LORA_REQUESTS,
    OF_THE_SERVER,
    TOOL_PARSES,
    of_an_engine,
)
from tokentwin.apiserver.messages import Add, Asked, Late, finish_reason
from tokentwin.apiserver.process_metrics import ProcessMetrics
from tokentwin.serving.deployments.config import Deployment
from tokentwin.serving.request import Request, Status
from tokentwin.serving.scheduler import Scheduler
from tokentwin.serving.step_plan import StepPlan
from tokentwin.serving.workload import STOPPED

_SECOND_NS = 1e9
_SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")  # by level
_TIERS = {"cpu": "host", "disk": "disk"}


class ReplicaNow(NamedTuple):
    """A replica that is alive.

    `holds` is True if it has requests. `blocks` is its number of KV blocks without the null block.
    """

    number: int
    holds: bool
    blocks: int
    deployment: Deployment


class _Life:
    """A request under way, with the time of its last token (-1 before the first) and the preemptions counted so far."""

    __slots__ = ("admitted", "last_ns", "preempted", "received_ns")

    def __init__(self, received_ns: int) -> None:
        self.received_ns = received_ns
        self.last_ns = -1
        self.preempted = 0
        self.admitted: Admitted | None = None


class LiveMetrics:
    """The metrics of the served `model`; requests have up to `longest` tokens, and drafts up to `draft_tokens`."""

    def __init__(self, model: str, longest: int, draft_tokens: int = 0) -> None:
        self._model = model
        self._families = of_an_engine(longest, draft_tokens)
        self._computed: dict[int, int] = {}  # tokens of each engine since its last step that sampled
        self._engines: dict[int, Series] = {}
        self._server = Series(OF_THE_SERVER, {"model_name": model})
        self._asked: dict[tuple[str, ...], Series] = {}
        self._parsed: dict[tuple[str, ...], Series] = {}
        self._adapters: dict[int, tuple[str, str]] = {}  # by engine, adapters of running and of waiting requests
        self._process = ProcessMetrics()
        self._sleeps = _SLEEP_STATES[0]
        self._by_hand: dict[str, float | dict[str, float]] = {}
        self._shown = "{}"
        self._lives: dict[int, _Life] = {}
        self._ended: list[int] = []  # finished requests; the end of their last step is not noted yet

    def expects(self, id: int, received_ns: int) -> None:
        """Note request `id`, which the API server received at `received_ns`."""
        self._lives[id] = _Life(received_ns)

    def refused(self) -> None:
        """Count a request that was refused because too many requests were under way."""
        self._server.inc("vllm:admission_rejections", split="max_num_queued_reqs")

    def late(self, late: Late) -> None:
        """Add an API process's report of the delays with which tokens were sent."""
        self._server.add("tokentwin:lateness_seconds", late.counts, late.sum_s)

    def asked(self, asked: Asked) -> None:
        """Add an API process's report of what it has answered."""
        for method, path, status, count in asked.counts:
            _count(self._asked, HTTP_REQUESTS, {"handler": path, "method": method, "status": status}, count)
        for mode, outcome, kind, count in asked.parsed:
            labels = {"model_name": self._model, "mode": mode, "outcome": outcome, "request_type": kind}
            _count(self._parsed, TOOL_PARSES, labels, count)

    def stalled(self, seconds: float) -> None:
        """Count real time for which the run of a twin paused, because its machine stalled."""
        self._server.inc("tokentwin:stalled_seconds", seconds)

    def sleeps(self, level: int | None) -> None:
        """Note the level at which the server sleeps; None if it is awake."""
        self._sleeps = _SLEEP_STATES[level or 0]
        for engine in self._engines.values():
            self._set_sleep(engine)

    def _set_sleep(self, engine: Series) -> None:
        for state in _SLEEP_STATES:
            engine.set("vllm:engine_sleep_state", int(state == self._sleeps), state)

    def show(self, numbers: str, living: Iterable[ReplicaNow]) -> bytes:
        """Show `numbers` (JSON, by metric; empty: keep the present ones) instead of what was counted.

        A metric has one number, or an object with a number for each engine that is `living`, by its index. Return the
        present ones as JSON; if a metric cannot be set, return a text that says so.
        """
        if numbers:
            shown: dict[str, float | dict[str, float]] = json.loads(numbers)
            plain = {
                one.name: one.sample_name for one in self._families if one.kind != "histogram" and not one.split[0]
            }
            names = {sample: name for name, sample in plain.items()}
            for name in shown.keys() - names.keys():
                return f"{name} cannot be set; {', '.join(sorted(names))} can".encode()
            engines = [str(one.number) for one in living]
            for name, number in shown.items():
                for given in number if isinstance(number, dict) else ():
                    if given not in engines:
                        return f"{name}: there is no engine {given}; give one of {', '.join(engines)}".encode()
            self._by_hand = {names[name]: number for name, number in shown.items()}
            self._shown = numbers
            for index, engine in self._engines.items():
                engine.by_hand = self._of_engine(index)
        return self._shown.encode()

    def _of_engine(self, index: int) -> dict[str, float]:
        by_engine = {
            name: numbers.get(str(index)) if isinstance(numbers, dict) else numbers
            for name, numbers in self._by_hand.items()
        }
        return {name: number for name, number in by_engine.items() if number is not None}

    def step(self, end: StepEnd) -> None:
        engine = self._engine(end.replica)
        _holds(engine, end.running, end.waiting, end.deferred, end.usage)
        self._adapters[end.replica] = end.adapters
        if not end.tokens:
            return  # no step has run: a request was aborted
        engine.inc("vllm:generation_tokens", end.generated)
        self._computed[end.replica] = self._computed.get(end.replica, 0) + end.tokens
        if end.sampled:  # as in vLLM, a step that only computes a part of a prompt is counted with the next step
            engine.observe("vllm:iteration_tokens_total", self._computed.pop(end.replica))
        for tokens, accepted in end.drafts:
            engine.inc("vllm:spec_decode_num_drafts")
            engine.inc("vllm:spec_decode_num_draft_tokens", tokens)
            engine.inc("vllm:spec_decode_num_accepted_tokens", accepted)
            for position in range(accepted):
                engine.inc("vllm:spec_decode_num_accepted_tokens_per_pos", 1, str(position))
        for admitted in end.admitted:
            self._admitted(engine, admitted)
        gaps: dict[int, int] = {}  # number of requests by time since their last token; most steps have one such time
        for id in end.sampled:
            if (life := self._lives.get(id)) is None:
                continue  # the request has ended since
            if life.last_ns < 0:
                self._first_token(engine, life, end.now_ns)
            else:
                gap_ns = end.now_ns - life.last_ns
                gaps[gap_ns] = gaps.get(gap_ns, 0) + 1
            life.last_ns = end.now_ns
        for id in self._ended:
            del self._lives[id]
        self._ended.clear()
        for gap_ns, times in gaps.items():
            engine.observe("vllm:inter_token_latency_seconds", gap_ns / _SECOND_NS, times)

    def _admitted(self, engine: Series, admitted: Admitted) -> None:
        if (life := self._lives.get(admitted.id)) is None:
            return
        if admitted.preemptions > life.preempted:  # the overlapped loop may have preempted it since it was admitted
            engine.inc("vllm:num_preemptions", admitted.preemptions - life.preempted)
            life.preempted = admitted.preemptions
        if life.admitted is None:
            life.admitted = admitted
            engine.inc("vllm:prefix_cache_queries", admitted.prompt_tokens)
            engine.inc("vllm:prefix_cache_hits", admitted.hit_tokens)
            engine.inc("vllm:prompt_tokens_cached_by_source", admitted.hit_tokens, "device")

    def _first_token(self, engine: Series, life: _Life, now_ns: int) -> None:
        engine.observe("vllm:time_to_first_token_seconds", (now_ns - life.received_ns) / _SECOND_NS)
        self._prompt_read(engine, life)

    def _prompt_read(self, engine: Series, life: _Life) -> None:
        if life.admitted is not None:
            prompt, hit = life.admitted.prompt_tokens, life.admitted.hit_tokens
            engine.inc("vllm:prompt_tokens", prompt)
            engine.inc("vllm:prompt_tokens_by_source", prompt - hit, "local_compute")
            engine.inc("vllm:prompt_tokens_by_source", hit, "local_cache_hit")
            engine.inc("vllm:prompt_tokens_cached", hit)

    def request(self, row: Mapping[str, Any], asked: Add) -> None:
        """Count a request that has ended, by its row of the dataset `requests`."""
        id, replica = row["request_id"], row["replica"]
        if row["status"] == "rejected":
            del self._lives[id]
            if replica is None:  # vLLM does not count a request that can never fit
                self.refused()
            return
        life = self._lives[id]
        if row["status"] == "finished" and row["reason"] != STOPPED and life.last_ns < row["finish_ns"]:
            self._ended.append(id)
        else:
            del self._lives[id]
        if replica is None:
            return
        engine = self._engine(replica)
        engine.inc("vllm:request_success", split=finish_reason(row, asked))
        engine.inc("vllm:num_preemptions", max(row.get("preemptions", 0) - life.preempted, 0))  # not readmitted
        if row["status"] == "finished":
            self._finished(engine, row, asked, life)

    def _finished(self, engine: Series, row: Mapping[str, Any], asked: Add, life: _Life) -> None:
        prompt, tokens, hit = row["prompt_tokens"], row["output_tokens"], row["prefix_hit_tokens"]
        arrival_ns, scheduled_ns, finish_ns = row["arrival_ns"], row["scheduled_ns"], row["finish_ns"]
        first_ns = row["first_token_ns"]
        pooled = not asked.max_tokens
        if pooled:
            self._prompt_read(engine, life)
            first_ns = finish_ns  # it has no decode phase
        if first_ns is not None:
            decode_ns = finish_ns - first_ns
            seconds = {
                "e2e_request_latency": finish_ns - life.received_ns,
                "request_queue_time": scheduled_ns - arrival_ns,
                "request_prefill_time": first_ns - scheduled_ns,
                "request_inference_time": finish_ns - scheduled_ns,
            }
            if not pooled:
                seconds["request_decode_time"] = decode_ns
                seconds["request_time_per_output_token"] = decode_ns / (tokens - 1) if tokens > 1 else 0
            for name, ns in seconds.items():
                engine.observe(f"vllm:{name}_seconds", ns / _SECOND_NS)
        counts = {
            "prompt_tokens": prompt,
            "generation_tokens": tokens,
            "max_num_generation_tokens": tokens,
            "params_max_tokens": asked.max_tokens,
            "params_n": 1,
            "num_preemptions": row["preemptions"],
            "prefill_kv_computed_tokens": prompt - hit,
        }
        for name, count in counts.items():
            engine.observe(f"vllm:request_{name}", count)
        if (loaded := row.get("tier_hit_tokens")) is not None:
            engine.inc("vllm:external_prefix_cache_queries", prompt)
            for tier, hit_tokens in loaded:
                engine.inc("vllm:external_prefix_cache_hits", hit_tokens)
                engine.inc("vllm:prompt_tokens_cached_by_source", hit_tokens, _TIERS.get(tier, "external_unspecified"))

    def text(self, living: Iterable[ReplicaNow], records: bool, only: int | None = None) -> bytes:
        """Return the metrics of all replicas that are alive, or of replica `only`, in Prometheus' text format.

        `records` is True if a recording is being written.
        """
        self._server.set("tokentwin:recording", int(records))
        engines, caches, adapters = {}, [], []
        for now in living:
            engines[now.number] = engine = self._engine(now.number)
            if not now.holds:
                _holds(engine, 0, 0, 0, 0)
            if only in (None, now.number):
                cache = Series([CACHE_CONFIG], _cache_labels(now))
                cache.set(CACHE_CONFIG.name, 1)
                caches.append(cache)
                if now.deployment.lora is not None:
                    running = self._adapters.get(now.number, ("", "")) if now.holds else ("", "")
                    adapter = Series([LORA_REQUESTS], _lora_labels(now.deployment.lora.max_loras, *running))
                    adapter.set(LORA_REQUESTS.name, time())
                    adapters.append(adapter)
        self._engines = engines
        shown = [engine for number, engine in engines.items() if only in (None, number)]
        return (
            exposition(self._families, shown)
            + exposition([CACHE_CONFIG], caches)
            + (exposition([LORA_REQUESTS], adapters) if adapters else b"")
            + exposition(OF_THE_SERVER, [self._server])
            + exposition([HTTP_REQUESTS], list(self._asked.values()))
            + (exposition([TOOL_PARSES], list(self._parsed.values())) if self._parsed else b"")
            + self._process.text()
        )

    def _engine(self, number: int) -> Series:
        if (engine := self._engines.get(number)) is None:
            engine = self._engines[number] = Series(self._families, {"model_name": self._model, "engine": str(number)})
            self._set_sleep(engine)
            engine.by_hand = self._of_engine(number)
        return engine


def _holds(engine: Series, running: int, waiting: int, deferred: int, usage: float) -> None:
    engine.set("vllm:num_requests_running", running)
    engine.set("vllm:num_requests_waiting", waiting)
    engine.set("vllm:num_requests_waiting_by_reason", waiting - deferred, "capacity")
    engine.set("vllm:num_requests_waiting_by_reason", deferred, "deferred")
    engine.set("vllm:kv_cache_usage_perc", usage)


def _lora_labels(slots: int, running: str, waiting: str) -> dict[str, str]:
    return {"max_lora": str(slots), "running_lora_adapters": running, "waiting_lora_adapters": waiting}


def _cache_labels(now: ReplicaNow) -> dict[str, str]:
    scheduler, deployment = now.deployment.scheduler, now.deployment
    return {
        "block_size": str(scheduler.block_size),
        "cache_dtype": deployment.kv_cache_dtype,
        "enable_prefix_caching": str(scheduler.enable_prefix_caching),
        "gpu_memory_utilization": str(deployment.gpu_memory_utilization),
        "kv_cache_size_tokens": str(now.blocks * scheduler.block_size),
        "num_gpu_blocks": str(now.blocks + 1),
        "engine": str(now.number),
    }


def step_end(
    replica: int,
    scheduler: Scheduler,
    plan: StepPlan,
    now_ns: int,
    sampled: list[int],
    generated: int,
    lora: bool = False,
) -> StepEnd:
    """Return the message about the end of a step for the metrics; `scheduler` has committed its `plan`.

    With `lora` the message names the adapters of running and of waiting requests.
    """
    pool = scheduler.pool
    return StepEnd(
        replica,
        now_ns,
        len(scheduler.running),
        len(scheduler.waiting),
        sum(request.status is Status.LOADING for request in scheduler.waiting),
        (pool.total - pool.free) / pool.total,
        plan.tokens,
        generated,
        sampled,
        [Admitted(one.id, one.prompt_len, one.first_hit or 0, one.preemptions) for one in plan.admitted],
        plan.verified,
        (_adapters_of(scheduler.running.values()), _adapters_of(scheduler.waiting)) if lora else ("", ""),
    )


def _count(known: dict[tuple[str, ...], Series], family: Family, labels: Mapping[str, str], count: int) -> None:
    """Add `count` to the counter of `family` with these labels."""
    key = tuple(labels.values())
    if key not in known:
        known[key] = Series([family], labels)
    known[key].inc(family.name, count)


def _adapters_of(requests: Iterable[Request]) -> str:
    """Return the names of the adapters of `requests`, with commas between them, as vLLM does."""
    return ",".join(dict.fromkeys(request.arrived.adapter for request in requests if request.arrived.adapter))
