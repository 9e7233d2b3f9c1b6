"""The rows of a simulated run have the columns of the schema as attributes, with types that fit."""

import ast
from pathlib import Path

import pyarrow as pa

from tokentwin.sim.run_log import _ROW, _SERVED_ONLY
from tokentwin.sim.step_log import _MEASURED_ONLY, _NOT_WRITTEN
from tokentwin.traces.schema import DATASETS

SIM = Path(__file__).parents[2] / "sim"
TYPES = {
    "int": pa.types.is_integer,
    "str": pa.types.is_string,
    "list[int]": lambda kind: pa.types.is_list(kind) and pa.types.is_integer(kind.value_type),
}


def attributes(module: str, name: str) -> dict[str, str]:
    """Return the annotations of a class, which a compiled class lacks."""
    body = ast.parse((SIM / f"{module}.py").read_text()).body
    (row,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        ast.unparse(node.target): ast.unparse(node.annotation) for node in row.body if isinstance(node, ast.AnnAssign)
    }


def test_a_step_has_the_columns_of_the_schema():
    columns = {column.name: column.type for column in DATASETS["steps"] if column.name not in _MEASURED_ONLY}
    kinds = attributes("step_log", "StepRow")
    assert set(kinds) == columns.keys() | {*_NOT_WRITTEN, "leap"}
    for name, kind in columns.items():
        assert TYPES[kinds[name].removesuffix(" | None")](kind), name


def test_a_request_has_the_columns_of_the_schema():
    assert sorted((*_ROW, *_SERVED_ONLY)) == sorted(column.name for column in DATASETS["requests"])
