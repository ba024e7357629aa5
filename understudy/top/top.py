"""`understudy top`: the pod live in a terminal, or as repeated lines without one.

Owns the terminal, whose state is always restored. `view.py` decides what is shown.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from plumbing.errors import UnreachableError
from understudy.status.events import Record, follow_events, past_events
from understudy.status.gather import gather
from understudy.top.view import Line, Shown, TopPage, log_line, page

if TYPE_CHECKING:
    from rich.console import RenderableType

Say = Callable[[str], None]

REFRESH_S = 1.0
ANSWER_S = 2.0  # the longest wait for a part that hangs
EVENTS_MAX = 10_000  # the history of ten parts
LOG_LINES = 200  # per part, more than a screen
LOG_LINE_BYTES = 200  # an average, to guess how much of the file to read
PLAIN_HEIGHT = 60  # without a terminal there is no limit
QUIT = "q"


class Top:
    """The state of the pod, refreshed by `look`, and the current page."""

    def __init__(self, directory: Path, log_dir: Path) -> None:
        self.which = TopPage.POD
        self._directory, self._log_dir = directory, log_dir
        self._events: deque[Record] = deque(maxlen=EVENTS_MAX)
        self._view: dict[str, Any] | None = None

    async def follow(self) -> None:
        """Collect events until cancelled; wait for a pod that is not running yet."""
        while True:
            with contextlib.suppress(UnreachableError):
                self._events.extend(await past_events(self._directory))
                await follow_events(self._directory, self._events.append)
            await asyncio.sleep(REFRESH_S)

    async def look(self) -> None:
        self._view = await gather(self._directory, ANSWER_S)

    def lines(self, height: int) -> list[Line]:
        if self._view is None:
            return [("loading …", "dim")]
        logs = _logs(self._log_dir) if self.which is TopPage.LOGS else []
        shown = Shown(self._view, list(self._events), logs, datetime.now(UTC), height)
        return page(self.which, shown)


async def run(directory: Path, log_dir: Path, say: Say) -> None:
    """Show the pod until `q` is pressed; without a terminal, until interrupted."""
    top = Top(directory, log_dir)
    following = asyncio.create_task(top.follow(), name="events")
    try:
        if sys.stdout.isatty():
            await _live(top)
        else:
            await _plain(top, say)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await following


async def _plain(top: Top, say: Say) -> None:
    while True:
        await top.look()
        say("\n".join(text for text, _ in top.lines(PLAIN_HEIGHT)[:-1]))  # there are no keys
        await asyncio.sleep(REFRESH_S)


async def _live(top: Top) -> None:
    from rich.console import Console
    from rich.live import Live

    console = Console()
    pressed: asyncio.Queue[str] = asyncio.Queue()
    with (
        _keys(pressed),
        Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop") as live,
    ):
        looking = asyncio.create_task(_keep_looking(top, pressed), name="look")
        try:
            key = ""
            while key != QUIT:
                if key in list(TopPage):
                    top.which = TopPage(key)
                live.update(_renderable(top.lines(console.height)), refresh=True)
                key = await pressed.get()
                if looking.done():
                    looking.result()  # re-raise its error
        finally:
            looking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await looking


async def _keep_looking(top: Top, pressed: asyncio.Queue[str]) -> None:
    """Refresh once a second; an empty key triggers a redraw."""
    try:
        while True:
            await top.look()
            pressed.put_nowait("")
            await asyncio.sleep(REFRESH_S)
    finally:
        pressed.put_nowait("")


@contextlib.contextmanager
def _keys(pressed: asyncio.Queue[str]) -> Iterator[None]:
    """Put each key into `pressed`, without Enter; Ctrl-C works as usual, SIGTERM counts as `q`."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGTERM, pressed.put_nowait, QUIT)
    if not sys.stdin.isatty():
        yield
        return
    fd = sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def read() -> None:
        raw = os.read(fd, 64)
        if not raw:  # the terminal was closed
            loop.remove_reader(fd)
            raw = QUIT.encode()
        for key in raw.decode(errors="replace"):
            pressed.put_nowait(key)

    tty.setcbreak(fd)
    loop.add_reader(fd, read)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


def _renderable(lines: list[Line]) -> RenderableType:
    from rich.text import Text

    text = Text(no_wrap=True, overflow="ellipsis")
    for number, (line, style) in enumerate(lines):
        text.append("\n" if number else "").append(line, style or None)
    return text


def _logs(log_dir: Path) -> list[str]:
    """The last lines of each part's log."""
    found = []
    for path in sorted(log_dir.glob("*.log")):
        try:
            with open(path, "rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(0, end - LOG_LINES * LOG_LINE_BYTES))
                lines = file.read().decode(errors="replace").splitlines()
        except OSError:
            continue
        found += [log_line(path.stem, line) for line in lines[-LOG_LINES:]]
    return found
