"""What the processes of an engine import to borrow its device's KV memory. Blocking.

    claim = KvClaim(engine, incarnation, token, era, size_bytes, index_bytes)
    lease = borrow_pool(directory, "HOST-0", claim, deadline_s=45)
    range.map(0, lease.slabs, writable=True)     # a worker; zero it first on a GPU if `is_fresh`
    lease.mark(BEGUN)                            # from here on the memory is written
    lease.mark(ADOPTING)                         # before blocks of an earlier engine are believed
    lease.mark(ADOPTED)                          # once the canary has passed on them
    lease.discard("device error …")              # the content must not be believed again
    lease.close()                                # unmap everything first; the next one finds it
    lease.give_up(wait_s=5)                      # … or have the memory freed

Any number of processes of one incarnation borrow the same pool; of another incarnation none, until
the kernel says that none of these maps it. A lease outlives the service: the engine keeps serving,
and a thread of the lease hands the pool back to the restarted service.

`KvLease` owns the session, the flock that says "this process maps the pool", and the descriptors.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import Struct

from gms import epoch_file, names
from gms import kv_messages as msg
from gms.client.device import memory_for
from gms.client.sessions import BACKOFF_S, TEMPORARY, rejoin
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

# The service may answer differently the next time: it has just given this pool up, or ran short.
PASSING = ("gms.stale_epoch", "gms.server_exhausted")


def has_pool_service(directory: str, device: str) -> bool:
    """Whether the memory service of this directory lends KV memory for `device`."""
    return os.path.exists(names.kv_socket_path(directory, device))


def pool_service_answers(directory: str, device: str, deadline_s: float) -> bool:
    """Whether that service accepts connections; one that is restarting gets until the deadline."""
    end = time.monotonic() + deadline_s
    while has_pool_service(directory, device):
        try:
            path = names.kv_socket_path(directory, device)
            BlockingClient(path, msg.CATALOGUE, ACCEPT_TIMEOUT_S).close()
        except UnreachableError:
            if time.monotonic() + BACKOFF_S > end:
                return False
            time.sleep(BACKOFF_S)
        else:
            return True
    return False


def borrow_pool(
    directory: str,
    device: str,
    claim: KvClaim,
    deadline_s: float,
    *,
    away_s: float = math.inf,
    on_wait: OnText = lambda reason: None,
    on_change: OnText = lambda sentence: None,
    memory: DeviceMemory | None = None,
) -> KvLease:
    """Borrow the KV pool of `device`, waiting at most `deadline_s`, also for a service that is
    restarting.

    Args:
        away_s: how long to wait, of that, for a service that does not answer.
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
    away_end = math.inf
    while True:
        try:
            return _borrow(directory, device, claim, end, on_wait, on_change, memory)
        except UnderstudyError as error:
            now = time.monotonic()
            is_away = isinstance(error, UnreachableError)
            away_end = min(away_end, now + away_s) if is_away else math.inf
            if not (is_away or error.code in PASSING) or now + BACKOFF_S > min(end, away_end):
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
            raise unexpected(f"the pool's file {granted.pool_file!r}", "borrow")
        file = os.path.join(directory, granted.pool_file)
        flock = stack.enter_context(_join(file, placeholder))
        make_fd_room(msg.SLABS_MAX + 1)
        reply = client.request(msg.TakeMsg(), timeout_s=GRACE_S)
        fds, taken = reply.fds, reply.message
        try:
            if not isinstance(taken, msg.PoolTakenMsg) or len(fds) != len(taken.slab_sizes) + 1:
                raise unexpected(f"{taken.TYPE} and {len(fds)} descriptors", "take")
            lease = KvLease(path, device, client, claim, taken, flock, fds, memory, on_change)
        except BaseException:
            close_all(fds)
            raise
        stack.pop_all()
        return lease


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
        raise unexpected(reply.message.TYPE, "borrow")
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
