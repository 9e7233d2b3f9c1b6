"""A job on a page: its progress, polled; a button that cancels it; and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from dashboard.blocks import mistake
from dashboard.shown import capitalised
from planning.jobs.job import Job, Status
from planning.progress import in_words
from serving.errors import UserError, reason

POLL_S = 1.0


def follow(job: Job, watched: str = "") -> Status:
    """Show where the job stands. While it is active the page is drawn anew when it ends, or leaves `watched`.

    `watched` names a document that the task leaves on its way, and may leave anew. A job that is absent or done shows
    nothing.
    """
    status = job.status
    if status.active:
        _progress(job, watched, job.document(watched) if watched else None)
    elif status.state == "failed":
        mistake(status.error)
    elif status.state == "cancelled":
        st.info("Cancelled. You can start it again.", icon=":material/cancel:")
    return status


def offer(job: Job, why: str, button: str, key: str, icon: str = "search", watched: str = "") -> bool:
    """Whether the job is at work, which `follow` then shows; else a button that starts it, with the reason for it."""
    status = follow(job, watched)
    if status.active:
        return True
    if status.state == "absent":
        st.markdown(why)
    if st.button(button, type="primary", key=key, icon=f":material/{icon}:"):
        start(job)
    return False


def start(job: Job) -> None:
    """Start it and draw the page anew, or say in a line why that cannot be."""
    if _done(job.start, job):
        st.rerun()


def start_once(job: Job) -> None:
    """Start it if nobody ever has, for `follow` to show; or say in a line why that cannot be."""
    if job.status.state == "absent":
        _done(job.start, job)


def _cancel(job: Job) -> None:
    _done(job.cancel, job)


def _done(what: Callable[[], None], job: Job) -> bool:
    try:
        what()
    except OSError as error:
        mistake(UserError("runs", str(job.directory), f"cannot be written: {reason(error)}"))
        return False
    return True


@st.fragment(run_every=POLL_S)
def _progress(job: Job, watched: str, seen: Any) -> None:
    status = job.status
    if not status.active or (watched and job.document(watched) != seen):
        st.rerun()
    bar, button = st.columns([5, 1], vertical_alignment="center")
    bar.progress(status.share, text=_words(status))
    # By a callback, which comes first: a click in the moment that the page is drawn anew would be lost.
    button.button("Cancel", key=f"cancel_{job.id}", width="stretch", on_click=_cancel, args=(job,))


def _words(status: Status) -> str:
    if status.state == "queued":
        return "Queued. It starts when a processor is free"
    left = "" if status.eta_s is None else f", about {in_words(status.eta_s)} left"
    return f"{capitalised(status.stage)}{left}"
