"""The `lockserver` command: `serve`, `status`, `events`, `switchover`. Words and exit codes."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NoReturn

import click

from plumbing.errors import RemoteError, UnreachableError, WaitTimeoutError
from plumbing.service.cli import INTERRUPTED, options, run_async
from plumbing.service.config import Option, Resolved

if TYPE_CHECKING:
    from plumbing.wire.tcp.address import TcpAddress
    from plumbing.wire.tcp.security import Security

DIR_DEFAULT = "/run/understudy"
STATUS_TIMEOUT_S = 5.0
WATCH_S = 1.0  # the pace of people
SWITCHED, ALREADY_ACTIVE = "switched", "already_active"
FOLLOW_TIMEOUT_S = 24 * 3600.0  # between two events; a pod may be quiet for a night

# Below, a heartbeat that comes late by a busy moment would cost the holder its lock.
LEASE_MS_MIN = 200

DIR = Option("dir", str, DIR_DEFAULT, "The pod's shared directory.", env="UNDERSTUDY_DIR")


def _tcp(text: str) -> TcpAddress:
    from plumbing.wire.tcp.address import TcpAddress

    return TcpAddress.parse(text)


def _service(text: str) -> tuple[str, str]:
    from lockserver.server.service_socket import parse_service

    return parse_service(text)


SERVE = (
    DIR,
    Option("service", _service, (), "LOCK=HOST:PORT: the address of a lock.", many=True),
    Option("http_host", str, "127.0.0.1", "Where probes, status and metrics listen."),
    Option("http_port", int, 9400, "Their port.", minimum=0, maximum=65535),
    Option("window_ms", float, 10_000.0, "After a restart: when a silent holder is reported."),
    Option("hold_ms", float, 10_000.0, "Without an active engine: when requests get a 503."),
    Option("silent_ms", float, 3_000.0, "Without a heartbeat: when an engine counts as silent."),
    Option("listen", _tcp, None, "tcp://HOST:PORT: also for engines on other hosts."),
    Option(
        "lease_ms",
        int,
        5_000,
        "Over TCP: what a member may count on without an answer.",
        minimum=LEASE_MS_MIN,
        maximum=3_600_000,
    ),
    Option(
        "lease_margin_ms",
        int,
        1_000,
        "Over TCP: what is waited for on top of a lease.",
        minimum=0,
        maximum=3_600_000,
    ),
    Option("tls_cert", str, None, "Over TCP: this server's certificate, PEM."),
    Option("tls_key", str, None, "Its private key."),
    Option("tls_ca", str, None, "The certificate of the CA that members' are from."),
    Option("psk_file", str, None, "Or: a file with 32 bytes or more that all members have."),
)


@click.group()
def main() -> None:
    """Who may serve: one active engine, granted only when the last one's processes are gone."""


@main.command()
@options(SERVE, command="lockserver")
def serve(config: Resolved) -> None:
    """Run the lock server until SIGTERM."""
    from lockserver.server.daemon import run
    from lockserver.server.settings import LockSettings
    from plumbing.service.log import configure
    from plumbing.service.parent import arm_from_environment
    from plumbing.service.paths import runtime_dir

    configure("lockserver")
    arm_from_environment()
    listen = config["listen"]
    settings = LockSettings(
        directory=runtime_dir(config["dir"]),
        listen=listen,
        security=_security(config) if listen is not None else None,
        lease_ms=config["lease_ms"],
        lease_margin_ms=config["lease_margin_ms"],
        services=dict(config["service"]),
        window_ms=config["window_ms"],
        hold_ms=config["hold_ms"],
        silent_ms=config["silent_ms"],
    )
    run_async(lambda: run(settings, config["http_host"], config["http_port"]))


def _security(config: Resolved) -> Security | None:
    """How members prove who they are; what cannot be is a `UsageError`."""
    from plumbing.errors import UsageError
    from plumbing.wire.tcp.security import settle

    if config["service"]:
        raise UsageError(
            "lock.service_over_tcp",
            "--service lends a listening socket to engines on this host, and --listen is for"
            " engines on others, to which no socket can be lent; give the engines"
            " --service-address instead",
        )
    files = (config[name] for name in ("tls_cert", "tls_key", "tls_ca", "psk_file"))
    return settle(config["listen"], *files)


@main.command()
@options((DIR,), command="lockserver")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--watch", is_flag=True, help="Once a second, until Ctrl-C.")
def status(config: Resolved, as_json: bool, watch: bool) -> None:
    """Who holds what, who waits, and what for. Without a server: what its state file says."""
    directory = os.path.abspath(config["dir"])
    if watch:
        _watch(directory, as_json=as_json)
    document = _document(directory)
    click.echo(json.dumps(document, indent=2) if as_json else _text(document))


