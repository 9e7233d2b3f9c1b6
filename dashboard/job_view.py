"""A job on a page: its progress, which the page polls, a button that cancels it, and its outcome."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import streamlit as st

from tokentwin.dashboard.blocks import mistake
from tokentwin.dashboard.shown import capitalised
from tokentwin.planning.jobs.job import Job, Status
from tokentwin.planning.progress import in_words
from tokentwin.serving.errors import UserError, reason

POLL_S = 1.0


def follow(job: Job, watched: str = "") -> Status:
    """Show the state of the job, and return it. The page is redrawn when an active job ends, or writes `watched` anew.

    `watched` names a document that the task writes on its way, perhaps several times. A job that is absent or done
    shows nothing.
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
    """Show the progress of an active job and return True; otherwise draw a button that starts it, and `why`."""
    status = follow(job, watched)
    if status.active:
        return True
    if status.state == "absent":
        st.markdown(why)
    if st.button(button, type="primary", key=key, icon=f":material/{icon}:"):
        start(job)
    return False


def start(job: Job) -> None:
    """Start the job and draw the page again, or show in one line why it cannot start."""
    if _done(job.start, job):
        st.rerun()


def start_once(job: Job) -> None:
    """Start the job if it was never started, or show in one line why it cannot start."""
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
    # Streamlit runs a callback before it draws the page. Without one, a click during a redraw would be lost.
    button.button("Cancel", key=f"cancel_{job.id}", width="stretch", on_click=_cancel, args=(job,))


def _words(status: Status) -> str:
    if status.state == "queued":
        return "Queued. The job starts when a processor is free"
    left = "" if status.eta_s is None else f", about {in_words(status.eta_s)} left"
    return f"{capitalised(status.stage)}{left}"
