"""Keeps a reader's session through the deaths of the service.

Every report about the memory is repeated to each new service, because the one that received it may
have died before it was on disk.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable

from gms import messages as msg
from gms.client.reader import Reader
from gms.client.session_thread import CLOSE_TIMEOUT_S, OnText, SessionThread
from plumbing.errors import UnderstudyError

REJOIN_TIMEOUT_S = 90.0  # longer than a server keeps a survivor waiting (gms.core.weights)

logger = logging.getLogger(__name__)


class Keeper(SessionThread):
    """The thread that keeps `reader` attached; `close` it before the reader."""

    what, kept = "memory service", "the weights stay mapped"

    def __init__(
        self,
        reader: Reader,
        *,
        may_digest: Callable[[], bool] = lambda: True,
        on_change: OnText = lambda sentence: None,
    ) -> None:
        """`may_digest`: whether this process has time to read all its weights: a standby has."""
        super().__init__("gms-keeper", on_change)
        self._reader = reader
        self._may_digest = may_digest
        self._digests: list[threading.Thread] = []
        # Repeated to each new service: the digest, and the reasons (with their details) why the
        # bytes cannot be trusted.
        self._authors_digest: str | None = None
        self._reports: dict[str, str] = {}
        self._report_lock = threading.Lock()
        self._is_reported = threading.Event()
        self._is_reported.set()

    def start(self) -> None:
        """Begin; a reader that has just committed computes the digest of its bytes.

        Raises:
            UnderstudyError: `gms.no_thread`.
        """
        self._start()
        if self._reader.is_author:
            self._start_digest(0)

    def close(self) -> None:
        """Stop keeping the session; the reader stays as it is. Safe to call again."""
        if not self._is_closing:
            self._stop(self._reader.interrupt)
            for thread in self._digests:
                thread.join(CLOSE_TIMEOUT_S)

    def report_canary_failure(self, detail: str) -> None:
        """This engine's canary failed; the second such report condemns the epoch.

        Without a service it is sent once there is one; see `wait_until_reported`.
        """
        self._report("canary", detail)

    def report_device_error(self, detail: str) -> None:
        """The device failed on this memory, which condemns the epoch at once. Without a service it
        is sent once there is one."""
        self._report("device_error", detail)

    def wait_until_reported(self, timeout_s: float) -> bool:
        """Before an exit: whether a service has received every report."""
        return self._is_reported.wait(timeout_s)

    def _report(self, why: str, detail: str) -> None:
        with self._report_lock:
            self._reports[why] = detail
            self._is_reported.clear()
            with contextlib.suppress(UnderstudyError):  # the thread rejoins and sends it then
                self._reader.condemn(why, detail)
                self._is_reported.set()

    # ------------------------------------------------------------------ on the thread

    def _session(self) -> int:
        return self._reader.fileno()

    def _has_pending(self) -> bool:
        return self._reader.has_pending

    def _hear(self) -> None:
        reply = self._reader.receive()
        if isinstance(reply.message, msg.DigestWantedMsg):
            is_ours = reply.message.epoch == self._reader.epoch
            if not (is_ours and self._may_digest() and self._start_digest(reply.request_id)):
                self._reader.send(msg.DigestMsg(None), reply.request_id)

    def _attach_again(self) -> None:
        """Then send what this service may not have received."""
        self._reader.rejoin(REJOIN_TIMEOUT_S, may_go_on=lambda: not self._is_closing)
        if self._authors_digest is not None:
            self._reader.send(msg.DigestMsg(self._authors_digest))
        with self._report_lock:
            for why, detail in self._reports.items():
                self._reader.condemn(why, detail)
            self._is_reported.set()

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
            logger.warning("no digest of epoch %s: %s", self._reader.epoch, error)
            return False
        self._digests.append(thread)
        return True

    def _digest(self, request_id: int) -> None:
        with contextlib.suppress(OSError):  # best effort: not allowed in every container
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        try:
            if request_id:  # asked for: say at once that it has begun
                self._reader.send(msg.DigestMsg(None, is_coming=True), request_id)
            digest = self._reader.digest(lambda: not self._is_closing)
            if digest is not None:
                if request_id == 0:
                    self._authors_digest = digest
                self._reader.send(msg.DigestMsg(digest), request_id)
        except UnderstudyError as error:
            logger.warning("no digest of epoch %s: %s", self._reader.epoch, error.message)
