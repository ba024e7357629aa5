"""A reader's session: a committed epoch, mapped read-only, for as long as the engine lives.

Owns the questions to the mapping and the messages to the service about it. Its connection may end
and be replaced (`gms.client.fd_keeper`); the mapping stays.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec import structs

from gms import messages as msg
from gms.client.session_thread import ACCEPT_TIMEOUT_S, RECEIVE_TIMEOUT_S
from gms.client.sessions import Attachment, Opening, WeightsSession, hand_back
from gms.manifest import TensorRecord, WeightsManifest
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.messages import Message

PIECE_BYTES = 8 << 20  # large: few thread switches; small: soon stopped

# How an epoch is written again where it was unmapped; returns the reader that its commit makes.
Rewrite = Callable[[Opening, BlockingClient, Attachment, msg.AttachMsg, msg.WritingMsg], "Reader"]


class Reader(WeightsSession):
    """A committed epoch, mapped read-only at addresses that never change.

    `tensors` maps names to their records, in the order in which they were placed; `identity` is
    the epoch's.
    """

    def __init__(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: msg.AttachMsg,
        epoch: msg.EpochAttachedMsg,
        *,
        is_author: bool = False,
    ) -> None:
        """`is_author`: this process has just written the epoch."""
        super().__init__(opening, client, attachment, request)
        self.is_author = is_author
        self.epoch = epoch.epoch
        self.identity: dict[str, Any] = epoch.identity
        self.layout_hash = epoch.layout_hash
        self.slab_sizes = epoch.slab_sizes
        self.manifest = WeightsManifest(epoch.manifest)
        self._coming: BlockingClient | None = None  # a connection that is not a session yet

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The epoch's tensors, by name."""
        return self.manifest

    @property
    def size_bytes(self) -> int:
        """What the epoch takes of the device, shared with every other reader."""
        return sum(self.slab_sizes)

    def read(self, name: str) -> bytes:
        """A copy of the bytes of tensor `name`, from device memory too."""
        record = self.manifest[name]
        return self._attachment.range.read(record.offset, record.nbytes)

    def slab_fds(self) -> list[int]:
        """Lend the slabs' read-only descriptors, in order."""
        return [slab.fileno() for slab in self._attachment.slabs]

    def digest(self, may_go_on: Callable[[], bool] = lambda: True) -> str | None:
        """SHA-256, in hex, of all slabs in order; None once `may_go_on` is false. Takes half a
        second per GiB, and other threads run meanwhile."""
        whole = hashlib.sha256()
        for first in range(0, self.size_bytes, PIECE_BYTES):
            if not may_go_on():
                return None
            size_bytes = min(PIECE_BYTES, self.size_bytes - first)
            # A copy: the memory may be unmapped while another thread runs.
            whole.update(self._attachment.range.read(first, size_bytes))
        return whole.hexdigest()

    def pieces(self) -> Iterator[tuple[int, bytes | memoryview]]:
        """All slabs in order, piece by piece, each with its offset: in place, so only while nobody
        unmaps them, or copied from a device's memory."""
        mapped = self._attachment.range
        look = mapped.view if self._opening.memory.kind == "host" else mapped.read
        for first in range(0, self.size_bytes, PIECE_BYTES):
            yield first, look(first, min(PIECE_BYTES, self.size_bytes - first))

    # ------------------------------------------------------------------ for the keeper

    @property
    def has_pending(self) -> bool:
        """Whether `receive` has a message although `fileno` is not readable: one that arrived
        together with the answer to `rejoin`."""
        return self._client.has_pending

    def receive(self) -> Reply:
        """The next message that the service sends of itself.

        Raises:
            UnreachableError, ProtocolError, RemoteError: this session is over.
        """
        return self._client.receive(timeout_s=RECEIVE_TIMEOUT_S)

    def send(self, message: Message, request_id: int = 0) -> None:
        """Send a message to the service; as the answer to its `request_id`, if not 0.

        Raises:
            UnreachableError: it is gone.
        """
        self._client.notify(message, request_id=request_id)

    def condemn(self, why: str, detail: str) -> None:
        """Report that the bytes cannot be trusted: `device_error` or `canary`.

        Raises:
            UnreachableError: the service is gone and has no report.
        """
        self.send(msg.CondemnMsg(why, detail[: msg.DETAIL_LENGTH_MAX]))

    def rejoin(
        self,
        deadline_s: float,
        *,
        was_committed: bool = True,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Hand the memory back to a restarted service, as this epoch's reader. The mapping stays as
        it is throughout.

        `interrupt`, from another thread, ends it once `may_go_on` is false.

        Raises:
            UnreachableError, WaitTimeoutError, RemoteError, ProtocolError: try again later, but
                for RemoteError `gms.not_committed`: this epoch was never published.
            UnderstudyError: `gms.not_mapped`, there is nothing to read.
        """
        if self.slab_sizes and not self._attachment.slabs:
            raise UnderstudyError(
                "gms.not_mapped", f"epoch {self.epoch} is unmapped here; `remap` attaches again"
            )
        self._client.close()
        self._coming = client = self._opening.connect(min(deadline_s, ACCEPT_TIMEOUT_S))
        held = msg.HeldEpoch(was_committed, self.identity, self.layout_hash)
        who = self._request.engine, self._request.incarnation
        sizes = tuple(self.slab_sizes)
        message = msg.HandBackMsg(*who, self.epoch, sizes, self._request.rank, epoch=held)
        try:
            if not may_go_on():  # asked when `interrupt` knows the client: one of the two sees it
                raise _closed()
            hand_back(client, message, self.slab_fds(), self.manifest.encoded, deadline_s)
            self._client = client
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

    # ------------------------------------------------------------------ away and back

    def unmap(self) -> None:
        """Release the memory and the session; the addresses stay reserved for `remap`. Close the
        keeper first: while it waits for a message it keeps the session open."""
        with contextlib.closing(self.leave()):
            pass

    def leave(self) -> BlockingClient:
        """Release the memory; the addresses stay. Gives the session's connection to the caller,
        who may tell the service that this reader has nothing mapped any more."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._client.close)
            self._attachment.unmap()
            stack.pop_all()
        return self._client

    def remap(
        self, deadline_s: float, copy: str | None = None, rewrite: Rewrite | None = None
    ) -> None:
        """Attach again and map the same layout at the same addresses.

        Args:
            copy, rewrite: the host copy from which the memory may be written again, and how.

        Raises:
            WaitTimeoutError, RemoteError, UnreachableError: not within `deadline_s`.
            UnderstudyError: `gms.stale_layout`, another layout is committed now; `gms.stale_copy`,
                the host copy stands for nothing. All are fatal to an engine that computes: its
                tensors point at addresses where nothing is mapped.
        """
        wait_ms = round(deadline_s * 1000)
        mode = "ro" if rewrite is None else "rw_or_ro"
        request = structs.replace(
            self._request, mode=mode, identity=self.identity, wait_ms=wait_ms, replace=False
        )
        client, grant = self._opening.attach(
            request, deadline_s, self._attachment, layout_hash=self.layout_hash, copy=copy
        )
        if isinstance(grant, msg.WritingMsg) and rewrite is not None:
            with contextlib.ExitStack() as stack:
                stack.callback(client.close)
                stack.callback(self._attachment.unmap)
                client = rewrite(self._opening, client, self._attachment, request, grant)._client
                stack.pop_all()
        self._client, self.epoch = client, grant.epoch


def _closed() -> UnreachableError:
    return UnreachableError("wire.closed", "this reader was closed while it was rejoining")
