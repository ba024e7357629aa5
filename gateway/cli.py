"""The `gateway` command: `serve`, `status`, `events`, `replace`, `leave`, `certificates`.

The text of a status has at most 15 lines, that of a front with many pods a few more. It owns words
and lines, no facts. A gateway has nothing on disk but its lock file, since its state is its
connections: of one that does not answer, the process and what follows for clients are known.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import click

from gateway.front_text import history, pods_line, pods_table
from gateway.messages import CONTROL, LeaveFleetMsg, LeavingFleetMsg, ReplaceMsg, ReplacingMsg
from gateway.server.settings import DAY_S, OPTIONS, GatewaySettings, settle
from plumbing.errors import UnreachableError, WaitTimeoutError
from plumbing.pod.cli import (
    Look,
    add_events,
    add_status,
    ask_status,
    json_flag,
    options,
    run_async,
)
from plumbing.pod.paths import DIR, gateway_socket, lockserver_guard
from plumbing.service import log, procfs
from plumbing.service.config import Option, Resolved, duration_s
from plumbing.service.process import arm_from_environment
from plumbing.text import duration, since, size, to_json
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.server import guard_holder

REPLACE_TIMEOUT_S = 70.0  # a successor needs half a second, and gives up after 60
POLL_S = 0.05
FRONTS_HEAR_S = 0.5  # at the latest, that the pod leaves
WITHIN = Option(
    "within",
    duration_s,
    90.0,
    "How long fronts have to move streams, such as 90s.",
    minimum=0.1,
    maximum=DAY_S,
)


@click.group()
def main() -> None:
    """Gateway: accepts clients' connections, and resumes their streams after a failover."""


@main.command()
@options(OPTIONS)
def serve(config: Resolved) -> None:
    """Run the gateway until SIGTERM.

    On SIGTERM it accepts no more connections, and exits when all streams have ended, or after
    --drain-timeout. A second SIGTERM ends it at once. SIGHUP works like `gateway replace`.
    """
    arm_from_environment()
    log.configure("gateway")
    settings = settle(config)
    sys.exit(run_async(lambda: _serve(settings)))


async def _serve(settings: GatewaySettings) -> int:
    from gateway.server.server import GatewayServer  # heavy, and only needed here

    if settings.pods:
        from gateway.server.program import FrontServer

        return await FrontServer(settings).run()
    return await GatewayServer(settings).run()


def _look(config: Resolved) -> Look:
    """The gateway's own status, or what is known without it.

    Raises:
        UnreachableError, WaitTimeoutError: no gateway was ever there.
    """
    directory, away = os.path.abspath(config["dir"]), None
    try:
        document = ask_status(gateway_socket(directory), CONTROL)
    except (UnreachableError, WaitTimeoutError) as error:
        guard = f"{gateway_socket(directory).removesuffix('.sock')}.lock"
        if not os.path.exists(guard):
            raise
        pid, what = _offline(directory, os.stat(guard))
        code = "gateway.not_answering" if pid else "gateway.offline"
        away = UnreachableError(code, what, cause=error.code)
        document = {"schema": 1, "online": False, "pid": pid, "dir": directory}
        document |= {"accepting": None, "problems": [what]}
    return Look(document, render(document), away)


add_status(
    main,
    _look,
    "Show what the gateway accepts, where requests go, and what waits.\n\n"
    "If the gateway does not answer, show what that means for clients, and exit with code 3.",
)
add_events(main, "gateway", gateway_socket, CONTROL)


@main.command()
@options((DIR,))
@json_flag
def replace(config: Resolved, as_json: bool) -> None:
    """Replace the gateway by a new process, without losing a request.

    The new process reads the certificate and the API keys again and accepts connections; the old
    one finishes its requests, then exits.
    """
    path = gateway_socket(os.path.abspath(config["dir"]))
    with BlockingClient(path, CONTROL) as client:
        old = client.request(ReplaceMsg()).message
    assert isinstance(old, ReplacingMsg)
    new_pid = _wait_for_successor(path, old.pid)
    document = {"schema": 1, "old_pid": old.pid, "new_pid": new_pid, "in_flight": old.in_flight}
    if as_json:
        click.echo(to_json(document))
        return
    click.echo(f"pid {new_pid} accepts connections")
    click.echo(f"pid {old.pid} finishes {old.in_flight} requests, then exits")


