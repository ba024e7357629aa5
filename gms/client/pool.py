"""What the processes of an engine import to borrow its device's KV memory. Blocking.

    claim = KvClaim(engine, incarnation, token, era, size_bytes, index_bytes)
    lease = borrow_pool(directory, "HOST-0", claim, deadline_s=45)
    range.map(0, lease.slabs, writable=True)     # a worker; zero it first on a GPU if `is_fresh`
    lease.mark(BEGUN)                            # from here on the memory is written
    lease.mark(ADOPTING)                         # before blocks of an earlier engine are believed
    lease.mark(ADOPTED)                          # once the canary has passed on them
    lease.discard("device error …")              # the content must not be believed again
    lease.close()                                # unmap everything first

Any number of processes of one incarnation borrow the same pool; of another incarnation none, until
the kernel says that none of these maps it. A lease outlives the service: the engine keeps serving,
and a thread of the lease hands the pool back to the restarted service.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from gms import epoch_file, names
from gms import kv_messages as msg
from gms.client.device_memory import memory_for
from gms.kv_messages import ADOPTED as ADOPTED
from gms.kv_messages import ADOPTING as ADOPTING
from gms.kv_messages import BEGUN as BEGUN
from gms.messages import DETAIL_LENGTH_MAX
from gms.vmm.interface import Allocation, DeviceMemory, release_all
from plumbing.errors import (
    ProtocolError,
    RemoteError,
    UnderstudyError,
    UnreachableError,
    WaitTimeoutError,
)
from plumbing.service.process import make_fd_room
from plumbing.wire import sockets
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.fds import OwnedFd, close_all

if TYPE_CHECKING:
    from collections.abc import Sequence

GRACE_S = 5.0  # the server ends an overdue wait by itself; how much longer we wait for its answer
ACCEPT_TIMEOUT_S = 0.5  # a server that does not accept for so long is tried again
HAND_BACK_TIMEOUT_S = 30.0  # two trial maps for each slab, of which there are at most 249
RECEIVE_TIMEOUT_S = 5.0  # for the rest of a frame that has begun
BACKOFF_S, BACKOFF_S_MAX = 0.02, 0.1  # a server restarts in a quarter of a second
CLOSE_TIMEOUT_S = 5.0

# The service may answer differently the next time: it has just given this pool up, or ran short.
PASSING = ("gms.stale_epoch", "gms.server_exhausted")
# It never will: it has another pool by now, and this one ends with this engine.
FINAL = ("gms.kv_pool_gone",)
TEMPORARY = (UnderstudyError, OSError, MemoryError)

HELD, REJOINING, DETACHED = "held", "rejoining", "detached"

logger = logging.getLogger(__name__)

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


def has_pool_service(directory: str, device: str) -> bool:
    """Whether the memory service of this directory lends KV memory for `device`."""
    return os.path.exists(names.kv_socket_path(directory, device))


def borrow_pool(
    directory: str,
    device: str,
    claim: KvClaim,
    deadline_s: float,
    *,
    on_wait: OnText = lambda reason: None,
    on_change: OnText = lambda sentence: None,
    memory: DeviceMemory | None = None,
) -> KvLease:
    """Borrow the KV pool of `device`, waiting at most `deadline_s`, also for a service that is
    restarting.

    Args:
        on_wait: called with a sentence whenever the reason for waiting changes.
        on_change: called on the lease's thread when the service is lost, or back.
        memory: what the slabs are mapped with; by default the kind that `device` has.

    Raises:
        UnreachableError: no service answered in time.
        RemoteError: it refused: `gms.kv_stale_token` (a newer grant is known: this engine has lost
            the lock), `gms.kv_size_differs`, `gms.kv_too_large`; or the wait ended:
            `gms.kv_busy` (it names the process that still maps the pool), `gms.device_full`.
        WaitTimeoutError: `gms.kv_busy`, the service did not answer in time.
    """
    end = time.monotonic() + deadline_s
    while True:
        try:
            return _borrow(directory, device, claim, end, on_wait, on_change, memory)
        except UnderstudyError as error:
            is_passing = isinstance(error, UnreachableError) or error.code in PASSING
            if not is_passing or time.monotonic() + BACKOFF_S > end:
                raise
            time.sleep(BACKOFF_S)


def _borrow(
    directory: str,
    device: str,
    claim: KvClaim,
    end: float,
    on_wait: OnText,
    on_change: OnText,
    memory: DeviceMemory | None,
) -> KvLease:
    rest_s = max(0.0, end - time.monotonic())
    request = msg.BorrowPoolMsg(
        claim.engine,
        claim.incarnation,
        claim.token,
        claim.era,
        claim.size_bytes,
        claim.index_bytes,
        wait_ms=round(rest_s * 1000),
    )
    path = names.kv_socket_path(directory, device)
    with contextlib.ExitStack() as stack:
        # Opened first for its low number; see `epoch_file.join`.
        placeholder = stack.enter_context(_placeholder())
        client = stack.enter_context(BlockingClient(path, msg.CATALOGUE, ACCEPT_TIMEOUT_S))
        granted = _wait_for_grant(client, request, rest_s, on_wait)
        if not names.is_pool_file(granted.pool_file):
            raise _unexpected(f"the pool's file {granted.pool_file!r}", "borrow")
        file = os.path.join(directory, granted.pool_file)
        flock = stack.enter_context(_join(file, placeholder))
        make_fd_room(msg.SLABS_MAX + 1)
        reply = client.request(msg.TakeMsg(), timeout_s=GRACE_S)
        fds, taken = reply.fds, reply.message
        try:
            if not isinstance(taken, msg.PoolTakenMsg) or len(fds) != len(taken.slab_sizes) + 1:
                raise _unexpected(f"{taken.TYPE} and {len(fds)} descriptors", "take")
            lease = KvLease(path, device, client, claim, taken, flock, fds, memory, on_change)
        except BaseException:
            close_all(fds)
            raise
        stack.pop_all()
        return lease


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
            UnderstudyError: `gms.driver_failed`, …: this process cannot use the device.
        """
        if not self._slabs:
            if self._memory is None:
                self._memory = memory_for(self._device)
            adopted: list[Allocation] = []
            try:
                for fd, size_bytes in zip(self._fds, self.slab_sizes, strict=True):
                    adopted.append(self._memory.adopt(fd.duplicate(), size_bytes))
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
        if self._is_closing:
            return
        self._is_closing = True
        os.eventfd_write(self._wake.fileno(), 1)
        self._client.interrupt()
        self._thread.join(CLOSE_TIMEOUT_S)
        with contextlib.ExitStack() as stack:
            stack.callback(self._client.close)
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
            raise _unexpected(reply.message.TYPE, "nothing")

    def _rejoin(self, why: BaseException) -> None:
        self.state = REJOINING
        self._client.close()
        began, delay_s, said = time.monotonic(), 0.0, ""
        while not self._is_closing:
            sentence = getattr(why, "message", None) or str(why)
            if sentence != said:
                said = sentence
                self._on_change(
                    f"no KV memory service for pool {self.pool[:8]} ({sentence}); this engine keeps"
                    " its KV memory and serves on"
                )
            self._pause(delay_s)
            delay_s = min(max(BACKOFF_S, delay_s * 2), BACKOFF_S_MAX)
            try:
                self._hand_back()
            except RemoteError as error:
                why = error
                if error.code in FINAL:
                    self.state = DETACHED
                    self._on_change(f"{error.message}; this engine serves on")
                    return
            except TEMPORARY as error:
                why = error
            else:
                self.state = HELD
                self._report()  # what was said meanwhile
                took_ms = 1000 * (time.monotonic() - began)
                self._on_change(f"the KV memory service is back after {took_ms:.0f} ms")
                return

    def _pause(self, delay_s: float) -> None:
        """Until `close`, at most `delay_s`. No `select`: an engine has descriptors above 1,023."""
        poll = select.poll()
        poll.register(self._wake.fileno(), select.POLLIN)
        poll.poll(delay_s * 1000)

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
                raise _unexpected(reply.message.TYPE, "hand_back")
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


def _wait_for_grant(
    client: BlockingClient, request: msg.BorrowPoolMsg, wait_s: float, on_wait: OnText
) -> msg.PoolGrantedMsg:
    end = time.monotonic() + wait_s + GRACE_S
    reply: Reply = client.request(request, timeout_s=wait_s + GRACE_S)
    while isinstance(reply.message, msg.WaitingMsg):
        on_wait(reply.message.message)
        rest_s = end - time.monotonic()
        if rest_s <= 0:
            raise WaitTimeoutError(
                "gms.kv_busy", f"waited {wait_s:g} s for the KV memory: {reply.message.message}"
            )
        reply = client.receive(rest_s)
    if not isinstance(reply.message, msg.PoolGrantedMsg):
        close_all(reply.fds)
        raise _unexpected(reply.message.TYPE, "borrow")
    return reply.message


def _join(path: str, placeholder: OwnedFd) -> OwnedFd:
    try:
        return epoch_file.join(path, placeholder)
    except OSError as error:
        raise sockets.no_descriptors(f"hold the pool's file {path}", error) from error


def _placeholder() -> OwnedFd:
    try:
        return OwnedFd(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise sockets.no_descriptors("borrow the KV memory", error) from error


def _unexpected(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")
