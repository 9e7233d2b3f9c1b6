"""`tokentwin policy check`: what it says of policies that keep their contract, and of one that breaks each rule."""

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.serving.test_contract import FAILING
from tokentwin.commands.policy import policy
from tokentwin.serving.scheduler import POLICIES
from tokentwin.sim.checks.policy_check import LOOPS, RULES, check_policy

DOCUMENTED = Path(__file__).parents[2] / "docs" / "policies.md"


@pytest.mark.parametrize("name", POLICIES)
def test_our_own_policies_keep_their_contract(name: str) -> None:
    found = check_policy(name)
    assert found.holds, [finding for finding in found.findings if any(finding.broken.values())]
    assert found.grows is None
    assert (found.starves is not None) == (name == "sjf")


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("ManyTokens", "budget"),
        ("ManyBlocks", "KV"),
        ("TakesNoBlocks", "KV"),
        ("Doubles", "rows"),
        ("PlansNothing", "progress"),
        ("PromisesAlone", "promises"),
        ("Raises", "calls"),
        ("Guesses", "determinism"),
    ],
)
def test_a_broken_rule_is_named(name: str, rule: str) -> None:
    found = check_policy(f"{FAILING}:{name}")
    broken = {finding.rule: finding.broken for finding in found.findings if any(finding.broken.values())}
    assert not found.holds and rule in broken and set(broken[rule]) == set(LOOPS)


@pytest.mark.parametrize("name", ["RejectsLong", "RejectsAll"])
def test_a_policy_may_reject(name: str) -> None:
    assert check_policy(f"{FAILING}:{name}").holds


def test_what_grows_with_the_batch_is_said() -> None:
    found = check_policy(f"{FAILING}:LooksAtEveryone")
    assert found.holds
    assert re.fullmatch(r"\d+ calls at a batch of 8, \d+ at 128", found.grows or "")


def test_the_command_tells_by_its_exit_status() -> None:
    held = CliRunner().invoke(policy, ["check", "vllm", "--format", "json"])
    assert held.exit_code == 0 and json.loads(held.stdout)["holds"] is True
    broken = CliRunner().invoke(policy, ["check", f"{FAILING}:ManyTokens"])
    assert broken.exit_code == 1
    assert re.search(r"budget +BROKEN +BROKEN", broken.stdout) and "max_num_batched_tokens is 256" in broken.stdout
    assert all(rule in broken.stdout for rule in RULES)


# The examples of docs/policies.md


def test_the_documented_policies_keep_their_contract(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", DOCUMENTED.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 3
    for name, code in blocks:
        (tmp_path / name).write_text(code)
        for policy_class in re.findall(r"^class (\w+)\(\w+Scheduler\)", code, re.MULTILINE):
            found = check_policy(f"{tmp_path / name}:{policy_class}")
            assert found.holds and found.grows is None, policy_class
