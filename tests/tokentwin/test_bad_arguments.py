"""Whatever is wrong with an argument of any command is one line and exit status 2; nothing is written."""

import shlex
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import click
import pytest

from tokentwin.cli import VERBS, cli, main

NONSENSE = (
    "", "nan", "-1", "1e400", "9" * 20, "x" * 5000, "../../etc/passwd", "{}", "[1", "a=b", ",", "\U0001f600", "\udcff",
    "a\nb", "p99<=", "ttft_ms p99<=nan",
)  # fmt: skip
# What else is given. Each command fails for a reason of its own as well: nothing that is allowed starts long work.
REST = {
    "bench": ("nothing.csv", "-o", "out"),
    "columns": ("nothing",),
    "compare": ("--trace", "nothing.csv", "--gpu", "H100", "--a", "policy=vllm", "--b", "policy=sjf"),
    "diagnose": ("nothing",),
    "export": ("nothing", "--to", "csv", "-o", "out"),
    "generate": ("hello", "--model", "nothing"),
    "learn": ("nothing.csv", "--url", "http://127.0.0.1:1", "-d", "nothing.yaml", "-o", "out"),
    "plan": ("nothing.csv", "--gpu", "H100", "--slo", "ttft_ms p99<=900"),
    "policy check": ("nothing.py:Nothing",),
    "router check": ("nothing.py:Nothing",),
    "simulate": ("nothing.csv", "--gpu", "H100", "-o", "out"),
    "sweep": ("nothing.yaml", "-o", "out"),
    "trace convert": ("nothing.csv", "out.parquet"),
    "trace inspect": ("nothing.csv",),
    "trace synth": ("out.parquet", "--spec", "nothing.yaml"),
    "validate front-door": ("nothing", "--front-door", "nothing", "--gpu", "H100"),
    "validate runs": ("nothing", "-c", "nothing", "-o", "out"),
    "watch": ("--url", "http://127.0.0.1:1", "--twin", "nothing"),
}
MAY_WORK = ("explain", "model inspect")  # they write nothing and take no time
LONGEST = 700  # characters of the line


def commands() -> Iterator[tuple[str, click.Command]]:
    for verb in VERBS:
        command = cli.get_command(click.Context(cli), verb)
        if isinstance(command, click.Group):
            yield from ((f"{verb} {name}", inner) for name, inner in command.commands.items())
        elif command is not None:
            yield verb, command


def ending(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["tokentwin", *arguments])
    try:
        main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@pytest.mark.parametrize("name", [*REST, *MAY_WORK])
def test_nonsense_is_one_line(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # which `main` sets
    command, rest = dict(commands())[name], list(REST.get(name, ("Llama-3.1-8B",) if name == "model inspect" else ()))
    given = []
    for parameter in command.params:
        for bad in NONSENSE:
            if isinstance(parameter, click.Argument):
                given.append([*name.split(), bad, *rest[1:]])
            elif not parameter.is_flag:
                given.append([*name.split(), *rest, f"{max(parameter.opts, key=len)}={bad}"])
    assert len(given) >= len(NONSENSE)
    for arguments in given:
        status = ending(arguments, monkeypatch)
        said = capsys.readouterr().err
        assert status == 2 or (status == 0 and name in MAY_WORK), arguments
        assert status == 0 or (len(said.splitlines()) == 1 and len(said) <= LONGEST), (arguments, said)
    assert not list(tmp_path.iterdir())


def test_the_commands_that_are_left_out_are_few() -> None:
    """Those that take nothing, or would begin what takes long: the engine, a server, a download."""
    left = {name for name, _ in commands()} - {*REST, *MAY_WORK}
    without = {"calibrate", "conformance", "dashboard", "demo", "gpus", "model fetch", "model list", "serve"}
    assert left <= {*without, "validate external"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("sweep s.yaml -o out --retry-failed", "retry-failed: needs --resume"),
        ("simulate t.yaml --gpu H100 -o out --router ''", "router: '': must not be empty"),
        ("simulate t.yaml --gpu H100 -o out --model ''", "model: '': must not be empty"),
        ("plan t.yaml --slo 'ttft_ms p99<=900' --gpu H100 --split ''", "split: '': must not be empty"),
        ("plan t.yaml --slo 'ttft_ms p99<=900' --gpu H100 --router ''", "router: '': must not be empty"),
        ("plan t.yaml --slo 'ttft_ms p99<=900' --gpu H100,,", "gpu: 'H100,,': has a comma without a name"),
        ("plan t.yaml --slo 'ttft_ms p99<=900' --gpu H100 --tp 1,", "tp: '1,': has a comma without a name"),
        ("plan t.yaml --slo 'ttft_ms p99<=900' --gpu H100 --vary max_num_seqs=-1,5", "max_num_seqs: -1: must be at le"),
        ("compare --trace t.yaml --gpu '' --b policy=fair", "gpu: '': must not be empty"),
        ("dashboard --served-as 'a b/c'", "served-as: 'a b/c': is no host name"),
        ("dashboard --served-as https://twin.example", "served-as: 'https://twin.example': is no host name"),
        ("serve --twin --gpu H100 --model Llama-3.1-8B --allowed-hosts 'a b/c'", "allowed-hosts: 'a b/c': is no host"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    (tmp_path / "t.yaml").write_text(
        "{requests: 5, arrivals: {kind: poisson, rate: 5}, "
        "prompt: {kind: fixed, tokens: 9}, output: {kind: fixed, tokens: 9}}"
    )
    assert ending(shlex.split(arguments), monkeypatch) == 2
    said = capsys.readouterr().err
    assert line in said and len(said.splitlines()) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["t.yaml"]


@pytest.mark.parametrize("twin", [(), ("--twin", "--gpu", "H100", "--model", "Llama-3.1-8B")], ids=["engine", "twin"])
@pytest.mark.parametrize("package", ["aiohttp", "msgspec", "zmq"])
def test_a_server_without_its_packages_says_what_to_install(package, twin, monkeypatch, capsys):
    def found(name: str) -> object:
        return None if name == package else find_spec(name)

    monkeypatch.setattr("tokentwin.commands.serve.find_spec", found)
    assert ending(["serve", *twin], monkeypatch) == 2
    said = capsys.readouterr().err
    assert said == f"tokentwin: serve: '{package}': is not installed; pip install 'tokentwin[server]'\n"
