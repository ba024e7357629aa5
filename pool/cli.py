"""The `pool` command: `serve`, what looks at a pool, and what orders it; and `lease`.

`understudy pool` has the same commands, and `understudy lease` is `lease`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import click

from plumbing.errors import UnderstudyError, UnreachableError, UsageError, WaitTimeoutError
from plumbing.pod.cli import (
    Look,
    add_events,
    add_status,
    ask_status,
    json_flag,
    options,
    run_async,
    until_interrupted,
)
from plumbing.pod.paths import DIR, lockserver_socket, pool_socket
from plumbing.service import log
from plumbing.service.clock import SystemClock
from plumbing.service.config import Resolved, duration_s, size_bytes
from plumbing.service.process import arm_from_environment
from plumbing.text import one_line, size, to_json
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message
from pool import status_text
from pool.core.events import Order
from pool.core.states import PRIORITY_MAX
from pool.messages import CATALOGUE, LeaseGrantedMsg, LeaseMsg, OrderedMsg, OrderMsg, SetMsg
from pool.server.settings import OPTIONS, settle

ANSWER_S = 10.0  # the pool answers in milliseconds, unless its disk is slow

model_argument = click.argument("model")


@click.group()
def main() -> None:
    """Show and control the pool."""


@main.command()
@options(OPTIONS)
def serve(config: Resolved) -> None:
    """Run the pool until SIGTERM. Engines and the gateway keep working if it stops."""
    arm_from_environment()
    log.configure("pool")
    settings = settle(config)

    async def run() -> None:
        from pool.server import server as daemon  # heavy, and only needed here

        await daemon.run(settings)

    run_async(run)


def _look(config: Resolved) -> Look:
    document = _ask(os.path.abspath(config["dir"]))
    return Look(document, status_text.text_of(document))


def _ask(directory: str) -> dict[str, Any]:
    try:
        return ask_status(pool_socket(directory), CATALOGUE)
    except UnreachableError as error:
        raise _no_pool(directory, error) from error


add_status(
    main,
    _look,
    "Show each model's state, the requests that wait and the memory reserved on each device.\n\n"
    "Exits with code 3 if the pool does not answer.",
)
add_events(main, "pool", pool_socket, CATALOGUE)


def _add_order(order: Order, about: str) -> None:
    @main.command(order.value, help=about)
    @options((DIR,))
    @model_argument
    @json_flag
    def command(config: Resolved, model: str, as_json: bool) -> None:
        _order(config, OrderMsg(model, order), as_json=as_json)


_add_order(
    Order.LOAD, "Load and wake MODEL, as a request for it would. This may evict other models."
)
_add_order(Order.SLEEP, "Put MODEL to sleep once it has no requests. The next request wakes it.")
_add_order(Order.PIN, "Protect MODEL from eviction and sleep. The pin survives restarts.")
_add_order(Order.UNPIN, "Allow MODEL to be evicted and put to sleep again.")
_add_order(Order.RESET, "Retry a failed MODEL.")


@main.command()
@options((DIR,))
@model_argument
@click.option("--force", is_flag=True, help="Unload it even if it is pinned.")
@json_flag
def unload(config: Resolved, model: str, force: bool, as_json: bool) -> None:
    """End MODEL's processes and free all its memory.

    Running requests get `drain_timeout` to finish. Streams that are parked by then end with an
    error.
    """
    _order(config, OrderMsg(model, Order.UNLOAD, force), as_json=as_json)


@main.command("set")
@options((DIR,))
@click.argument("assignment", metavar="SETTING=VALUE")
@click.option(
    "--model", default=None, help="The model whose setting to change; default: the whole pool's."
)
@json_flag
def set_(config: Resolved, assignment: str, model: str | None, as_json: bool) -> None:
    """Change a setting of the running pool, e.g. starve_after=5m.

    SETTING and VALUE are written as in the pool file. An empty VALUE restores that of the
    pool file. The change survives restarts of the pool.
    """
    setting, equals, value = assignment.partition("=")
    if not equals or not setting:
        raise UsageError("pool.bad_setting", "write SETTING=VALUE, such as starve_after=5m")
    _order(config, SetMsg(setting, value or None, model), as_json=as_json)


@main.command()
@options((DIR,))
@click.argument("model", required=False)
@json_flag
def explain(config: Resolved, model: str | None, as_json: bool) -> None:
    """Explain each model's state: why, what it is waiting for, and the longest it can take."""
    pool = _ask(os.path.abspath(config["dir"]))
    chosen = [each for each in pool["models"] if model in (None, each["model"])]
    if not chosen:
        raise UsageError("model_not_found", f"this pool has no model {model}; see `pool status`")
    models = [{"model": it["model"], "lines": status_text.explained(pool, it)} for it in chosen]
    text = "\n".join("\n  ".join(each["lines"]) for each in models)
    click.echo(to_json({"schema": 1, "models": models}, indent=2) if as_json else text)


def _read(read: Callable[[str], Any]) -> Callable[[Any, Any, str], Any]:
    def callback(_context: Any, _parameter: Any, text: str) -> Any:
        try:
            return read(text)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


