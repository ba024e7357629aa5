"""The `gateway` command: `serve`, `status`, `events`, `restart-child`."""

from __future__ import annotations

import os
import sys

import click

from gateway.messages import CONTROL, ChildRestartedMsg, RestartChildMsg
from gateway.supervisor.settings import DIR, OPTIONS, GatewaySettings, settle
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

RESTART_TIMEOUT_S = 60.0  # a fresh child needs half a second; this is for a busy machine


@click.group()
def main() -> None:
    """Gateway: accepts clients' connections, and resumes their streams after a failover."""


@main.command()
@options(OPTIONS)
def serve(config: Resolved) -> None:
    """Run the gateway until SIGTERM.

    On SIGTERM it accepts no more connections, and exits when all streams have ended, or after
    --drain-timeout. A second SIGTERM ends it at once. SIGHUP works like `gateway restart-child`.
    """
    arm_from_environment()
    log.configure("gateway")
    settings = settle(config)
    sys.exit(run_async(lambda: _supervise(settings)))


async def _supervise(settings: GatewaySettings) -> int:
    from gateway.supervisor.supervisor import GatewaySupervisor  # heavy, and only needed here

    return await GatewaySupervisor(settings).run()


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
    from gateway.supervisor import text
    from gateway.supervisor import text as offline

    away: UnderstudyError | None = None
    try:
        document = ask_status(gateway_socket(directory), CONTROL)
    except (UnreachableError, WaitTimeoutError) as error:
        found = offline.look(directory, error)
        if found is None:
            raise
        document, away = found.document, found.error
    return Look(document, text.render(document), away)


@main.command()
@options((DIR,))
@json_flag
@click.option("-f", "--follow", is_flag=True, help="Print new events until the gateway exits.")
def events(config: Resolved, as_json: bool, follow: bool) -> None:
    """Print the last thousand events of the gateway."""
    path = gateway_socket(os.path.abspath(config["dir"]))
    print_events(path, CONTROL, follow=follow, as_json=as_json)


@main.command("restart-child")
@options((DIR,))
@json_flag
def restart_child(config: Resolved, as_json: bool) -> None:
    """Replace the process that serves, without losing a request.

    A new process reads the certificate and the API keys again and accepts connections; the present
    one finishes its streams, then exits.
    """
    with BlockingClient(gateway_socket(os.path.abspath(config["dir"])), CONTROL) as client:
        done = client.request(RestartChildMsg(), timeout_s=RESTART_TIMEOUT_S).message
    assert isinstance(done, ChildRestartedMsg)
    document = {
        "schema": 1,
        "old_pid": done.old_pid or None,
        "new_pid": done.new_pid,
        "in_flight": done.in_flight,
    }
    if as_json:
        click.echo(to_json(document))
        return
    click.echo(f"pid {done.new_pid} accepts connections")
    if done.old_pid:
        click.echo(f"pid {done.old_pid} finishes {done.in_flight} requests, then exits")


if __name__ == "__main__":
    main()
