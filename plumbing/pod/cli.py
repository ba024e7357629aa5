"""What all commands share: settings as flags, errors as sentences, `status` and `events`.

An `UnderstudyError` becomes one sentence on stderr and its exit code; any other exception is a bug
and keeps its stack trace. The second half asks a part for its status or follows its events; exit
code 3 means that nothing answers.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import io
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import click
import uvloop

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.messages import EventMsg, StatusMsg, StatusReplyMsg, WatchMsg
from plumbing.pod.paths import DIR
from plumbing.service.config import Option, Resolved, resolve
from plumbing.service.process import raise_fd_limit
from plumbing.text import one_line, to_json
from plumbing.wire.messages import Catalogue

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])

OUR_FAULT = 70  # EX_SOFTWARE of sysexits.h
INTERRUPTED = 130  # what shells report for a program ended by SIGINT


def options(declared: Sequence[Option]) -> Callable[[Command], Command]:
    """Add the flags of `declared` to a click command, which is called with `config: Resolved`.

    Put this directly under `@click.command()`. A command with a `--json` names it `as_json`.
    """

    def decorate(function: Command) -> Command:
        @functools.wraps(function)
        def wrapper(*args: Any, **params: Any) -> Any:
            flags = {option.name: params.pop(option.name) for option in declared}
            _show_any_name()
            try:
                return function(*args, config=resolve(declared, flags), **params)
            except UnderstudyError as error:
                fail(error, as_json=params.get("as_json", False))

        for option in reversed(declared):
            wrapper = _click_option(option)(wrapper)
        return wrapper  # type: ignore[return-value] # click calls it by keyword only

    return decorate


def run_command(main: Any) -> NoReturn:
    """Run a click command as click does, but an interrupt is silent and exits with 130."""
    try:
        sys.exit(main(standalone_mode=False))
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except click.Abort as error:
        if not isinstance(error.__cause__, KeyboardInterrupt):  # a question got no yes
            click.echo("Aborted!", err=True)
        sys.exit(INTERRUPTED)


def run_async(main: Callable[[], Coroutine[Any, Any, T]], *, as_json: bool = False) -> T:
    """Run `main` on uvloop to its end, with as many descriptors as the machine allows.

    An `UnderstudyError` ends the program as `fail` does, SIGINT with 130. Any other exception, even
    in a callback of the loop, is our own fault and ends it with a stack trace.
    """
    raise_fd_limit()
    gc.freeze()  # what is imported stays: no later collection scans it while a request waits
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.get_loop().set_exception_handler(_crash_on_our_fault)
            return runner.run(main())
    except UnderstudyError as error:
        fail(error, as_json=as_json)
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)


def _crash_on_our_fault(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """End the process at once: after a bug, nothing of it may run any more.

    What the loop reports without an exception, or with a peer's OSError, is only logged. So is what
    happens in uvloop alone: its TLS raises RuntimeError for a connection that was just closed.
    """
    error = context.get("exception")
    frames = [] if error is None else traceback.extract_tb(error.__traceback__)
    is_uvloops = bool(frames) and all(each.filename.startswith("uvloop/") for each in frames)
    if error is None or isinstance(error, OSError) or is_uvloops:
        loop.default_exception_handler(context)
        return
    traceback.print_exception(error)
    sys.stderr.flush()
    os._exit(OUR_FAULT)


def _show_any_name() -> None:
    """A path that is not UTF-8 must not end the program that names it: `\\udcff`."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def fail(error: UnderstudyError, *, as_json: bool = False) -> NoReturn:
    """End the program: `error: <sentence> [<code>]` on stderr, the error's exit code.

    With `as_json`, stdout also gets `{"error": {code, message, details}}`.
    """
    if as_json:
        click.echo(to_json({"error": error.to_dict()}))
    click.echo(f"error: {error}", err=True)
    sys.exit(error.exit_code)


def _click_option(option: Option) -> Callable[[Any], Any]:
    # Every value reaches `resolve` as the user wrote it: one place understands and refuses values,
    # wherever they come from. So click is told nothing of types and defaults.
    shown = "" if option.default in (None, ()) else f" [default: {_text(option.default)}]"
    number = "NUMBER" if option.type in (int, float) else "TEXT"
    return click.option(
        f"{option.flag}/--no-{option.flag[2:]}" if option.type is bool else option.flag,
        option.name,
        default=None,
        multiple=option.many,
        metavar=None if option.type is bool else "|".join(option.choices) or number,
        help=f"{option.help} [env: {option.env_name}]{shown}",
    )


def _text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)


