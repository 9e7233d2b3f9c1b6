"""Deployment options that several verbs share: a YAML file, and flags that override it."""

from __future__ import annotations

import click

from planning.deployments import FLAGS, SCHEDULER_FLAGS
from serving.deployments.config import Deployment, SchedulerConfig
from tokentwin.request_options import Command, options_of


def deployment_options(command: Command) -> Command:
    """Add --deployment and the flags that override single fields of it."""
    setting = options_of(SchedulerConfig, Deployment, default_of="a deployment's default")
    command = setting("--async-scheduling/--no-async-scheduling", default=None)(command)
    for name in reversed(SCHEDULER_FLAGS):
        command = setting(f"--{name.replace('_', '-')}", type=int)(command)
    for name, kind in reversed(FLAGS.items()):
        command = setting(f"--{name.replace('_', '-')}", type=kind)(command)
    return click.option("--deployment", "-d", "deployment_file", type=click.Path(), help="Deployment, in YAML.")(
        command
    )
