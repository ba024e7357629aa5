"""A reader's session: a committed epoch, mapped read-only, for as long as the engine lives.

Owns the questions to the mapping and the messages to the service about it. Its connection may end
and be replaced (`gms.client.fd_keeper`); the mapping stays.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import structs

from gms import messages as msg
from gms.client.sessions import Attachment, Opening, WeightsSession
from gms.manifest import TensorRecord, WeightsManifest
from plumbing.errors import UnderstudyError
from plumbing.wire.blocking import BlockingClient

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
        look = mapped.view if self.opening.memory.kind == "host" else mapped.read
        for first in range(0, self.size_bytes, PIECE_BYTES):
            yield first, look(first, min(PIECE_BYTES, self.size_bytes - first))

    # ------------------------------------------------------------------ for the service

    def held(self) -> tuple[msg.HandBackMsg, Sequence[int], bytes]:
        """
        Raises:
            UnderstudyError: `gms.not_mapped`.
        """
        if self.slab_sizes and not self._attachment.slabs:
            raise UnderstudyError(
                "gms.not_mapped", f"epoch {self.epoch} is unmapped here; `remap` attaches again"
            )
        epoch = msg.HeldEpoch(True, self.identity, self.layout_hash)
        who = self.request.engine, self.request.incarnation
        sizes, rank = tuple(self.slab_sizes), self.request.rank
        message = msg.HandBackMsg(*who, self.epoch, sizes, rank, epoch=epoch)
        return message, self.slab_fds(), self.manifest.encoded

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
            self.request, mode=mode, identity=self.identity, wait_ms=wait_ms, replace=False
        )
        client, grant = self.opening.attach(
            request, self._attachment, layout_hash=self.layout_hash, copy=copy
        )
        if isinstance(grant, msg.WritingMsg) and rewrite is not None:
            with contextlib.ExitStack() as stack:
                stack.callback(client.close)
                stack.callback(self._attachment.unmap)
                client = rewrite(self.opening, client, self._attachment, request, grant)._client
                stack.pop_all()
        self._client, self.epoch = client, grant.epoch
