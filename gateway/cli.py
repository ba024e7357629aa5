"""The `gateway` command: `serve`, `status`, `events`, `replace`."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from copy import copy

import click

from gateway.messages import CONTROL, ReplaceMsg, ReplacingMsg
from gateway.server.settings import DIR, OPTIONS, GatewaySettings, settle
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.cli import (
    Look,
    ask_status,
    json_flag,
    options,
    print_events,
    run_async,
    show_status,
    watch_flag,
)
from plumbing.pod.paths import gateway_socket
from plumbing.service import log
from plumbing.service.config import Resolved
from plumbing.service.process import arm_from_environment
from plumbing.text import to_json
from plumbing.wire.blocking import BlockingClient

REPLACE_TIMEOUT_S = 70.0  # a successor needs half a second, and gives up after 60
POLL_S = 0.05


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

    return await GatewayServer(settings).run()


@main.command()
@options((DIR,))
@json_flag
@watch_flag
def status(config: Resolved, as_json: bool, watch: bool) -> None:
    """Show what the gateway accepts, where requests go, and what waits.

    If the gateway does not answer, show what that means for clients, and exit with code 3.
    """
    directory = os.path.abspath(config["dir"])
    show_status(lambda: _look(directory), as_json=as_json, watch=watch)


def _look(directory: str) -> Look:
    """The gateway's own status, or what is known without it.

    Raises:
        UnreachableError: no gateway was ever there.
    """
    from gateway import text

    away: UnderstudyError | None = None
    try:
        document = ask_status(gateway_socket(directory), CONTROL)
    except (UnreachableError, WaitTimeoutError) as error:
        found = text.look(directory, error)
        if found is None:
            raise
        document, away = found
    return Look(document, text.render(document), away)


@main.command()
@options((DIR,))
@json_flag
@click.option("-f", "--follow", is_flag=True, help="Print new events until the gateway exits.")
def events(config: Resolved, as_json: bool, follow: bool) -> None:
    """Print the last thousand events of the gateway."""
    path = gateway_socket(os.path.abspath(config["dir"]))
    print_events(path, CONTROL, follow=follow, as_json=as_json)


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


main.add_command(copy(replace), "restart-child")
main.commands["restart-child"].hidden = True  # its older name


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


if __name__ == "__main__":
    main()
