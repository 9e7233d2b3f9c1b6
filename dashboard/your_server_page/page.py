"""Your server: what `tokentwin learn` found out about a server, and how far its twin is off."""

from __future__ import annotations

import json
from pathlib import Path
from types import MappingProxyType

import streamlit as st

from tokentwin.dashboard import blocks, sheet
from tokentwin.dashboard.blocks import beside, code, figure, mistake
from tokentwin.dashboard.bundled import SAMPLES
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.library import find
from tokentwin.dashboard.planned import Ways
from tokentwin.dashboard.shown import literal
from tokentwin.dashboard.url import choose, in_url
from tokentwin.dashboard.your_server_page.charts import prompts_chart, steps_chart
from tokentwin.planning.learn.document import FILE, LearntServer
from tokentwin.planning.learn.watched import read_look
from tokentwin.serving.errors import UserError

SAMPLE = SAMPLES / FILE
_EXAMPLE = "bundled example"
_COMMAND = "tokentwin learn --url http://SERVER:8000 --gpu H100 -d deployment.yaml -o {runs}/my-twin"


@in_url
def show(runs: Path, ways: Ways = MappingProxyType({})) -> None:
    """Draw the page over the learnt servers under `runs`, the newest first."""
    st.title("Your server", anchor=False)
    learnt = find(runs, FILE)
    name = choose("Server", [*learnt, _EXAMPLE], "server")
    try:
        folder = learnt.get(name)
        answer = LearntServer.read(json.loads((SAMPLE if folder is None else folder / FILE).read_text("utf-8")))
    except (UserError, ValueError, OSError) as error:
        mistake(
            error if isinstance(error, UserError) else UserError("learnt.json", name, "cannot be read; learn again")
        )
        return
    if folder is None:
        st.info("This is an example: a server with simulated steps on a loopback port. To learn your own server, run:")
        code(_COMMAND.format(runs=runs.resolve().name))
    device = answer.gpu or "an unnamed device"
    st.caption(f"{literal(answer.url)}: {literal(answer.model)} on {literal(device)}, learnt on {answer.created}")
    st.header(literal(answer.headline()), anchor=False)
    if folder is not None and (seen := read_look(folder)) is not None:
        say = st.warning if seen.drifted else st.success
        say(f"{literal(seen.headline())} ({seen.at}).")
    left, right = beside(2)
    with left:
        figure(steps_chart(answer.steps), "steps", "The time of a decode step", None)
    with right:
        figure(prompts_chart(answer.prompts), "prompts", "The time to the first token of a lone prompt", None)
    if folder is not None and (plan := ways.get("Plan")):
        st.page_link(plan, label=f"Plan with it: choose {name} under *Step times from*", icon=":material/dns:")
    downloads(answer, "learnt")
    sheet.show(blocks, answer.details())
