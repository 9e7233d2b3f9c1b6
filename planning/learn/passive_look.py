"""Whether a server treats its own traffic as its twin would: two scrapes of its `/metrics`, and no request of ours.

The twin serves made-up traffic with the means of the requests that ended between the scrapes, and the mean latencies of
both are compared layer by layer. The metrics are measured in the server. They lack the client and the network, which
the twin's front door has; so the twin's time outside of the engine is only an upper limit of the API server's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from time import monotonic, sleep

import numpy as np
from pydantic import SecretStr

from tokentwin.planning.learn.answers import Simulated, simulated
from tokentwin.planning.learn.kept_twin import KeptTwin
from tokentwin.planning.learn.reported import engines, read_page, vllm_settings
from tokentwin.planning.learn.request import MetricsPage
from tokentwin.planning.learn.twin import Twin
from tokentwin.planning.learn.watch import OUTSIDE, settings
from tokentwin.planning.learn.watched import FEWEST, Layer, WatchedServer
from tokentwin.serving.errors import UserError, reason
from tokentwin.serving.workload import Workload
from tokentwin.traces.measured.prometheus import OUTPUT_TOKENS, Window, made_up_workload, samples_of, shared_share

_MOST = 400  # requests of which the twin's means are taken
_WARM_UP = 3.0  # mean durations of a request before the twin's means are taken
_BURSTINESS = (1.0, 1.0, 1.0, 4.0, 4.0, 9.0)  # of each made-up traffic: the metrics do not say how bursty the real is
_SHARED = 0.5  # change of prefills, at a hit rate of 1, because the metrics do not say who shares which prefix
_SPREADS = 3.0  # standard deviations between made-up traffics that the server may be away from their mean
_LEAST_MS = 0.01  # shorter times count as this long, because changes are in percent

DECODE, PREFILL, QUEUE, OUTER, FIRST = "decode steps", "prefill", "queueing", "API server", "first token"
Means = dict[str, float]
"""Mean times in ms by layer."""


@dataclass(frozen=True)
class Scrape:
    """The text of a server's metrics, and the time of the monotonic clock at which it came."""

    url: str
    text: str
    at_s: float

    @classmethod
    def take(cls, url: str, key: SecretStr | None) -> Scrape:
        """Get the metrics at `url`. Raises UserError if there are none."""
        try:
            return cls(url, read_page(url, key), monotonic())
        except (OSError, ValueError) as error:
            cause = getattr(error, "reason", error)  # that of an error of urllib is another error, or a text
            why = reason(cause) if isinstance(cause, Exception) else str(cause)
            raise UserError("metrics", url, f"cannot be read: {why}") from None


class PassiveWatch:
    """Looks at one server. Each begins at the scrape with which the last one ended, and lasts `window_s` or longer."""

    def __init__(self, kept: KeptTwin, page: MetricsPage) -> None:
        self._kept, self._page = kept, page
        self._last = self._scrape()

    def look(self) -> WatchedServer:
        """Wait for the end of the window, and compare. Raises UserError as `passive_look` does."""
        sleep(max(self._last.at_s + 60 * self._page.window - monotonic(), 0.0))
        before, self._last = self._last, self._scrape()
        return passive_look(self._kept, before, self._last)

    def _scrape(self) -> Scrape:
        return Scrape.take(self._page.metrics, self._page.api_key)


def passive_look(kept: KeptTwin, before: Scrape, after: Scrape) -> WatchedServer:
    """Compare a server with its twin by the requests that ended between two scrapes of its metrics.

    If these are fewer than `FEWEST`, only the settings that the metrics state are compared. Raises UserError for
    metrics that are not those of one engine, or that were reset between the scrapes.
    """
    window = Window(samples_of(before.text, before.url), samples_of(after.text, after.url), after.url)
    if not window.has(f"{OUTPUT_TOKENS}_bucket"):
        raise UserError(
            "metrics", after.url, f"has no {OUTPUT_TOKENS}, which vLLM and tokentwin serve have; give --url"
        )
    if (count := engines(after.text)) > 1:
        raise UserError("metrics", after.url, f"has the metrics of {count} engines; a twin is one engine")
    layers = settings(kept.twin, vllm_settings(after.text))
    requests = round(window.histogram(OUTPUT_TOKENS).count)
    if requests >= FEWEST:
        layers = [*_latencies(kept, window, after.at_s - before.at_s), *layers]
    return WatchedServer.now(after.url, layers, requests)


