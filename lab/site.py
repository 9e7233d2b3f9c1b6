"""Build the documentation as a website, with an API reference from the docstrings: `python -m lab.site OUT`.

The pages link to one another and to sources as in the repository, so the linked files are copied beside them.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from shutil import copy

import yaml

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "docs/images/*", "lab/results/*.md")
REFERENCE = {
    "Ask from Python": ("tokentwin.api",),
    "Scheduling": (
        "tokentwin.serving.scheduler",
        "tokentwin.serving.policies.ranked",
        "tokentwin.serving.policies.vllm",
        "tokentwin.serving.request",
        "tokentwin.serving.step_plan",
    ),
    "KV blocks": ("tokentwin.serving.kv.block_pool",),
    "Simulation": ("tokentwin.sim.cluster", "tokentwin.sim.replica", "tokentwin.sim.router"),
    "Workloads and recordings": (
        "tokentwin.serving.workload",
        "tokentwin.traces.recording",
        "tokentwin.traces.schema",
        "tokentwin.traces.metrics.run_metrics",
    ),
    "Cost models": ("tokentwin.serving.cost_model", "tokentwin.calibration.steps.step_cost"),
    "Deployments": ("tokentwin.serving.deployments.config", "tokentwin.serving.deployments.fleet"),
}
_LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def pages() -> list[Path]:
    """Return the pages and pictures, relative to the root."""
    return [path.relative_to(ROOT) for pattern in PAGES for path in sorted(ROOT.glob(pattern))]


def linked(page: Path) -> Iterator[Path]:
    """Yield the files of the repository that a page links to, relative to the root."""
    if page.suffix != ".md":
        return
    for target in _LINK.findall((ROOT / page).read_text(encoding="utf-8")):
        path = (ROOT / page.parent / target).resolve()
        if "://" not in target and path.is_file():
            yield path.relative_to(ROOT)


def assemble(folder: Path) -> None:
    """Copy the pages to `folder`, with whatever they link to, and write the reference."""
    for path in sorted({*pages(), *(target for page in pages() for target in linked(page))}):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        copy(ROOT / path, folder / path)
    lines = ["# API reference", ""]
    for title, modules in REFERENCE.items():
        lines += [f"## {title}", "", *(f"::: {module}\n" for module in modules)]
    (folder / "reference.md").write_text("\n".join(lines), encoding="utf-8")


def main(out: Path) -> int:
    """Build the site in `out`; a warning is an error. Return the exit status."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary, "pages")
        assemble(folder)
        config = yaml.safe_load((ROOT / "lab" / "site.yaml").read_text(encoding="utf-8"))
        config |= {"docs_dir": str(folder), "site_dir": str(out.resolve())}
        config["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(ROOT)]
        (Path(temporary) / "mkdocs.yml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", f"{temporary}/mkdocs.yml"]
        return subprocess.run(command, env=quiet).returncode


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
