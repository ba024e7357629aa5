"""How a session with a device's server is opened and regained, and what writers and readers have in
common.

`Attachment` is one process's hold on one epoch: the flock on its file, the slabs, their range of
addresses. It owns the order: the flock before the first mapping; at the end unmap, release the
slabs, the flock last. If the driver fails at that, the flock stays until the process ends, because
the memory may stay mapped until then. It knows neither messages nor what the bytes mean.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import structs

from gms import epoch_file, names
from gms import messages as msg
from gms.manifest import TensorRecord
from gms.questions import unexpected_answer
from gms.vmm.interface import Allocation, DeviceMemory, Reservation, release_all
from plumbing.errors import (
    InvariantError,
    RemoteError,
    UnderstudyError,
    UnreachableError,
    WaitTimeoutError,
)
from plumbing.service.process import make_fd_room
from plumbing.wire import sockets
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.limits import FDS_PER_FRAME_MAX
from plumbing.wire.messages import Message

# The server ends an overdue wait by itself; this is how much longer we wait for that answer.
GRACE_S = 5.0
CONNECT_TIMEOUT_S = 5.0  # a server that does not accept for so long hangs

OnWait = Callable[[str], None]


class Opening:
    """The way to one device's server: for a new session, and for a reader that attaches again."""

    def __init__(self, directory: str, device: str, memory: DeviceMemory) -> None:
        self.memory, self.device = memory, device
        self.directory = directory
        self._path = names.socket_path(directory, device)

    def connect(self, deadline_s: float = CONNECT_TIMEOUT_S) -> BlockingClient:
        """A new connection to the device's server."""
        return BlockingClient(self._path, msg.CATALOGUE, connect_timeout_s=deadline_s)

    def attach(
        self,
        request: msg.AttachMsg,
        wait_s: float,
        attachment: Attachment,
        *,
        on_wait: OnWait = lambda reason: None,
        layout_hash: str | None = None,
        copy: str | None = None,
    ) -> tuple[BlockingClient, msg.WritingMsg | msg.EpochAttachedMsg]:
        """Wait for the grant and let `attachment`, which has nothing mapped, hold the epoch.

        Args:
            layout_hash: map a committed epoch of this layout, or fail.
            copy: or write, if this host copy stands for the weights.

        Raises:
            What `open_session` raises; UnderstudyError `gms.stale_layout`.
        """
        with contextlib.ExitStack() as stack:
            low = stack.enter_context(placeholder("attach to the memory service"))
            client = stack.enter_context(self.connect())
            try:
                reply = wait_for_grant(
                    client, request, wait_s, on_wait, "gms.wait_timeout", "the weights"
                )
            except RemoteError as error:
                if error.code != "gms.server_exhausted":
                    raise
                # It serves again once it has room: like a server that is away.
                raise UnreachableError(error.code, error.message, **error.details) from error
            grant = reply.message
            stack.callback(attachment.unmap)
            if isinstance(grant, msg.EpochAttachedMsg) and layout_hash in (None, grant.layout_hash):
                self._take_slabs(client, reply.fds, grant, attachment, low)
            elif isinstance(grant, msg.WritingMsg) and (
                layout_hash is None or (copy is not None and grant.copy == copy)
            ):
                attachment.hold(self._join(grant.epoch_file, low))
                # Addresses for all that it could ever write: more may become free while it loads.
                attachment.reserve(grant.capacity_bytes)
            else:
                close_all(reply.fds)
                if isinstance(grant, msg.WritingMsg) and copy is not None:
                    raise UnderstudyError(
                        "gms.stale_copy",
                        f"the host copy {copy} no longer matches the weights of this device; "
                        "restart this engine, which loads them again",
                    )
                if not isinstance(grant, msg.EpochAttachedMsg):
                    raise unexpected_answer(grant.TYPE, "attach")
                raise UnderstudyError(
                    "gms.stale_layout",
                    f"epoch {grant.epoch} has a different layout from the one that was mapped "
                    "before; restart this engine",
                    epoch=grant.epoch,
                )
            stack.pop_all()
            return client, grant

    def _take_slabs(
        self,
        client: BlockingClient,
        first: Sequence[OwnedFd],
        grant: msg.EpochAttachedMsg,
        attachment: Attachment,
        low: OwnedFd,
    ) -> None:
        """Every descriptor of the answer, then the flock, then the mappings: in this order."""
        fds = list(first)
        count = len(grant.slab_sizes)
        try:
            if count > len(fds):
                make_fd_room(count - len(fds))
            while len(fds) < count:
                more = client.receive(GRACE_S)
                fds += more.fds
                if not isinstance(more.message, msg.SlabsMsg) or more.message.epoch != grant.epoch:
                    raise unexpected_answer(more.message.TYPE, "attach")
            if len(fds) != count:
                raise unexpected_answer(f"{len(fds)} descriptors", "attach")
            attachment.hold(self._join(grant.epoch_file, low))
            attachment.reserve(sum(grant.slab_sizes))
        except BaseException:
            close_all(fds)
            raise
        attachment.adopt(fds, grant.slab_sizes, writable=False)

    def _join(self, name: str, low: OwnedFd) -> OwnedFd:
        if not names.is_epoch_file(name):
            raise unexpected_answer(f"the epoch file {name!r}", "attach")
        return join_file(os.path.join(self.directory, name), low)


