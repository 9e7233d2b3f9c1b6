"""The cost of opening a page of the dashboard on a warm server: waiting time and CPU seconds.

    python -m lab.benchmarks.page_opening              # every page, on bundled data
    python -m lab.benchmarks.page_opening RUNS NAME    # the Run page on recording NAME under RUNS

Pages run in this process, in Streamlit's AppTest, without a browser. A page is opened once to warm the server (the Run
page on a bundled recording), and then by a visitor who sees data that nobody has opened yet; `again` is the time of the
next visitor. System time is shown separately, because most of it is spent on memory that is touched for the first time.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import tempfile
from pathlib import Path
from typing import Any

from streamlit.testing.v1 import AppTest

from tokentwin.tables import print_table

TARGET_S = 3.0
PAGES = ("plan", "frontier", "policy_lab", "run", "step", "trust", "calibration", "sweeps", "glossary")


def page(module: str, runs: str) -> None:
    """Run the script of one page; imports are inside, because AppTest runs only this function's source."""
    import inspect
    from importlib import import_module

    show = import_module(f"dashboard.{module}_page.page").show
    show(*([Path(runs)] if "runs" in inspect.signature(show).parameters else []))


def opened(module: str, runs: str, **url: str) -> dict[str, float]:
    """Return the wall seconds and CPU seconds that one visitor's opening of a page takes."""
    app = AppTest.from_function(page, args=(module, runs), default_timeout=600)
    for name, value in url.items():
        app.query_params[name] = value
    before = os.times()
    app.run()
    after = os.times()
    faults = [error.value for error in (*app.exception, *app.error)]
    if faults:
        raise SystemExit(f"{module}: {faults[0]}")
    return {
        "wall_s": round(after.elapsed - before.elapsed, 2),
        "user_s": round(after.user - before.user, 2),
        "system_s": round(after.system - before.system, 2),
    }


def measure(runs: str | None, name: str) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory() as nothing:
        for module in PAGES if runs is None else ("run",):
            opened(module, nothing)
            place, url = (nothing, {}) if runs is None else (runs, {"run": name})
            rows += [{"page": module, "visit": visit, **opened(module, place, **url)} for visit in ("first", "again")]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?")
    parser.add_argument("name", nargs="?")
    options = parser.parse_args()
    if (options.runs is None) != (options.name is None):
        parser.error("give both RUNS and NAME, or neither")
    measured = measure(options.runs, options.name)
    times = {"waited (s)": "wall_s", "user (s)": "user_s", "system (s)": "system_s"}
    rows = ((row["page"], row["visit"], *(f"{row[name]:.2f}" for name in times.values())) for row in measured)
    print_table(("page", "visit", *times), rows, f"target {TARGET_S:g} s", right=list(times))
    peak_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps({"target_s": TARGET_S, "peak_rss_mb": peak_mb, "opened": measured}))


if __name__ == "__main__":
    main()
