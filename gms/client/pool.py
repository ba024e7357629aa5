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
"""

from __future__ import annotations

import contextlib
import math
import os
import time

from gms import epoch_file, names
from gms import kv_messages as msg
from gms.client.lease import ACCEPT_TIMEOUT_S, KvClaim, KvLease, OnText, unexpected
from gms.client.rejoining import BACKOFF_S
from gms.vmm.interface import DeviceMemory
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.service.process import make_fd_room
from plumbing.wire import sockets
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.fds import OwnedFd, close_all

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
