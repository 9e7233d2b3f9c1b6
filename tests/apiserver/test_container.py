"""The container image: its steps run here, without a container, and what they install serves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.deep  # it installs all dependencies twice


def run(command: str, venv: Path, folder: Path) -> str:
    """Run a step in a shell whose `pip` and `python` are those of an environment; return its output."""
    environment = {**os.environ, "PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "VIRTUAL_ENV": str(venv)}
    done = subprocess.run(["sh", "-ec", command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


def environment(folder: Path) -> Path:
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


def steps_of(stage: str) -> list[str]:
    """Return the commands of a stage, without the installation of Debian's packages and the user's account."""
    commands = re.findall(r"^RUN (.*)$", stage, re.MULTILINE)
    return [command for command in commands if not command.startswith(("apt-get", "useradd"))]


@pytest.mark.timeout(1200)
def test_the_steps_of_the_image_make_a_server_with_a_compiled_core(tmp_path: Path) -> None:
    build, final = re.split(r"^FROM .*$", (ROOT / "deploy/Containerfile").read_text(), flags=re.MULTILINE)[1:]
    source, wheel = tmp_path / "src", tmp_path / "wheel"
    run(f"git clone --quiet --depth 1 file://{shlex.quote(str(ROOT))} {shlex.quote(str(source))}", tmp_path, tmp_path)
    for stage, name in ((build, "build"), (final, "final")):
        venv = environment(tmp_path / name)
        for command in steps_of(stage):
            run(command.replace("/wheel", str(wheel)).replace("/src", str(source)), venv, source)
    modules = "import llguidance, tokenizers, serving.compiled_core as core; print(core.CORE)"
    assert run(f'python -c "{modules}"', tmp_path / "final", tmp_path).strip() == "compiled core"
    entry, arguments = (
        json.loads(re.search(rf"^{word} (.*)$", final, re.MULTILINE)[1]) for word in ("ENTRYPOINT", "CMD")
    )
    command = [str(tmp_path / "final/bin" / entry[0]), *entry[1:], *arguments, "--port", "0"]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as server:
        try:
            said = server.stdout.readline()
            port = re.search(r":(\d+)/v1", said)[1]
            assert urlopen(f"http://127.0.0.1:{port}/health", timeout=60).status == 200
        finally:
            server.terminate()
