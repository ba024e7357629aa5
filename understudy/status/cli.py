"""The commands of `understudy` with which people look at a pod: they change nothing.

Owns flags and what is printed; `attach` adds the commands to the group of `understudy/cli.py`.
The one exception to looking is `doctor --fix`, and it does only what `mends.py` calls safe.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

from plumbing.errors import DegradedError, UnreachableError, UsageError
from plumbing.part.format import since
from plumbing.service.cli import fail, options, run_async
from plumbing.service.config import Option, Resolved
from understudy.settings import DIR, STATUS_OPTIONS, UP_OPTIONS
from understudy.status.follow import Record, follow_events
from understudy.status.gather import gather, way_out
from understudy.status.last_words import last_lines, last_words
from understudy.status.past_events import last_event, past_events
from understudy.status.view import is_reachable, lines
from understudy.up.ports import Ports

# A part that hangs is one that people want to know of soon. What answers does so in milliseconds.
STATUS_TIMEOUT_S = 2.0
WATCH_S = 1.0  # the pace of people; a look costs the pod's parts about a millisecond each

LOG_DIR = Option(
    "log_dir",
    str,
    None,
    "Where the parts' logs are; `log` in --dir unless given (`up -f` has it in its own --dir).",
)
LOG_OPTIONS = (DIR, LOG_DIR)
DOCTOR_OPTIONS = (DIR, *(each for each in UP_OPTIONS if each.name.endswith("_port")))

json_flag = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")


def attach(group: click.Group) -> None:
    """Add these commands to `group`."""
    for command in (status, events, doctor, top, support_bundle):
        group.add_command(command)


@click.command()
@options(STATUS_OPTIONS, command="status")
@json_flag
@click.option("--check", is_flag=True, help="Exit with 4 unless the pod is healthy.")
@click.option("--watch", is_flag=True, help="Once a second, until Ctrl-C.")
def status(config: Resolved, as_json: bool, check: bool, watch: bool) -> None:
    """Is it fine, who is active, since when, and what would happen on a failure?"""
    directory = _directory(config)
    if watch:
        run_async(lambda: _watch(directory, as_json=as_json))
    view, text = run_async(lambda: _look(directory, as_json=as_json))
    if is_reachable(view) or not as_json:
        click.echo(text)
    if not is_reachable(view):
        raise _unreachable(view)
    if check and view["state"] != "healthy":
        reason = "; ".join(view["problems"]) or "no holder"
        # With --json, too, a sentence on stderr alone: stdout has its one document.
        fail(DegradedError("pod.degraded", f"the pod is {view['state']}: {reason}"))


async def _watch(directory: Path, *, as_json: bool) -> None:
    """One view after another; a pod that is away is what one waits to see the end of."""
    while True:
        _, text = await _look(directory, as_json=as_json)
        if not as_json and sys.stdout.isatty():
            click.clear()
        elif not as_json:
            text += "\n"  # an empty line between two views
        click.echo(text)
        await asyncio.sleep(WATCH_S)


async def _look(directory: Path, *, as_json: bool) -> tuple[dict[str, Any], str]:
    """The pod's view, and how it is printed."""
    view, now = await gather(directory, STATUS_TIMEOUT_S), datetime.now(UTC)
    if as_json:
        return view, json.dumps(view, default=str)
    if not is_reachable(view):
        words = last_lines(last_words(directory), now)
        return view, "\n".join([f"pod    {directory}   no part answers", *words])
    record = await last_event(directory, view)
    last = f"last   {_last(record, now)}" if record else "last   nothing has happened"
    return view, "\n".join([*lines(view, now), last])


def _last(record: Record, now: datetime) -> str:
    return f"{since(record['ts'], now)} ago   {record['source']}   {record['message']}"


def _unreachable(view: dict[str, Any]) -> UnreachableError:
    reason = view["lockserver"].get("error", "nobody answers")
    return UnreachableError(
        "pod.unreachable",
        f"no part of a pod answers in {view['dir']} ({reason}); {way_out(Path(view['dir']))}",
        dir=view["dir"],
    )


