"""Queries of the dashboard: what they may do, and what they must not."""

import pyarrow as pa
import pytest

pytest.importorskip("duckdb")

from tokentwin.dashboard.sweeps_page.query import LONGEST, cut_short, query
from tokentwin.serving.errors import UserError

RUNS = pa.table({"gpu": ["H100", "L40S"] * 50, "rate": list(range(100)), "ttft_ms_p99": [0.5 * i for i in range(100)]})


def test_an_answer_has_names_types_and_order():
    answer = query(RUNS, "select gpu, max(rate) as best, avg(ttft_ms_p99) as mean from runs group by all order by gpu")
    assert answer.to_pydict() == {"gpu": ["H100", "L40S"], "best": [98, 99], "mean": [24.5, 25.0]}
    assert query(RUNS, "from runs order by rate desc", rows=7)["rate"].to_pylist() == list(range(99, 92, -1))


@pytest.mark.parametrize(
    "sql", ["summarize runs", "pivot runs on gpu using max(rate)", "with a as (from runs) select count(*) from a"]
)
def test_what_only_reads_is_allowed(sql):
    assert query(RUNS, sql).num_rows >= 1


def test_an_endless_answer_is_cut_at_its_row_limit():
    assert query(RUNS, "select * from range(1000000000000)", rows=10)["range"].to_pylist() == list(range(10))


def test_a_large_answer_is_cut_at_five_megabytes():
    answer = query(RUNS, "select rate, repeat('x', 100_000) as x from runs order by rate")
    assert cut_short(answer) and 4e6 < answer.nbytes <= 5e6
    assert answer["rate"].to_pylist() == list(range(answer.num_rows))
    assert not cut_short(query(RUNS, "select rate, repeat('x', 40_000) as x from runs"))
    with pytest.raises(UserError, match="one row is larger than 5 MB"):
        query(RUNS, "select repeat('x', 6_000_000) as x")


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret.csv"
    path.write_text("a,b\n1,hunter2\n")
    return path


@pytest.mark.parametrize(
    "sql",
    [
        "select * from '{path}'",
        "select * from read_csv('{path}')",
        "select * from read_text('{path}')",
        "select * from glob('{folder}/*')",
        "select * from read_parquet('https://example.invalid/x.parquet')",
        "copy runs to '{folder}/stolen.csv'",
        "export database '{folder}/stolen'",
        "attach '{folder}/stolen.db'",
        "create table stolen as select * from runs",
        "install httpfs",
        "set enable_external_access = true",
        "pragma enable_external_access",
        "select 1; select * from read_csv('{path}')",
        "set lock_configuration = false; select 1",
        "select getenv('HOME')",
        "select * from given",
        "",
        "-- nothing",
        "selec",
        "select nothing from runs",
        "select error('two\nlines')",
        "select \x00",
        "select 1 -- " + LONGEST * "x",
    ],
)
def test_what_is_not_reading_the_table_is_one_line(sql, secret, recwarn):
    before = sorted(secret.parent.iterdir())
    with pytest.raises(UserError) as caught:
        query(RUNS, sql.replace("{path}", str(secret)).replace("{folder}", str(secret.parent)))
    message = str(caught.value)
    assert caught.value.field == "query" and "\n" not in message
    assert "hunter2" not in message and "Traceback" not in message
    assert sorted(secret.parent.iterdir()) == before


def test_its_settings_are_locked():
    settings = query(RUNS, "select name, value from duckdb_settings()")
    value = dict(zip(settings["name"].to_pylist(), settings["value"].to_pylist(), strict=True))
    assert value["enable_external_access"] == "false" and value["lock_configuration"] == "true"
    assert value["autoload_known_extensions"] == "false" and value["python_enable_replacements"] == "false"


@pytest.mark.parametrize(
    "sql",
    [
        "select sum(a.range * b.range) from range(10000000) a, range(10000000) b",
        "with recursive t as (select 1 x union all select x + 1 from t) select count(*) from t",
    ],
)
def test_an_endless_query_is_stopped(sql):
    with pytest.raises(UserError, match="longer than 1 s and was stopped"):
        query(RUNS, sql, seconds=1)


@pytest.mark.parametrize(
    "sql",
    [
        "select repeat('a', 2000000000)",  # which DuckDB does not count
        "select list_sum(range(1000000000))",
        "select array_agg(repeat('x', 1000000)) from range(100000)",
    ],
)
def test_a_greedy_query_ends_alone(sql):
    with pytest.raises(UserError, match=r"(?i)memory"):
        query(RUNS, sql, seconds=30)
