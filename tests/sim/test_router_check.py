"""`tokentwin router check`: what it says of routers that keep their rules, and of one that breaks each."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tokentwin.commands.router import router
from tokentwin.sim.checks.router_check import RULES, check_router
from tokentwin.sim.router import ROUTERS

BROKEN = """
import random
from tokentwin.serving.cost_model import TokenCost

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

class Replaces:
    def choose(self, request, replicas):
        TokenCost.step_ns = lambda self, plan: 1
        return replicas[0]

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
        ("Loops", "time", "choose() has not returned after 0.05 s"),
        ("Replaces", "code", "replaces tokentwin.serving.cost_model.TokenCost.step_ns"),
    ],
)
def test_a_broken_rule_is_named(name: str, rule: str, says: str, routers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "Loops":
        monkeypatch.setattr("tokentwin.serving.user_code.call_limit.CALL_LIMIT_S", 0.05)
    from tokentwin.serving.cost_model import TokenCost

    monkeypatch.setattr(TokenCost, "step_ns", TokenCost.step_ns)  # put back at the end
    broken = {rule: what for rule, what in check_router(f"{routers}:{name}", {}).broken.items() if what}
    assert list(broken) == [rule] and says in broken[rule]


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
