"""`tokentwin router`: a check of a router against its rules."""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from tokentwin.serving.errors import UserError


@click.group()
def router() -> None:
    """Check routers: built-in routers, and your own."""


@router.command()
@click.argument("name")
@click.option(
    "--setting", "settings", multiple=True, metavar="NAME=VALUE", help="Setting of the router; can be repeated."
)
@click.option("--limit-s", type=click.FloatRange(1), default=60.0, help="Time limit of the whole check, in seconds.")
@click.option("--format", "style", type=click.Choice(["table", "json"]), default="table")
def check(name: str, settings: tuple[str, ...], limit_s: float, style: str) -> None:
    """Run a router on scripted workloads, and report whether it keeps the rules for routers (docs/fleet.md).

    NAME is a built-in router, path/to/file.py:Class or package.module:Class. The fleets have one replica, four equal
    replicas, full queues, one pool for each SLO class, replicas that come and go, or separate prefill and decode pools.
    Each fleet runs twice, because equal runs must have equal routes.

    Exit status: 0 if the router keeps all rules, 1 if it does not, 2 if there is no such router. The report also says
    how evenly requests are spread, and whether a choice takes longer in a large fleet. These two do not change the exit
    status.
    """
    from tokentwin.sim.checks.router_check import RULES, check_router_apart

    result = check_router_apart(name, dict(map(_setting, settings)), limit_s)
    if style == "json":
        click.echo(json.dumps({**asdict(result), "holds": result.holds}))
    else:
        for rule, what in result.broken.items():
            click.echo(f"{rule:14}{'BROKEN' if what else 'holds':12}{RULES[rule]}")
        for rule, what in result.broken.items():
            if what:
                click.echo(f"{rule}: {what}")
        click.echo(f"{'spread':14}{result.spread}")
        click.echo(f"{'large fleets':14}{result.grows or 'a choice takes equally long among 8 and among 128 replicas'}")
    if not result.holds:
        raise SystemExit(1)


def _setting(text: str) -> tuple[str, int | float | str | bool]:
    import yaml

    name, equals, value = text.partition("=")
    read = yaml.safe_load(value) if equals else None
    if not name or not isinstance(read, int | float | str):
        raise UserError("setting", text, "must be NAME=VALUE, with a number, a text, true or false")
    return name, read
