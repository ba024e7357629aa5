"""The two kinds of session: a reader of a committed epoch, a writer of a staging one.

Made by `gms.client.open_session`, which says how they are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from gms.attachment import Attachment, Slab
from gms.core.manifest import TensorRecord, layout_hash
from gms.core.suballocator import NeedSlab, Suballocator
from gms.messages import Allocate, Allocated, Attach, Attached, Commit, Committed, Progress, Writing
from gms.vmm.interface import Memory
from understudy.errors import ProtocolError, UnderstudyError
from understudy.wire.blocking import BlockingClient
from understudy.wire.fds import close_all

# The longest that sealing and journalling may take: 2.3 ms per GiB, and a disk that is full for
# a while (the server tries again every second).
COMMIT_TIMEOUT_S = 120.0


class Opening(Protocol):
    """How a session came to be, for a reader that attaches again."""

    memory: Memory

    def run(self, request: Attach, wait_s: float) -> Reader | Writer: ...


class Session:
    """What readers and writers share: a connection, mapped slabs, and their end."""

    def __init__(
        self, opening: Opening, client: BlockingClient, attachment: Attachment, request: Attach
    ) -> None:
        self._opening = opening
        self._client = client
        self._attachment = attachment
        self._request = request
        self.is_closed = False

    def fileno(self) -> int:
        """Lend the session's socket: readable means that the service is gone or speaks."""
        return self._client.fileno()

    def close(self) -> None:
        """Unmap, let the epoch go, leave. In this order; again is harmless."""
        if not self.is_closed:
            self.is_closed = True
            self._attachment.close()
            self._client.close()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Reader(Session):
    """A committed epoch, mapped read-only at addresses that never change.

    `tensors` maps names to their records, `identity` is the epoch's, `manifest` its order.
    """

    def __init__(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: Attach,
        epoch: Attached,
    ) -> None:
        super().__init__(opening, client, attachment, request)
        self._take(epoch)

    def _take(self, epoch: Attached) -> None:
        self.epoch = epoch.epoch
        self.identity: dict[str, Any] = epoch.identity
        self.layout_hash = epoch.layout_hash
        self.slab_sizes = epoch.slab_sizes
        self.manifest = epoch.manifest
        self.tensors: dict[str, TensorRecord] = {r.name: r for r in epoch.manifest}

    @property
    def size_bytes(self) -> int:
        """What the epoch takes of the device, shared with every other reader."""
        return sum(self.slab_sizes)

    def address(self, name: str) -> int:
        """Where the first byte of tensor `name` is, also while it is not mapped."""
        record = self.tensors[name]
        return self._attachment.slabs[record.slab].address + record.offset

    def view(self, name: str) -> memoryview:
        """The bytes of tensor `name`, read-only, in place."""
        record = self.tensors[name]
        whole = self._attachment.slabs[record.slab].view()
        return whole[record.offset : record.offset + record.nbytes]

    def slab_fds(self) -> list[int]:
        """Lend the slabs' read-only descriptors, in order."""
        return [slab.fileno() for slab in self._attachment.slabs]

    def unmap(self) -> None:
        """Let go of the memory and the session; the addresses stay reserved for `remap`."""
        self._attachment.unmap()
        self._client.close()

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
        fresh = self._opening.run(request, deadline_s)
        assert isinstance(fresh, Reader)  # it asked for `ro`
        if fresh.layout_hash != self.layout_hash:
            fresh.close()
            raise UnderstudyError(
                "gms.stale_layout",
                f"epoch {fresh.epoch} has another layout than epoch {self.epoch}, which was mapped "
                "before; this engine must start anew",
            )
        self._attachment.remap_from(fresh._attachment)
        self._client = fresh._client
        self.epoch = fresh.epoch


class Writer(Session):
    """A staging epoch: place tensors, write them, commit. Closing it without loses it."""

    def __init__(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: Attach,
        grant: Writing,
    ) -> None:
        super().__init__(opening, client, attachment, request)
        self.epoch = grant.epoch
        self._grant = grant
        self._places = Suballocator(grant.granularity_bytes, grant.free_bytes)
        self._records: list[TensorRecord] = []

    def plan(self, total_bytes: int, tensor_bytes_max: int) -> None:
        """Say beforehand how much will be placed, and the largest tensor of it."""
        self._places.plan(total_bytes, tensor_bytes_max)

    def place(self, name: str, nbytes: int, shape: Sequence[int], dtype: str) -> memoryview:
        """Room for one C-contiguous tensor, zeroed and writable until `commit`.

        Raises:
            RemoteError: `gms.out_of_memory`, naming what holds the device. The session is over.
        """
        placement = self._places.place(nbytes)
        if isinstance(placement, NeedSlab):
            self._open_slab(placement.size_bytes)
            placement = self._places.place(nbytes)
            assert not isinstance(placement, NeedSlab)  # the slab is as large as was asked for
        self._records.append(
            TensorRecord(name, placement.slab, placement.offset, tuple(shape), dtype, nbytes)
        )
        whole = self._attachment.slabs[placement.slab].view()
        return whole[placement.offset : placement.offset + nbytes]

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Tell the service that the load goes on; without it, the writer's deadline runs."""
        self._client.notify(Progress(done_bytes, total_bytes))

    def commit(self, identity: Mapping[str, Any]) -> Reader:
        """Publish the epoch and go on as its reader: same session, same addresses, read-only.

        Raises:
            RemoteError: `gms.still_writable`, `gms.identity_changed`, …; the load is lost.
        """
        sizes, manifest = self._places.slab_sizes, tuple(self._records)
        computed = layout_hash(sizes, manifest)
        self._attachment.make_read_only()
        reply = self._client.request(
            Commit(dict(identity), manifest, computed), timeout_s=COMMIT_TIMEOUT_S
        )
        if not isinstance(reply.message, Committed) or reply.message.epoch != self.epoch:
            raise unexpected_answer(reply.message.TYPE, "commit")
        epoch = Attached(
            epoch=self.epoch,
            epoch_file=self._grant.epoch_file,
            identity=dict(identity),
            layout_hash=computed,
            slab_sizes=tuple(sizes),
            manifest=manifest,
        )
        self.is_closed = True  # the reader owns everything from here on
        return Reader(self._opening, self._client, self._attachment, self._request, epoch)

    def abort(self) -> None:
        """Give the staging epoch up."""
        self.close()

    def _open_slab(self, size_bytes: int) -> None:
        # As long as a commit: the server may first wait for memory that another gave up.
        reply = self._client.request(Allocate(size_bytes), timeout_s=COMMIT_TIMEOUT_S)
        message = reply.message
        if not isinstance(message, Allocated) or message.slab != len(self._attachment.slabs):
            close_all(reply.fds)
            raise unexpected_answer(message.TYPE, "allocate")
        self._attachment.slabs.append(
            Slab.writable(self._opening.memory, reply.fds[0], message.size_bytes)
        )
        self._places.slab_opened(message.size_bytes)


def unexpected_answer(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")
