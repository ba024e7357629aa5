"""A thread of an engine's process that keeps a session through the deaths of its service.

It must not touch the mapping: the engine computes on it. A restarted server gets the memory back
from here, so no failure that may be temporary ends the thread.
"""

from __future__ import annotations

import abc
import errno
import os
import select
import threading
import time
from collections.abc import Callable

from plumbing.errors import UnderstudyError, UnreachableError, explain_shortage
from plumbing.text import duration
from plumbing.wire import sockets
from plumbing.wire.fds import OwnedFd

CLOSE_TIMEOUT_S = 5.0  # waits are interrupted, and digests check between two pieces
# The first attempts fall into the restart of a server, which takes half a second; after that the
# whole container is being restarted. A failed attempt costs microseconds, and a pause as long as
# the wait so far would double the time without a service.
BACKOFF_S, BACKOFF_S_MAX = 0.02, 0.1
RECEIVE_TIMEOUT_S = 5.0  # for the rest of a frame that has begun
# Short: a server that does not accept yet is tried again, and the thread may have to end meanwhile.
ACCEPT_TIMEOUT_S = 0.5

ATTACHED, REJOINING, DETACHED = "attached", "rejoining", "detached"

# What may succeed the next time.
TEMPORARY = (UnderstudyError, OSError, MemoryError)

OnText = Callable[[str], None]


class SessionThread(abc.ABC):
    """The thread. A subclass says how its session is attached again."""

    what: str  # `memory service`, in sentences
    kept: str  # what the engine keeps without a service

    def __init__(self, name: str, on_change: OnText) -> None:
        """`on_change` is called on the thread when the session is lost, or back.

        Raises:
            UnreachableError: `wire.no_descriptors`.
        """
        self.state = ATTACHED
        self._on_change = on_change
        self._is_closing = False
        try:
            self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError as error:
            raise sockets.no_descriptors(f"watch the {self.what}", error) from error
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _start(self) -> None:
        """
        Raises:
            UnderstudyError: `gms.no_thread`.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            why = explain_shortage(errno.EAGAIN)
            raise UnderstudyError(
                "gms.no_thread", f"cannot watch the {self.what}: {why}"
            ) from error

    def _stop(self, interrupt: Callable[[], None]) -> None:
        """End the thread; `interrupt` ends its wait for an answer."""
        self._is_closing = True
        os.eventfd_write(self._wake.fileno(), 1)
        interrupt()
        if self._thread.ident is not None:
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # else it may still poll this number
            self._wake.close()

    # ------------------------------------------------------------------ what a subclass says

    @abc.abstractmethod
    def _session(self) -> int:
        """The descriptor of the session's socket; -1: there is none."""

    def _has_pending(self) -> bool:
        """Whether a message waits although the socket is not readable."""
        return False

    @abc.abstractmethod
    def _hear(self) -> None:
        """Read what the service has sent; raises once the session has ended."""

    @abc.abstractmethod
    def _attach_again(self) -> None:
        """Hand the memory back to a new service, which raises what is TEMPORARY; or set `state` to
        DETACHED: it never will take it back."""

    def _repeat(self) -> None:  # noqa: B027 - a reader repeats its reports while it attaches
        """The session is back: say what was said meanwhile."""

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while not self._is_closing and self.state != DETACHED:
            try:
                self._attend()
            except TEMPORARY as error:
                if not self._is_closing:
                    self._rejoin(error)

    def _attend(self) -> None:
        """Hear the service until the session ends, which raises."""
        number = self._session()
        if number < 0:  # its last keeper was closed before it had found a service
            raise UnreachableError("wire.closed", "there is no session")
        poll = select.poll()  # no `select`: an engine has descriptors above 1,023
        poll.register(number, select.POLLIN | select.POLLRDHUP)
        poll.register(self._wake.fileno(), select.POLLIN)
        while not self._is_closing:
            if not self._has_pending():
                poll.poll()
            if not self._is_closing:
                self._hear()

    def _rejoin(self, why: BaseException) -> None:
        """Try until it succeeds: an engine computes without a service, too."""
        self.state = REJOINING
        began, delay_s, said = time.monotonic(), 0.0, ""
        pause = select.poll()
        pause.register(self._wake.fileno(), select.POLLIN)
        while not self._is_closing:
            sentence = why.message if isinstance(why, UnderstudyError) else str(why)
            if sentence != said:
                said = sentence
                self._on_change(f"no {self.what} ({sentence}); {self.kept}, retrying")
            pause.poll(delay_s * 1000)
            delay_s = min(max(BACKOFF_S, delay_s * 2), BACKOFF_S_MAX)
            try:
                self._attach_again()
            except TEMPORARY as error:
                why = error
            else:
                break
        else:
            return
        if self.state == REJOINING:
            self.state = ATTACHED
            self._repeat()
            took = duration((time.monotonic() - began) * 1000)
            self._on_change(f"attached to the {self.what} again after {took}")
