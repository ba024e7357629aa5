"""What an engine holds of its device's KV memory: a lease that outlives the memory service.

Owns the session, the flock that says "this process maps the pool", and the descriptors. When the
service dies the engine keeps serving, and the lease's thread hands the pool back to the next one.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from gms import kv_messages as msg
from gms.client.device_memory import memory_for
from gms.client.rejoining import BACKOFF_S, TEMPORARY, rejoin
from gms.messages import DETAIL_LENGTH_MAX
from gms.vmm.interface import Allocation, DeviceMemory, release_all
from plumbing.errors import ProtocolError, RemoteError, UnderstudyError, UnreachableError
from plumbing.service.process import make_fd_room
from plumbing.wire import sockets
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd, close_all

if TYPE_CHECKING:
    from collections.abc import Sequence

ACCEPT_TIMEOUT_S = 0.5  # a server that does not accept for so long is tried again
HAND_BACK_TIMEOUT_S = 30.0  # two trial maps for each slab, of which there are at most 249
RECEIVE_TIMEOUT_S = 5.0  # for the rest of a frame that has begun
CLOSE_TIMEOUT_S = 5.0
ANSWER_GRACE_S = 5.0  # the server ends an overdue wait by itself; how much longer we wait for that

# It never will take this pool back: it has another by now, and this one ends with this engine.
FINAL = ("gms.kv_pool_gone",)

HELD, REJOINING, DETACHED = "held", "rejoining", "detached"

OnText = Callable[[str], None]


class KvClaim(Struct, frozen=True):
    """Who asks for how much. `token` and `era` are those of the grant of `active`; the sizes are
    the same in every process of an incarnation."""

    engine: str
    incarnation: str
    token: int
    era: str
    size_bytes: int
    index_bytes: int


class KvLease:
    """The device's KV pool, this incarnation's until `close`. It keeps itself through deaths of
    the service, on a thread."""

    def __init__(
        self,
        path: str,
        device: str,
        client: BlockingClient,
        claim: KvClaim,
        taken: msg.PoolTakenMsg,
        flock: OwnedFd,
        fds: Sequence[OwnedFd],
        memory: DeviceMemory | None,
        on_change: OnText,
    ) -> None:
        """Takes `client`, `flock` and `fds`, unless it raises."""
        self.claim, self.pool, self.is_fresh = claim, taken.pool, taken.is_fresh
        self.slab_sizes, self.index_bytes = taken.slab_sizes, taken.index_bytes
        self.index = fds[0]  # lent to the caller, to map it writable
        self.state = HELD
        self._device, self._memory, self._on_change = device, memory, on_change
        self._path, self._client, self._flock = path, client, flock
        self._fds: list[OwnedFd] = list(fds[1:])  # of the slabs, until they are adopted
        self._slabs: list[Allocation] = []
        self._mark, self._discarded = "", ""
        self._is_closing = False
        try:
            self._wake = OwnedFd(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
        except OSError as error:
            raise sockets.no_descriptors("watch the memory service", error) from error
        self._thread = threading.Thread(target=self._run, name="kv-lease", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._wake.close()
            raise UnderstudyError(
                "gms.no_thread", f"cannot watch the KV memory: {error}"
            ) from error

    @property
    def slabs(self) -> list[Allocation]:
        """The pool's memory, in order, to be mapped side by side; together at least the claim's
        size. The lease releases it.

        Raises:
            UnderstudyError: `gms.driver_failed`, …: this process cannot use the device;
                `wire.no_descriptors`.
        """
        if not self._slabs:
            if self._memory is None:
                self._memory = memory_for(self._device)
            adopted: list[Allocation] = []
            try:
                for fd, size_bytes in zip(self._fds, self.slab_sizes, strict=True):
                    adopted.append(self._memory.adopt(fd.duplicate(), size_bytes))
            except OSError as error:
                release_all(adopted)
                raise sockets.no_descriptors("map the KV memory", error) from error
            except BaseException:
                release_all(adopted)
                raise
            self._slabs = adopted
        return self._slabs

    def fileno(self) -> int:
        """Lend the session's socket; -1 while the service is away."""
        return -1 if self.state != HELD else self._client.fileno()

    def mark(self, mark: str) -> None:
        """Report `BEGUN`, `ADOPTING` or `ADOPTED`; the last one is repeated to a new service."""
        self._mark = mark
        self._report()

    def discard(self, why: str) -> None:
        """The content must never be believed again: no engine borrows this pool after this one. Its
        memory is freed when this engine's processes are gone; this lease stays as it is."""
        self._discarded = why[:DETAIL_LENGTH_MAX] or "no reason given"
        self._report()

    def close(self) -> None:
        """Give the pool back: whoever calls this maps nothing of it any more. Safe to repeat."""
        if not self._is_closing:
            self._stop(is_interrupted=True)
            with contextlib.closing(self._client):
                self._let_go()

    def give_up(self, wait_s: float) -> None:
        """Have the pool's memory freed, because this engine rests: as `close`, and returns when the
        service says that the memory is free. The engine's other processes must let go of the pool
        meanwhile. It is also free if the service dies: then nobody has it any more.

        Raises:
            RemoteError: `gms.kv_busy`, a process still maps it; `gms.kv_stale_token`, it is another
                engine's by now.
            WaitTimeoutError: the service does not answer.
            UnreachableError: a service that had died got the memory back from this very lease.
        """
        end = time.monotonic() + wait_s
        while self.state == REJOINING and time.monotonic() < end:
            time.sleep(BACKOFF_S)  # a service that is back may have the memory already
        was_held = self.state == HELD
        self._stop(is_interrupted=not was_held)
        with contextlib.closing(self._client):
            self._let_go()
            if was_held:
                with contextlib.suppress(UnreachableError):
                    self._wait_until_freed(max(0.0, end - time.monotonic()))
            elif self.state == HELD:
                raise UnreachableError("wire.closed", "the memory service came back meanwhile")

    def _wait_until_freed(self, wait_s: float) -> None:
        request = msg.GiveUpMsg(round(wait_s * 1000))
        reply = self._client.request(request, timeout_s=wait_s + ANSWER_GRACE_S)
        if not isinstance(reply.message, msg.PoolFreedMsg):
            raise unexpected(reply.message.TYPE, "give_up")

    def _stop(self, *, is_interrupted: bool) -> None:
        """End the thread; `is_interrupted`: also one that waits for the service's answer."""
        self._is_closing = True
        os.eventfd_write(self._wake.fileno(), 1)
        if is_interrupted:
            self._client.interrupt()
        self._thread.join(CLOSE_TIMEOUT_S)

    def _let_go(self) -> None:
        """Of memory, index and file, in this order."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._flock.close)  # after the memory
            if not self._thread.is_alive():  # else it may still poll this number
                stack.callback(self._wake.close)
            stack.callback(close_all, [self.index, *self._fds])
            slabs, self._slabs = self._slabs, []
            release_all(slabs)

    def __enter__(self) -> KvLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _report(self) -> None:
        """Tell the service, if there is one; all of it is repeated to the next."""
        if self.state != HELD:
            return
        with contextlib.suppress(UnderstudyError, OSError):
            if self._mark:
                self._client.notify(msg.MarkMsg(self._mark))
            if self._discarded:
                self._client.notify(msg.DiscardMsg(self._discarded))

    # ------------------------------------------------------------------ on the thread

    def _run(self) -> None:
        while not self._is_closing and self.state != DETACHED:
            try:
                self._attend()
            except TEMPORARY as error:
                if not self._is_closing:
                    self._rejoin(error)

    def _attend(self) -> None:
        """Wait for the end of the session, which raises: the service says nothing to a holder."""
        poll = select.poll()
        poll.register(self._client.fileno(), select.POLLIN | select.POLLRDHUP)
        poll.register(self._wake.fileno(), select.POLLIN)
        poll.poll()
        if not self._is_closing:
            reply = self._client.receive(RECEIVE_TIMEOUT_S)
            close_all(reply.fds)
            raise unexpected(reply.message.TYPE, "nothing")

    def _rejoin(self, why: BaseException) -> None:
        self.state = REJOINING
        self._client.close()
        took_ms = rejoin(
            self._try_to_hand_back,
            lambda reason: self._on_change(
                f"no KV memory service for pool {self.pool[:8]} ({reason}); this engine keeps its"
                " KV memory and serves on"
            ),
            why,
            self._wake.fileno(),
            lambda: not self._is_closing,
        )
        if took_ms is not None and self.state != DETACHED:
            self.state = HELD
            self._report()  # what was said meanwhile
            self._on_change(f"the KV memory service is back after {took_ms:.0f} ms")

    def _try_to_hand_back(self) -> None:
        try:
            self._hand_back()
        except RemoteError as error:
            if error.code not in FINAL:
                raise
            self.state = DETACHED
            self._on_change(f"{error.message}; this engine serves on")

    def _hand_back(self) -> None:
        """Report the pool to a new service, with all of its descriptors."""
        client = BlockingClient(self._path, msg.CATALOGUE, ACCEPT_TIMEOUT_S)
        try:
            self._client = client  # which `close` may interrupt
            if self._is_closing:
                raise UnreachableError("wire.closed", "this lease was closed")
            request = msg.HandBackMsg(
                self.claim.engine,
                self.claim.incarnation,
                self.claim.token,
                self.claim.era,
                self.claim.size_bytes,
                self.claim.index_bytes,
                self.pool,
                self.slab_sizes,
                self._mark,
                self._discarded,
            )
            reply = client.request(request, self._copies(), HAND_BACK_TIMEOUT_S)
            if not isinstance(reply.message, msg.PoolKeptMsg):
                raise unexpected(reply.message.TYPE, "hand_back")
        except BaseException:
            client.close()
            raise

    def _copies(self) -> list[OwnedFd]:
        make_fd_room(len(self._fds) + 1)
        copies: list[OwnedFd] = []
        try:
            for fd in (self.index, *self._fds):
                copies.append(fd.duplicate())  # noqa: PERF401 - closed if one fails
        except OSError as error:
            close_all(copies)
            raise sockets.no_descriptors("hand the KV memory back", error) from error
        return copies


def unexpected(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")