@click.command(context_settings={"ignore_unknown_options": True})
@options((DIR,))
@click.option(
    "--device", required=True, help="The device whose memory COMMAND will use: HOST-0, GPU-<uuid>."
)
@click.option(
    "--bytes", "size_bytes", required=True, callback=_read(size_bytes), help="How much, e.g. 20GiB."
)
@click.option(
    "--priority",
    type=click.IntRange(-PRIORITY_MAX, PRIORITY_MAX),
    default=0,
    help="As for requests; lower values go first.",
)
@click.option(
    *("--timeout", "timeout_s"),
    default="1h",
    callback=_read(duration_s),
    show_default=True,
    help="How long to wait for the memory, e.g. 30m.",
)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- COMMAND")
def lease(config: Resolved, command: tuple[str, ...], **asked: Any) -> None:
    """Reserve memory while COMMAND runs.

    The lease queues with requests, and the pool evicts models to make room. It ends when all of
    COMMAND's processes have exited. COMMAND has no standard input.

    Exits with COMMAND's exit code; 1 if the memory can never become free, 3 without a pool, 5 after
    --timeout.
    """
    with until_interrupted():
        directory = os.path.abspath(config["dir"])
        run_with_lease(directory, command, say=partial(click.echo, err=True), **asked)


main.add_command(lease)


def _order(config: Resolved, message: Message, *, as_json: bool) -> None:
    directory = os.path.abspath(config["dir"])
    try:
        with BlockingClient(pool_socket(directory), CATALOGUE) as client:
            answer = client.request(message, timeout_s=ANSWER_S).message
    except UnreachableError as error:
        raise _no_pool(directory, error) from error
    assert isinstance(answer, OrderedMsg)
    document = {"schema": 1, "state": answer.state, "message": answer.sentence}
    click.echo(to_json(document) if as_json else answer.sentence)


def _no_pool(directory: str, error: UnreachableError) -> UnreachableError:
    """Why no pool answers: it is away, the pod in `directory` has none, or there is no pod."""
    if os.path.exists(pool_socket(directory).removesuffix(".sock") + ".lock"):
        why = f"no pool answers in {directory}; models stay as they are until the pool is back"
        return UnreachableError("pool.offline", why, cause=error.code)
    if not os.path.exists(lockserver_socket(directory)):
        return error
    return UnreachableError(
        "pool.none",
        f"the pod in {directory} has no pool, because it was started without a pool file; see"
        " `understudy status`",
    )


# ------------------------------------------------------------------------------------- a lease

RETRY_S = 0.2  # while the pool is away
PROGRAM_CHARS_MAX = 256
NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells exit


def run_with_lease(
    directory: str,
    command: tuple[str, ...],
    *,
    device: str,
    size_bytes: int,
    priority: int,
    timeout_s: float,
    say: Callable[[str], None],
) -> NoReturn:
    """Wait for the memory of a device, and become `command`.

    The neighbour's processes hold a file by flock, on two descriptors that children inherit: on 0,
    for children of programs that close all others, and on one above 2, for background jobs of a
    shell, of which it replaces 0. So a lease lasts as long as any of them. It costs the command its
    standard input.

    Raises:
        UnderstudyError: refused, with who holds what; `pool.cannot_run`; WaitTimeoutError: not
            granted in time; UnreachableError: there is no pool.
    """
    lease = secrets.token_hex(8)
    path = os.path.join(directory, f"lease_{lease}")
    asked = LeaseMsg(
        lease=lease,
        device=device,
        bytes=size_bytes,
        since_ms=SystemClock().now_ms(),
        priority=priority,
        program=one_line(os.path.basename(command[0]))[:PROGRAM_CHARS_MAX],
    )
    fd = _create(path)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        say(f"waiting for {size(size_bytes)} of {device}; see `understudy pool status`")
        _wait(pool_socket(directory), asked, timeout_s, say)
        os.dup2(fd, 0)
        os.set_inheritable(fd, True)
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # which Python ignores
        os.execvp(command[0], command)
    except BaseException as error:
        with contextlib.suppress(OSError):  # the pool has removed it
            os.unlink(path)
        if not isinstance(error, OSError):
            raise
        why = f"cannot run {command[0]}: {error.strerror}"
        failed = UnderstudyError("pool.cannot_run", why)
        failed.exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        raise failed from error


def _create(path: str) -> int:
    """
    Raises:
        UnreachableError: `pool.offline`, no pod was ever here; UnderstudyError:
            `pool.no_lease_file`, the disk is full, …
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags, 0o600)
    except FileNotFoundError as error:
        why = f"no pool answers in {os.path.dirname(path)}: there is no such directory"
        raise UnreachableError("pool.offline", f"{why}; name the pod's with --dir") from error
    except OSError as error:
        why = f"cannot create {path}: {error.strerror}"
        raise UnderstudyError("pool.no_lease_file", f"{why}; free space on that disk") from error


def _wait(path: str, asked: LeaseMsg, timeout_s: float, say: Callable[[str], None]) -> None:
    """Until it is granted."""
    end_s, was_there = time.monotonic() + timeout_s, False
    while True:
        try:
            with BlockingClient(path, CATALOGUE) as client:
                was_there = True
                left_s = max(0.0, end_s - time.monotonic())
                answer = client.request(asked, timeout_s=left_s).message
                assert isinstance(answer, LeaseGrantedMsg), answer
                return
        except UnreachableError as error:
            if not was_there or time.monotonic() > end_s:
                raise _no_pool(os.path.dirname(path), error) from error
            say("the pool is restarting; the lease keeps its place")
            time.sleep(RETRY_S)
        except WaitTimeoutError as error:
            why = f"the pool could not free {asked.bytes} bytes of {asked.device} within"
            why += f" {timeout_s:g} s; see `understudy pool explain`"
            raise WaitTimeoutError("pool.lease_timeout", why) from error


if __name__ == "__main__":
    main()
