"""The time from opening a dashboard page in a browser with an empty cache to its title and to its first plot.

    python -m lab.benchmarks.first_plot [--cold] [--pages run,trust] [--rounds 5] [--runs RUNS --query 'run=NAME']

Each page is opened once to warm the server, then once a round in a new Chromium. With `--cold` each round has a server
that has just started. The table shows medians, and the last line has all times as JSON. `main` is the CPU time of the
page's main thread (scripts, layout and Plotly) until the first plot or a little later. On a busy machine only `main` is
reliable. The targets are a first plot after 2.5 s, and after 6 s if cold, on two quiet cores.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from playwright.sync_api import Browser, sync_playwright

from tests.dashboard.browser import chromium, dashboard
from tokentwin.tables import print_table

PAGES = ("plan", "policy-lab", "run", "step", "trust", "calibration", "sweeps")
SEEN = """
const seen = window.seen = {}
new MutationObserver(() => {
    const is = (name, selector) => name in seen || !document.querySelector(selector) || (seen[name] = performance.now())
    is('title', 'h1')
    is('plot', '[data-testid=stPlotlyChart] :is(path.point, .points path, path.js-line, .heatmaplayer image)')
}).observe(document, {subtree: true, childList: true, attributes: true, attributeFilter: ['d']})
"""
MEASURED = ("title_s", "plot_s", "main_s", "fetched_mb")


def opened(browser: Browser, address: str) -> dict[str, float]:
    """Return seconds until the title and the first plot, CPU seconds of the main thread, and megabytes fetched."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.add_init_script(SEEN)
    devtools = context.new_cdp_session(page)
    devtools.send("Performance.enable", {"timeDomain": "threadTicks"})
    page.goto(address, wait_until="commit")
    # a function, because an expression would need eval, which the page forbids
    page.wait_for_function("() => 'plot' in window.seen", timeout=120_000)
    spent = {metric["name"]: metric["value"] for metric in devtools.send("Performance.getMetrics")["metrics"]}
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=notRunning]", timeout=120_000)
    seen = page.evaluate("window.seen")
    sizes = page.evaluate("performance.getEntriesByType('resource').map(entry => entry.transferSize)")
    context.close()
    row = (seen["title"] / 1e3, seen["plot"] / 1e3, spent["TaskDuration"], sum(sizes) / 1e6)
    return {name: round(value, 2) for name, value in zip(MEASURED, row, strict=True)}


def measure(pages: list[str], rounds: int, runs: str | None, query: str, cold: bool) -> list[dict[str, Any]]:
    """Return a row for every page and round; a warm server has one more round first, which is left out."""
    rows = []
    with tempfile.TemporaryDirectory() as elsewhere, sync_playwright() as playwright:
        nothing = Path(elsewhere) / "runs"
        nothing.mkdir()
        served = partial(dashboard, Path(runs).resolve() if runs else nothing, Path(elsewhere))

        def row(address: str, name: str) -> dict[str, Any]:
            with chromium(playwright) as browser:
                return {"page": name, **opened(browser, f"{address}/{'' if name == 'plan' else name}?{query}")}

        if cold:
            for name in pages * rounds:
                with served() as address:
                    rows.append(row(address, name))
            return rows
        with served() as address:
            rows = [row(address, name) for name in pages * (rounds + 1)]
    return rows[len(pages) :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pages", default=",".join(PAGES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", help="directory of runs; by default the bundled runs")
    parser.add_argument("--query", default="")
    parser.add_argument("--cold", action="store_true", help="start a new server for each opening")
    options = parser.parse_args()
    openings = measure(options.pages.split(","), options.rounds, options.runs, options.query, options.cold)
    rows = []
    for name in options.pages.split(","):
        mine = [row for row in openings if row["page"] == name]
        rows.append((name, *(f"{median(row[measured] for row in mine):.2f}" for measured in MEASURED)))
    figures = ("title (s)", "first plot (s)", "main (CPU s)", "fetched (MB)")
    print_table(("page", *figures), rows, f"medians of {options.rounds}; load {os.getloadavg()[0]:.1f}", right=figures)
    print(json.dumps({"load": os.getloadavg(), "opened": openings}))


if __name__ == "__main__":
    main()
