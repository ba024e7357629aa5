"""A thread of an engine's process that keeps a session through the deaths of its service.

It must not touch the mapping: the engine computes on it. A restarted server gets the memory back
from here, so no failure that may be temporary ends the thread. Every report about the memory is
repeated to each new service, because the one that received it may have died before it was on disk.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import select
import threading
import time
from collections.abc import Callable

from gms import messages as msg
from gms.client.reader import Reader
from gms.client.sessions import RegionSession
from gms.questions import unexpected_answer
from plumbing.errors import RemoteError, UnderstudyError, UnreachableError, explain_shortage
from plumbing.text import duration
from plumbing.wire import sockets
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

CLOSE_TIMEOUT_S = 5.0  # waits are interrupted, and digests check between two pieces
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
        self,
        session: RegionSession,
        *,
        may_digest: Callable[[], bool] = lambda: True,
        on_change: OnText = lambda sentence: None,
    ) -> None:
        """`may_digest`: whether this process has time to read all its weights: a standby has.
        `on_change` is called on the thread when the session is lost, or back.
        """
        self.state = ATTACHED
        self._session = session
        self._may_digest, self._on_change = may_digest, on_change
        self._is_closing = False
        self._digests: list[threading.Thread] = []
        self._reports: dict[str, Message] = {}  # the last of each kind
        self._report_lock = threading.Lock()
        self._is_reported = threading.Event()
        self._is_reported.set()
        try:
            self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError as error:
            raise sockets.no_descriptors(f"watch the {session.service}", error) from error
        self._thread = threading.Thread(target=self._run, name="gms-keeper", daemon=True)

    def start(self) -> None:
        """Begin; a reader that has just committed computes the digest of its bytes.

        Raises:
            UnderstudyError: `gms.no_thread`.
        """
        try:
            self._thread.start()
        except RuntimeError as error:
            self._wake.close()
            why = explain_shortage(errno.EAGAIN)
            raise UnderstudyError(
                "gms.no_thread", f"cannot watch the {self._session.service}: {why}"
            ) from error
        if self._session.is_author:
            self._start_digest(0)

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
        for thread in self._digests:
            thread.join(CLOSE_TIMEOUT_S)

    def report_canary_failure(self, detail: str) -> None:
        """This engine's canary failed; the second such report condemns the epoch.

        Without a service it is sent once there is one; see `wait_until_reported`.
        """
        self.report("canary", condemnation("canary", detail))

    def report_device_error(self, detail: str) -> None:
        """The device failed on this memory, which condemns the epoch at once. Without a service it
        is sent once there is one."""
        self.report("device_error", condemnation("device_error", detail))

    def report(self, kind: str, message: Message) -> None:
        """Send `message` now, and to every later service, until another of its kind."""
        with self._report_lock:
            self._reports[kind] = message
            self._is_reported.clear()
            with contextlib.suppress(UnderstudyError):  # the thread rejoins and sends it then
                self._session.send(message)
                self._is_reported.set()

    def wait_until_reported(self, timeout_s: float) -> bool:
        """Before an exit: whether a service has received every report."""
        return self._is_reported.wait(timeout_s)

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
        number = self._session.fileno()
        if number < 0:  # its last keeper was closed before it had found a service
            raise UnreachableError("wire.closed", "there is no session")
        poll = select.poll()  # no `select`: an engine has descriptors above 1,023
        poll.register(number, select.POLLIN | select.POLLRDHUP)
        poll.register(self._wake.fileno(), select.POLLIN)
        while not self._is_closing:
            if not self._session.has_pending:
                poll.poll()
            if not self._is_closing:
                self._hear()

    def _hear(self) -> None:
        reply = self._session.receive()
        close_all(reply.fds)
        wanted, session = reply.message, self._session
        if not isinstance(wanted, msg.DigestWantedMsg) or not isinstance(session, Reader):
            raise unexpected_answer(wanted.TYPE, "nothing")
        is_ours = wanted.epoch == session.epoch
        if not (is_ours and self._may_digest() and self._start_digest(reply.request_id)):
            session.send(msg.DigestMsg(None), reply.request_id)

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
                        session.send(message)
                    self._is_reported.set()
            except TEMPORARY as error:
                why = error
            else:
                self.state = ATTACHED
                took = duration((time.monotonic() - began) * 1000)
                self._on_change(f"attached to the {session.service} again after {took}")
                return

    # ------------------------------------------------------------------ digests

    def _start_digest(self, request_id: int) -> bool:
        """Compute the digest on a thread of its own: it takes half a second per GiB. False if no
        thread can be had: this session matters more."""
        self._digests = [thread for thread in self._digests if thread.is_alive()]
        thread = threading.Thread(
            target=self._digest, args=(request_id,), name="gms-digest", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:
            logger.warning("no digest of the weights: %s", error)
            return False
        self._digests.append(thread)
        return True

    def _digest(self, request_id: int) -> None:
        """Of an author's own accord, or as the answer to `request_id`."""
        reader = self._session
        assert isinstance(reader, Reader)
        with contextlib.suppress(OSError):  # best effort: not allowed in every container
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            if request_id:  # say at once that it has begun
                reader.send(msg.DigestMsg(None, is_coming=True), request_id)
            digest = reader.digest(lambda: not self._is_closing)
            if digest is not None and request_id:
                reader.send(msg.DigestMsg(digest), request_id)
            elif digest is not None:
                self.report("digest", msg.DigestMsg(digest))
        except UnderstudyError as error:
            logger.warning("no digest of epoch %s: %s", reader.epoch, error.message)


def condemnation(why: str, detail: str) -> msg.CondemnMsg:
    """The bytes cannot be trusted: `device_error` or `canary`."""
    return msg.CondemnMsg(why, detail[: msg.DETAIL_LENGTH_MAX])