ANSWER_TIMEOUT_S = 5.0
FOLLOW_TIMEOUT_S = 24 * 3600.0  # between two events; a pod may be quiet overnight
WATCH_S = 1.0  # an operator's pace; a look costs each part about a millisecond

json_flag = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
watch_flag = click.option("--watch", is_flag=True, help="Repeat every second until Ctrl-C.")


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at a part found. `offline`: why this is only what its files tell."""

    document: dict[str, Any]
    text: str
    offline: UnderstudyError | None = None


def show_status(look: Callable[[], Look], *, as_json: bool, watch: bool = False) -> Look:
    """Print what `look` returns; with `watch` every second, whether its part answers or not.

    Ends the program with exit code 3 where the part does not answer: its offline view is on
    stdout, the reason on stderr.
    """
    while watch:
        with until_interrupted():
            try:
                seen = look()
            except UnreachableError as error:
                seen = Look({"error": error.to_dict()}, error.message, error)
            if not as_json and sys.stdout.isatty():
                click.clear()
            click.echo(to_json(seen.document) if as_json else f"{_watched(seen)}\n")
            time.sleep(WATCH_S)
    seen = look()
    click.echo(to_json(seen.document, indent=2) if as_json else _shown(seen.text))
    if seen.offline is not None:
        fail(seen.offline)  # on stderr alone: stdout has its one document
    return seen


def _watched(seen: Look) -> str:
    """The text, and the reason for an offline view: a watch prints on stdout alone."""
    if seen.offline is None or seen.offline.message in seen.text:
        return _shown(seen.text)
    return _shown(f"{seen.text}\n{seen.offline.message}")


def _shown(text: str) -> str:
    """`text`, which may quote any process, as lines that steer no terminal."""
    return "\n".join(map(one_line, text.split("\n")))


def add_status(
    main: click.Group,
    look: Callable[[Resolved], Look],
    about: str,
    declared: Sequence[Option] = (DIR,),
) -> None:
    """Add the command `status` of a part, with this help."""

    @main.command(help=about)
    @options(declared)
    @json_flag
    @watch_flag
    def status(config: Resolved, as_json: bool, watch: bool) -> None:
        show_status(lambda: look(config), as_json=as_json, watch=watch)


def show_event(record: dict[str, Any], *, as_json: bool) -> None:
    """Print one event on one line."""
    if as_json:
        click.echo(to_json(record))
    else:
        source, kind = record["source"], record["type"]
        click.echo(one_line(f"{record['ts']}  {source:<11}  {kind:<20}  {record['message']}"))


def events_of(path: str, catalogue: Catalogue, *, follow: bool = False) -> Iterator[dict[str, Any]]:
    """The events that the part at the socket `path` keeps; or new ones until it exits.

    Raises:
        UnreachableError: nothing answers there, or not any more.
        WaitTimeoutError: no answer in time.
    """
    from plumbing.wire.blocking import BlockingClient  # as in `ask_status`

    wait_s = FOLLOW_TIMEOUT_S if follow else ANSWER_TIMEOUT_S
    with BlockingClient(path, catalogue) as client:
        reply = client.request(WatchMsg(None if follow else 0), timeout_s=ANSWER_TIMEOUT_S).message
        assert isinstance(reply, StatusReplyMsg)
        shown_id = 0
        while follow or shown_id < reply.document["as_of_event_id"]:
            message = client.receive(timeout_s=wait_s).message
            if isinstance(message, EventMsg):
                shown_id = message.record["id"]
                yield message.record


def add_events(
    main: click.Group, part: str, socket_of: Callable[[str], str], catalogue: Catalogue
) -> None:
    """Add the command `events` of `part`, which has a socket in the pod's directory."""

    @main.command(help=f"Print the last thousand events of the {part}.")
    @options((DIR,))
    @json_flag
    @click.option("-f", "--follow", is_flag=True, help=f"Print new events until the {part} exits.")
    def events(config: Resolved, as_json: bool, follow: bool) -> None:
        path = socket_of(os.path.abspath(config["dir"]))
        with until_interrupted():
            for record in events_of(path, catalogue, follow=follow):
                show_event(record, as_json=as_json)


def ask_status(path: str, catalogue: Catalogue) -> dict[str, Any]:
    """The status document of the part that listens on the socket `path`.

    Raises:
        UnreachableError: nothing answers there.
        WaitTimeoutError: no answer in time.
    """
    from plumbing.wire.blocking import BlockingClient  # servers share this module, and never ask

    with BlockingClient(path, catalogue) as client:
        reply = client.request(StatusMsg(), timeout_s=ANSWER_TIMEOUT_S).message
    assert isinstance(reply, StatusReplyMsg)
    return reply.document


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """For commands that run until Ctrl-C: end with the exit code of an interrupted program."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
