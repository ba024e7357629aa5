"""The `engine` command: run a supervisor, show its status, drain it."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import click

from engine.backends.registry import command_line, show_help
from engine.messages import CONTROL, LeaveMsg, OkMsg
from engine.supervisor.settings import OPTIONS, EngineSettings, placed, settle
from plumbing.errors import UnreachableError, WaitTimeoutError
from plumbing.pod.cli import (
    ANSWER_TIMEOUT_S,
    Look,
    add_status,
    ask_status,
    json_flag,
    options,
    run_async,
)
from plumbing.pod.paths import engine_socket, engine_state, engine_states, runtime_dir
from plumbing.service import log
from plumbing.service.config import Option, Resolved
from plumbing.service.files import read_json
from plumbing.service.process import arm_from_environment
from plumbing.text import duration
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.server import guard_holder
from plumbing.wire.sockets import check_path

DRAIN_TIMEOUT_S = 60.0  # more than the drain and reap budgets together

WHERE = tuple(option for option in OPTIONS if option.name in ("dir", "engine_id"))
DRAIN = (
    *WHERE,
    Option(
        "finish",
        bool,
        False,
        "Finish streams here, even those that the next engine could continue behind a gateway.",
    ),
    Option("timeout_s", float, DRAIN_TIMEOUT_S, "How long to wait, in seconds.", minimum=0),
)


@click.group()
def main() -> None:
    """Engine: a supervisor and the inference backend that it runs."""


@main.command(context_settings={"ignore_unknown_options": False})
@options(OPTIONS)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(config: Resolved, arguments: tuple[str, ...]) -> None:
    """Run an engine until it is drained or receives SIGTERM.

    Arguments after `--` go to the backend; `engine run --backend reference -- --help` lists them.
    """
    show_help(config["backend"], arguments)
    arm_from_environment()
    log.configure("engine", engine_id=config["engine_id"], role=config["role"])
    directory = runtime_dir(config["dir"])
    if config["pool"] is not None:
        config, own, environment = placed(config, directory)
        arguments = (*own, *arguments)
        os.environ.update(environment)  # for the backend
    settings = settle(config, command_line(config["backend"], arguments), directory)
    check_path(settings.control_path if settings.is_remote else settings.private_path)
    run_async(lambda: _supervise(settings))


async def _supervise(settings: EngineSettings) -> None:
    from engine.supervisor.supervisor import EngineSupervisor  # heavy, and only needed here

    await EngineSupervisor(settings).run()


def _look(config: Resolved) -> Look:
    """The supervisor's own status, or its state file.

    Raises:
        UnreachableError, WaitTimeoutError: there is neither.
    """
    directory, engine, offline = config["dir"], config["engine_id"], None
    path = engine_socket(directory, engine)
    try:
        document = ask_status(path, CONTROL)
    except (UnreachableError, WaitTimeoutError) as error:
        try:
            on_file = read_json(engine_state(directory, engine))
        except OSError:  # another user's directory
            on_file = None
        if on_file is None:
            known = [each.stem.removeprefix("engine_") for each in engine_states(Path(directory))]
            if not known or engine in known:
                raise
            there = f"there is no engine {engine} in {directory}; engines: {', '.join(known)}"
            raise UnreachableError("engine.unknown", f"{there} (--engine-id)") from error
        document, offline = on_file, error
        if isinstance(error, WaitTimeoutError):
            holder = guard_holder(path.removesuffix(".sock") + ".lock") or "a process"
            why = f"the supervisor of {engine} ({holder} in its container) does not answer"
            fix = "if it was stopped, resume it with kill -CONT; if it hangs, kill it with kill -9"
            offline = UnreachableError("engine.not_answering", f"{why}; {fix}")
    document |= {"online": offline is None}
    return Look(document, _text(document), offline)


add_status(
    main,
    _look,
    "Show what the engine does and why.\n\n"
    "If the supervisor does not answer, show its state file, and exit with code 3.",
    WHERE,
)


@main.command()
@options(DRAIN)
@json_flag
def drain(config: Resolved, as_json: bool) -> None:
    """Finish the requests in flight, then exit, as on SIGTERM.

    Behind a gateway, streams that the next engine can continue are left to it. Returns when the
    engine has exited.
    """
    begun = time.monotonic()
    with BlockingClient(engine_socket(config["dir"], config["engine_id"]), CONTROL) as client:
        leave = LeaveMsg(finish=config["finish"])
        reply = client.request(leave, timeout_s=ANSWER_TIMEOUT_S).message
        assert isinstance(reply, OkMsg)
        _wait_for_exit(client, begun + config["timeout_s"])
        # Open until this process has exited, which the engine waits for: when it ends, the kernel
        # may kill every process of its container.
        os.dup(client.fileno())
    took_ms = round((time.monotonic() - begun) * 1000)
    changed = {"status": "ended", "transition": reply.detail, "duration_ms": took_ms}
    text = f"{config['engine_id']} exited ({reply.detail}) after {duration(took_ms)}"
    click.echo(json.dumps(changed) if as_json else text)


def _wait_for_exit(client: BlockingClient, end: float) -> None:
    """Wait for the engine's word that it ends, or for its end."""
    try:
        client.receive(timeout_s=max(0.0, end - time.monotonic()))
    except WaitTimeoutError as error:
        raise WaitTimeoutError(
            "engine.still_draining",
            "the engine is still draining and will exit by itself; check with `engine status`",
        ) from error
    except UnreachableError:
        return  # it has exited


def _text(document: dict[str, Any]) -> str:
    engine, lock, backend = document["engine"], document["lock"], document["backend"]
    pids = ", ".join(f"{name} {pid}" for name, pid in backend["pids"].items()) or "none"
    view = "" if document["online"] else "   (offline view, from its state file)"
    lines = [
        f"engine {engine['id']}   {engine['state']} since {engine['since']}{view}",
        f"reason   {engine['reason']}",
        f"lock     {'' if document['online'] else 'was '}"
        + ("connected" if lock["connected"] else "not connected")
        + (f", token {lock['token']}" if lock["token"] else ""),
        f"backend  {backend['name']}, launch {engine['number']}; processes: {pids}",
        f"load     {document['inflight']} requests in flight",
    ]
    if lease := lock.get("lease"):
        valid, held = duration(lease["valid_for_ms"]), ", held" if lease["is_held"] else ""
        lines.append(f"lease    {'lost' if lease['is_lost'] else f'valid for {valid}{held}'}")
    if backend.get("serves_on"):
        lines.append(f"serves   {backend['serves_on']}")
    if hang := (document.get("health") or {}).get("hang_budget"):
        lines.append(f"health   hang {hang}")
    if document["relaunch"]:
        lines.append(f"next     launch in at most {duration(document['relaunch']['in_ms'])}")
    if document["deaths"]:
        last = document["deaths"][-1]
        lines.append(f"death    {last['at']}  {last['message']}")
    lines += [f"problem  {problem}" for problem in document["problems"]]
    return "\n".join(lines)
