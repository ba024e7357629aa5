"""The commands of `understudy` that look at a pod, and `sleep` and `wake`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from functools import lru_cache, partial
from pathlib import Path

import click

from plumbing.errors import DegradedError, UnderstudyError, UsageError
from plumbing.pod.cli import (
    Look,
    fail,
    json_flag,
    options,
    run_async,
    show_event,
    show_status,
    watch_flag,
)
from plumbing.pod.messages import Tier
from plumbing.pod.paths import DIR, engine_sockets, gms_sockets, lockserver_socket
from plumbing.service.clock import SystemClock
from plumbing.service.config import Option, Resolved
from plumbing.service.process import arm_from_environment
from plumbing.text import to_json
from understudy.cli.settings import UI_OPTIONS
from understudy.goal import give_goal
from understudy.status.gather import (
    Record,
    follow_events,
    gather,
    past_events,
    require_pod,
    states_on_file,
    unreachable,
)
from understudy.status.view import (
    front_lines,
    front_view,
    is_reachable,
    lines,
    offline_lines,
    parts_of,
    watch_lines,
)

STATUS_TIMEOUT_S = 2.0  # a part answers in milliseconds; one that hangs should be seen soon

LOG_DIR = Option("log_dir", str, None, "The directory of the parts' logs [default: DIR/log].")


@click.command()
@options((DIR,))
@json_flag
@click.option("--check", is_flag=True, help="Exit with 4 unless the pod is healthy.")
@watch_flag
def status(config: Resolved, as_json: bool, check: bool, watch: bool) -> None:
    """Show who is active and whether failover is ready."""
    directory = _directory(config)
    look = partial(_look, directory, has_events=watch and not as_json)
    seen = show_status(look, as_json=as_json, watch=watch)
    state, problems = seen.document["state"], seen.document["problems"]
    if check and state != "healthy":
        reason = "; ".join(problems) or "no engine holds the lock"
        # With --json, too, a sentence on stderr alone: stdout has its one document.
        fail(DegradedError("pod.degraded", f"the pod is {state}: {reason}"))


def _look(directory: Path, *, has_events: bool) -> Look:
    """The pod's view, or what its engines last wrote.

    Raises:
        UnreachableError: there is neither.
    """
    view, now = run_async(lambda: gather(directory, STATUS_TIMEOUT_S)), datetime.now(UTC)
    last = str([part.get("last_event") for part in parts_of(view)])
    if (front := view["gateway"]) is not None and "pods" in front:
        seen = front_view(str(directory), front)
        events = _events_until(last, directory) if has_events else None
        return Look(seen, "\n".join(front_lines(seen, events)))
    if is_reachable(view):
        events = _events_until(last, directory) if has_events else []
        return Look(view, "\n".join([*lines(view, now), *watch_lines(events)]))
    has_socket = os.path.exists(lockserver_socket(str(directory)))
    error = unreachable(directory, view["lockserver"]["error"] if has_socket else "")
    on_file = offline_lines(states_on_file(directory), now)
    if not on_file:
        raise error
    text = "\n".join([f"pod    {directory}   no part answers", *on_file])
    return Look({"error": error.to_dict()}, text, error)


@lru_cache(maxsize=1)
def _events_until(last: str, directory: Path) -> list[Record]:
    """The events of all parts, of which `last` are the newest: each part sends a thousand."""
    return past_events(directory)


@click.command()
@options((DIR,))
@json_flag
@click.option("-f", "--follow", is_flag=True, help="Print new events until Ctrl-C.")
def events(config: Resolved, as_json: bool, follow: bool) -> None:
    """Print the events of all parts, oldest first.

    Each part keeps its last thousand events; those of a part that has exited are gone.
    """
    directory, show = _directory(config), partial(show_event, as_json=as_json)
    if follow:
        run_async(lambda: _follow(directory, show), as_json=as_json)
    for record in past_events(directory):
        show(record)


async def _follow(directory: Path, show: Callable[[Record], None]) -> None:
    await require_pod(directory)
    now_ms = SystemClock().now_ms()
    async with contextlib.aclosing(follow_events(directory, now_ms)) as following:
        async for record in following:
            show(record)


@click.command()
@options((DIR,))
@json_flag
@click.option("--strict", is_flag=True, help="Exit with 1 for warnings, too.")
def doctor(config: Resolved, as_json: bool, strict: bool) -> None:
    """Check the machine and the pod, and print fixes.

    Run it in every container: each sees only its own processes and devices.

    Exit codes: 0 no check failed, 1 at least one did.
    """
    from understudy.doctor import examine, look, report

    directory = _directory(config)
    found = examine(run_async(lambda: look(directory, os.environ)))
    click.echo(to_json(found) if as_json else "\n".join(report(found)))
    sys.exit(found.status == "fail" or (strict and found.status == "warn"))


@click.command()
@options(UI_OPTIONS)
def ui(config: Resolved) -> None:
    """Show the pod live in a browser.

    The page only reads, and works with any part down. `understudy up` starts one.
    """
    from understudy.ui.server import run

    arm_from_environment()  # of an init above it

    address = (config["http_host"], config["http_port"], config["http_allowed_host"])
    directory = _directory(config)
    run_async(lambda: run(directory, *address))


@click.command("support-bundle")
@options((DIR, LOG_DIR))
@click.option(
    "--output",
    metavar="FILE",
    help="The file to write, or - for standard output; default: understudy-support-TIME.tar.gz.",
)
def support_bundle(config: Resolved, output: str | None) -> None:
    """Collect diagnostics for remote support in one file.

    It contains no prompts and no secrets. Works with any or all parts down.
    """
    from understudy.bundle import STDOUT, collect

    directory = _directory(config)
    log_dir = Path(os.path.abspath(config["log_dir"] or directory / "log"))
    path = STDOUT if output == "-" else Path(os.path.abspath(output)) if output else None
    say = partial(click.echo, err=path == STDOUT)
    run_async(lambda: collect(directory, log_dir, path, say))


timeout_flag = click.option(
    "--timeout",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="How long to wait until it is done, in seconds.",
)


@click.command()
@options((DIR,))
@click.option("--offloaded", is_flag=True, help="Free the weights' device memory, too.")
@timeout_flag
@json_flag
def sleep(config: Resolved, timeout: float, offloaded: bool, as_json: bool) -> None:
    """Put the pod to sleep and free its KV memory. It wakes in milliseconds.

    Returns when the engine that holds the lock is asleep. The next request wakes it, unless the
    gateway runs with --wake manual.

    Exit codes: 0 done, 1 refused or overridden by another goal, 3 no engine, 5 not done in time; it
    continues in the background.
    """
    goal = Tier.OFFLOADED if offloaded else Tier.WARM
    _order(config, goal, timeout, as_json=as_json)


@click.command()
@options((DIR,))
@timeout_flag
@json_flag
def wake(config: Resolved, timeout: float, as_json: bool) -> None:
    """Wake a sleeping pod.

    Returns when the engine that holds the lock is active.

    Exit codes: 0 done, 1 overridden by another goal, 3 no engine, 5 not done in time; it continues
    in the background.
    """
    _order(config, Tier.AWAKE, timeout, as_json=as_json)


def _order(config: Resolved, goal: Tier, timeout_s: float, *, as_json: bool) -> None:
    directory = _directory(config)
    paths = engine_sockets(directory)
    if not paths:
        raise unreachable(directory)
    if goal is Tier.OFFLOADED and not any(
        name.startswith("OFFLOAD-") for name in gms_sockets(directory)
    ):
        raise UnderstudyError(
            "gms.no_copy",
            "this pod keeps no copy of its weights in host memory; start it with"
            " `gms serve --host-memory SIZE`, or UNDERSTUDY_HOST_MEMORY=SIZE understudy up",
        )
    text, document = run_async(lambda: give_goal(goal, paths, timeout_s), as_json=as_json)
    click.echo(to_json(document) if as_json else text)


def _directory(config: Resolved) -> Path:
    """The pod's directory, which need not exist.

    Raises:
        UsageError: `pod.directory_refused`.
    """
    path = os.path.abspath(config["dir"])
    try:
        os.stat(os.path.join(path, "."))
    except (FileNotFoundError, NotADirectoryError):
        pass  # there is no pod, which each command reports in its own way
    except OSError as error:
        raise UsageError(
            "pod.directory_refused",
            f"cannot read {path}: {error.strerror}; run this as the user who owns the pod, or name "
            "another directory with --dir",
        ) from error
    return Path(path)
