"""A job on a page: its progress, polled; a button that cancels it; and how it ended."""

from __future__ import annotations

import streamlit as st

from tokentwin.jobs.job import Job, Status

POLL_S = 1.0


def follow(job: Job, watched: str = "") -> Status:
    """Show where the job stands. While it is active the page is drawn anew when it ends, or leaves `watched`.

    `watched` names a document that the task leaves on its way. A job that is absent or done shows nothing.
    """
    status = job.status
    if status.active:
        _progress(job, watched, bool(watched) and job.document(watched) is not None)
    elif status.state == "failed":
        st.error(status.error, icon=":material/error:")
    elif status.state == "cancelled":
        st.info("Cancelled. It can be started again.", icon=":material/cancel:")
    return status


def start(job: Job) -> None:
    """Start it and draw the page anew, or say in a line why that cannot be."""
    try:
        job.start()
    except OSError as error:
        st.error(f"runs: {str(job.directory)!r}: cannot be written: {error.strerror}", icon=":material/error:")
    else:
        st.rerun()


@st.fragment(run_every=POLL_S)
def _progress(job: Job, watched: str, there: bool) -> None:
    status = job.status
    if not status.active or (watched and not there and job.document(watched) is not None):
        st.rerun()
    bar, button = st.columns([5, 1], vertical_alignment="center")
    bar.progress(status.share, text=_words(status))
    if button.button("Cancel", key=f"cancel_{job.id}", width="stretch"):
        job.cancel()
        st.rerun()


def _words(status: Status) -> str:
    if status.state == "queued":
        return "Queued: it starts when a processor is free"
    left = "" if status.eta_s is None else f", about {_seconds(status.eta_s)} left"
    return f"{status.stage[:1].upper()}{status.stage[1:]}{left}"


def _seconds(seconds: float) -> str:
    return f"{max(seconds, 1):.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"
