"""`tokentwin policy`: a check of a scheduling policy against its contract."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from tokentwin.sim.checks.policy_check import PolicyCheck


@click.group()
def policy() -> None:
    """Check scheduling policies: built-in policies, and your own."""


@policy.command()
@click.argument("name")
@click.option("--limit-s", type=click.FloatRange(1), default=60.0, help="Time limit of the whole check, in seconds.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
def check(name: str, limit_s: float, style: str) -> None:
    """Run a policy on scripted workloads, and report whether it keeps the rules for policies (docs/policies.md).

    NAME is a built-in policy, path/to/file.py:Class or package.module:Class. The workloads have scarce KV memory,
    shared prefixes, bursts, priorities, aborts or long prompts. Each workload runs in the plain loop and in the
    overlapped loop (async scheduling).

    Exit status: 0 if the policy keeps all rules, 1 if it does not, 2 if there is no such policy. The report also says
    whether requests can starve, and whether the time to plan a decode step grows with the batch. These two do not
    change the exit status.
    """
    from tokentwin.sim.checks.policy_check import check_policy_apart

    result = check_policy_apart(name, limit_s)
    if style == "json":
        click.echo(json.dumps({**asdict(result), "holds": result.holds}))
    else:
        _print(result)
    if not result.holds:
        raise SystemExit(1)


def _print(result: PolicyCheck) -> None:
    from tokentwin.sim.checks.policy_check import LOOPS, RULES

    click.echo(f"{'':14}" + "".join(f"{loop:12}" for loop in LOOPS))
    for finding in result.findings:
        marks = ("BROKEN" if finding.broken[loop] else "holds" for loop in LOOPS)
        click.echo(f"{finding.rule:14}" + "".join(f"{mark:12}" for mark in marks) + RULES[finding.rule])
    for finding in result.findings:
        for loop, what in finding.broken.items():
            if what:
                click.echo(f"{finding.rule}, {loop} loop: {what}")
    click.echo(f"{'starvation':14}{result.starves or 'no request is overtaken by nearly all later requests'}")
    click.echo(
        f"{'steady decode':14}{result.grows or 'O(1): planning a step takes equally long with batches of 8 and 128'}"
    )
