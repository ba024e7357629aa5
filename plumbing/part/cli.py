"""What the `status` and `events` commands of all programs share: flags, output, exit code 3."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click

from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.part.observe import EventMsg, StatusMsg, StatusReplyMsg, WatchMsg
from plumbing.service.cli import INTERRUPTED, fail
from plumbing.text import to_json
from plumbing.wire.messages import Catalogue

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
    click.echo(to_json(seen.document, indent=2) if as_json else seen.text)
    if seen.offline is not None:
        fail(seen.offline)  # on stderr alone: stdout has its one document
    return seen


def _watched(seen: Look) -> str:
    """The text, and the reason for an offline view: a watch prints on stdout alone."""
    if seen.offline is None or seen.offline.message in seen.text:
        return seen.text
    return f"{seen.text}\n{seen.offline.message}"


def show_event(record: dict[str, Any], *, as_json: bool) -> None:
    """Print one event on one line."""
    if as_json:
        click.echo(to_json(record))
    else:
        source, kind = record["source"], record["type"]
        click.echo(f"{record['ts']}  {source:<11}  {kind:<20}  {record['message']}")


def print_events(path: str, catalogue: Catalogue, *, follow: bool, as_json: bool) -> None:
    """Print the events that the part at the socket `path` keeps; or new ones until it exits.

    Raises:
        UnreachableError: nothing answers there, or not any more.
        WaitTimeoutError: no answer in time.
    """
    from plumbing.wire.blocking import BlockingClient  # as in `ask_status`

    wait_s = FOLLOW_TIMEOUT_S if follow else ANSWER_TIMEOUT_S
    with until_interrupted(), BlockingClient(path, catalogue) as client:
        reply = client.request(WatchMsg(None if follow else 0), timeout_s=ANSWER_TIMEOUT_S).message
        assert isinstance(reply, StatusReplyMsg)
        shown_id = 0
        while follow or shown_id < reply.document["as_of_event_id"]:
            message = client.receive(timeout_s=wait_s).message
            if isinstance(message, EventMsg):
                shown_id = message.record["id"]
                show_event(message.record, as_json=as_json)


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
