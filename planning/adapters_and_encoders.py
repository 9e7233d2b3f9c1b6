"""Sentences about a run's LoRA adapters and encoders, from what its simulation noted or its real steps recorded."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from tokentwin.serving.answers.figures import shown_number, shown_share, shown_time
from tokentwin.sim.adapter_slots import AdapterUse
from tokentwin.sim.encoder import EncoderUse
from tokentwin.sim.encoder_pools import ApartUse
from tokentwin.traces.recording import Recording, notes_of


def adapter_use(recording: Recording) -> AdapterUse | None:
    """Return what adapters were loaded; None without any."""
    if noted := notes_of(recording.run).get("adapters"):
        return AdapterUse(**noted)
    column: pa.ChunkedArray = recording.table("steps", ["adapters"])["adapters"]
    if column.null_count == len(column):
        return None

    def total(field: str) -> int:
        return int(pc.sum(pc.struct_field(column, field)).as_py() or 0)

    return AdapterUse(total("loads"), total("copies"), total("load_ns") + total("copy_ns"))


def adapters_said(use: AdapterUse) -> str:
    """Return how many adapters were loaded, and how long that took."""
    return (
        f"adapters: {use.loads:,} loads from disk and {use.copies:,} copies into slots took "
        f"{shown_number(use.waiting_ns / 1e9)} s before steps"
    )


def encoder_said(use: EncoderUse, apart: ApartUse | None) -> str:
    """Return what encoders did, and how long requests waited for encoders on GPUs of their own."""
    seconds = shown_number(use.encoding_ns / 1e9)
    said = f"encoder: {use.items:,} items with {use.tokens:,} tokens were encoded, which took {seconds} s of steps"
    if apart is None or not apart.requests:
        return said
    waited, sent = (shown_time(ns / apart.requests / 1e6) for ns in (apart.waiting_ns, apart.sending_ns))
    busy = shown_share(apart.busy_ns / max(apart.ready_ns, 1))
    return (
        f"{said} of encoder replicas ({apart.replicas:,}, busy {busy} of the time); on average a request with items "
        f"waited {waited} until they were encoded, and {sent} until the embeddings had arrived"
    )


def recorded_encoding(recording: Recording) -> str:
    """Return the sentence about a run's encoders; empty without any, and for real runs, which do not time them."""
    notes: dict[str, Any] = notes_of(recording.run)
    if not (use := notes.get("encoder")):
        return ""
    apart = notes.get("encoders_apart")
    return encoder_said(EncoderUse(**use), ApartUse(**apart) if apart else None)
