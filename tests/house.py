"""The size of the house, which may only shrink: `python -m tests.house` lowers the ceilings in house.toml to it."""

import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "house.toml"
_COMMANDS = {
    "simulate": ("simulate", "trace.csv", "--gpu", "H100", "-o", "run"),
    "plan": ("plan", "trace.csv", "--gpu", "H100", "--tp", "1", "--jobs", "1", "--slo", "ttft_ms p99<=9000"),
}
_IMPORTED = """
import sys
from tokentwin.cli import main
try:
    main()
finally:
    files = [getattr(module, "__file__", None) or "" for module in list(sys.modules.values())]
    print("imported", sum(file.startswith(ROOT) and "/.venv" not in file for file in files))
"""


def sizes() -> dict[str, dict[str, int]]:
    """Return the lines and files of each package, words of docs, and the modules that two commands import."""
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    files = [ROOT / name for name in tracked if name.endswith(".py") and (ROOT / name).is_file()]
    packages: dict[str, list[Path]] = {}
    for file in files:
        package = file.relative_to(ROOT).parts[0]
        if package not in ("lab", "tests", file.name):
            packages.setdefault(package, []).append(file)
    docs = [path.read_text(encoding="utf-8") for path in (ROOT / "docs").glob("*.md")]
    return {
        "lines": {
            name: sum(file.read_text(encoding="utf-8").count("\n") for file in of) for name, of in packages.items()
        },
        "files": {name: len(of) for name, of in packages.items()},
        "words": {
            "docs": sum(len(text.split()) for text in docs),
            "readme": len((ROOT / "README.md").read_text(encoding="utf-8").split()),
        },
        "modules": {name: _modules(command) for name, command in _COMMANDS.items()},
    }


def _modules(command: tuple[str, ...]) -> int:
    """Return how many of our modules a command imports, without the compiled core."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,100,10\n")
        done = subprocess.run(
            [sys.executable, "-c", f"ROOT = {str(ROOT)!r}{_IMPORTED}", *command],
            cwd=folder,
            env={**os.environ, "TOKENTWIN_PURE": "1"},
            capture_output=True,
            text=True,
        )
    found = re.search(r"^imported (\d+)$", done.stdout, re.MULTILINE)
    assert done.returncode in (0, 4) and found, done.stderr
    return int(found[1])


def ceilings() -> dict[str, dict[str, int]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def main() -> None:
    lines, now, table = [], sizes(), ""
    for line in FILE.read_text(encoding="utf-8").splitlines():
        if line.startswith("["):
            table = line.strip("[]")
        name, equals, rest = line.partition(" = ")
        if equals and name in now.get(table, {}):
            number, comment, why = rest.partition("  #")
            line = f"{name} = {min(int(number), now[table][name])}{comment}{why}"
        lines.append(line)
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
