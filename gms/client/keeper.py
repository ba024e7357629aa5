"""A thread of an engine's process that keeps a session through the deaths of its service.

It must not touch the mapping: the engine computes on it. A restarted server gets the memory back
from here, so no failure that may be temporary ends the thread. Every report about the memory is
repeated to each new service, because the one that received it may have died before it was on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable

from gms import messages as msg
from gms.client.attach import RegionSession
from plumbing.errors import RemoteError, UnderstudyError, UnreachableError
from plumbing.text import duration
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

CLOSE_TIMEOUT_S = 5.0  # waits are interrupted, and a digest checks between two pieces
RECEIVE_TIMEOUT_S = 5.0  # for the rest of a frame that has begun
REJOIN_TIMEOUT_S = 90.0  # longer than a server keeps a survivor waiting (gms.core.weights)
# The first attempts fall into the restart of a server, which takes half a second; after that the
# whole container is being restarted. A failed attempt costs microseconds, and a pause as long as
# the wait so far would double the time without a service.
BACKOFF_S, BACKOFF_S_MAX = 0.02, 0.1

ATTACHED, REJOINING, DETACHED = "attached", "rejoining", "detached"

# What may succeed the next time.
TEMPORARY = (UnderstudyError, OSError, MemoryError)
# It never will take this region back: it has another by now, and this one ends with this engine.
FINAL = ("gms.kv_pool_gone",)

OnText = Callable[[str], None]

logger = logging.getLogger(__name__)


class Keeper:
    """The thread that keeps `session` attached; `close` it before the session."""

    def __init__(
        self, session: RegionSession, *, on_change: OnText = lambda sentence: None
    ) -> None:
        """`on_change` is called on the thread when the session is lost, or back."""
        self.state = ATTACHED
        self._session, self._on_change = session, on_change
        self._is_closing = False
        self._reports: dict[str, Message] = {}  # the last of each kind
        self._report_lock = threading.Lock()
        self._is_reported = threading.Event()
        self._is_reported.set()
        self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        self._thread = threading.Thread(target=self._run, name="gms-keeper", daemon=True)
        self._digest = threading.Thread(target=self._digest_all, name="gms-digest", daemon=True)

    def start(self) -> None:
        """Begin; a reader that has just committed computes the digest of its bytes, on a thread of
        its own: it takes half a second per GiB."""
        self._thread.start()
        if self._session.is_author:
            self._digest.start()

    def close(self) -> None:
        """Stop keeping the session, which stays as it is. Safe to call again."""
        if self._is_closing:
            return
        self._is_closing = True
        if self._thread.ident is not None:
            os.eventfd_write(self._wake.fileno(), 1)
            self._session.interrupt()
            self._thread.join(CLOSE_TIMEOUT_S)
        if not self._thread.is_alive():  # else it may still poll this number
            self._wake.close()
        if self._digest.ident is not None:
            self._digest.join(CLOSE_TIMEOUT_S)

    def report_canary_failure(self, detail: str) -> None:
        """This engine's canary failed; the second such report condemns the epoch.

        Without a service it is sent once there is one; see `wait_until_reported`.
        """
        self.report("canary", msg.CondemnMsg(detail[: msg.DETAIL_LENGTH_MAX]))

    def report(self, kind: str, message: Message) -> None:
        """Send `message` now, and to every later service, until another of its kind."""
        with self._report_lock:
            self._reports[kind] = message
            self._is_reported.clear()
            with contextlib.suppress(UnderstudyError):  # the thread rejoins and sends it then
                self._session.client.notify(message)
                self._is_reported.set()

    def wait_until_reported(self, timeout_s: float) -> bool:
        """Before an exit: whether a service has received every report."""
        return self._is_reported.wait(timeout_s)

    # ------------------------------------------------------------------ on the threads

    def _run(self) -> None:
        while not self._is_closing and self.state != DETACHED:
            try:
                self._attend()
            except TEMPORARY as error:
                if not self._is_closing:
                    self._rejoin(error)

    def _attend(self) -> None:
        """Wait for the end of the session, which raises: a service says nothing of itself."""
        number = self._session.client.fileno()
        if number < 0:  # its last keeper was closed before it had found a service
            raise UnreachableError("wire.closed", "there is no session")
        poll = select.poll()  # no `select`: an engine has descriptors above 1,023
        poll.register(number, select.POLLIN | select.POLLRDHUP)
        poll.register(self._wake.fileno(), select.POLLIN)
        poll.poll()
        if not self._is_closing:
            reply = self._session.client.receive(RECEIVE_TIMEOUT_S)
            close_all(reply.fds)
            raise msg.unexpected_answer(reply.message.TYPE, "nothing")

    def _rejoin(self, why: BaseException) -> None:
        """Try until it succeeds: an engine computes without a service, too."""
        self.state, session = REJOINING, self._session
        began, delay_s, said = time.monotonic(), 0.0, ""
        pause = select.poll()
        pause.register(self._wake.fileno(), select.POLLIN)
        while not self._is_closing:
            sentence = why.message if isinstance(why, UnderstudyError) else str(why)
            if isinstance(why, RemoteError) and why.code in FINAL:
                self.state = DETACHED
                self._on_change(f"{sentence}; {session.kept}")
                return
            if sentence != said:
                said = sentence
                self._on_change(f"no {session.service} ({sentence}); {session.kept}, retrying")
            pause.poll(delay_s * 1000)
            delay_s = min(max(BACKOFF_S, delay_s * 2), BACKOFF_S_MAX)
            try:
                session.rejoin(REJOIN_TIMEOUT_S, may_go_on=lambda: not self._is_closing)
                with self._report_lock:
                    for message in self._reports.values():
                        session.client.notify(message)
                    self._is_reported.set()
            except TEMPORARY as error:
                why = error
            else:
                self.state = ATTACHED
                took = duration((time.monotonic() - began) * 1000)
                self._on_change(f"attached to the {session.service} again after {took}")
                return

    def _digest_all(self) -> None:
        with contextlib.suppress(OSError):  # best effort: not allowed in every container
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            digest = self._session.digest(lambda: not self._is_closing)
        except UnderstudyError as error:
            logger.warning("no digest of the weights: %s", error.message)
        else:
            if digest is not None:
                self.report("digest", msg.DigestMsg(digest))