def _latencies(kept: KeptTwin, window: Window, window_s: float) -> list[Layer]:
    """Return the layers whose mean times the metrics have."""
    seen = measured_means(window)
    traffics = [_Traffic.like(window, window_s, kept.twin, seed) for seed in range(len(_BURSTINESS))]
    said = [traffic.means(kept.twin) for traffic in traffics]
    ends = [traffics[0].means(replace(kept.twin, times=kept.twin.times.scaled(factor))) for factor in kept.unchanged]
    layers = []
    share, most_ms = OUTSIDE
    step_ms = float(np.mean([means[DECODE] for means in said if DECODE in means] or [0.0]))
    outside_ms = float(np.mean([means[OUTER] for means in said]))
    for layer, seen_ms in seen.items():
        values = [means[layer] for means in said if layer in means]
        if not values:
            continue
        twin_ms = max(float(np.mean(values)), _LEAST_MS)
        reach_ms = max(abs(end.get(layer, values[0]) - values[0]) for end in ends)
        allowed_ms = reach_ms + _SPREADS * float(np.std(values))
        if layer in (PREFILL, FIRST):
            allowed_ms += _SHARED * shared_share(window) * twin_ms
        if layer == OUTER:
            allowed_ms += max(share * twin_ms, most_ms) + step_ms
        elif layer == QUEUE:  # it depends most on bursts, and vLLM does not count the rest of the running step
            allowed_ms += step_ms + _SPREADS * float(np.std(values))
        elif layer == FIRST:
            allowed_ms += outside_ms + step_ms
        layers.append(Layer.of(layer, seen_ms, twin_ms, "ms", 100 * allowed_ms / twin_ms, layer == OUTER))
    return layers


def measured_means(window: Window) -> Means:
    """Return the mean times of the requests that ended in the window, as far as the engine exports them.

    Times of the engine are preferred. If they are missing, the first token stands for prefill, queue and API server.
    """
    means: Means = {}

    def mean_ms(*names: str) -> float | None:
        """Return the mean of the first of these histograms that has values."""
        for name in (f"vllm:{name}_seconds" for name in names):
            if window.has(f"{name}_bucket") and (histogram := window.histogram(name)).count:
                return 1e3 * histogram.mean
        return None

    outputs = window.histogram(OUTPUT_TOKENS)
    decode_ms, gaps = mean_ms("request_decode_time"), outputs.total / outputs.count - 1
    gap_ms = mean_ms("inter_token_latency", "time_per_output_token")
    if decode_ms is not None and gaps > 0:
        gap_ms = decode_ms / gaps
    parts = {DECODE: gap_ms, PREFILL: mean_ms("request_prefill_time"), QUEUE: mean_ms("request_queue_time")}
    means |= {layer: ms for layer, ms in parts.items() if ms is not None}
    whole_ms = mean_ms("e2e_request_latency")
    if PREFILL in means and QUEUE in means:
        if whole_ms is not None and decode_ms is not None:
            means[OUTER] = max(whole_ms - decode_ms - means[PREFILL] - means[QUEUE], 0.0)
    elif (first_ms := mean_ms("time_to_first_token")) is not None:
        means[FIRST] = first_ms
    return means


@dataclass(frozen=True)
class _Traffic:
    """Made-up requests, of which those count that end between `from_ns` and `until_ns`."""

    workload: Workload
    from_ns: float
    until_ns: float

    @classmethod
    def like(cls, window: Window, window_s: float, twin: Twin, seed: int) -> _Traffic:
        """Return traffic with the means of the window, which begins earlier: a server in use is not empty."""
        rate = window.histogram(OUTPUT_TOKENS).count / window_s
        lasting_s = min(window_s, _MOST / rate)
        earlier_s = min(_WARM_UP * window.histogram("vllm:e2e_request_latency_seconds").mean, _WARM_UP * _MOST / rate)
        made_up = made_up_workload(
            window,
            window_s,
            "window",
            seed=seed,
            lasting_s=earlier_s + lasting_s,
            burstiness=_BURSTINESS[seed],
        )
        longest = twin.deployment.scheduler.max_model_len
        fitting = [one for one in made_up.requests if one.prompt_len + one.output_len <= longest]
        return cls(replace(made_up, requests=fitting), 1e9 * earlier_s, 1e9 * (earlier_s + lasting_s))

    def means(self, twin: Twin) -> Means:
        """Return the twin's mean times of these requests."""
        deployment = twin.deployment
        return self._means(simulated(self.workload, deployment, twin.times.cost(deployment), twin.front_door))

    def _means(self, said: Simulated) -> Means:
        names = ["request_id", "arrival_ns", "scheduled_ns", "first_token_ns", "finish_ns", "output_tokens"]
        engine, clients = (
            {name: table[name].to_numpy(zero_copy_only=False) for name in names}
            for table in (said.engine.sort_by("request_id"), said.clients.sort_by("request_id"))
        )
        counted = (engine["finish_ns"] > self.from_ns) & (engine["finish_ns"] <= self.until_ns)
        if not counted.any():
            return {}
        whole_ns, clients_ns = (one["finish_ns"] - one["arrival_ns"] for one in (engine, clients))
        gaps = (engine["output_tokens"] - 1)[counted].sum()
        times_ns = {
            PREFILL: engine["first_token_ns"] - engine["scheduled_ns"],
            QUEUE: engine["scheduled_ns"] - engine["arrival_ns"],
            FIRST: engine["first_token_ns"] - engine["arrival_ns"],
            OUTER: clients_ns + said.delay_ns - whole_ns,
        }
        means = {layer: float(ns[counted].mean()) / 1e6 for layer, ns in times_ns.items()}
        if gaps:
            decode_ns = (engine["finish_ns"] - engine["first_token_ns"])[counted].sum()
            means[DECODE] = float(decode_ns / gaps) / 1e6
        return means
