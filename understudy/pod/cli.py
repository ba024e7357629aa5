"""The `understudy` command: the pod for people.

Owns flags and what is printed. Everything else is elsewhere: `local_pod` says what runs, `runner`
runs it, `gather` and `view` look at it, `drill` breaks it.
"""

from __future__ import annotations

import json
import os
import platform
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click

import understudy
from understudy.errors import DegradedError, UnreachableError, UsageError
from understudy.pod import sessions
from understudy.pod.drill.page.data import page_data
from understudy.pod.drill.page.write import check_destination, write_page
from understudy.pod.drill.report import machine, print_report
from understudy.pod.drill.run import DrillPlan
from understudy.pod.follow import Record, follow_events
from understudy.pod.gather import gather
from understudy.pod.local_pod import LocalPod, Ports
from understudy.pod.settings import DRILL_OPTIONS, POD_OPTIONS, STATUS_OPTIONS, UP_OPTIONS
from understudy.pod.view import is_reachable, lines
from understudy.service.cli import INTERRUPTED, options, plain_errors, run_async
from understudy.service.clock import rfc3339
from understudy.service.config import Resolved, resolve
from understudy.service.paths import runtime_dir

# A part that hangs is one that people want to know of soon. What answers does so in milliseconds.
STATUS_TIMEOUT_S = 2.0

json_flag = click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
backend_arguments = click.argument(
    "arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- BACKEND'S FLAGS]"
)


@click.group()
def main() -> None:
    """Understudy: a parked engine takes over from a dead one, on weights loaded once."""


@main.command()
@options(UP_OPTIONS, command="up")
@backend_arguments
def up(config: Resolved, arguments: tuple[str, ...]) -> None:
    """Start a lock server, a GPU memory service and two engines here, and keep them running.

    What follows `--` goes to both engines' backends.
    """
    model = _model(config["model"])
    first = config["engine_port"]
    pod = LocalPod(
        Path(runtime_dir(config["dir"])),
        model or Path(),
        Ports(
            config["service_port"],
            config["lockserver_port"],
            config["gms_port"],
            (first, first + 1),
        ),
        backend=config["backend"],
        host=config["host"],
        device_bytes=config["device_bytes"],
        tensor_parallel=config["tensor_parallel"],
        backend_args=arguments,
        # Whoever reads this terminal reads text; a log collector sets LOG_FORMAT itself.
        env={"LOG_FORMAT": "text"}
        if sys.stdout.isatty() and "LOG_FORMAT" not in os.environ
        else {},
    )
    run_async(lambda: sessions.stay_up(pod, model, click.echo))


@main.command()
@options(STATUS_OPTIONS, command="status")
@json_flag
@click.option("--check", is_flag=True, help="Exit with 4 unless the pod is healthy.")
def status(config: Resolved, as_json: bool, check: bool) -> None:
    """Is it fine, who is active, since when, and what would happen on a failure?"""
    directory = Path(os.path.abspath(config["dir"]))
    view = run_async(lambda: gather(directory, STATUS_TIMEOUT_S))
    if not is_reachable(view):
        reason = view["lockserver"].get("error", "nobody answers")
        raise UnreachableError(
            "pod.unreachable",
            f"no part of a pod answers in {directory}: {reason}",
            dir=str(directory),
        )
    if as_json:
        click.echo(json.dumps(view, default=str))
    else:
        click.echo("\n".join(lines(view, datetime.now(UTC))))
    if check and view["state"] != "healthy":
        raise DegradedError(
            "pod.degraded",
            f"the pod is {view['state']}: {'; '.join(view['problems']) or 'no holder'}",
        )