@main.command()
@options((DIR, WITHIN))
@json_flag
def leave(config: Resolved, as_json: bool) -> None:
    """Leave the fleet: have fronts move this pod's streams to other pods.

    Returns once no request is left; then stop the pod. Streams that no other pod can take are
    dropped 10 s before the end, and their fronts resume them when one can.

    Exit codes: 0 nothing is left, 5 requests were left after --within.
    """
    begun_s = time.monotonic()
    in_flight = _leave(gateway_socket(os.path.abspath(config["dir"])), config["within"])
    took_ms = round((time.monotonic() - begun_s) * 1000)
    if in_flight:
        why = f"{in_flight} requests are left after {duration(took_ms)}"
        raise WaitTimeoutError("gateway.still_leaving", why)
    if as_json:
        click.echo(to_json({"schema": 1, "took_ms": took_ms}))
    else:
        click.echo(f"no request is left after {duration(took_ms)}")


def _leave(path: str, within_s: float) -> int:
    """How many requests are left at the end; none if the gateway ends meanwhile, with its
    requests."""
    begun_s, left_ms, is_told = time.monotonic(), round(within_s * 1000), False
    try:
        with BlockingClient(path, CONTROL) as client:
            while True:
                said = client.request(LeaveFleetMsg(left_ms)).message
                assert isinstance(said, LeavingFleetMsg)
                is_told, left_ms = True, said.left_ms
                is_heard = time.monotonic() - begun_s >= FRONTS_HEAR_S
                if not left_ms or (is_heard and not said.in_flight):
                    return said.in_flight
                time.sleep(POLL_S)
    except UnreachableError:
        if not is_told:
            raise
        return 0


@main.command()
@options(())
@click.argument("directory", metavar="DIR")
def certificates(config: Resolved, directory: str) -> None:
    """Write a CA, and the certificates of a fleet's pods and fronts.

    DIR/pod and DIR/front each get tls.crt, tls.key and ca.crt, for --fleet-tls. Keep DIR/ca.key
    away from both.
    """
    from gateway.server.hop import POD
    from plumbing.wire.certificates import create

    for path in create(os.path.abspath(directory), [POD], "pod", "front"):
        click.echo(path)


def _wait_for_successor(path: str, old_pid: int) -> int:
    """The pid of the gateway that accepts in place of `old_pid`."""
    deadline_s = time.monotonic() + REPLACE_TIMEOUT_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(UnreachableError, WaitTimeoutError):  # between the two
            found = ask_status(path, CONTROL)
            if found["accepting"] and found["pid"] != old_pid:
                return int(found["pid"])
        time.sleep(POLL_S)
    raise WaitTimeoutError(
        "gateway.restart_failed",
        f"no successor accepts after {REPLACE_TIMEOUT_S:g} s, its log says why; pid {old_pid}"
        " serves on",
    )


# ------------------------------------------------------------------------------ as text

Document = dict[str, Any]
PROBLEMS_MAX = 5  # of fifteen lines
MODELS_MAX = 4  # in one line


def render(document: Document) -> str:
    return "\n".join(f"{label:<9}{text}" for label, text in _lines(document))


def _lines(document: Document) -> Iterator[tuple[str, str]]:
    if not document["online"]:
        yield "gateway", f"offline view  {document['dir']}"
        yield from _problems(document)
        return
    now = datetime.now(UTC)
    yield "gateway", f"pid {document['pid']}  since {document['since']}  {document['dir']}"
    yield "service", _service(document, now)
    yield from _front(document, now) if "pods" in document else _behind(document)
    yield "requests", _load(document["load"])
    held = size(document["load"]["memory_bytes"])
    yield "memory", f"{held} of {size(document['memory_bytes_max'])} for journals, bodies, answers"
    yield "totals", _totals(document)
    stop = document["stop"]
    kind = f"; class {stop['class']}" if stop["class"] else ""
    yield "stop", f"streams get {duration(stop['drain_ms'])}{kind}"
    if (server := document.get("lock_server")) is not None:
        how, then = ("", "") if server["connected"] else ("not ", "; a takeover waits for it")
        yield "lock", f"server {how}connected for {since(server['since'], now)}{then}"
    yield from _problems(document)


def _front(document: Document, now: datetime) -> Iterator[tuple[str, str]]:
    yield "pods", pods_line(document)
    yield from (("", line) for line in pods_table(document, now))
    yield "fleet", history(document)


def _behind(document: Document) -> Iterator[tuple[str, str]]:
    """What is behind a gateway of one pod."""
    if document["predecessor"] is not None:
        yield "", f"pid {document['predecessor']}, which it replaced, finishes its requests"
    if document["pool"] is None:
        yield "engine", _engine(document)
    else:
        yield "models", models_line(document["pool"]["models"])
    if (hop := document["hop"]) is not None:
        leaves = hop["leaving_ms"]
        leaving = f"; leaving, {duration(leaves)} left" if leaves is not None else ""
        yield "fronts", f"{hop['fronts']} connected to {hop['address']} as {hop['pod']}{leaving}"