@click.command()
@options(STATUS_OPTIONS, command="events")
@json_flag
@click.option("-f", "--follow", is_flag=True, help="What happens from now on, until Ctrl-C.")
def events(config: Resolved, as_json: bool, follow: bool) -> None:
    """What happened in the pod: grants, states of engines, memory, deaths.

    Every part keeps its last thousand; a part that is gone has taken its own along.
    """
    directory = _directory(config)

    def show(record: Record) -> None:
        if as_json:
            click.echo(json.dumps(record, default=str))
        else:
            source, kind = record.get("source", ""), record.get("type", "")
            click.echo(f"{record.get('ts')}  {source:<11}  {kind:<20}  {record.get('message')}")

    if follow:
        run_async(lambda: _follow(directory, show), as_json=as_json)
    for record in run_async(lambda: past_events(directory), as_json=as_json):
        show(record)


async def _follow(directory: Path, show: Callable[[Record], None]) -> None:
    """Show what is heard, but not where it is heard: if nobody reads any more, that ends us."""
    heard: asyncio.Queue[Record | None] = asyncio.Queue()
    following = asyncio.create_task(follow_events(directory, heard.put_nowait))
    following.add_done_callback(lambda _: heard.put_nowait(None))
    try:
        while (record := await heard.get()) is not None:
            show(record)
        await following  # which ends with what is wrong
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


@click.command()
@options(DOCTOR_OPTIONS, command="doctor")
@json_flag
@click.option("--strict", is_flag=True, help="Exit with 1 also where something is to be looked at.")
@click.option("--fix", is_flag=True, help="Do what is safe: stale sockets, our directory's mode.")
def doctor(config: Resolved, as_json: bool, strict: bool, fix: bool) -> None:
    """What is wrong with this machine and its pod, and what to do about it.

    Exit codes: 0 nothing failed, 1 something did. Run it in every container: each sees its own.
    """
    from understudy.doctor import checks
    from understudy.doctor import fixes as mends
    from understudy.doctor.probe import look

    directory, first = _directory(config, is_entered=False), config["engine_port"]
    ports = Ports(
        config["service_port"], config["lockserver_port"], config["gms_port"], (first, first + 1)
    )
    facts = run_async(lambda: look(directory, ports, os.environ))
    fixed = mends.fix(facts) if fix else []
    if fixed:
        facts = run_async(lambda: look(directory, ports, os.environ))
    results = checks.examine(facts)
    if as_json:
        click.echo(json.dumps(checks.document(str(directory), results, fixed)))
    else:
        click.echo("\n".join(checks.lines(results, fixed)))
    sys.exit(0 if checks.is_well(results, is_strict=strict) else 1)


@click.command()
@options(LOG_OPTIONS, command="top")
def top(config: Resolved) -> None:
    """The pod, live in this terminal: `q` ends it, `?` lists the keys.

    Where stdout is no terminal, a few lines once a second.
    """
    from understudy.top.top import run

    directory, log_dir = _directory(config), _log_dir(config)
    run_async(lambda: run(directory, log_dir, click.echo))


@click.command("support-bundle")
@options(LOG_OPTIONS, command="support-bundle")
@click.option("--output", metavar="FILE", help="Where to; understudy-support-TIME.tar.gz here.")
def support_bundle(config: Resolved, output: str | None) -> None:
    """Collect what somebody needs who helps from afar, into one file. No prompts, no secrets.

    Works with any part down, or all of them.
    """
    from understudy.bundle.bundle import collect

    directory, log_dir = _directory(config, is_entered=False), _log_dir(config)
    path = Path(os.path.abspath(output)) if output else None
    run_async(lambda: collect(directory, log_dir, path, click.echo))


def _directory(config: Resolved, *, is_entered: bool = True) -> Path:
    """The pod's directory, which may be away. Not `is_entered`: nor need we be let into it.

    Raises:
        UsageError: `pod.directory_refused`.
    """
    path = os.path.abspath(config["dir"])
    try:
        os.stat(os.path.join(path, ".") if is_entered else path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # there is no pod, and each command has its own words for that
    except OSError as error:
        raise UsageError(
            "pod.directory_refused",
            f"cannot look into {path}: {error.strerror}; ask as the user whose pod it is, or name "
            "another directory with --dir",
        ) from error
    return Path(path)


def _log_dir(config: Resolved) -> Path:
    given = config["log_dir"]
    return Path(os.path.abspath(given or os.path.join(config["dir"], "log")))
