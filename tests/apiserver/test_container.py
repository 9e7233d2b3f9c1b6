"""The container image: buildah builds it, if it and the base can be had, and its steps run here without a container."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest

ROOT = Path(__file__).parents[2]
BUILDAH = shutil.which("buildah")
MODULES = "import llguidance, tokenizers, tokentwin.serving.compiled_core as core"
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


def clone(folder: Path) -> None:
    subprocess.run(["git", "clone", "--quiet", "--depth", "1", f"file://{ROOT}", str(folder)], check=True)


@pytest.mark.timeout(3600)
@pytest.mark.skipif(BUILDAH is None, reason="buildah is not installed")
def test_buildah_makes_an_image_whose_user_has_a_compiled_core(tmp_path: Path) -> None:
    def buildah(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(BUILDAH), *arguments], capture_output=True, text=True)

    (base,) = re.findall(r"^ARG BASE=(\S+)", (ROOT / "deploy/Containerfile").read_text(), re.MULTILINE)
    if (pulled := buildah("pull", "--policy", "missing", base)).returncode:
        pytest.skip(f"the base image cannot be had: {pulled.stderr.splitlines()[-1]}")
    clone(tmp_path / "src")
    image = f"tokentwin-test-{os.getpid()}"
    built = buildah("bud", "--pull-never", "-f", tmp_path / "src/deploy/Containerfile", "-t", image, tmp_path / "src")
    assert built.returncode == 0, built.stdout[-3000:] + built.stderr[-3000:]
    container = buildah("from", "--pull-never", image).stdout.strip()
    try:
        said = buildah("run", container, "--", "python", "-c", f"{MODULES}; import os; print(core.CORE, os.getuid())")
        assert said.stdout.split() == ["compiled", "core", "10001"], said.stderr
    finally:
        buildah("rm", container)
        buildah("rmi", image)


def beside_a_project_of_the_same_names(venv: Path, project: Path) -> None:
    """Use the installed package in a project whose folders have the names of ours."""
    (places,) = venv.glob("lib/*/site-packages")
    (distribution,) = places.glob("tokentwin-*.dist-info")
    files = (distribution / "RECORD").read_text().splitlines()
    assert {file.partition("/")[0] for file in files} == {"tokentwin", distribution.name, ".."}  # .. is bin/tokentwin
    for package in (ROOT / "tokentwin").iterdir():
        if package.is_symlink():
            (project / package.name).mkdir(parents=True)
            (project / package.name / "__init__.py").write_text("MINE = True\n")
    (project / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,100,10\n1,100,10\n")
    (project / "mine.py").write_text(
        "import sim, traces, serving, tokentwin\n"
        "tokentwin.simulate('trace.csv', gpu='H100', out='run')\n"
        "print(sim.MINE, traces.MINE, serving.MINE, len(tokentwin.read_recording('run').requests))\n"
    )
    assert run("python mine.py", venv, project).split() == ["True", "True", "True", "2"]
    run("python -m tokentwin export run --to csv -o out && tokentwin diagnose run --gpu H100", venv, project)


@pytest.mark.timeout(1200)
def test_the_steps_of_the_image_make_a_server_with_a_compiled_core(tmp_path: Path) -> None:
    build, final = re.split(r"^FROM .*$", (ROOT / "deploy/Containerfile").read_text(), flags=re.MULTILINE)[1:]
    source, wheel = tmp_path / "src", tmp_path / "wheel"
    clone(source)
    for stage, name in ((build, "build"), (final, "final")):
        venv = environment(tmp_path / name)
        for command in steps_of(stage):
            run(command.replace("/wheel", str(wheel)).replace("/src", str(source)), venv, source)
    assert run(f'python -c "{MODULES}; print(core.CORE)"', tmp_path / "final", tmp_path).strip() == "compiled core"
    beside_a_project_of_the_same_names(tmp_path / "final", tmp_path / "project")
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
