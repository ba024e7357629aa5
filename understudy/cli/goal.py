"""`understudy sleep` and `understudy wake`."""

from __future__ import annotations

import os
from pathlib import Path

import click

from plumbing.errors import UsageError
from plumbing.pod.cli import json_flag, options, run_async
from plumbing.pod.messages import Tier
from plumbing.pod.paths import engine_sockets
from plumbing.service.config import Resolved
from plumbing.text import to_json
from understudy.cli.settings import DIR
from understudy.goal import give_goal
from understudy.status.gather import unreachable

timeout_flag = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long to wait until it is done, in seconds.",
)
one_engine = click.argument("engine", required=False, metavar="[ENGINE]")


def attach(group: click.Group) -> None:
    """Add these commands to `group`."""
    group.add_command(sleep)
    group.add_command(wake)


@click.command()
@options((DIR,))
@click.option("--offloaded", is_flag=True, help="Free the weights' device memory, too.")
@timeout_flag
@one_engine
@json_flag
def sleep(
    config: Resolved, engine: str | None, timeout: float, offloaded: bool, as_json: bool
) -> None:
    """Put the pod to sleep and free its KV memory. It wakes in milliseconds.

    Applies to all engines, or to ENGINE alone, and returns when the one that holds the lock is
    asleep. The next request wakes it, unless the gateway runs with --wake manual.

    Exit codes: 0 done, 1 refused or overridden by another goal, 3 no engine, 5 not done in time; it
    continues in the background.
    """
    goal = Tier.OFFLOADED if offloaded else Tier.WARM
    _order(config["dir"], engine, goal, timeout, as_json=as_json)


@click.command()
@options((DIR,))
@timeout_flag
@one_engine
@json_flag
def wake(config: Resolved, engine: str | None, timeout: float, as_json: bool) -> None:
    """Wake a sleeping pod.

    Applies to all engines, or to ENGINE alone, and returns when the one that holds the lock is
    active.

    Exit codes: 0 done, 1 overridden by another goal, 3 no engine, 5 not done in time; it continues
    in the background.
    """
    _order(config["dir"], engine, Tier.AWAKE, timeout, as_json=as_json)


def _order(where: str, engine: str | None, goal: Tier, timeout_s: float, *, as_json: bool) -> None:
    directory = Path(os.path.abspath(where))
    paths = engine_sockets(directory)
    if not paths:
        raise unreachable(directory)
    if engine is not None:
        if engine not in paths:
            raise UsageError(
                "pod.unknown_engine",
                f"there is no engine {engine!r} in {directory}; there are {', '.join(paths)}",
                engine=engine,
            )
        paths = {engine: paths[engine]}
    is_one = engine is not None
    text, document = run_async(
        lambda: give_goal(goal, paths, timeout_s, is_one=is_one), as_json=as_json
    )
    click.echo(to_json(document) if as_json else text)