class WeightsSession:
    """What readers and writers share: a connection, mapped slabs, and their end."""

    def __init__(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: msg.AttachMsg,
    ) -> None:
        self._opening = opening
        self._client = client
        self._attachment = attachment
        self._request = request
        self.is_closed = False

    @property
    def opening(self) -> Opening:
        """The way to the server of this session."""
        return self._opening

    @property
    def request(self) -> msg.AttachMsg:
        """What this session asked for."""
        return self._request

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The tensors that the epoch has so far, by name."""
        raise NotImplementedError  # a reader has all of them, a writer what it has added

    def address(self, name: str) -> int:
        """Where the first byte of tensor `name` is, for good, also while it is not mapped."""
        return self._attachment.range.address + self.tensors[name].offset

    def view(self, name: str) -> memoryview:
        """The bytes of tensor `name`, in place: writable until the commit, then read-only.

        Raises:
            UnderstudyError: `gms.not_host_memory`.
        """
        record = self.tensors[name]
        return self._attachment.range.view(record.offset, record.nbytes)

    def fileno(self) -> int:
        """Lend the session's socket: readable means that the service is gone or has sent
        something."""
        return self._client.fileno()

    def close(self) -> None:
        """Unmap, release the epoch, disconnect, in this order; safe to call again."""
        if not self.is_closed:
            self.is_closed = True
            with contextlib.ExitStack() as stack:
                stack.callback(self._client.close)  # also where the driver fails to unmap
                self._attachment.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def placeholder(what: str) -> OwnedFd:
    """A descriptor that is opened first, for its low number; see `epoch_file.join`.

    Raises:
        UnreachableError: `wire.no_descriptors`.
    """
    try:
        return OwnedFd(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise sockets.no_descriptors(what, error) from error


def join_file(path: str, placeholder: OwnedFd) -> OwnedFd:
    """The shared flock on the file of an epoch or a KV pool; takes `placeholder`.

    Raises:
        UnreachableError: `wire.no_descriptors`; UnderstudyError: `gms.stale_epoch`.
    """
    try:
        return epoch_file.join(path, placeholder)
    except OSError as error:
        raise sockets.no_descriptors(f"hold the file {path}", error) from error


def duplicates(fds: Sequence[int]) -> list[OwnedFd]:
    """A copy of each, for a frame.

    Raises:
        UnreachableError: `wire.no_descriptors`.
    """
    make_fd_room(len(fds))
    with contextlib.ExitStack() as stack:
        try:
            copies = [stack.enter_context(OwnedFd(os.dup(fd))) for fd in fds]
        except OSError as error:
            raise sockets.no_descriptors(f"copy {len(fds)} descriptors", error) from error
        stack.pop_all()
        return copies


def hand_back(
    client: BlockingClient,
    message: msg.HandBackMsg,
    fds: Sequence[int],
    manifest: bytes,
    timeout_s: float,
) -> None:
    """Report a region to a service that has not lent it, with copies of its descriptors, in as many
    frames as it takes.

    Raises:
        UnreachableError, WaitTimeoutError, RemoteError, ProtocolError: it is not registered.
    """
    per, piece = FDS_PER_FRAME_MAX, msg.MANIFEST_PIECE_BYTES
    last = max(1, -(-len(fds) // per), -(-len(manifest) // piece)) - 1
    for n in range(last + 1):
        part = manifest[n * piece : (n + 1) * piece]
        frame: msg.HandBackMsg | msg.MoreMsg = msg.MoreMsg(part)
        if n == 0:
            frame = structs.replace(message, manifest=part, more=last)
        copies = duplicates(fds[n * per : (n + 1) * per])
        if n < last:
            client.notify(frame, copies)
            continue
        answer = client.request(frame, copies, timeout_s).message
        if not isinstance(answer, msg.KeptMsg) or answer.region != message.region:
            raise unexpected_answer(answer.TYPE, "hand_back")


def wait_for_grant(
    client: BlockingClient, request: Message, wait_s: float, on_wait: OnWait, code: str, what: str
) -> Reply:
    """Send `request` and wait for its last answer, passing reasons on to `on_wait`.

    Raises:
        WaitTimeoutError: `code`: waited in vain for `what`.
    """
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


class Attachment:
    """The flock, the slabs and the one range in which they lie side by side."""

    def __init__(self, memory: DeviceMemory) -> None:
        self.slabs: list[Allocation] = []
        self._memory = memory
        self._range: Reservation | None = None
        self._flock: OwnedFd | None = None

    @property
    def range(self) -> Reservation:
        """The addresses of the epoch."""
        if self._range is None:
            raise InvariantError("this attachment has no addresses")
        return self._range

    @property
    def size_bytes(self) -> int:
        """How much is mapped."""
        return sum(slab.size_bytes for slab in self.slabs)

    def hold(self, flock: OwnedFd) -> None:
        """Takes the descriptor with the shared flock."""
        self._flock = flock

    def reserve(self, size_bytes: int) -> None:
        """Reserve addresses for `size_bytes`, if there are none yet; they cost no memory."""
        if self._range is not None:
            return
        granularity = self._memory.granularity_bytes
        # An epoch may be empty, a range of addresses may not.
        self._range = self._memory.reserve(max(1, -(-size_bytes // granularity)) * granularity)

    def adopt(self, fds: Sequence[OwnedFd], sizes: Sequence[int], *, writable: bool) -> None:
        """Map more slabs after the mapped ones; takes `fds`."""
        fresh: list[Allocation] = []
        rest = deque(fds)
        try:
            for size_bytes in sizes:
                slab = self._memory.adopt(rest.popleft(), size_bytes)
                fresh.append(slab)
            self.range.map(self.size_bytes, fresh, writable=writable)
        except BaseException:
            close_all(rest)
            release_all(fresh)
            raise
        self.slabs += fresh

    def make_read_only(self) -> None:
        """Map every slab read-only over itself; this process cannot write any more."""
        self.range.make_read_only()

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
