"""The `understudy` command: starts a pod, drills it, shows it.

Owns flags and output. The commands for a running pod are in `look.py`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click

import pool.cli
import understudy
from plumbing.pod.cli import options, run_async
from plumbing.pod.paths import runtime_dir
from plumbing.service.config import Resolved
from plumbing.service.process import arm_from_environment
from understudy.cli import look
from understudy.cli.drill import drill
from understudy.cli.settings import (
    NOT_WITH_POOL,
    UP_OPTIONS,
    BackendCommand,
    backend_arguments,
    given_flags,
    pod_of,
    refuse_flags,
)
from understudy.pod.output import terminal
from understudy.up import pods


@click.group()
@click.version_option(understudy.__version__, message="understudy %(version)s")
def main() -> None:
    """Understudy: failover for LLM inference, with one copy of the weights."""


main.add_command(pool.cli.main, "pool")
for command in (
    *(look.status, look.events, look.doctor, look.ui, look.support_bundle, look.sleep, look.wake),
    *(drill, pool.cli.lease),
):
    main.add_command(command)


@main.command(cls=BackendCommand)
@options(UP_OPTIONS)
@backend_arguments
def up(config: Resolved, arguments: tuple[str, ...]) -> None:
    """Start a pod on this machine and keep it running.

    The pod has a lock server, a GPU memory service, a gateway and two engines. With --pool it
    serves many models, and a pool process decides which models are awake. With --replicas it starts
    several pods behind a front. Arguments after `--` go to all engines' backends.
    """
    arm_from_environment()  # of an init above it, in a container
    if config["pool"] is not None:
        given = [*given_flags(NOT_WITH_POOL, config), *arguments[:1]]
        why = "--pool, where the pool file says it for each model"
        refuse_flags("pod.needless_flag", given, why)
    prepare = pod_of(config, arguments)
    directory = Path(runtime_dir(config["dir"]))
    with terminal() as say:
        killed_by = run_async(lambda: pods.stay_up(prepare, directory, say))
    if killed_by is not None:
        sys.exit(128 + killed_by)


if __name__ == "__main__":
    main()
