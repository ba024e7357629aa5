"""How a session with a device's server is opened and regained.

`Attachment` is one process's hold on one epoch: the flock on its file, the slabs, and the range of
addresses in which these lie side by side. It owns the order: every descriptor of the answer, the
flock, then the mappings; at the end unmap, release the slabs, the flock last. If the driver fails
at that, the flock stays until the process ends, because the memory may stay mapped until then.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gms import epoch_file, names
from gms import messages as msg
from gms.vmm.host import HostMemory
from gms.vmm.interface import Allocation, DeviceMemory, Reservation, release_all
from plumbing.errors import InvariantError, RemoteError, UnreachableError, WaitTimeoutError
from plumbing.pod.models import device_of
from plumbing.pod.paths import gms_socket
from plumbing.service import procfs
from plumbing.service.process import make_fd_room
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message

# The server ends an overdue wait by itself; this is how much longer we wait for that answer.
GRACE_S = 5.0
CONNECT_TIMEOUT_S = 5.0  # a server that does not accept for so long hangs

OnWait = Callable[[str], None]


class Attachment:
    """A hold on an epoch of `device`, or the way to one: nothing is held before `attach`."""

    def __init__(self, directory: str, device: str, memory: DeviceMemory) -> None:
        self.directory, self.device, self.memory = directory, device, memory
        self.path = gms_socket(directory, device)
        self.slabs: list[Allocation] = []
        self._range: Reservation | None = None
        self._flock: OwnedFd | None = None

    @property
    def range(self) -> Reservation:
        """The addresses of the epoch."""
        assert self._range is not None, "this attachment has no addresses"
        return self._range

    def connect(self) -> BlockingClient:
        """A new connection to the device's server."""
        return BlockingClient(self.path, msg.CATALOGUE, connect_timeout_s=CONNECT_TIMEOUT_S)

    def attach(
        self,
        request: msg.AttachMsg,
        *,
        on_wait: OnWait = lambda reason: None,
        check: Callable[[Message], None] = lambda grant: None,
    ) -> tuple[BlockingClient, msg.WritingMsg | msg.EpochAttachedMsg]:
        """Wait for the grant, `check` it, and hold the epoch; nothing may be mapped before.

        Raises:
            What `open_session` raises, and `check`.
        """
        with contextlib.ExitStack() as stack:
            low = stack.enter_context(placeholder())
            client = stack.enter_context(self.connect())
            try:
                reply = wait_for_grant(client, request, on_wait, "gms.wait_timeout", "the weights")
            except RemoteError as error:
                if error.code != "gms.server_exhausted":
                    raise
                # It serves again once it has room: like a server that is away.
                raise UnreachableError(error.code, error.message, **error.details) from error
            fds, grant = list(reply.fds), reply.message
            stack.callback(self.unmap)
            try:
                check(grant)
                match grant:
                    case msg.EpochAttachedMsg(epoch=epoch, slab_sizes=sizes):
                        if len(fds) != len(sizes):
                            raise msg.unexpected_answer(f"{len(fds)} descriptors", "attach")
                        reserved_bytes = sum(sizes)
                    case msg.WritingMsg(epoch=epoch):  # more than is free may become free meanwhile
                        sizes, reserved_bytes = (), grant.capacity_bytes
                    case _:
                        raise msg.unexpected_answer(grant.TYPE, "attach")
                at = self.directory, self.device, names.WEIGHTS, epoch
                self._flock = join_file(*at, low)
                self._reserve(reserved_bytes)
                self.adopt(fds, sizes, writable=False)
            except BaseException:
                close_all(fds)
                raise
            stack.pop_all()
            return client, grant

    def _reserve(self, size_bytes: int) -> None:
        """Reserve addresses for `size_bytes`, if there are none yet; they cost no memory."""
        if self._range is None:
            granularity = self.memory.granularity_bytes
            # An epoch may be empty, a range of addresses may not.
            whole = max(1, -(-size_bytes // granularity)) * granularity
            self._range = self.memory.reserve(whole)

    def adopt(self, fds: Sequence[OwnedFd], sizes: Sequence[int], *, writable: bool) -> None:
        """Map more slabs after the mapped ones; takes `fds`."""
        fresh: list[Allocation] = []
        rest = deque(fds)
        try:
            for size_bytes in sizes:
                slab = self.memory.adopt(rest.popleft(), size_bytes)
                fresh.append(slab)
            self.range.map(self.range.mapped_bytes, fresh, writable=writable)
        except BaseException:
            close_all(rest)
            release_all(fresh)
            raise
        self.slabs += fresh

    def unmap(self) -> None:
        """Release the memory and then the epoch, keeping the addresses."""
        slabs, self.slabs = self.slabs, []
        flock, self._flock = self._flock, None
        try:
            with contextlib.ExitStack() as stack:
                stack.callback(release_all, slabs)
                if self._range is not None:
                    self._range.unmap()
        except BaseException:
            if flock is not None:
                flock.detach()
            raise
        if flock is not None:
            flock.close()

    def close(self) -> None:
        """Release everything; safe to call again."""
        with contextlib.ExitStack() as stack:
            if self._range is not None:
                stack.callback(self._range.free)
            self.unmap()


# Short: a server that does not accept yet is tried again, and the thread may have to end meanwhile.
ACCEPT_TIMEOUT_S = 0.5


class RegionSession:
    """A connection by which this process holds a region, or writes one: `client`, whose descriptor
    is readable once the service is gone. `rejoin` hands the region to the next one."""

    service = "memory service"  # in sentences
    kept = "the weights stay mapped"  # without it

    def __init__(self, path: str, client: BlockingClient) -> None:
        self._path, self.client = path, client
        self._coming: BlockingClient | None = None  # a connection that is not a session yet
        self.is_closed = False
        self.is_author = False  # this process has just written the epoch that it reads

    def digest(self, may_go_on: Callable[[], bool]) -> str | None:
        """What an author computes of what it reads; None once `may_go_on` is false."""
        raise InvariantError("this session has not written weights")

    def held(self) -> tuple[msg.HandBackMsg, Sequence[int]]:
        """What `rejoin` hands back: the message, and descriptors."""
        raise InvariantError("this session has nothing to hand back")

    def rejoin(self, deadline_s: float, may_go_on: Callable[[], bool] = lambda: True) -> None:
        """Hand the region back to a restarted service, with copies of its descriptors. The mapping
        stays as it is throughout.

        `interrupt`, from another thread, ends it once `may_go_on` is false.

        Raises:
            UnreachableError, WaitTimeoutError, RemoteError, ProtocolError: try again later, but
                for RemoteError `gms.not_committed`, this epoch was never published, and
                `gms.kv_pool_gone`.
            UnderstudyError: `gms.not_mapped`, there is nothing to hand back.
        """
        message, fds = self.held()
        self.client.close()
        accept_s = min(deadline_s, ACCEPT_TIMEOUT_S)
        self._coming = client = BlockingClient(self._path, msg.CATALOGUE, accept_s)
        try:
            if not may_go_on():  # asked when `interrupt` knows the client: one of the two sees it
                raise _closed()
            answer = client.request(message, _duplicates(fds), deadline_s).message
            if not isinstance(answer, msg.KeptMsg) or answer.region != message.region:
                raise msg.unexpected_answer(answer.TYPE, "hand_back")
            self.client = client
            if self.is_closed:  # asked when `close` sees the new client: one of the two closes it
                raise _closed()
        except BaseException:
            client.close()
            raise
        finally:
            self._coming = None

    def interrupt(self) -> None:
        """End a `rejoin` that is under way on another thread; a session that is there stays."""
        client = self._coming
        if client is not None:
            client.interrupt()

    def close(self) -> None:
        """Let the memory go and disconnect; safe to call again."""
        self.client.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _closed() -> UnreachableError:
    return UnreachableError("wire.closed", "this session was closed while it was rejoining")


def _duplicates(fds: Sequence[int]) -> list[OwnedFd]:
    """A copy of each, for a frame."""
    make_fd_room(len(fds))
    with contextlib.ExitStack() as stack:
        copies = [stack.enter_context(OwnedFd(os.dup(fd))) for fd in fds]
        stack.pop_all()
        return copies


def placeholder() -> OwnedFd:
    """A descriptor that is opened first, for its low number; see `epoch_file.join`."""
    return OwnedFd(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def join_file(directory: str, device: str, tag: str, region: str, placeholder: OwnedFd) -> OwnedFd:
    """The shared flock on the region's file; takes `placeholder`.

    Raises:
        ProtocolError: `gms.unexpected_answer`, the server has sent an id that is none.
        UnderstudyError: `gms.stale_epoch`.
    """
    if not names.is_region_id(region):
        raise msg.unexpected_answer(f"region {region[:64]!r}", "the request for memory")
    return epoch_file.join(names.region_path(directory, device, tag, region), placeholder)


def wait_for_grant(
    client: BlockingClient,
    request: msg.AttachMsg | msg.BorrowPoolMsg,
    on_wait: OnWait,
    code: str,
    what: str,
) -> Reply:
    """Send `request` and wait for its last answer, passing reasons on to `on_wait`.

    Raises:
        WaitTimeoutError: `code`: waited in vain for `what`.
    """
    wait_s = request.wait_ms / 1000
    end = time.monotonic() + wait_s + GRACE_S
    reply = client.request(request, timeout_s=wait_s + GRACE_S)
    while isinstance(reply.message, msg.WaitingMsg):
        on_wait(reply.message.message)
        rest_s = end - time.monotonic()
        if rest_s <= 0:
            text = f"waited {wait_s:g} s for {what}: {reply.message.message}"
            raise WaitTimeoutError(code, text, reason=reply.message.reason)
        reply = client.receive(rest_s)
    return reply


def memory_for(device: str) -> DeviceMemory:
    """The memory of `device`: a GPU's for `GPU-…` and `MIG-…`, the host's for `HOST-…`; of a place,
    that of its device.

    Raises:
        UsageError: `gms.no_cuda`, `gms.device_not_visible`, …: never a fallback to the other kind.
        UnderstudyError: `gms.driver_failed`.
    """
    if not device.startswith(("GPU-", "MIG-")):
        return HostMemory()
    from gms.vmm.cuda import CudaMemory  # which loads cuda-python

    return CudaMemory(device_of(device))


MPS_PIPE = "CUDA_MPS_PIPE_DIRECTORY"
MPS_DAEMON = "nvidia-cuda-mps"  # prefix of its processes' names


def look_for_mps(environ: Mapping[str, str]) -> str | None:
    """Evidence of NVIDIA's Multi-Process Service: its pipe directory is set, or its daemon runs. A
    context then belongs to the service: a fault in one client ends all of them, and what a killed
    client had launched may go on writing."""
    pipes = environ.get(MPS_PIPE)
    if pipes and os.path.isdir(pipes):
        return f"{MPS_PIPE} is {pipes}"
    daemons = [pid for pid in procfs.pids() if procfs.name(pid).startswith(MPS_DAEMON)]
    return f"pid {daemons[0]} is {procfs.name(daemons[0])}" if daemons else None
