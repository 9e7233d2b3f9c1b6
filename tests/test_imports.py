"""The house rules that imports must keep, read from the source; and an instant --help."""

from __future__ import annotations

import ast
import re
import resource
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = {"serving", "traces", "realengine", "calibration", "sim", "dashboard", "tokentwin"}
MAY_IMPORT = {
    "serving": {"serving"},
    "traces": {"traces", "serving"},
    "sim": {"sim", "traces", "serving"},
    "realengine": {"realengine", "traces", "serving"},
    "calibration": {"calibration", "sim", "traces", "serving"},
    "dashboard": OURS,
    "tokentwin": OURS - {"dashboard"},
}
STARTS_THE_DASHBOARD = {"tokentwin/commands/dashboard.py", "tokentwin/exports/html_report.py"}
NEVER = {
    "serving": {"torch", "simpy", "pyarrow", "numpy"},
    "traces": {"torch", "simpy"},
    "sim": {"torch"},
    "calibration": {"torch"},
    "realengine": {"simpy"},
    "dashboard": {"torch"},
}
HEAVY = {"torch", "streamlit", "pandas", "ray", "plotly", "transformers", "scipy"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def names_the_dashboard(tree: ast.AST) -> bool:
    """Whether a string under `tree` is the name of a module of it, as `dashboard.badge:figure`, to import later."""
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return any(re.fullmatch(r"dashboard\.[\w.]*(:\w+)?", text) for text in texts)


def imported(tree: ast.AST) -> set[str]:
    """Top-level names of the packages imported anywhere under `tree`."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def at_import_time(tree: ast.AST) -> set[str]:
    """The same, leaving out what functions import when called and what only type checkers read."""
    found = set()
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            continue
        if isinstance(node, ast.Import | ast.ImportFrom):
            found |= imported(node)
        else:
            found |= at_import_time(node)
    return found


@pytest.mark.parametrize("package", sorted(OURS))
def test_imports_point_one_way(package: str) -> None:
    assert modules(package)
    for path in modules(package):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        names = imported(tree) | ({"dashboard"} if names_the_dashboard(tree) else set())
        wrong = (names & OURS) - MAY_IMPORT[package] | names & NEVER.get(package, set())
        if name in STARTS_THE_DASHBOARD:
            wrong -= {"dashboard"}
        assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


def test_the_commands_import_heavy_things_only_when_called() -> None:
    for path in modules("tokentwin"):
        heavy = at_import_time(ast.parse(path.read_text())) & (HEAVY | OURS - {"tokentwin", "serving"})
        assert not heavy, f"{path.relative_to(ROOT)} imports {', '.join(sorted(heavy))} at the top"


def test_loading_every_command_loads_nothing_heavy() -> None:
    """Whatever they import in turn, too."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in modules("tokentwin") if path.stem != "__init__"]
    names = [".".join(path.parts) for path in paths]
    code = f"import sys, {', '.join(names)}; sys.exit(', '.join({HEAVY} & sys.modules.keys()) or 0)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_is_instant() -> None:
    """Under 0.3 s of CPU time, the best of three."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-m", "tokentwin.cli", "--help"], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert "conformance" in done.stdout
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(times) < 0.3


def test_the_simulator_loads_without_torch() -> None:
    code = "import sys, sim.cluster, sim.conformance, calibration.covalidation; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
