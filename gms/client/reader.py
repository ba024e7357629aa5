"""A reader's session: a committed epoch, mapped read-only, for as long as the engine lives.

Owns what may be asked of the mapping and what is said to the service about it. Its connection may
end and come back (`gms.client.keeper`); the mapping stays.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

from gms.client import survivor
from gms.client.attachment import Attachment
from gms.client.sessions import Opening, Session
from gms.core.manifest import Manifest, TensorRecord
from gms.messages import DETAIL_LENGTH_MAX, Attach, Attached, Condemn, Rejoin
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.messages import Message

HEAR_TIMEOUT_S = 5.0  # for the rest of a frame that has begun
# A server that does not accept yet is tried again by whoever comes back, who may want to leave.
ACCEPT_TIMEOUT_S = 0.5
DIGEST_PIECE_BYTES = 8 << 20  # large enough that threads seldom change places, small to stop at


class Reader(Session):
    """A committed epoch, mapped read-only at addresses that never change.

    `tensors` maps names to their records, in the order in which they were placed; `identity` is
    the epoch's.
    """

    def __init__(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: Attach,
        epoch: Attached,
        *,
        is_author: bool = False,
    ) -> None:
        """`is_author`: it was the writer of this epoch a moment ago."""
        super().__init__(opening, client, attachment, request)
        self.is_author = is_author
        self.epoch = epoch.epoch
        self.identity: dict[str, Any] = epoch.identity
        self.layout_hash = epoch.layout_hash
        self.slab_sizes = epoch.slab_sizes
        self.manifest = Manifest(epoch.manifest)
        self._coming: BlockingClient | None = None  # a connection that is no session yet

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The epoch's tensors, by name."""
        return self.manifest

    @property
    def size_bytes(self) -> int:
        """What the epoch takes of the device, shared with every other reader."""
        return sum(self.slab_sizes)

    def address(self, name: str) -> int:
        """Where the first byte of tensor `name` is, also while it is not mapped."""
        return self._attachment.range.address + self.manifest[name].offset

    def view(self, name: str) -> memoryview:
        """The bytes of tensor `name`, read-only, in place.

        Raises:
            UnderstudyError: `gms.not_host_memory`.
        """
        record = self.manifest[name]
        return self._attachment.range.view(record.offset, record.nbytes)

    def read(self, name: str) -> bytes:
        """A copy of the bytes of tensor `name`, from device memory too."""
        record = self.manifest[name]
        return self._attachment.range.read(record.offset, record.nbytes)

    def slab_fds(self) -> list[int]:
        """Lend the slabs' read-only descriptors, in order."""
        return [slab.fileno() for slab in self._attachment.slabs]

    def digest(self, may_go_on: Callable[[], bool] = lambda: True) -> str | None:
        """SHA-256, in hex, of all slabs in order; None once `may_go_on` says no. Takes half a
        second per GiB, and other threads run meanwhile."""
        whole = hashlib.sha256()
        for first in range(0, self.size_bytes, DIGEST_PIECE_BYTES):
            if not may_go_on():
                return None
            size_bytes = min(DIGEST_PIECE_BYTES, self.size_bytes - first)
            whole.update(self._attachment.range.read(first, size_bytes))
        return whole.hexdigest()

    # ------------------------------------------------------------------ for the keeper

    @property
    def has_heard(self) -> bool:
        """Whether `hear` has something to give although `fileno` is not readable: what the service
        said together with the answer to `rejoin`."""
        return self._client.has_pending

    def hear(self) -> Reply:
        """What the service says unasked.

        Raises:
            UnreachableError, ProtocolError, RemoteError: this session is over.
        """
        return self._client.receive(timeout_s=HEAR_TIMEOUT_S)

    def tell(self, message: Message, request_id: int = 0) -> None:
        """Say something to the service; as the answer to its `request_id`, if not 0.

        Raises:
            UnreachableError: it is gone.
        """
        self._client.notify(message, request_id=request_id)

    def condemn(self, why: str, detail: str) -> None:
        """Tell the service that the bytes cannot be trusted: `device_error` or `canary`.

        Raises:
            UnreachableError: it is gone; nobody was told.
        """
        self.tell(Condemn(why, detail[:DETAIL_LENGTH_MAX]))

    def rejoin(
        self,
        deadline_s: float,
        *,
        was_committed: bool = True,
        may_go_on: Callable[[], bool] = lambda: True,
    ) -> None:
        """Be this epoch's reader at a service that has been restarted, and hand the memory back to
        it if it asks. The mapping stays as it is throughout.

        `interrupt`, from another thread, ends it once `may_go_on` says no.

        Raises:
            UnreachableError, WaitTimeoutError, RemoteError, ProtocolError: try again later, but
                for RemoteError `gms.not_committed`: this epoch was never published.
            UnderstudyError: `gms.not_mapped`, there is nothing to be the reader of.
        """
        if self.slab_sizes and not self._attachment.slabs:
            raise UnderstudyError(
                "gms.not_mapped", f"epoch {self.epoch} is unmapped here; `remap` attaches again"
            )
        self._client.close()
        self._coming = client = self._opening.connect(min(deadline_s, ACCEPT_TIMEOUT_S))
        request = Rejoin(
            engine=self._request.engine,
            incarnation=self._request.incarnation,
            epoch=self.epoch,
            slab_sizes=self.slab_sizes,
            was_committed=was_committed,
            rank=self._request.rank,
        )
        try:
            if not may_go_on():  # asked when `interrupt` knows the client: one of the two sees it
                raise _left()
            survivor.rejoin(
                client,
                request,
                identity=self.identity,
                manifest=self.manifest.encoded,
                layout_hash=self.layout_hash,
                slab_fds=self.slab_fds(),
                timeout_s=deadline_s,
            )
            self._client = client
            if self.is_closed:  # asked when `close` sees the new client: one of the two closes it
                raise _left()
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
        """Let go of the memory and the session; the addresses stay reserved for `remap`. Close its
        keeper first: one that waits for the service to speak keeps the session open."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._client.close)
            self._attachment.unmap()

    def remap(self, deadline_s: float) -> None:
        """Attach again and map the same layout at the same addresses.

        Raises:
            WaitTimeoutError, RemoteError, UnreachableError: not within `deadline_s`.
            UnderstudyError: `gms.stale_layout`, something else is committed now. All are fatal to
                the engine: its tensors point at addresses where nothing is mapped.
        """
        request = Attach(
            engine=self._request.engine,
            incarnation=self._request.incarnation,
            mode="ro",
            identity=self.identity,
            rank=self._request.rank,
            wait_ms=round(deadline_s * 1000),
        )
        self._client, epoch = self._opening.reattach(
            request, deadline_s, self._attachment, self.layout_hash
        )
        self.epoch = epoch.epoch


def _left() -> UnreachableError:
    return UnreachableError("wire.closed", "this reader left while it was coming back")
