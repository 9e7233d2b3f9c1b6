"""The rows of a simulated run have the columns of the schema as attributes, with types that fit."""

import ast
from pathlib import Path

import pyarrow as pa
import pytest

from tokentwin.sim.run_log import _SERVED_ONLY
from tokentwin.sim.step_log import _MEASURED_ONLY, _NOT_WRITTEN
from tokentwin.traces.schema import DATASETS

SIM = Path(__file__).parents[2] / "sim"
TYPES = {
    "int": pa.types.is_integer,
    "str": pa.types.is_string,
    "list[int]": lambda kind: pa.types.is_list(kind) and pa.types.is_integer(kind.value_type),
    "list[tuple[str, int]]": pa.types.is_map,
    "Sampled": pa.types.is_list,
}


def attributes(module: str, name: str) -> dict[str, str]:
    """Return the annotations of a class, which a compiled class lacks."""
    body = ast.parse((SIM / f"{module}.py").read_text()).body
    (row,) = (node for node in body if isinstance(node, ast.ClassDef) and node.name == name)
    return {
        ast.unparse(node.target): ast.unparse(node.annotation) for node in row.body if isinstance(node, ast.AnnAssign)
    }


@pytest.mark.parametrize(
    ("dataset", "module", "row", "null", "more"),
    [
        ("requests", "run_log", "RequestRow", _SERVED_ONLY, set()),
        ("steps", "step_log", "StepRow", _MEASURED_ONLY, {*_NOT_WRITTEN, "leap"}),
    ],
)
def test_a_row_has_the_columns_of_the_schema(dataset, module, row, null, more):
    columns = {column.name: column.type for column in DATASETS[dataset] if column.name not in null}
    kinds = attributes(module, row)
    assert set(kinds) == columns.keys() | more
    for name, kind in columns.items():
        assert TYPES[kinds[name].removesuffix(" | None")](kind), name
