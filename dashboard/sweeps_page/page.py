"""Sweeps: many simulated runs at once, started here or read from disk, as plots and tables, and SQL over all of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import streamlit as st
import yaml

from tokentwin.dashboard.blocks import choosing, code, data_table, figure, mistake, titled
from tokentwin.dashboard.downloads import downloads
from tokentwin.dashboard.job_view import offer
from tokentwin.dashboard.kept_inputs import Incomplete
from tokentwin.dashboard.library import find
from tokentwin.dashboard.loading import BY_FILES
from tokentwin.dashboard.palette import SERIES
from tokentwin.dashboard.sweeps_page import charts as sweep_charts
from tokentwin.dashboard.sweeps_page.inputs import sweep_inputs
from tokentwin.dashboard.sweeps_page.query import MOST_MB, ROWS, SECONDS, cut_short, query
from tokentwin.dashboard.sweeps_page.tasks import DATASET, PARTIAL, SWEEP, UNDER_WAY, check_sweep
from tokentwin.dashboard.url import choose, choose_many, fresh_key, in_url, interval, keep, named, pick, switch
from tokentwin.planning.exports.sweep import Sweep, SweepView
from tokentwin.planning.jobs.job import Job
from tokentwin.planning.sweep.dataset import ABOUT
from tokentwin.planning.sweep.results import SweepResults
from tokentwin.serving.answers.figures import counted
from tokentwin.serving.errors import UserError

SAMPLE = "bundled: Llama-3.1-8B on two GPUs"
_SAMPLES = Path(__file__).resolve().parents[1] / "samples"
_MOST = len(SERIES)
_LISTED = 30  # number of values up to which they are listed one by one
_NONE = "nothing"
_MODES = {"open": "Open a sweep", "start": "Start a sweep"}
_TABLE = "table"
_ASKED = "sweeps_asked"  # key of `st.session_state`: queries for which somebody here pressed Run


@in_url
def show(runs: Path, own_policies: bool = False) -> None:
    """Draw the page, over the sweeps under `runs` and a bundled one, or over a sweep that is started here.

    If `own_policies` is set, users may upload policies, which are code.
    """
    with titled("Metrics against settings"):
        mode = pick("Sweeps", list(_MODES), "do", _MODES.__getitem__)
    try:
        name, directory = _started(runs, own_policies) if mode == "start" else _chosen(runs)
        if directory is None:
            return
        results = _load(directory)
    except UserError as error:
        mistake(error, runs)
        return
    under_way = directory.name == UNDER_WAY
    top = st.container(horizontal=True, vertical_alignment="center")
    with top:
        st.caption(f"{'So far: ' if under_way else ''}{results.summary}", width="content")
    if results.old_sizing:
        st.warning(results.old_sizing)
    if under_way and not results.runs.num_rows:
        st.caption("The first runs are simulated. Their results appear here.")
        return
    if not results.complete.num_rows or not results.metrics:
        st.warning("No run of this sweep finished. The errors are below.", icon=":material/warning:")
        data_table(results.runs.select(["status", "error", *results.parameters]))
        return
    kind = pick("View", _kinds(results, under_way), "view", str.capitalize)
    left, right = st.columns([2, 5], gap="medium")
    with left:
        if kind == sweep_charts.HEAT_MAP and len(_several_valued(results)) < 2:
            st.info("A heat map needs two settings with several values each. The runs so far have no two.")
            return
        view = _axes(results, kind)
        chosen = _filtered(results, view.by, view.values)
    with right:
        if kind == _TABLE:
            _table(results, chosen, view.y, name, height=440)
        else:
            _plot(results, chosen, view)
    if not under_way:
        with top:
            downloads(Sweep(directory, replace(results, runs=chosen), view), name)
    if kind != _TABLE:
        _table(results, chosen, view.y, name)
    _sql(directory, results, view.y)


def _chosen(runs: Path) -> tuple[str, Path]:
    """Draw the choice of a sweep, and return its name and directory."""
    sweeps = {**find(runs, ABOUT, named("sweep")), SAMPLE: _SAMPLES / "sweep"}
    name = choose("Sweep", list(sweeps), "sweep", lasting=False, help="Made here, or by `tokentwin sweep FILE -o OUT`.")
    return name, sweeps[name]


def _started(runs: Path, own_policies: bool) -> tuple[str, Path | None]:
    """Draw the inputs of a new sweep, and its job; return its name and the directory of the runs that have ended."""
    asked = sweep_inputs(runs, own_policies)
    if isinstance(asked, Incomplete):
        st.info(asked.what)
        return "", None
    count = check_sweep(asked.data, asked.trace, asked.policy)
    job = Job(runs / "jobs", SWEEP, {"sweep": asked.data})
    directory = job.directory / DATASET
    if job.result is None:
        why = f"{counted(count, 'run')}, on all processors of this server. You can close the page meanwhile."
        offer(job, why, "Start the sweep", "start_sweep", "play_arrow", watched=PARTIAL)
        begun = job.directory / UNDER_WAY
        return f"jobs/{job.id}", begun if (begun / ABOUT).is_file() else None
    if not directory.is_dir():
        raise UserError("sweep", f"jobs/{job.id}/{DATASET}", "is gone; delete its job and start it again")
    with st.expander("As a file for `tokentwin sweep`"):
        code(yaml.safe_dump(asked.data, sort_keys=False))
    return f"jobs/{job.id}/{DATASET}", directory


def _kinds(results: SweepResults, under_way: bool) -> list[str]:
    """Return the views that the sweep can have, or may have when it ends."""
    heat = [sweep_charts.HEAT_MAP] if under_way or len(_several_valued(results)) > 1 else []
    return [sweep_charts.LINE, sweep_charts.SCATTER, *heat, _TABLE]


def _several_valued(results: SweepResults) -> list[str]:
    """Return the parameters that can be rows or columns of a heat map."""
    order = sweep_charts.parameters_in_order(results)
    return [name for name in order if 1 < len(results.values(name)) <= sweep_charts.MOST_CELLS]


@st.cache_resource(max_entries=4, show_spinner="Reading the sweep", hash_funcs=BY_FILES)
def _load(directory: Path) -> SweepResults:
    return SweepResults.load(directory)


def _axes(results: SweepResults, kind: str) -> SweepView:
    """Draw the axes of the view."""
    y = choose("Metric", sweep_charts.metrics_in_order(results), "y", show=results.metrics.__getitem__)
    if kind == _TABLE:
        return SweepView(y, sweep_charts.parameters_in_order(results)[0], None, (None,))
    if kind == sweep_charts.HEAT_MAP:
        return _cells(results, y)
    likely = sweep_charts.parameters_in_order(results)
    if kind == sweep_charts.SCATTER:
        others = [name for name in sweep_charts.metrics_in_order(results) if name != y]
        x = choose("Against", [*others, *likely], "over", show=lambda name: results.metrics.get(name, name))
    else:
        x = choose(
            "Against",
            likely,
            "x",
            help="The line is the median over all values of the other parameters; the band is the range.",
            growing=True,
        )
    by = choose("Colours by", [*sweep_charts.others_in_order(results, x), _NONE], "by", growing=True)
    if by == _NONE:
        return SweepView(y, x, None, [None], switch("Log metric", "log"), kind)
    values = _several(by, results, f"of_{by}", f"At most {_MOST} are shown.", most=sweep_charts.SERIES_AT_FIRST)
    return SweepView(y, x, by, values[:_MOST], switch("Log metric", "log"), kind)


def _cells(results: SweepResults, y: str) -> SweepView:
    """Draw the parameters of a heat map."""
    several = _several_valued(results)
    x = choose("Columns", several, "columns", help="A cell is the median over all values of the other parameters.")
    by = choose("Rows", [name for name in several if name != x], "rows")
    return SweepView(y, x, by, results.values(by), False, sweep_charts.HEAT_MAP)


def _several(
    name: str, results: SweepResults, parameter: str, help: str | None = None, most: int | None = None
) -> list[Any]:
    """Draw a choice of a parameter's values; the default is all, or `most` of them from the first to the last."""
    options = {sweep_charts.shown(value): value for value in results.values(name)}
    otherwise = sweep_charts.some(list(options), most) if most else list(options)
    chosen = choose_many(name, list(options), parameter, otherwise, help=help, growing=True)
    return [options[label] for label in chosen]