@main.command()
@options(DRILL_OPTIONS, command="drill")
@backend_arguments
@json_flag
@click.option("--attach", is_flag=True, help="Drill the pod that runs in --dir.")
@click.option("--yes", is_flag=True, help="With --attach: do not ask.")
def drill(
    config: Resolved, arguments: tuple[str, ...], as_json: bool, attach: bool, yes: bool
) -> None:
    """Kill the active engine, or the memory service, under load, and report what came of it.

    What follows `--` goes to the backends of the pod that it starts.
    """
    expected = Path(config["expected"]) if config["expected"] else None
    plan = DrillPlan(config["kills"], config["target"], config["clients"], expected)
    page = Path(config["report"]) if config["report"] else None
    if page is not None:
        check_destination(page)

    def say(line: str) -> None:
        click.echo(line, err=True)

    if attach:
        _refuse_own_pod_flags(config, arguments)
        directory = Path(os.path.abspath(config["dir"]))
        _ask_first(directory, plan, yes=yes)
        result = run_async(lambda: sessions.drill_running_pod(directory, plan, say))
    else:
        model = _model(config["model"])
        result = run_async(lambda: sessions.drill_own_pod(model, config, plan, say, arguments))
    if result is None:
        sys.exit(INTERRUPTED)
    backend = result.backend or config["backend"]
    if as_json:
        click.echo(json.dumps(result.report.to_dict(backend, machine())))
    else:
        from rich.console import Console

        print_report(result.report, Console(), backend, result.usages)
    for problem in result.report.problems:
        click.echo(f"error: {problem}", err=True)
    if page is not None:
        now, found = rfc3339(datetime.now(UTC)), result.report
        data = page_data(result.records, found, backend, machine(), result.usages, now)
        write_page(page, data)
        click.echo(f"the report is in {page}", err=True)
    sys.exit(0 if result.report.passed else 1)


@main.command()
@options(STATUS_OPTIONS, command="events")
@json_flag
def events(config: Resolved, as_json: bool) -> None:
    """Follow what happens in the pod: grants, states of engines, memory, deaths. Ctrl-C ends it."""

    def show(record: Record) -> None:
        if as_json:
            click.echo(json.dumps(record, default=str))
        else:
            source, kind = record.get("source", ""), record.get("type", "")
            click.echo(f"{record.get('ts')}  {source:<11}  {kind:<20}  {record.get('message')}")

    run_async(lambda: follow_events(Path(os.path.abspath(config["dir"])), show))


@main.command()
@json_flag
@plain_errors
def config(as_json: bool) -> None:
    """Print every setting of `up` and `drill` with its value and where that came from."""
    described = {
        "up": resolve(
            UP_OPTIONS, {}, os.environ, os.environ.get("UNDERSTUDY_CONFIG"), command="up"
        ),
        "drill": resolve(
            DRILL_OPTIONS, {}, os.environ, os.environ.get("UNDERSTUDY_CONFIG"), command="drill"
        ),
    }
    if as_json:
        document = {command: resolved.describe() for command, resolved in described.items()}
        click.echo(json.dumps(document, default=str))
        return
    for command, resolved in described.items():
        click.echo(f"[{command}]")
        for setting in resolved.describe():
            click.echo(_setting_line(setting))


@main.command()
@json_flag
def version(as_json: bool) -> None:
    """Print the version."""
    about = {"version": understudy.__version__, "python": platform.python_version()}
    click.echo(json.dumps(about) if as_json else f"understudy {about['version']}")


def _setting_line(setting: dict[str, Any]) -> str:
    value = "-" if setting["value"] in (None, ()) else setting["value"]
    return f"  {setting['name']:<16} {value!s:<20} {setting['origin']:<12} {setting['env']}"


def _model(given: str | None) -> Path | None:
    """The checkpoint's absolute path. Whether it is a good one, the engine says."""
    if given is None:
        return None
    path = Path(os.path.abspath(given))
    if not path.is_dir():
        raise UsageError(
            "pod.no_model", f"{path} is not a directory; --model takes a Hugging Face checkpoint"
        )
    return path


def _refuse_own_pod_flags(config: Resolved, arguments: tuple[str, ...]) -> None:
    """A pod that runs has its model, devices and backend: a flag for them would change nothing."""
    needless = [each.flag for each in POD_OPTIONS if config.origin(each.name) == "flag"]
    needless += arguments[:1]
    if needless:
        raise UsageError(
            "drill.needless_flag",
            f"{', '.join(needless)} cannot be used with --attach: they say what pod to start, and "
            "the one in --dir runs already; leave them out, or leave out --attach",
        )


def _ask_first(directory: Path, plan: DrillPlan, *, yes: bool) -> None:
    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            "drill.unconfirmed", "--attach kills engines that may be in use: add --yes"
        )
    what = ", ".join(plan.targets) or "the active engine"
    question = f"Kill {what} of the pod in {directory} {plan.kills} times?"
    if not click.confirm(question, err=True):
        raise UsageError("drill.declined", "nothing was killed")


if __name__ == "__main__":
    main()
