"""Every page in a real browser: every other one in the dark theme, all of them in a narrow window."""

import re

from tests.dashboard.browser import NEEDED, drawn, fits, in_scheme, settle

pytestmark = NEEDED
THEMES = ("light", "dark")

# What is to be seen on a page, how many plots it has at least, and how many marks in them. Pages that open on the
# newest of what there is are told what to show: other tests leave plans and runs.
PAGES = {
    "plan": ("Why not", 5, 50),
    "frontier?plan=example": ("The cost of speed", 2, 20),
    "policy-lab": ("Winners and losers", 4, 40),
    "run?run=real-1": ("Four lifecycles", 6, 60),
    "step": ("The time of one engine step", 2, 10),
    "your-server": ("What the server is", 2, 20),
    "trust": ("TTFT p50 -3.1 %", 2, 20),
    "claims": ("Results of each case", 1, 3),
    "calibration": ("Comparison of GPUs", 3, 30),
    "sweeps": ("Ask in SQL", 1, 10),
    "glossary": ("vllm:time_to_first_token_seconds", 0, 0),
}

# Streamlit's own frontend looks for its server below the page's path before it looks at the root, and logs the 404.
PROBE = re.compile(r"/[\w-]+/_stcore/(health|host-config)$")


def test_every_page_opens(server, page):
    outside = []
    page.on(
        "request",
        lambda r: outside.append(r.url) if not r.url.startswith((server, "ws://127", "data:", "blob:")) else 0,
    )
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on(
        "console",
        lambda said: (
            faults.append(f"{said.text} {said.location}")
            if said.type == "error" and not PROBE.search(said.location["url"])
            else 0
        ),
    )
    page.set_viewport_size({"width": 800, "height": 900})
    for number, (path, (words, plots, marks)) in enumerate(PAGES.items()):
        page.emulate_media(color_scheme=THEMES[number % 2])
        page.goto(f"{server}/{path}")
        page.get_by_text(words).first.wait_for()
        in_scheme(page, THEMES[number % 2])  # and so the themes beside app.py were found
        settle(page, plots)
        drawn(page, marks)
        assert page.locator("h1").count() == 1
        fits(page, 800)
        if number == 0:  # turned to the other theme and made wider, it is drawn anew
            in_scheme(page, THEMES[1])
            fits(page, 1280)
            settle(page, plots)
            drawn(page, marks)
            page.set_viewport_size({"width": 800, "height": 900})
    assert outside == [] and faults == []
