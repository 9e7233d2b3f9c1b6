"""Live: a server while it runs, and a trace of the reader's own prompt through it."""

from __future__ import annotations

import time
from collections import deque
from itertools import count
from typing import Any
from uuid import uuid4

import streamlit as st

from tokentwin.dashboard.blocks import data_table, figure, heading, mistake, titled
from tokentwin.dashboard.live_page.charts import latencies, latency_rows, mates, over_time, waterfall
from tokentwin.dashboard.live_page.server import Server
from tokentwin.dashboard.live_page.snapshot import Snapshot
from tokentwin.dashboard.slos import Bounds, asked_slos, bounds_of
from tokentwin.dashboard.url import in_url, text
from tokentwin.serving.errors import UserError

_USUAL = "http://127.0.0.1:8000"
_EVERY_S = 2
_MOST = 900  # maximum number of snapshots kept, for half an hour
_OFTEN = 8  # number of pieces of an answer between two requests for its trace
_KINDS = {
    "twin": "a twin: scheduling is that of the real engine, times are simulated, and the text is meaningless",
    "real": "the real engine",
}
_ESTIMATED = (
    "Means are exact. Quantiles are as exact as the buckets of the server's histograms: within 15 % on our server, and "
    "only an upper bound where buckets are wide, as vLLM's are. *values* is the number of requests, or of gaps between "
    "tokens for ITL."
)
_HISTORY, _JOURNEY = "live-history", "live-journey"


@in_url
def show() -> None:
    """Draw the page, of the server whose URL is given."""
    with titled("A running server"):
        url = text("Server", "server", _USUAL)
        bounds = bounds_of(asked_slos())
    try:
        server = Server(url)
        model, kind = server.model(), server.kind()
    except UserError as error:
        mistake(error)
        st.info("Start a server beside the dashboard: `tokentwin serve --twin --gpu H100 --model Llama-3.1-8B`")
        return
    st.caption(f"{model} at {server.url}: {_KINDS.get(kind, 'a server of another engine')}.")
    left, right = st.columns([3, 2], gap="large")
    with left:
        _follow(server, dict(bounds))
    with right:
        _ask(server)


@st.fragment(run_every=_EVERY_S)
def _follow(server: Server, bounds: Bounds) -> None:
    url, history = st.session_state.get(_HISTORY, ("", None))
    if url != server.url or history is None:
        history = deque[Snapshot](maxlen=_MOST)
        st.session_state[_HISTORY] = server.url, history
    try:
        history.append(server.snapshot(time.monotonic()))
    except UserError as error:
        mistake(error)
        return
    begun = history[0].seconds
    shown = [Snapshot(snapshot.seconds - begun, snapshot.values, snapshot.buckets) for snapshot in history]
    figure(over_time(shown), "live-over-time", "Requests, KV and tokens", None)
    if (drawn := latencies(shown, bounds)) is not None:
        figure(drawn, "live-latencies", "Latency of the last half minute, over time", None, help=_ESTIMATED)
    heading("Latency in the last half minute", None, help=_ESTIMATED)
    data_table(latency_rows(shown), dict.fromkeys(("values", "mean", "p50", "p90", "p99"), "right"))


def _ask(server: Server) -> None:
    heading("The journey of a prompt", None, help="Send a prompt, and see how long each phase of its answer takes.")
    with st.form("live-prompt", border=False):
        prompt = st.text_area("Prompt", "What is the capital of France?", max_chars=20_000)
        tokens = int(st.number_input("Maximum number of output tokens", 1, 4096, 64))
        sent = st.form_submit_button("Send", type="primary")
    said, drawn = st.empty(), st.empty()
    if sent and prompt.strip():
        try:
            _travel(server, prompt, tokens, said, drawn)
        except UserError as error:
            mistake(error)
            return
    elif (kept := st.session_state.get(_JOURNEY)) is not None:
        said.markdown(kept[0])
        _draw(kept[1], drawn, "kept")


def _travel(server: Server, prompt: str, tokens: int, said: Any, drawn: Any) -> None:
    id, answer, looks = f"live-{uuid4().hex}", "", count()
    for pieces, piece in enumerate(server.answer(id, prompt, tokens)):
        answer += piece
        said.markdown(answer)
        if pieces % _OFTEN == 1:
            _draw(server.journey(id), drawn, f"{next(looks)}")
    journey = server.journey(id)
    for _ in range(10):  # the end of a trace comes after the end of its answer
        if journey["times"].get("last_sent_ns") is not None:
            break
        time.sleep(0.05)
        journey = server.journey(id)
    st.session_state[_JOURNEY] = answer, journey
    _draw(journey, drawn, "end")


def _draw(journey: dict[str, Any], place: Any, key: str) -> None:
    with place.container():
        figure(waterfall(journey), f"live-waterfall-{key}", "Where the time went", None, small=True)
        if journey["steps"]:
            figure(mates(journey), f"live-mates-{key}", "Batch size and KV memory", None, small=True)
        where = "" if journey["replica"] is None else f", on replica {journey['replica']}"
        st.caption(
            f"{journey['prompt_tokens']} prompt tokens, {len(journey['steps'])} steps{where}: {journey['status']}"
        )