def _filtered(results: SweepResults, by: str | None, values: Sequence[Any]) -> pa.Table:
    """Draw the filters, and return the runs whose other parameters have one of the chosen values."""
    table = results.complete
    if by is not None:
        table = table.filter(pc.is_in(table[by], pa.array(values, table[by].type)))
    with st.expander("Filter", icon=":material/filter_alt:"):
        for name in results.parameters:
            options = [value for value in results.values(name) if value is not None]
            if name == by or len(options) < 2:
                continue
            if len(options) > _LISTED and sweep_charts.numeric(results, name):
                low, high = interval(name, float(options[0]), float(options[-1]), f"only_{name}")
                table = table.filter(pc.and_(pc.greater_equal(table[name], low), pc.less_equal(table[name], high)))
            else:
                kept = _several(name, results, f"only_{name}")
                table = table.filter(pc.is_in(table[name], pa.array(kept, table[name].type)))
    return table


def _plot(results: SweepResults, chosen: pa.Table, view: SweepView) -> None:
    if not chosen.num_rows:
        st.info("No run matches this filter.", icon=":material/filter_alt_off:")
        return
    figure(
        sweep_charts.drawn(results, chosen, view),
        "metric",
        sweep_charts.heading(results, view),
        sweep_charts.trust(chosen),
        sweep_charts.help_of(view.y),
        marked=True,
    )


