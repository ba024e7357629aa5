"""The `engine` command: run a supervisor, ask one how it is, have it leave."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

import click

from engine.backends import asks_for_help, command_line
from engine.messages import CONTROL, Leave, Ok, StatusMsg, StatusReplyMsg
from engine.supervisor import state_file
from engine.supervisor.settings import OPTIONS, Settings, control_path, settle
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.service import log, parent
from plumbing.service.cli import options, run_async
from plumbing.service.config import Option, Resolved
from plumbing.service.files import read_json
from plumbing.service.paths import runtime_dir, socket_path
from plumbing.wire.blocking import BlockingClient

ANSWER_TIMEOUT_S = 5.0
DRAIN_TIMEOUT_S = 60.0  # longer than the drain budget and the reap budget together

WHERE = tuple(option for option in OPTIONS if option.name in ("dir", "engine_id"))
DRAIN = (*WHERE, Option("timeout_s", float, DRAIN_TIMEOUT_S, "How long to wait.", minimum=0))


@click.group()
def main() -> None:
    """One inference engine of the pod: a supervisor and the backend under it."""


@main.command(context_settings={"ignore_unknown_options": False})
@options(OPTIONS, command="engine")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(config: Resolved, arguments: tuple[str, ...]) -> None:
    """Run an engine until it is told to end.

    What follows `--` goes to the backend: `engine run --backend reference -- --help` prints what
    that takes.
    """
    if asks_for_help(config["backend"], arguments):
        command = command_line(config["backend"], arguments)
        sys.exit(subprocess.run(command, check=False).returncode)
    parent.arm_from_environment()
    log.configure("engine", engine_id=config["engine_id"], role=config["role"])
    directory = runtime_dir(config["dir"])
    settings = settle(config, command_line(config["backend"], arguments), directory)
    socket_path(directory, settings.control_path.rpartition("/")[2])
    run_async(lambda: _supervise(settings))


async def _supervise(settings: Settings) -> None:
    from engine.supervisor.supervisor import Supervisor  # the other commands do without its imports

    await Supervisor(settings).run()


@main.command()
@options(WHERE, command="engine")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def status(config: Resolved, as_json: bool) -> None:
    """Say what the engine does; from its state file where it does not answer."""
    directory, engine = config["dir"], config["engine_id"]
    try:
        document = _ask_status(directory, engine)
    except UnreachableError as error:
        document = _offline(directory, engine, error)
    click.echo(json.dumps(document, indent=2) if as_json else _human(document))


@main.command()
@options(DRAIN, command="engine")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def drain(config: Resolved, as_json: bool) -> None:
    """Have the engine finish what it does and end, as SIGTERM would; waits for its end."""
    begun = time.monotonic()
    with BlockingClient(control_path(config["dir"], config["engine_id"]), CONTROL) as client:
        reply = client.request(Leave(), timeout_s=ANSWER_TIMEOUT_S).message
        assert isinstance(reply, Ok)
        _wait_for_end(client, begun + config["timeout_s"])
    took_ms = round((time.monotonic() - begun) * 1000)
    changed = {"status": "ended", "transition": reply.detail, "duration_ms": took_ms}
    text = f"{config['engine_id']} has ended ({reply.detail}) after {took_ms} ms"
    click.echo(json.dumps(changed) if as_json else text)


def _wait_for_end(client: BlockingClient, end: float) -> None:
    try:
        client.receive(timeout_s=max(0.0, end - time.monotonic()))
    except WaitTimeoutError as error:
        raise WaitTimeoutError(
            "engine.still_draining",
            "the engine is still draining; it goes on by itself, look again with `engine status`",
        ) from error
    except UnreachableError:
        return  # it has ended


def _ask_status(directory: str, engine: str) -> dict[str, Any]:
    with BlockingClient(control_path(directory, engine), CONTROL) as client:
        reply = client.request(StatusMsg(), timeout_s=ANSWER_TIMEOUT_S).message
    assert isinstance(reply, StatusReplyMsg)
    return {**reply.document, "online": True}


def _offline(directory: str, engine: str, error: UnderstudyError) -> dict[str, Any]:
    try:
        document = read_json(state_file.path_of(directory, engine))
    except OSError:  # somebody else's directory
        document = None
    if document is None:
        raise error
    return {**document, "online": False}


def _human(document: dict[str, Any]) -> str:
    engine, lock, backend = document["engine"], document["lock"], document["backend"]
    pids = ", ".join(f"{name} {pid}" for name, pid in backend["pids"].items()) or "none"
    view = "" if document["online"] else "   (offline view: what its state file last said)"
    lines = [
        f"engine {engine['id']}   {engine['state']} since {engine['since']}{view}",
        f"reason   {engine['reason']}",
        f"lock     {'connected' if lock['connected'] else 'not connected'}"
        + (f", token {lock['token']}" if lock["token"] else ""),
        f"backend  {backend['name']}, launch {engine['number']}; processes: {pids}",
        f"load     {document['inflight']} requests in flight",
    ]
    if lock.get("lease"):
        lines.insert(3, f"lease    {_lease(lock['lease'])}")
    if engine.get("members", 1) > 1:
        lines.insert(1, f"member   {engine['member']} of {engine['members']} (0 serves)")
    if document["relaunch"]:
        lines.append(f"next     launch in at most {document['relaunch']['in_ms'] / 1000:g} s")
    if document["deaths"]:
        last = document["deaths"][-1]
        lines.append(f"death    {last['at']}  {last['message']}")
    lines += [f"problem  {problem}" for problem in document["problems"]]
    return "\n".join(lines)


def _lease(lease: dict[str, Any]) -> str:
    """`valid for 2600 ms of 5000 ms, held; the lock server was heard 120 ms ago`."""
    if lease["is_lost"]:
        text = "lost: what was held under it is being ended"
    elif lease["lease_ms"] is None:
        text = "none yet"
    else:
        held = ", held" if lease["is_held"] else ""
        text = f"valid for {lease['valid_for_ms']:.0f} ms of {lease['lease_ms']} ms{held}"
    heard_ms = lease["server_heard_ms_ago"]
    if heard_ms is None:
        return f"{text}; the lock server has not been heard"
    return f"{text}; the lock server was heard {heard_ms:.0f} ms ago"