def _service(document: Document, now: datetime) -> str:
    address = document["service"]["address"]
    if document["accepting"]:
        tls = " (TLS)" if document["service"]["tls"] else ""
        return f"accepts on {address}{tls} for {since(document['accepting_since'], now)}"
    if document["stopping"]:
        return f"stopping: does not accept on {address}"
    return f"does not accept on {address}" if address else "no socket yet"


def _engine(document: Document) -> str:
    found, idle = document["upstream"], document["idle"]
    if idle is not None:
        return f"none for {duration(idle['for_ms'])}: {idle['reason']}"
    if found is None:
        return "none was granted the lock yet"
    text = f"{found['engine']}  token {found['token']}  for {duration(found['for_ms'])}"
    if document["rest"]["door"] == "shut":
        return f"{text}  {_rest(document['rest'])}"
    if found["continuation"]:
        text += f"  streams: {found['continuation']}"
    if found["continuation_id"]:
        text += f"  continuation id {found['continuation_id'][:16]}"
    return f"{text}  ({found['problem']})" if found["problem"] else text


def models_line(models: dict[str, Document]) -> str:
    """`chat awake, 2 in flight; coder warm, 1 waiting`"""
    kinds = ("in_flight", "waiting", "parked")
    said = []
    for name, model in list(models.items())[:MODELS_MAX]:
        counts = [f"{model[kind]} {kind.replace('_', ' ')}" for kind in kinds if model[kind]]
        said.append(", ".join([f"{name} {model['state'] or 'unknown'}", *counts]))
    if len(models) > MODELS_MAX:
        said.append(f"{len(models) - MODELS_MAX} more; all: understudy pool status")
    return "; ".join(said)


def _rest(rest: Document) -> str:
    """`resting for 5m00s (gateway); a request wakes it`"""
    said = rest["engine"] or {}
    by = f" ({said['goal_by']})" if said.get("goal_by") else ""
    text = f"{said.get('state', 'resting')} for {duration(said.get('for_ms', 0))}{by}"
    if said.get("goal") == "awake":
        return f"{text}; it is being woken"
    then = "a request wakes it" if rest["wake"] == "on-request" else "wake it: understudy wake"
    return f"{text}; {then}"


def _load(load: Document) -> str:
    oldest = f" (oldest {duration(load['parked_oldest_ms'])})" if load["parked"] else ""
    text = (
        f"{load['in_flight']} in flight, {load['waiting']} waiting for an engine,"
        f" {load['parked']} parked{oldest}, {load['replaying']} replaying"
    )
    return f"{text}, {load['suspects']} suspects" if load["suspects"] else text


def _totals(document: Document) -> str:
    totals = document["totals"]
    endings: dict[str, int] = {}
    for each in totals["requests"]:
        endings[each["ending"]] = endings.get(each["ending"], 0) + each["count"]
    parts = [f"{count} {ending.replace('_', ' ')}" for ending, count in endings.items()]
    parts += [
        f"{totals['pauses']} pauses",
        f"{totals['resumes']} resumed",
        f"{totals['replayed_tokens']} tokens replayed",
    ]
    return ", ".join(parts)


def _problems(document: Document) -> Iterator[tuple[str, str]]:
    problems = document["problems"]
    for problem in problems[:PROBLEMS_MAX]:
        yield "problem", problem
    if len(problems) > PROBLEMS_MAX:
        yield "problem", f"and {len(problems) - PROBLEMS_MAX} more"


HOLDS = "new connections wait for 10 s (--hold-ms of the lock server), then they are refused"


def _offline(directory: str, guard: os.stat_result) -> tuple[int | None, str]:
    """The process that holds `guard`, if any, and what that means for clients."""
    pids = [each for each in procfs.holders_of(guard.st_dev, guard.st_ino) if each != os.getpid()]
    if not pids:
        start = f"start it: gateway serve --dir {directory}"
        is_held = guard_holder(lockserver_guard(directory))
        meanwhile = HOLDS if is_held else "new connections are refused: no lock server runs there"
        return None, f"no gateway answers in {directory}; {meanwhile}; {start}"
    pid, halted = pids[0], procfs.halted(pids[0])
    fix = "resume it: kill -CONT" if halted == "stopped" else "if it stays so: kill -9"
    return pid, (
        f"the gateway, pid {pid} ({procfs.name(pid)}, {halted or 'runs'}), does not respond;"
        f" connections wait, and an init replaces it after 3 s; {fix} {pid}"
    )


if __name__ == "__main__":
    main()
