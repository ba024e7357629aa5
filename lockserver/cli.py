"""The `lockserver` command: `serve`, `certificates`, `status`, `events`, `switchover`."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from lockserver.messages import CATALOGUE, SwitchedOverMsg, SwitchOverMsg
from plumbing.errors import RemoteError, UnreachableError, UsageError, WaitTimeoutError
from plumbing.pod.cli import (
    ANSWER_TIMEOUT_S,
    INTERRUPTED,
    Look,
    add_events,
    add_status,
    ask_status,
    json_flag,
    options,
    run_async,
)
from plumbing.pod.models import ACTIVE, model_names
from plumbing.pod.paths import DIR, lockserver_socket, runtime_dir
from plumbing.service.config import Option, Resolved
from plumbing.service.hosts import http_options
from plumbing.text import duration, split_address
from plumbing.wire.tcp_address import TcpAddress

if TYPE_CHECKING:
    from plumbing.wire.tcp import Security

# With less, one late heartbeat on a busy machine would cost the holder its lock.
LEASE_MS_MIN, LEASE_MS_MAX = 200, 3_600_000


def parse_service(text: str) -> str:
    """`active=127.0.0.1:8000` → "127.0.0.1:8000"; ValueError says what is wrong."""
    lock, _, address = text.partition("=")
    if lock != ACTIVE:
        raise ValueError(f"it must be {ACTIVE}=HOST:PORT, such as {ACTIVE}=127.0.0.1:8000")
    split_address(address)
    return address


SERVE = (
    DIR,
    Option(
        "service",
        parse_service,
        None,
        "active=HOST:PORT: the address that clients send requests to, through the gateway.",
    ),
    Option(
        "model",
        str,
        (),
        "A model of the pod, which then has a lock of its own, active:MODEL. All models are served"
        " at one address, that of `active`. Repeatable.",
        env="UNDERSTUDY_MODELS",
        many=True,
    ),
    *http_options(9400),
    Option(
        "window_ms",
        float,
        10_000.0,
        "How long after a restart to wait for a silent holder before reporting it.",
    ),
    Option(
        "hold_ms",
        float,
        10_000.0,
        "How long connections wait for a gateway before the port is closed.",
    ),
    Option(
        "silent_ms",
        float,
        3_000.0,
        "Time without a heartbeat after which an engine counts as silent.",
    ),
    Option(
        "listen", TcpAddress.parse, None, "tcp://HOST:PORT to listen on for engines on other hosts."
    ),
    Option(
        "lease_ms",
        int,
        5_000,
        "Over TCP: how long a lease lasts.",
        minimum=LEASE_MS_MIN,
        maximum=LEASE_MS_MAX,
    ),
    Option(
        "lease_margin_ms",
        int,
        1_000,
        "Over TCP: extra wait after a lease has expired.",
        minimum=0,
        maximum=LEASE_MS_MAX,
    ),
    Option("tls_cert", str, None, "Over TCP: this server's certificate, a PEM file."),
    Option("tls_key", str, None, "Over TCP: the private key of this certificate."),
    Option("tls_ca", str, None, "Over TCP: the CA certificate that engines are verified with."),
)

HOST = Option(
    "host",
    str,
    ("understudy-lockserver",),
    "Name or address by which engines reach the lock server. Repeatable.",
    env="UNDERSTUDY_LOCKSERVER_HOST",
    many=True,
)


@click.group()
def main() -> None:
    """Lock server: grants the lock `active` to one engine of a model at a time.

    The server grants a lock only when no process of its previous holder can serve.
    """


@main.command()
@options(SERVE)
def serve(config: Resolved) -> None:
    """Run the lock server until SIGTERM."""
    from lockserver.server.server import LockSettings, run
    from plumbing.service.log import configure
    from plumbing.service.process import arm_from_environment

    configure("lockserver")
    arm_from_environment()
    same = ("listen", "lease_ms", "lease_margin_ms", "service", "window_ms", "hold_ms", "silent_ms")
    settings = LockSettings(
        directory=runtime_dir(config["dir"]),
        security=_security(config),
        models=model_names(config["model"]),
        **{name: config[name] for name in same},
    )
    http = (config["http_host"], config["http_port"], config["http_allowed_host"])
    run_async(lambda: run(settings, *http))


def _security(config: Resolved) -> Security | None:
    """How engines on other hosts authenticate; an impossible combination is a `UsageError`."""
    if config["listen"] is None:
        return None
    from plumbing.wire.tcp import settle

    if config["service"]:
        raise UsageError(
            "lock.service_over_tcp",
            "--service lends a listening socket to engines on this host, which is impossible for"
            " engines on other hosts (--listen); give those engines --service-address instead",
        )
    security = settle(config["listen"], config["tls_cert"], config["tls_key"], config["tls_ca"])
    security.server_context()  # refuse unusable files now rather than later
    return security


@main.command()
@options((HOST,))
@click.argument("directory", metavar="DIR")
def certificates(config: Resolved, directory: str) -> None:
    """Write a CA, a lock server's and an engine's certificate.

    DIR/lockserver and DIR/engine each get tls.crt, tls.key and ca.crt, for --tls-cert, --tls-key
    and --tls-ca (engines: --lockserver-tls-cert and so on). Keep DIR/ca.key away from both.
    """
    from plumbing.wire.certificates import create

    for path in create(os.path.abspath(directory), config["host"]):
        click.echo(path)


def _look(config: Resolved) -> Look:
    """The server's own status, or what its state file tells.

    Raises:
        UnreachableError: there is neither.
    """
    from lockserver.status import offline, silent_server
    from lockserver.status_text import text_of

    directory = os.path.abspath(config["dir"])
    try:
        found = ask_status(lockserver_socket(directory), CATALOGUE)
        return Look(found, text_of(found))
    except (UnreachableError, WaitTimeoutError) as error:
        silent, why = silent_server(directory, error), error
        if silent is not None:
            why = UnreachableError("lock.not_answering", "; ".join(silent))
        on_file = offline(directory, silent)
        if on_file is None:
            raise why from error
        return Look(on_file, text_of(on_file), why)


add_status(
    main,
    _look,
    "Show who holds each lock and who waits for it.\n\n"
    "If the server does not answer, show its state file, and exit with code 3.",
)
add_events(main, "lock server", lockserver_socket, CATALOGUE)


@main.command()
@options((DIR,))
@click.option("--lock", default="active", show_default=True, help="The lock to hand over.")
@click.option(
    "--to", metavar="ENGINE", help="The engine to hand over to [default: the first in the queue]."
)
@click.option(
    "--timeout",
    type=click.FloatRange(0.001, 86_400),
    default=120.0,
    show_default=True,
    help="How long to wait for the switchover to finish, in seconds.",
)
@click.option(
    "--drain",
    is_flag=True,
    help="Finish all requests first, even where the next engine could continue them.",
)
@json_flag
def switchover(
    config: Resolved, lock: str, to: str | None, timeout: float, drain: bool, as_json: bool
) -> None:
    """Hand the lock over to a standby engine.

    The active engine first finishes its requests. Behind a gateway, it leaves the streams that the
    standby can continue, unless --drain is given.

    Exit codes: 0 done (or ENGINE is active already), 1 refused, or another engine was granted the
    lock, 5 not done within the timeout: the switchover continues.
    """
    try:
        done = _switch_over(os.path.abspath(config["dir"]), lock, to, timeout, drain=drain)
    except KeyboardInterrupt:
        click.echo("the switchover continues: see `lockserver status`", err=True)
        sys.exit(INTERRUPTED)
    is_news = done.engine != done.source
    if as_json:
        document = {"schema": 1, "result": "switched" if is_news else "already_active"}
        document |= {"lock": done.lock, "from": done.source, "engine": done.engine}
        click.echo(json.dumps(document | {"token": done.token, "took_ms": done.took_ms}))
    elif is_news:
        click.echo(
            f"{done.source} handed the {lock} lock over to {done.engine} in"
            f" {duration(done.took_ms)}, token {done.token}"
        )
    else:
        click.echo(f"{done.engine} already holds the {lock} lock, token {done.token}")


def _switch_over(
    directory: str, lock: str, to: str | None, timeout_s: float, *, drain: bool
) -> SwitchedOverMsg:
    """Request a switchover and wait for its end.

    Raises:
        UnderstudyError: refused, or another engine was granted the lock.
        WaitTimeoutError: not done within `timeout_s`.
        UnreachableError: no server, or it exited meanwhile.
    """
    from plumbing.wire.blocking import BlockingClient

    question = SwitchOverMsg(lock, to, round(timeout_s * 1000), drain)
    with BlockingClient(lockserver_socket(directory), CATALOGUE) as client:
        try:
            wait_s = timeout_s + ANSWER_TIMEOUT_S  # the server reports its timeout first
            answer = client.request(question, timeout_s=wait_s).message
        except RemoteError as error:
            if error.details.get("reason") == "timeout":
                raise WaitTimeoutError(error.code, error.message, **error.details) from error
            raise
        except UnreachableError as error:
            raise UnreachableError(
                "lock.switchover_forgotten",
                "the lock server exited during the switchover, and a new one knows nothing of it;"
                " the active engine may still hand over: check `lockserver status`, then try again",
            ) from error
    assert isinstance(answer, SwitchedOverMsg)
    return answer


if __name__ == "__main__":
    main()
