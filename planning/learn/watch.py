"""Whether a server still behaves as its twin: a few seconds of questions, and the layer that has changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tokentwin.planning.learn import questions as ask
from tokentwin.planning.learn.answers import Answer
from tokentwin.planning.learn.kept_twin import KeptTwin
from tokentwin.planning.learn.questions import Bounds
from tokentwin.planning.learn.seen_steps import decode_steps, joined
from tokentwin.planning.learn.server import Server
from tokentwin.planning.learn.twin import Twin
from tokentwin.planning.learn.watched import Layer, WatchedServer
from tokentwin.serving.errors import UserError

OUTSIDE = 0.25, 3.0  # share of the time outside of the engine, and milliseconds, by which it may change
_LONGEST = 4096  # tokens of the longest prompt
_ROWS = 16
_SETTINGS = {
    "enable_prefix_caching": ("prefix caching", "on"),
    "num_blocks": ("KV blocks", "blocks"),
    "block_size": ("block size", "tokens"),
}
_CACHED = 0.6  # share of the first TTFT below which a repeated prompt was cached


def look(kept: KeptTwin, server: Server, reported: Mapping[str, Any]) -> WatchedServer:
    """Ask the server a few questions, and compare it with its twin. `reported` are settings from its metrics."""
    twin = kept.twin
    longest = min(_LONGEST, twin.deployment.scheduler.max_model_len - 64)
    bounds = Bounds(_ROWS, longest + 64)
    lone, decoding, repeated = (
        server.ask(question)
        for question in (
            ask.two_lengths(64, longest, bounds),
            ask.plateau(_ROWS, 128, bounds),
            ask.repeated_prompt(twin.setting.replicas, bounds),
        )
    )
    allowed = 100 * (kept.unchanged[1] - 1)
    short, long = _first_ms(lone, 64), _first_ms(lone, longest)
    twin_short, twin_long = _twin_ms(twin, lone, 64), _twin_ms(twin, lone, longest)
    (said,) = twin.answers([decoding])
    steps = joined([decode_steps(decoding.only(engine.tokens_ns)) for engine in said.of_each_engine])
    step_ms, twin_step_ms = (float(np.median(ns)) / 1e6 for ns in (steps.measured_ns, twin.step_ns(steps.sizes)))
    share, most_ms = OUTSIDE
    layers = (
        Layer.of("decode steps", step_ms, twin_step_ms, "ms", allowed),
        Layer.of("prefill", long - short, twin_long - twin_short, "ms", allowed),
        Layer.of("API server", short, twin_short, "ms", 100 * max(share, most_ms / twin_short)),
    )
    asked = {"enable_prefix_caching": _cached(repeated)}
    return WatchedServer.now(kept.learnt.url, (*layers, *settings(twin, {**reported, **asked})))


def settings(twin: Twin, known: Mapping[str, Any]) -> list[Layer]:
    """Return a layer for each of the settings in `known` that a look compares with the twin's."""
    scheduler = twin.deployment.scheduler
    return [
        Layer.of(layer, float(known[name]), float(getattr(scheduler, name)), unit, 0.0)
        for name, (layer, unit) in _SETTINGS.items()
        if name in known
    ]


def _first_ms(answer: Answer, length: int) -> float:
    ids = _of_length(answer, length)
    return float(np.median([answer.tokens_ns[id][0] - answer.sent_ns[id] for id in ids])) / 1e6


def _twin_ms(twin: Twin, answer: Answer, length: int) -> float:
    (said,) = twin.answers([answer])
    return float(np.median([said.tokens_ns[id][0] - said.sent_ns[id] for id in _of_length(answer, length)])) / 1e6


def _of_length(answer: Answer, length: int) -> Sequence[int]:
    ids = [one.id for one in answer.as_sent.requests if one.prompt_len == length]
    if not ids:
        raise UserError("url", "the server", f"did not answer a prompt of {length} tokens; is it another server?")
    return ids


def _cached(repeated: Answer) -> bool:
    first, *again = (times[0] - repeated.sent_ns[id] for id, times in sorted(repeated.tokens_ns.items()))
    return bool(again) and float(min(again)) < _CACHED * float(first)
