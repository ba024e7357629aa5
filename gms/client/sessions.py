"""How a session with a device's server is opened, and what writers and readers have in common."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gms import epoch_file, names
from gms import messages as msg
from gms.client.attachment import Attachment
from gms.manifest import TensorRecord
from gms.vmm.interface import DeviceMemory
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
            # Opened first for its low number; see `epoch_file.join`.
            placeholder = stack.enter_context(_placeholder())
            client = stack.enter_context(self.connect())
            reply = _wait_for_grant(client, request, wait_s, on_wait)
            grant = reply.message
            stack.callback(attachment.unmap)
            if isinstance(grant, msg.EpochAttachedMsg) and layout_hash in (None, grant.layout_hash):
                self._take_slabs(client, reply.fds, grant, attachment, placeholder)
            elif isinstance(grant, msg.WritingMsg) and (
                layout_hash is None or (copy is not None and grant.copy == copy)
            ):
                attachment.hold(self._join(grant.epoch_file, placeholder))
                # Addresses for all that it could ever write: more may become free while it loads.
                attachment.reserve(grant.capacity_bytes)
            else:
                close_all(reply.fds)
                if isinstance(grant, msg.WritingMsg) and copy is not None:
                    raise UnderstudyError(
                        "gms.stale_copy",
                        f"the host copy {copy} does not stand for the weights of this device any "
                        "more; restart this engine, which loads them again",
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
        placeholder: OwnedFd,
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
            attachment.hold(self._join(grant.epoch_file, placeholder))
            attachment.reserve(sum(grant.slab_sizes))
        except BaseException:
            close_all(fds)
            raise
        attachment.adopt(fds, grant.slab_sizes, writable=False)

    def _join(self, name: str, placeholder: OwnedFd) -> OwnedFd:
        if not names.is_epoch_file(name):
            raise unexpected_answer(f"the epoch file {name!r}", "attach")
        try:
            return epoch_file.join(os.path.join(self.directory, name), placeholder)
        except OSError as error:
            raise sockets.no_descriptors(f"hold the epoch's file {name}", error) from error


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


def _placeholder() -> OwnedFd:
    try:
        return OwnedFd(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise sockets.no_descriptors("attach to the memory service", error) from error


def unexpected_answer(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")


def _wait_for_grant(
    client: BlockingClient, request: msg.AttachMsg, wait_s: float, on_wait: OnWait
) -> Reply:
    """Send `request` and wait for its last answer, passing reasons on to `on_wait`."""
    end = time.monotonic() + wait_s + GRACE_S
    try:
        reply = client.request(request, timeout_s=wait_s + GRACE_S)
        while isinstance(reply.message, msg.WaitingMsg):
            on_wait(reply.message.message)
            rest_s = end - time.monotonic()
            if rest_s <= 0:
                raise WaitTimeoutError(
                    "gms.wait_timeout",
                    f"waited {wait_s:g} s for the weights: {reply.message.message}",
                    reason=reply.message.reason,
                )
            reply = client.receive(rest_s)
    except RemoteError as error:
        if error.code != "gms.server_exhausted":
            raise
        # It serves again once it has room: like a server that is away, not like one that refuses.
        raise UnreachableError(error.code, error.message, **error.details) from error
    return reply
