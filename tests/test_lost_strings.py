"""A string that stands alone, as the second line of a text without brackets does, is lost: only documentation may."""

import ast
from collections.abc import Iterator

from tests.test_imports import OURS, ROOT

DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def lost(source: str) -> Iterator[int]:
    """Yield the lines of strings that are statements; in triple quotes they document a module, a class or a field."""
    lines = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        for field in ("body", "orelse", "finalbody"):
            body = getattr(node, field, None)
            for at, statement in enumerate(body if isinstance(body, list) else ()):
                value = statement.value if isinstance(statement, ast.Expr) else None
                text = isinstance(value, ast.JoinedStr) or (
                    isinstance(value, ast.Constant) and isinstance(value.value, str)
                )
                first = at == 0 and field == "body" and isinstance(node, DOCUMENTED)
                if text and not first and not lines[statement.lineno - 1].lstrip().startswith('"""'):
                    yield statement.lineno


def test_no_string_is_a_statement() -> None:
    assert list(lost('"""Doc."""\nx = "a "\n"b"\n')) == [3] and not list(lost('x = ("a "\n"b")\n"""Doc of x."""\n'))
    files = sorted(path for package in OURS | {"tests"} for path in (ROOT / package).rglob("*.py"))
    assert len(files) > 500
    assert not [f"{path.relative_to(ROOT)}:{line}" for path in files for line in lost(path.read_text("utf-8"))]
