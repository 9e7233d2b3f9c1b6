"""`tokentwin serve --help` begins with what a newcomer needs, and leaves nothing out."""

import re

from click.testing import CliRunner

from tokentwin.cli import cli
from tokentwin.commands.serve import serve


def test_the_help_of_serve_shows_five_options_first_and_every_option_once() -> None:
    _, first, *others = re.split(r"^\S.*:\n(?=  -)", CliRunner().invoke(cli, ["serve", "--help"]).output, flags=re.M)
    assert re.findall(r"--[a-z-]+(?= )", first) == ["--twin", "--gpu", "--model", "--replicas", "--out"]
    shown = re.findall(r"^  (?:-\w, )?(--[a-z-]+)", "".join([first, *others]), flags=re.M)
    longest = [max(param.opts, key=len) for param in serve.params]
    assert sorted(shown) == sorted([*longest, "--help"])
