"""The cost of opening a page of the dashboard on a warm server: waiting time and CPU seconds.

    python -m lab.benchmarks.page_opening              # every page, on bundled data
    python -m lab.benchmarks.page_opening RUNS NAME    # the Run page on recording NAME under RUNS
    python -m lab.benchmarks.page_opening --what-if    # another price, spare and risk on the Plan page

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
from typing import Any

from streamlit.testing.v1 import AppTest

from tokentwin.tables import print_table

TARGET_S = 3.0
PAGES = ("plan", "policy_lab", "run", "step", "trust", "calibration", "sweeps", "glossary")


def page(module: str, runs: str) -> None:
    """Run the script of one page; imports are inside, because AppTest runs only this function's source."""
    import inspect
    from importlib import import_module
    from pathlib import Path

    show = import_module(f"tokentwin.dashboard.{module}_page.page").show
    show(*([Path(runs)] if "runs" in inspect.signature(show).parameters else []))


def opened(module: str, runs: str, **url: str) -> dict[str, float]:
    """Return the wall seconds and CPU seconds that one visitor's opening of a page takes."""
    app = AppTest.from_function(page, args=(module, runs), default_timeout=600)
    for name, value in url.items():
        app.query_params[name] = value
    return drawn(app, module)


def drawn(app: AppTest, module: str) -> dict[str, float]:
    """Draw the page, and return the wall seconds and CPU seconds that this takes."""
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


def asked_what_if() -> list[dict[str, Any]]:
    """Return the cost of the answer to another price, spare and risk, each after the bundled plan was opened."""
    changes = {"H100 ($/h)": 4.0, "Spare replicas": 1, "Must hold in (% of cases)": 60.0}
    rows = []
    with tempfile.TemporaryDirectory() as nothing:
        for label, value in changes.items():
            app = AppTest.from_function(page, args=("plan", nothing), default_timeout=600).run()
            next(box for box in app.number_input if box.label == label).set_value(value)
            rows.append({"page": "plan", "visit": f"{label}: {value:g}", **drawn(app, "plan")})
            if not any("Nothing was simulated again" in str(caption.value) for caption in app.caption):
                raise SystemExit(f"{label}: {value:g} is not answered at once")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="?")
    parser.add_argument("name", nargs="?")
    parser.add_argument("--what-if", action="store_true")
    options = parser.parse_args()
    if (options.runs is None) != (options.name is None):
        parser.error("give both RUNS and NAME, or neither")
    measured = asked_what_if() if options.what_if else measure(options.runs, options.name)
    times = {"waited (s)": "wall_s", "user (s)": "user_s", "system (s)": "system_s"}
    rows = ((row["page"], row["visit"], *(f"{row[name]:.2f}" for name in times.values())) for row in measured)
    print_table(("page", "visit", *times), rows, f"target {TARGET_S:g} s", right=list(times))
    peak_mb = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    print(json.dumps({"target_s": TARGET_S, "peak_rss_mb": peak_mb, "opened": measured}))


if __name__ == "__main__":
    main()
