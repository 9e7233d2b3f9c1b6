"""The project's rules on imports, checked in the source; and a `--help` that loads little."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator, Set
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HOUSE = {
    "serving",
    "traces",
    "realengine",
    "calibration",
    "sim",
    "planning",
    "apiserver",
    "dashboard",
    "tokentwin",
    "vllmside",
}
OURS = HOUSE | {"lab"}
MAY_IMPORT = {
    "serving": {"serving"},
    "traces": {"traces", "serving"},
    "sim": {"sim", "traces", "serving"},
    "realengine": {"realengine", "traces", "serving"},
    "calibration": {"calibration", "sim", "traces", "serving"},
    "planning": HOUSE - {"apiserver", "dashboard", "tokentwin"},
    "apiserver": HOUSE - {"dashboard", "tokentwin", "vllmside"},
    "dashboard": HOUSE - {"tokentwin", "apiserver", "vllmside"},
    "tokentwin": HOUSE - {"vllmside"},
    "vllmside": {"vllmside", "realengine", "traces", "serving"},
    "lab": OURS,
}
# They ask `tokentwin.planning.checkout` for the lab when they are called, and report it if there is no checkout.
REACHES_THE_LAB = {
    "tokentwin/commands/validate_external.py",
}
STARTS_THE_DASHBOARD = "tokentwin/commands/dashboard.py"
NEVER = {
    "serving": {"torch", "simpy", "pyarrow", "numpy"},
    "traces": {"torch", "simpy"},
    "sim": {"torch"},
    "calibration": {"torch"},
    "realengine": {"simpy"},
    "dashboard": {"torch"},
    "vllmside": {"torch", "simpy", "scipy"},
}
HEAVY = {"torch", "streamlit", "pandas", "ray", "plotly", "transformers", "scipy"}


def modules(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def package_of(module: str) -> str:
    """Return the package of ours that holds `module`, such as `sim` of `tokentwin.sim.clock`; else the first name."""
    first, _, rest = module.partition(".")
    below = rest.partition(".")[0]
    return below if first == "tokentwin" and below in HOUSE else first


def named(tree: ast.AST) -> set[str]:
    """Return our packages with a module that a string under `tree` names, such as `tokentwin.dashboard.blocks:draw`."""
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return {package_of(text) for text in texts if re.fullmatch(r"\w+\.[\w.]*(:\w*)?", text) and is_module(text)}


def is_module(text: str) -> bool:
    """Return whether `text`, which may be cut short, begins with one of our modules or packages within packages."""
    package, _, below = text.partition(":")[0].removeprefix("tokentwin.").partition(".")
    below = below.partition(".")[0]
    return package in OURS and below != "" and any((ROOT / package / f"{below}{end}").exists() for end in (".py", ""))


def children(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes directly under `tree`, unless only type checkers read them."""
    if not (isinstance(tree, ast.If) and ast.unparse(tree.test) == "TYPE_CHECKING"):
        yield from ast.iter_child_nodes(tree)


def run(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield `tree` and all nodes under it that Python runs."""
    nodes = [tree]
    while nodes:
        node = nodes.pop()
        yield node
        nodes += children(node)


def imported(tree: ast.AST) -> set[str]:
    """Return the packages, ours and others' top-level ones, that are imported anywhere under `tree`."""
    names = set()
    for node in run(tree):
        if isinstance(node, ast.Import):
            names |= {package_of(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(package_of(node.module))
    return names


def at_import_time(tree: ast.AST) -> set[str]:
    """Return the top-level packages that are imported under `tree`, leaving out imports inside functions."""
    names = set()
    for node in children(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        names |= imported(node) if isinstance(node, ast.Import | ast.ImportFrom) else at_import_time(node)
    return names


@pytest.mark.parametrize("package", sorted(OURS))
def test_imports_point_one_way(package: str) -> None:
    assert modules(package)
    for path in modules(package):
        name, tree = path.relative_to(ROOT).as_posix(), ast.parse(path.read_text())
        names = imported(tree)
        allowed = MAY_IMPORT[package] | ({"lab"} if name in REACHES_THE_LAB else set())
        wrong = ((names | named(tree)) & OURS) - allowed | names & NEVER.get(package, set())
        assert not wrong, f"{name} imports {', '.join(sorted(wrong))}"


def test_every_module_has_one_name_below_tokentwin() -> None:
    for package in HOUSE - {"tokentwin"}:
        assert (ROOT / "tokentwin" / package).readlink() == Path("..") / package
    for path in (path for package in (*OURS, "tests") for path in modules(package)):
        nodes = list(ast.walk(ast.parse(path.read_text())))
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module or "" for node in nodes if isinstance(node, ast.ImportFrom) and not node.level}
        texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
        names |= {text for text in texts if re.fullmatch(r"\w+(\.\w+)*[.:]?\w*", text) and text.endswith(".")}
        names |= {text for text in texts if re.fullmatch(r"\w+(\.\w+)+(:\w+)?", text) and is_module(text)}
        assert not {name.partition(".")[0] for name in names} & HOUSE - {"tokentwin"}, path.relative_to(ROOT)


@pytest.mark.parametrize("name", sorted(REACHES_THE_LAB))
def test_what_reaches_the_lab_does_so_when_called_and_after_asking(name: str) -> None:
    tree = ast.parse((ROOT / name).read_text())
    assert "lab" in imported(tree) - at_import_time(tree)
    assert imported_modules(tree, {"tokentwin.planning.checkout"})


def every_module() -> dict[str, Path]:
    """Return the paths of all our modules, by name."""
    paths = [path.relative_to(ROOT) for package in OURS for path in modules(package)]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths]
    alone = ("lab", "tokentwin")
    names = [name if name.partition(".")[0] in alone else f"tokentwin.{name}" for name in names]
    return {name: ROOT / path for name, path in zip(names, paths, strict=True)}


def imported_modules(tree: ast.AST, known: Set[str]) -> set[str]:
    """Return the modules among `known` that are imported anywhere under `tree`."""
    named = set()
    for node in run(tree):
        if isinstance(node, ast.Import):
            named |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            named |= inner | (set() if inner <= known else {node.module})
    return named & known


def circles(graph: dict[str, set[str]]) -> list[set[str]]:
    """Return the groups of modules that all import one another, directly or through others."""
    reached: dict[str, set[str]] = {}
    for start in graph:
        seen, to_see = set[str](), [start]
        while to_see:
            new = graph[to_see.pop()] - seen
            seen |= new
            to_see += new
        reached[start] = seen
    groups = {
        frozenset(other for other in seen if one in reached[other]) for one, seen in reached.items() if one in seen
    }
    return sorted(map(set, groups), key=sorted)


def test_no_modules_import_one_another() -> None:
    """Not in functions either: what needs each other is one module, or three. Type checkers may go in circles."""
    paths = every_module()
    graph = {name: imported_modules(ast.parse(path.read_text()), paths.keys()) - {name} for name, path in paths.items()}
    assert not circles(graph), "; ".join(", ".join(sorted(circle)) for circle in circles(graph))


def test_a_circle_is_seen() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"d", "e"}}
    assert circles(graph) == [{"a", "b", "c"}, {"e"}]