def _table(results: SweepResults, chosen: pa.Table, y: str, name: str, height: int = 280) -> None:
    st.header("Runs", anchor=False)
    st.caption(f"{chosen.num_rows:,} runs. Select a run to see its configuration.")
    metrics = [column for column in dict.fromkeys((y, *sweep_charts.FIRST)) if column in results.metrics]
    rows = chosen.select([*results.parameters, "trust", *metrics]).slice(0, ROWS)
    ids = list(map(str, chosen["run_id"].slice(0, ROWS).to_pylist()))
    columns = {
        column: st.column_config.NumberColumn(results.metrics[column], format="%.4g", help=sweep_charts.help_of(column))
        for column in metrics
    }
    data_table(rows, columns=columns, height=height, **choosing("of_run", ids, f"runs-{name}"))
    picked = named("of_run")
    if picked in ids:
        keep("of_run", picked)
        st.caption(f"run {picked}")
        st.json(json.loads(chosen["config"][ids.index(picked)].as_py()), expanded=2)


def _sql(directory: Path, results: SweepResults, y: str) -> None:
    st.header(
        "Ask in SQL",
        anchor=False,
        help=f"A query in DuckDB's SQL. It can only read the table `runs`, for at most {SECONDS} s, and returns at "
        f"most {ROWS:,} rows. Columns are the parameters above, and metrics of the glossary with a statistic such as "
        "`_p99`.",
    )
    group = ", ".join(results.parameters[:2]) or "status"
    suggested = f"select {group}, max({y}), min({y}), count(*) as runs\nfrom runs\ngroup by all\norder by all"
    query_text = named("sql") or ""
    key = fresh_key("query", "sql")
    with st.form("sql", border=False):
        sql = st.text_area("Query", query_text or suggested, height=120, label_visibility="collapsed", key=key)
        if st.form_submit_button("Run", icon=":material/play_arrow:"):
            query_text = sql
            st.session_state.setdefault(_ASKED, set()).add(sql)
    if not query_text:
        return
    keep("sql", query_text)
    if query_text not in st.session_state.get(_ASKED, ()):
        st.info("This query came with the link. Read it, then press Run.", icon=":material/link:")
        return
    try:
        answer = _answer(directory, query_text)
    except UserError as error:
        mistake(error.remedy)
        return
    data_table(_plain(answer), placeholder=None)
    rows = "1 row" if answer.num_rows == 1 else f"{answer.num_rows:,} rows"
    cut = f"the first {rows}: an answer is cut at {MOST_MB} MB" if cut_short(answer) else rows
    st.caption(f"the first {rows}" if answer.num_rows == ROWS else cut)


@st.cache_data(max_entries=32, show_spinner="Running the query", hash_funcs=BY_FILES)
def _answer(directory: Path, sql: str) -> pa.Table:
    return query(_load(directory).runs, sql)


def _plain(answer: pa.Table) -> pa.Table:
    """Return the answer with decimals, which DuckDB makes of integer sums, as floats."""
    for at, field in enumerate(answer.schema):
        if pa.types.is_decimal(field.type):
            answer = answer.set_column(at, field.name, answer.column(at).cast(pa.float64()))
    return answer
