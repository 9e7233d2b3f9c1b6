"""`tokentwin router check`: what it says of routers that keep their rules, and of one that breaks each."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokentwin.commands.router import router
from tokentwin.sim.checks.router_check import RULES, check_router, check_router_apart
from tokentwin.sim.router import ROUTERS

BROKEN = """
import random

class First:
    def choose(self, request, replicas):
        return replicas[0]

class Guesses:
    def choose(self, request, replicas):
        return random.choice(replicas)

class Nobody:
    def choose(self, request, replicas):
        return None

class Remembers:
    kept = None
    def choose(self, request, replicas):
        self.kept = self.kept or replicas[-1]
        return self.kept

class Shortens:
    def choose(self, request, replicas):
        object.__setattr__(request, "output_len", 1)
        return replicas[0]

class Writes:
    def choose(self, request, replicas):
        replicas[0].outstanding_requests = 0
        return replicas[0]

class Loops:
    def choose(self, request, replicas):
        while True:
            pass

class Scans:
    def choose(self, request, replicas):
        return min(replicas, key=lambda replica: replica.outstanding_requests)

class Takes:
    def __init__(self, at):
        self.at = at

    def choose(self, request, replicas):
        return replicas[self.at % len(replicas)]
"""


@pytest.fixture
def routers(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(BROKEN)
    return f"{tmp_path}/mine.py"


@pytest.mark.parametrize("name", ROUTERS)
def test_our_own_routers_keep_their_rules(name: str) -> None:
    found = check_router(name, {})
    assert found.holds and found.grows is None, found.broken


@pytest.mark.parametrize(
    ("name", "rule", "says"),
    [
        ("Guesses", "determinism", "went to replica"),
        ("Nobody", "choice", "choose() returned None, which is none of the 1 replicas"),
        ("Remembers", "choice", "choose() returned a replica, which is none of"),
        ("Shortens", "requests", "it came with output_len"),
        ("Writes", "calls", "a router may not write outstanding_requests of a replica (mine.py, line"),
    ],
)
def test_a_broken_rule_is_named(name: str, rule: str, says: str, routers: str) -> None:
    broken = {rule: what for rule, what in check_router(f"{routers}:{name}", {}).broken.items() if what}
    assert list(broken) == [rule] and says in broken[rule]


def test_a_router_that_never_returns_ends_the_check(routers: str) -> None:
    found = check_router_apart(f"{routers}:Loops", {}, 2.0)
    assert found.broken == {"time": "is under way after 2 s, the limit of the whole check"} and not found.holds


def test_what_may_be_chosen_is_said(routers: str) -> None:
    first = check_router(f"{routers}:First", {})
    assert first.holds and first.spread.startswith("60, 0, 0, 0 of 60 requests")
    scans = check_router(f"{routers}:Scans", {})
    assert scans.holds and scans.grows is not None and scans.grows.endswith("among 128")


def test_the_command_tells_by_its_exit_status(routers: str) -> None:
    held = CliRunner().invoke(router, ["check", f"{routers}:Takes", "--setting", "at=2", "--format", "json"])
    assert held.exit_code == 0 and json.loads(held.stdout)["holds"] is True
    broken = CliRunner().invoke(router, ["check", f"{routers}:Nobody"])
    assert broken.exit_code == 1 and "choice        BROKEN" in broken.stdout
    assert all(rule in broken.stdout for rule in RULES)