def test_one_file_starts_the_dashboard() -> None:
    starting = [path for path in modules("tokentwin") if "streamlit" in path.read_text()]
    assert [path.relative_to(ROOT).as_posix() for path in starting] == [STARTS_THE_DASHBOARD]


@pytest.mark.parametrize(
    ("text", "package"),
    [
        ("tokentwin.dashboard.blocks:figure", {"dashboard"}),
        ("tokentwin.dashboard.html_reports.", {"dashboard"}),
        ("tokentwin.planning.jobs.worker", {"planning"}),
        ("dashboard.yaml", set()),
        ("what the tokentwin.dashboard.blocks shows", set()),
    ],
)
def test_a_module_in_a_string_is_found(text: str, package: set[str]) -> None:
    assert named(ast.parse(repr(text))) == package


def test_the_commands_import_heavy_things_only_when_called() -> None:
    for path in modules("tokentwin"):
        heavy = at_import_time(ast.parse(path.read_text())) & (
            HEAVY | OURS - {"tokentwin", "apiserver", "planning", "serving"}
        )
        assert not heavy, f"{path.relative_to(ROOT)} imports {', '.join(sorted(heavy))} at the top"


def test_loading_every_command_loads_nothing_heavy() -> None:
    """Whatever they import in turn, too. Until one runs, nothing is read, simulated or drawn."""
    paths = [path.relative_to(ROOT).with_suffix("") for path in modules("tokentwin") if path.stem != "__init__"]
    names = [".".join(path.parts) for path in paths]
    verbs = [name for name in names if name.startswith("tokentwin.commands.")]
    code = (
        f"import sys, {', '.join(verbs)}; early = {{'pyarrow', 'rich', 'simpy'}} & sys.modules.keys()\n"
        f"import {', '.join(names)}; sys.exit(', '.join(early | {HEAVY} & sys.modules.keys()) or 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_help_is_instant() -> None:
    """It loads click, Python's own, and a handful of ours: that is what makes it so, on whatever machine."""
    code = (
        "import sys; before = set(sys.modules)\n"
        "from tokentwin.cli import cli\n"
        "cli.main(['--help'], standalone_mode=False)\n"
        "print(*(set(sys.modules) - before), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert "conformance" in done.stdout
    loaded = [name for name in done.stderr.split() if name.partition(".")[0] not in sys.stdlib_module_names]
    assert {package_of(name) for name in loaded} <= {"click", "tokentwin", "planning", "serving"}
    assert sum(not name.startswith("click") for name in loaded) < 12


def test_a_short_simulation_loads_little(tmp_path: Path) -> None:
    """Most of its time is imports. Counted, since times differ by machine; tables still become data frames."""
    spec = tmp_path / "spec.yaml"
    spec.write_text("{requests: 5, arrivals: {kind: constant, rate: 9}, prompt: {kind: fixed, tokens: 9}, "
                    "output: {kind: fixed, tokens: 3}}")  # fmt: skip
    code = (
        "import sys; from tokentwin.cli import cli\n"
        f"arguments = ['simulate', {str(spec)!r}, '--gpu', 'H100', '-o', {str(tmp_path / 'run')!r}]\n"
        "cli.main(arguments, standalone_mode=False)\n"
        "print(*sys.modules, file=sys.stderr)\n"
        "import pyarrow; assert len(pyarrow.table({'a': [1, 2]}).to_pandas()) == 2"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    loaded = done.stderr.split()
    assert not {"pandas", "scipy", "pyarrow.dataset", "numpy.f2py", "msgspec", "rich._emoji_codes"} & set(loaded)
    assert len(loaded) < 700


def test_the_simulator_loads_without_torch() -> None:
    modules = "tokentwin.sim.cluster, tokentwin.sim.checks.conformance, tokentwin.calibration.validation.covalidation"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
