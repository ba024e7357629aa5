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
import time
from collections.abc import Sequence

from msgspec.structs import replace

from gms import messages as msg
from gms import names
from gms.client.attach import (
    ACCEPT_TIMEOUT_S,
    GRACE_S,
    RegionSession,
    join_file,
    memory_for,
    placeholder,
    wait_for_grant,
)
from gms.client.keeper import ATTACHED, BACKOFF_S, REJOINING, Keeper, OnText
from gms.vmm.interface import Allocation, release_all
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.paths import gms_socket
from plumbing.service.process import make_fd_room
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd, close_all

# Who asks for how much. `token` and `era` are those of the grant of `active`; the sizes are the
# same in every process of an incarnation.
KvClaim = msg.BorrowPoolMsg

# The service may answer differently the next time: it has just given this pool up, or ran short.
PASSING = ("gms.stale_epoch", "gms.server_exhausted")


def borrow_pool(
    directory: str,
    device: str,
    claim: KvClaim,
    deadline_s: float,
    *,
    on_wait: OnText = lambda reason: None,
    on_change: OnText = lambda sentence: None,
) -> KvLease:
    """Borrow the KV pool of `device`, waiting at most `deadline_s`, also for a service that is
    restarting.

    Args:
        on_wait: called with a sentence whenever the reason for waiting changes.
        on_change: called on the lease's thread when the service is lost, or back.

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
            wait_s = max(0.0, end - time.monotonic())
            return KvLease(directory, device, claim, wait_s, on_wait, on_change)
        except UnderstudyError as error:
            is_passing = isinstance(error, UnreachableError) or error.code in PASSING
            if not is_passing or time.monotonic() + BACKOFF_S > end:
                raise
            time.sleep(BACKOFF_S)


class KvLease(RegionSession):
    """The device's KV pool, this incarnation's until `close`. It keeps itself through deaths of
    the service, on a thread."""

    service = "KV memory service"
    kept = "this engine keeps its KV memory and keeps serving"

    def __init__(
        self,
        directory: str,
        device: str,
        claim: KvClaim,
        wait_s: float,
        on_wait: OnText,
        on_change: OnText,
    ) -> None:
        """Borrow it, as `borrow_pool` does."""
        self.claim, self._device = claim, device
        path = gms_socket(directory, device)
        with contextlib.ExitStack() as stack:
            low = stack.enter_context(placeholder())
            client = stack.enter_context(BlockingClient(path, msg.CATALOGUE, ACCEPT_TIMEOUT_S))
            super().__init__(path, client)
            request = replace(claim, wait_ms=round(wait_s * 1000))
            reply = wait_for_grant(client, request, on_wait, "gms.kv_busy", "the KV memory")
            stack.callback(close_all, reply.fds)
            granted = reply.message
            assert isinstance(granted, msg.PoolGrantedMsg), granted
            self.pool = granted.pool
            self._flock = stack.enter_context(
                join_file(directory, device, names.KV, self.pool, low)
            )
            make_fd_room(msg.POOL_SLABS_MAX + 1)
            reply = client.request(msg.TakeMsg(), timeout_s=GRACE_S)
            stack.callback(close_all, reply.fds)
            fds, taken = reply.fds, reply.message
            assert isinstance(taken, msg.PoolTakenMsg), taken
            assert len(fds) == len(taken.slab_sizes) + 1, "a slab lacks its descriptor"
            self.slab_sizes, self.index_bytes = taken.slab_sizes, taken.index_bytes
            self.is_fresh = taken.is_fresh
            self.index = fds[0]  # lent to the caller, to map it writable
            self._fds: list[OwnedFd] = list(fds[1:])  # of the slabs, until they are adopted
            self._slabs: list[Allocation] = []
            self._mark, self._discarded = "", ""
            self._keeper = Keeper(self, on_change=on_change)
            self._keeper.start()
            stack.pop_all()

    @property
    def state(self) -> str:
        """`attached`, `rejoining` or `detached`."""
        return self._keeper.state

    @property
    def slabs(self) -> list[Allocation]:
        """The pool's memory, in order, to be mapped side by side; together at least the claim's
        size. The lease releases it.

        Raises:
            UnderstudyError: `gms.driver_failed`, …: this process cannot use the device.
        """
        if not self._slabs:
            memory = memory_for(self._device)
            adopted: list[Allocation] = []
            try:
                for fd, size_bytes in zip(self._fds, self.slab_sizes, strict=True):
                    adopted.append(memory.adopt(fd.duplicate(), size_bytes))
            except BaseException:
                release_all(adopted)
                raise
            self._slabs = adopted
        return self._slabs

    def mark(self, mark: str) -> None:
        """Report `BEGUN`, `ADOPTING` or `ADOPTED`; the last one is repeated to a new service."""
        self._mark = mark
        self._keeper.report("mark", msg.MarkMsg(mark))

    def discard(self, why: str) -> None:
        """The content must never be believed again: no engine borrows this pool after this one. Its
        memory is freed when this engine's processes are gone; this lease stays as it is."""
        self._discarded = why[: msg.DETAIL_LENGTH_MAX] or "no reason given"
        self._keeper.report("discard", msg.DiscardMsg(self._discarded))

    def held(self) -> tuple[msg.HandBackMsg, Sequence[int]]:
        claim, said = self.claim, (self._mark, self._discarded)
        pool = msg.HeldPool(claim.token, claim.era, claim.size_bytes, claim.index_bytes, *said)
        who = claim.engine, claim.incarnation
        message = msg.HandBackMsg(*who, self.pool, self.slab_sizes, pool=pool)
        return message, [fd.fileno() for fd in (self.index, *self._fds)]

    def close(self) -> None:
        """Give the pool back: the caller maps nothing of it any more. Safe to repeat."""
        if not self.is_closed:
            self.is_closed = True
            self._keeper.close()
            with contextlib.closing(self.client):
                self._let_go()

    def give_up(self, wait_s: float) -> None:
        """Have the pool's memory freed, because this engine rests: as `close`, and returns when the
        service says that the memory is free. The engine's other processes must let go of the pool
        meanwhile. It is also free if the service dies: then no process has it any more.

        Raises:
            RemoteError: `gms.kv_busy`, a process still maps it; `gms.kv_stale_token`, it is another
                engine's by now.
            WaitTimeoutError: the service does not answer.
            UnreachableError: a service that had died got the memory back from this very lease.
        """
        end = time.monotonic() + wait_s
        while self.state == REJOINING and time.monotonic() < end:
            time.sleep(BACKOFF_S)  # a service that is back may have the memory already
        was_held = self.state == ATTACHED
        self._keeper.close()
        self.is_closed = True
        with contextlib.closing(self.client):
            self._let_go()
            if was_held:
                with contextlib.suppress(UnreachableError):
                    left_s = max(0.0, end - time.monotonic())
                    request = msg.GiveUpMsg(round(left_s * 1000))
                    freed = self.client.request(request, timeout_s=left_s + GRACE_S).message
                    assert isinstance(freed, msg.PoolFreedMsg), freed
            elif self.state == ATTACHED:
                raise UnreachableError("wire.closed", "the memory service came back meanwhile")

    def _let_go(self) -> None:
        """Of memory, index and file, in this order."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._flock.close)  # after the memory
            stack.callback(close_all, [self.index, *self._fds])
            slabs, self._slabs = self._slabs, []
            release_all(slabs)
