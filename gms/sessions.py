"""The two kinds of session: a reader of a committed epoch, a writer of a staging one.

Made by `gms.client.open_session`, which says how they are used.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from gms import survivor
from gms.attachment import Attachment
from gms.core.manifest import Manifest, TensorRecord, encode, layout_hash
from gms.core.suballocator import NeedSlab, Suballocator
from gms.messages import (
    DETAIL_LENGTH_MAX,
    Allocate,
    Allocated,
    Attach,
    Attached,
    Commit,
    Committed,
    Condemn,
    Progress,
    Rejoin,
    Waiting,
    Writing,
)
from gms.vmm.interface import Memory
from understudy.errors import InvariantError, ProtocolError, UnderstudyError, UnreachableError
from understudy.wire.blocking import BlockingClient, Reply
from understudy.wire.fds import close_all
from understudy.wire.messages import Message

# The longest that sealing and journalling may take: 2.3 ms per GiB, and a disk that is full for
# a while (the server tries again every second).
COMMIT_TIMEOUT_S = 120.0
DOUBT_POLL_S = 0.05  # a server is restarted in half a second

HEAR_TIMEOUT_S = 5.0  # for the rest of a frame that has begun
DIGEST_PIECE_BYTES = 8 << 20  # large enough that threads seldom change places, small to stop at


class Opening(Protocol):
    """How a session came to be, for a reader that attaches again."""

    memory: Memory

    def connect(self, deadline_s: float) -> BlockingClient: ...

    def reattach(
        self, request: Attach, wait_s: float, attachment: Attachment, layout_hash: str
    ) -> tuple[BlockingClient, Attached]: ...


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

    def rejoin(self, deadline_s: float, *, was_committed: bool = True) -> None:
        """Be this epoch's reader at a service that has been restarted, and hand the memory back to
        it if it asks. The mapping stays as it is throughout.

        Raises:
            UnreachableError, WaitTimeoutError, RemoteError, ProtocolError: try again later, but
                for RemoteError `gms.not_committed`: this epoch was never published.
        """
        self._client.close()
        client = self._opening.connect(deadline_s)
        request = Rejoin(
            engine=self._request.engine,
            incarnation=self._request.incarnation,
            epoch=self.epoch,
            slab_sizes=self.slab_sizes,
            was_committed=was_committed,
            rank=self._request.rank,
        )
        try:
            survivor.rejoin(
                client,
                request,
                identity=self.identity,
                manifest=self.manifest.encoded,
                layout_hash=self.layout_hash,
                slab_fds=self.slab_fds(),
                timeout_s=deadline_s,
            )
        except BaseException:
            client.close()
            raise
        self._client = client

    # ------------------------------------------------------------------ away and back

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
        self._client, epoch = self._opening.reattach(
            request, deadline_s, self._attachment, self.layout_hash
        )
        self.epoch = epoch.epoch


class Writer(Session):
    """A staging epoch: place tensors, write them, commit. Closing it without loses it."""

    def __init__(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: Attach,
        grant: Writing,
        on_wait: Callable[[str], None] = lambda reason: None,
    ) -> None:
        """`on_wait` is called with a sentence while a slab waits for memory."""
        super().__init__(opening, client, attachment, request)
        self.epoch = grant.epoch
        self._grant = grant
        self._on_wait = on_wait
        self._places = Suballocator(
            grant.granularity_bytes, grant.free_bytes, opening.memory.allocation_bytes_max
        )
        self._records: dict[str, TensorRecord] = {}

    def plan(self, total_bytes: int, tensor_bytes_max: int, slab_bytes: int | None = None) -> None:
        """Say beforehand how much will be placed, and the largest tensor of it.

        Args:
            slab_bytes: the size of slabs, instead of what follows from the other two.
        """
        self._places.plan(total_bytes, tensor_bytes_max, slab_bytes)

    def place(self, name: str, nbytes: int, shape: Sequence[int], dtype: str) -> int:
        """The address of room for one C-contiguous tensor, writable until `commit`.

        Raises:
            RemoteError: `gms.out_of_memory`, naming what holds the device. The session is over.
        """
        if name in self._records:
            raise InvariantError(f"tensor {name!r} was placed before")
        offset = self._places.place(nbytes)
        while isinstance(offset, NeedSlab):  # several times, for a tensor that spans slabs
            self._open_slab(offset.size_bytes)
            offset = self._places.place(nbytes)
        self._records[name] = TensorRecord(name, offset, nbytes, tuple(shape), dtype)
        return self._attachment.range.address + offset

    def view(self, name: str) -> memoryview:
        """The bytes of tensor `name`, writable in place until `commit`.

        Raises:
            UnderstudyError: `gms.not_host_memory`.
        """
        record = self._records[name]
        return self._attachment.range.view(record.offset, record.nbytes)

    def write(self, name: str, data: bytes | memoryview, at: int = 0) -> None:
        """Copy `data` to byte `at` of tensor `name`; into device memory too."""
        record = self._records[name]
        size_bytes = memoryview(data).nbytes
        if not 0 <= at <= record.nbytes - size_bytes:
            raise InvariantError(
                f"bytes {at} to {at + size_bytes} are not inside tensor {name!r} of "
                f"{record.nbytes} bytes"
            )
        self._attachment.range.write(record.offset + at, data)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Tell the service that the load goes on; without it, the writer's deadline runs."""
        self._client.notify(Progress(done_bytes, total_bytes))

    def commit(self, identity: Mapping[str, Any]) -> Reader:
        """Publish the epoch and go on as its reader: same session, same addresses, read-only.

        Raises:
            RemoteError: `gms.still_writable`, `gms.identity_changed`, …; the load is lost.
        """
        sizes, manifest = self._places.slab_sizes, encode(self._records.values())
        computed = layout_hash(sizes, manifest)
        self._attachment.make_read_only()
        is_answered = self._ask_to_commit(Commit(dict(identity), manifest, computed))
        epoch = Attached(
            epoch=self.epoch,
            epoch_file=self._grant.epoch_file,
            identity=dict(identity),
            layout_hash=computed,
            slab_sizes=tuple(sizes),
            manifest=manifest,
        )
        self.is_closed = True  # the reader owns everything from here on
        reader = Reader(
            self._opening, self._client, self._attachment, self._request, epoch, is_author=True
        )
        if not is_answered:
            with contextlib.ExitStack() as stack:
                stack.callback(reader.close)
                _settle_doubt(reader)
                stack.pop_all()
        return reader

    def _ask_to_commit(self, commit: Commit) -> bool:
        """Whether it was answered: a service that died may have committed or not."""
        try:
            message = self._client.request(commit, timeout_s=COMMIT_TIMEOUT_S).message
        except UnreachableError:
            return False
        if not isinstance(message, Committed) or message.epoch != self.epoch:
            raise unexpected_answer(message.TYPE, "commit")
        return True

    def abort(self) -> None:
        """Give the staging epoch up."""
        self.close()

    def _open_slab(self, size_bytes: int) -> None:
        # As long as a commit: the server may first wait for memory that another gave up.
        reply = self._client.request(Allocate(size_bytes), timeout_s=COMMIT_TIMEOUT_S)
        while isinstance(reply.message, Waiting):
            self._on_wait(reply.message.message)
            reply = self._client.receive(COMMIT_TIMEOUT_S)
        message = reply.message
        if not isinstance(message, Allocated) or message.slab != len(self._attachment.slabs):
            close_all(reply.fds)
            raise unexpected_answer(message.TYPE, "allocate")
        self._attachment.adopt(reply.fds, [message.size_bytes], writable=True)
        self._places.slab_opened(message.size_bytes)


def _settle_doubt(reader: Reader) -> None:
    """Ask the next service whether the epoch was committed; it takes the memory back if so.

    Raises:
        RemoteError: `gms.not_committed`, the load is lost.
        UnreachableError, WaitTimeoutError: no service within the time that a commit may take.
    """
    end = time.monotonic() + COMMIT_TIMEOUT_S
    while True:
        try:
            reader.rejoin(max(0.0, end - time.monotonic()), was_committed=False)
            return
        except UnreachableError:
            if time.monotonic() > end:
                raise
            time.sleep(DOUBT_POLL_S)


def stale_layout(epoch: str) -> UnderstudyError:
    return UnderstudyError(
        "gms.stale_layout",
        f"epoch {epoch} has another layout than the one that was mapped before; this engine must "
        "start anew",
        epoch=epoch,
    )


def unexpected_answer(what: str, request: str) -> ProtocolError:
    return ProtocolError("gms.unexpected_answer", f"the service answered {request} with {what}")