@main.command()
@options((DIR,), command="lockserver")
@click.option("--json", "as_json", is_flag=True, help="One JSON document per line.")
@click.option(
    "-f", "--follow", is_flag=True, help="What happens from now on; ends with the server."
)
def events(config: Resolved, as_json: bool, follow: bool) -> None:
    """What happened, as far as the server remembers: its last thousand events."""
    from lockserver.messages import CATALOGUE, EventMsg, StatusReplyMsg, WatchMsg
    from plumbing.wire.blocking import BlockingClient

    path = _socket(os.path.abspath(config["dir"]))
    with _until_interrupted(), BlockingClient(path, CATALOGUE) as client:
        question = WatchMsg(None if follow else 0)
        reply = client.request(question, timeout_s=STATUS_TIMEOUT_S).message
        assert isinstance(reply, StatusReplyMsg)
        shown_id = 0
        while follow or shown_id < reply.document["as_of_event_id"]:
            wait_s = FOLLOW_TIMEOUT_S if follow else STATUS_TIMEOUT_S
            message = client.receive(timeout_s=wait_s).message
            if isinstance(message, EventMsg):
                shown_id = message.record["id"]
                click.echo(json.dumps(message.record) if as_json else _line(message.record))


@main.command()
@options((DIR,), command="lockserver")
@click.option("--lock", default="active", show_default=True, help="What is to be handed over.")
@click.option("--to", metavar="ENGINE", help="To whom; who waits first unless given.")
@click.option(
    "--timeout",
    type=click.FloatRange(0.001, 86_400),
    default=120.0,
    show_default=True,
    help="Seconds to wait for the end of it.",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def switchover(config: Resolved, lock: str, to: str | None, timeout: float, as_json: bool) -> None:
    """Have the active engine finish its requests and hand over to one that stands by.

    Exit codes: 0 it is done (or ENGINE is active already), 1 refused, or it came otherwise, 5 not
    within the timeout: what was asked for goes on.
    """
    try:
        done = _switch_over(os.path.abspath(config["dir"]), lock, to, timeout)
    except KeyboardInterrupt:
        click.echo("what was asked for goes on: see `lockserver status`", err=True)
        sys.exit(INTERRUPTED)
    if as_json:
        click.echo(json.dumps(done))
    elif done["result"] == ALREADY_ACTIVE:
        click.echo(f"{done['engine']} holds {lock} already, token {done['token']}")
    else:
        seconds = done["took_ms"] / 1000
        click.echo(
            f"{done['from']} has handed {lock} over to {done['engine']} in {seconds:.1f} s, token"
            f" {done['token']}"
        )


def _switch_over(directory: str, lock: str, to: str | None, timeout_s: float) -> dict[str, Any]:
    """Ask, and wait for the end of it.

    Raises:
        UnderstudyError: refused, or it came otherwise.
        WaitTimeoutError: it has not come within `timeout_s`.
        UnreachableError: no server, or it ended meanwhile.
    """
    from lockserver.messages import CATALOGUE, SwitchedOver, SwitchOver
    from plumbing.wire.blocking import BlockingClient

    question = SwitchOver(lock, to, round(timeout_s * 1000))
    with BlockingClient(_socket(directory), CATALOGUE) as client:
        try:
            wait_s = timeout_s + STATUS_TIMEOUT_S  # the server's own word comes first
            answer = client.request(question, timeout_s=wait_s).message
        except RemoteError as error:
            if error.details.get("reason") == "timeout":
                raise WaitTimeoutError(error.code, error.message, **error.details) from error
            raise
        except UnreachableError as error:
            raise UnreachableError(
                "lock.switchover_forgotten",
                "the lock server ended while it was waited for, and a new one knows of no"
                " switchover; the active engine may hand over all the same: see"
                " `lockserver status`, and ask again",
            ) from error
    assert isinstance(answer, SwitchedOver)
    return {
        "schema": 1,
        "result": SWITCHED if answer.engine != answer.source else ALREADY_ACTIVE,
        "lock": answer.lock,
        "from": answer.source,
        "engine": answer.engine,
        "token": answer.token,
        "took_ms": answer.took_ms,
    }


def _watch(directory: str, *, as_json: bool) -> NoReturn:
    """One document after another, whether the server is there or not."""
    with _until_interrupted():
        while True:
            try:
                document = _document(directory)
                text = json.dumps(document) if as_json else _text(document)
            except UnreachableError as error:
                text = json.dumps({"error": error.to_dict()}) if as_json else error.message
            if not as_json and sys.stdout.isatty():
                click.clear()
            elif not as_json:
                text += "\n"  # an empty line between two
            click.echo(text)
            time.sleep(WATCH_S)


@contextlib.contextmanager
def _until_interrupted() -> Iterator[None]:
    """What has no end of its own ends with Ctrl-C, as other commands do."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _line(record: dict[str, Any]) -> str:
    return f"{record['ts']}  #{record['id']:<4} {record['type']:<22} {record['message']}"


def _document(directory: str) -> dict[str, Any]:
    """The server's own, or what its state file says.

    Raises:
        UnreachableError: there is neither.
    """
    try:
        return _ask(directory)
    except UnreachableError as error:
        from lockserver.status.offline import offline

        found = offline(directory)
        if found is None:
            raise error
        return found


def _socket(directory: str) -> str:
    return os.path.join(directory, "lockserver.sock")


def _ask(directory: str) -> dict[str, Any]:
    from lockserver.messages import CATALOGUE, StatusMsg, StatusReplyMsg
    from plumbing.wire.blocking import BlockingClient

    with BlockingClient(_socket(directory), CATALOGUE) as client:
        reply = client.request(StatusMsg(), timeout_s=STATUS_TIMEOUT_S).message
    assert isinstance(reply, StatusReplyMsg)
    return reply.document


def _text(document: dict[str, Any]) -> str:
    from lockserver.status.text import text_of

    return text_of(document)


if __name__ == "__main__":
    main()
