"""The way of weights from a checkpoint into other processes; and weights that are away.

    writer    gets slabs from the device's server, as descriptors, and maps them; its backend copies
              every tensor of the checkpoint to the address that `place` gives; `commit` ends the
              writing, makes the slabs read-only and files the manifest under a new epoch
    reader    gets the manifest and the same slabs, locks the epoch's file, and maps all read-only
              side by side (`attach.Attachment`) for as long as its engine lives; its backend binds
              its tensors to these addresses

Who may write is decided by the lock `loader` (`engine/core/loading.py`) and by the server's epochs
(`gms/core/weights.py`).

Weights that are away are released here, kept as a sealed copy in host memory, and brought back:

    away = release(reader, keeper)         # nothing is mapped any more; the addresses stay reserved
    away.free()                         # the device's memory is free, unless another engine maps it
    away.restage(deadline_s)            # the reader maps the same bytes at the same addresses
    Keeper(reader).start()              # as after every attach

The copy belongs to the memory service; this process holds it, too, while it has nothing else: so
the copy outlives the service's container, and comes back from here. It costs no memory: its pages
are shared. The surprising thing: no rank leads a restage. The first engine to come writes, the
others map what it has committed, and a rank waits for no other rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec.structs import replace

from gms import messages as msg
from gms import names
from gms.client.attach import Attachment, OnWait, RegionSession
from gms.client.keeper import Keeper
from gms.manifest import TensorRecord, decode, encode
from gms.vmm.host import HostMemory
from plumbing.errors import RemoteError, UnderstudyError, UnreachableError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.messages import Message

PIECE_BYTES = 8 << 20  # large: few thread switches; small: soon stopped
# The longest that sealing and journalling may take: 2.3 ms per GiB, and a disk that is full for
# a while (the server tries again every second).
COMMIT_TIMEOUT_S = 120.0
RETRY_S = 0.05  # a server is restarted in half a second
NOT_COMMITTED = "gms.not_committed"  # what one says of an epoch that died with the one before
# How long a load waits for a copy whose server has died: it is restarted in half a second, and
# its holder hands it back. If it is gone, this is what the load takes longer.
COPY_BACK_S = 5.0
# How long an engine waits for the proof that the memory is free: the kernel frees 8 GiB a second.
FREE_TIMEOUT_S = 30.0

logger = logging.getLogger(__name__)


class WeightsSession(RegionSession):
    """What readers and writers share: mapped slabs, and their end."""

    manifest = b""  # of a reader

    def __init__(
        self, attachment: Attachment, client: BlockingClient, request: msg.AttachMsg, epoch: str
    ) -> None:
        """`request`: what this session has asked for."""
        super().__init__(attachment.path, client)
        self.attachment, self.request, self.epoch = attachment, request, epoch

    @cached_property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """By name, in the order in which they were placed. A reader decodes them when they are
        first asked for, so attaching does not pay for it."""
        return decode(self.manifest)

    def address(self, name: str) -> int:
        """Where the first byte of tensor `name` is, for good, also while it is not mapped."""
        return self.attachment.range.address + self.tensors[name].offset

    def view(self, name: str) -> memoryview:
        """The bytes of tensor `name`, in place: writable until the commit, then read-only.

        Raises:
            UnderstudyError: `gms.not_host_memory`.
        """
        record = self.tensors[name]
        return self.attachment.range.view(record.offset, record.nbytes)

    def close(self) -> None:
        """Unmap, release the epoch, disconnect, in this order; safe to call again."""
        if not self.is_closed:
            self.is_closed = True
            with contextlib.ExitStack() as stack:
                stack.callback(super().close)  # also where the driver fails to unmap
                self.attachment.close()


class Reader(WeightsSession):
    """A committed epoch, mapped read-only at addresses that never change. Its connection may end
    and be replaced (`gms.client.keeper`); the mapping stays. `identity` is the epoch's."""

    def __init__(
        self,
        attachment: Attachment,
        client: BlockingClient,
        request: msg.AttachMsg,
        grant: msg.EpochAttachedMsg,
    ) -> None:
        super().__init__(attachment, client, request, grant.epoch)
        self.identity: dict[str, Any] = grant.identity
        self.layout, self.slab_sizes = grant.layout, grant.slab_sizes
        self.was_committed = True  # false while it is not known
        self.manifest = grant.manifest

    @property
    def size_bytes(self) -> int:
        """What the epoch takes of the device, shared with every other reader."""
        return sum(self.slab_sizes)

    def read(self, name: str) -> bytes:
        """A copy of the bytes of tensor `name`, from device memory too."""
        record = self.tensors[name]
        return self.attachment.range.read(record.offset, record.nbytes)

    def slab_fds(self) -> list[int]:
        """Lend the slabs' read-only descriptors, in order."""
        return [slab.fileno() for slab in self.attachment.slabs]

    def digest(self, may_go_on: Callable[[], bool] = lambda: True) -> str | None:
        """SHA-256, in hex, of all slabs in order; None once `may_go_on` is false. Takes half a
        second per GiB, and other threads run meanwhile."""
        whole = hashlib.sha256()
        # Copies: the memory may be unmapped while another thread runs.
        for _, piece in self.pieces(self.attachment.range.read):
            whole.update(piece)
            if not may_go_on():
                return None
        return whole.hexdigest()

    def pieces(
        self, look: Callable[[int, int], bytes | memoryview]
    ) -> Iterator[tuple[int, bytes | memoryview]]:
        """What `look` finds in all slabs in order, piece by piece, each with its offset."""
        for first in range(0, self.size_bytes, PIECE_BYTES):
            yield first, look(first, min(PIECE_BYTES, self.size_bytes - first))

    def held(self) -> tuple[msg.HandBackMsg, Sequence[int]]:
        """
        Raises:
            UnderstudyError: `gms.not_mapped`.
        """
        if self.slab_sizes and not self.attachment.slabs:
            raise UnderstudyError(
                "gms.not_mapped", f"epoch {self.epoch} is unmapped here; `remap` attaches again"
            )
        message = msg.HandBackMsg(
            self.request.engine,
            self.request.incarnation,
            self.epoch,
            tuple(self.slab_sizes),
            self.request.rank,
            epoch=msg.HeldEpoch(self.was_committed, self.identity),
            manifest=self.manifest,
        )
        return message, self.slab_fds()

    # ------------------------------------------------------------------ away and back

    def leave(self) -> BlockingClient:
        """Release the memory; the addresses stay reserved for `remap`. Gives the session's
        connection to the caller, who may tell the service that this reader has nothing mapped any
        more. Close the keeper first: while it waits for a message it keeps the session open."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.client.close)
            self.attachment.unmap()
            stack.pop_all()
        return self.client

    def remap(self, deadline_s: float, source: Reader) -> None:
        """Attach again and map the same layout at the same addresses. `source`: the host copy from
        which the memory may be written again.

        Raises:
            WaitTimeoutError, RemoteError, UnreachableError: not within `deadline_s`.
            UnderstudyError: `gms.stale_layout`, another layout is committed now; `gms.stale_copy`,
                the host copy stands for nothing. All are fatal to an engine that computes: its
                tensors point at addresses where nothing is mapped.
        """

        def check(grant: Message) -> None:
            if isinstance(grant, msg.WritingMsg) and grant.copy != source.epoch:
                raise UnderstudyError(
                    "gms.stale_copy",
                    "the host copy no longer matches the weights of this device; restart this "
                    "engine, which loads them again",
                )
            if isinstance(grant, msg.EpochAttachedMsg) and grant.layout != self.layout:
                raise UnderstudyError(
                    "gms.stale_layout",
                    f"epoch {grant.epoch} has a different layout from the one that was mapped "
                    "before; restart this engine",
                    epoch=grant.epoch,
                )

        wait_ms = round(deadline_s * 1000)
        request = replace(self.request, mode="rw_or_ro", identity=self.identity, wait_ms=wait_ms)
        client, grant = self.attachment.attach(request, check=check)
        if isinstance(grant, msg.WritingMsg):
            with contextlib.ExitStack() as stack:
                stack.callback(client.close)
                stack.callback(self.attachment.unmap)
                writer = Writer(self.attachment, client, request, grant)
                client = writer.restage(source).client
                stack.pop_all()
        self.client, self.epoch = client, grant.epoch


# Few slabs: attaching then takes one request and one frame of descriptors. They lie side by side,
# so a tensor may span them; a slab has at most what the memory's driver can take.
SLAB_BYTES_MIN = 64 << 20
SLABS_WANTED = 128  # half of what one frame carries
ALIGNMENT_BYTES = 256  # what cudaMalloc gives and vectorised kernels expect


class Writer(WeightsSession):
    """A staging epoch: place tensors, write them, commit. Closing it before loses the load."""

    def __init__(
        self,
        attachment: Attachment,
        client: BlockingClient,
        request: msg.AttachMsg,
        grant: msg.WritingMsg,
        on_wait: OnWait = lambda reason: None,
    ) -> None:
        """`on_wait` is called with a sentence while a slab waits for memory."""
        super().__init__(attachment, client, request, grant.epoch)
        self.source_epoch = grant.copy  # the host copy that stands for the requested weights
        self._grant = grant
        self._on_wait = on_wait
        self._records: dict[str, TensorRecord] = {}
        self.tensors = self._records
        self._end = 0  # of the last of them
        self._planned_bytes: int | None = None
        self._slab_bytes = SLAB_BYTES_MIN
        self._source: Reader | None = None  # what this epoch is a copy of

    def plan(self, total_bytes: int, slab_bytes: int | None = None) -> None:
        """Announce how much will be placed: slabs get the right size, and the last one what
        remains.

        Args:
            slab_bytes: the size of slabs, instead of what follows from the other.
        """
        self._planned_bytes = total_bytes
        self._slab_bytes = slab_bytes or max(SLAB_BYTES_MIN, total_bytes // SLABS_WANTED)

    def place(
        self,
        name: str,
        nbytes: int,
        shape: Sequence[int],
        dtype: str,
        strides: Sequence[int] | None = None,
    ) -> int:
        """The address of room for one tensor, writable until `commit`.

        Args:
            strides: in elements; None for one that is C-contiguous.

        Raises:
            RemoteError: `gms.out_of_memory`, naming what holds the device. The session is over.
        """
        assert name not in self._records, f"tensor {name!r} was placed before"
        offset = _round_up(self._end, ALIGNMENT_BYTES)
        self._end = offset + nbytes
        while (missing_bytes := self._end - self.attachment.range.mapped_bytes) > 0:
            self._open_slab(self._next_slab_bytes(missing_bytes))
        layout = None if strides is None else tuple(strides)
        self._records[name] = TensorRecord(name, offset, nbytes, tuple(shape), dtype, layout)
        return self.address(name)

    def _next_slab_bytes(self, missing_bytes: int) -> int:
        """What is planned and not there yet, and a little for alignment, but what the device has
        free at most: a small device gets small slabs. What is missing and not free the server waits
        for, or refuses with its explanation; slabs are no smaller for that."""
        mapped_bytes, wanted = self.attachment.range.mapped_bytes, self._slab_bytes
        if self._planned_bytes is not None:
            rest = max(self._planned_bytes - mapped_bytes, self._planned_bytes // SLABS_WANTED)
            wanted = min(wanted, rest + rest // 64)
        room_bytes = self._grant.free_bytes - mapped_bytes
        if room_bytes < missing_bytes:
            room_bytes = (self._planned_bytes or 0) // SLABS_WANTED
        whole = max(missing_bytes, min(wanted, room_bytes))
        granularity, cap = (
            self._grant.granularity_bytes,
            self.attachment.memory.allocation_bytes_max,
        )
        if cap is not None:
            whole = min(whole, cap // granularity * granularity)
        return _round_up(whole, granularity)

    def alias(self, name: str, of: str) -> None:
        """Let `name` be the tensor `of` too, in the same bytes: weights that are tied."""
        assert name not in self._records, f"tensor {name!r} was placed before"
        self._records[name] = replace(self._records[of], name=name)

    def write(self, name: str, data: bytes | memoryview, at: int = 0) -> None:
        """Copy `data` to byte `at` of tensor `name`; into device memory too."""
        record = self._records[name]
        size_bytes = memoryview(data).nbytes
        assert 0 <= at <= record.nbytes - size_bytes, f"{size_bytes} bytes at {at} of {record}"
        self.attachment.range.write(record.offset + at, data)

    def copy(self, source: Reader) -> None:
        """Make this epoch, in which nothing is placed, the same as `source`: slabs, tensors, bytes.

        Raises:
            RemoteError: `gms.out_of_memory`, …; the session is over.
        """
        assert not self.tensors, "a copy is made into an empty epoch"
        for size_bytes in source.slab_sizes:
            self._open_slab(size_bytes)
        mapped = source.attachment.range
        look = mapped.view if source.attachment.memory.kind == "host" else mapped.read
        for first, piece in source.pieces(look):
            self.attachment.range.write(first, piece)
            self.progress(first + len(piece), source.size_bytes)
        self._source = source

    def restage(self, source: Reader) -> Reader:
        """Copy and commit the host copy that stands for the device's weights."""
        self.copy(source)
        return self.commit(source.identity, restaged_from=source.epoch)

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Report that the load proceeds; without it, the writer's deadline runs out."""
        self.client.notify(msg.ProgressMsg(done_bytes, total_bytes))

    def commit(self, identity: Mapping[str, Any], *, restaged_from: str | None = None) -> Reader:
        """Publish the epoch and go on as its reader: same session, same addresses, read-only.

        Args:
            restaged_from: the host copy that stands for the device's weights, if this is its copy.

        Raises:
            RemoteError: `gms.still_writable`, `gms.identity_changed`, …; the load is lost.
        """
        sizes = tuple(slab.size_bytes for slab in self.attachment.slabs)
        source = self._source
        manifest = encode(self._records.values()) if source is None else source.manifest
        self.attachment.range.make_read_only()  # this process cannot write any more
        is_answered = self._request_commit(msg.CommitMsg(dict(identity), manifest, restaged_from))
        epoch = msg.EpochAttachedMsg(self.epoch, dict(identity), sizes, manifest)
        self.is_closed = True  # the reader owns everything from here on
        reader = Reader(self.attachment, self.client, self.request, epoch)
        # The digest of a restaged epoch is known: it is the copy's.
        reader.is_author = restaged_from is None
        if not is_answered:
            with contextlib.ExitStack() as stack:
                # The addresses of weights that come back stay reserved for another try.
                is_back = restaged_from is not None
                stack.callback((lambda: reader.leave().close()) if is_back else reader.close)
                _resolve_doubt(reader, self._on_wait)
                stack.pop_all()
        return reader

    def _request_commit(self, commit: msg.CommitMsg) -> bool:
        """Whether it was answered: a service that died may have committed or not."""
        try:
            message = self.client.request(commit, timeout_s=COMMIT_TIMEOUT_S).message
        except UnreachableError:
            return False
        assert isinstance(message, msg.CommittedMsg), message
        return True

    def _open_slab(self, size_bytes: int) -> None:
        # As long as a commit: the server may have to wait for memory that is being freed.
        reply = self.client.request(msg.AllocateMsg(size_bytes), timeout_s=COMMIT_TIMEOUT_S)
        while isinstance(reply.message, msg.WaitingMsg):
            self._on_wait(reply.message.message)
            reply = self.client.receive(COMMIT_TIMEOUT_S)
        message = reply.message
        assert isinstance(message, msg.AllocatedMsg), message
        self.attachment.adopt(reply.fds, [message.size_bytes], writable=True)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _resolve_doubt(reader: Reader, on_wait: OnWait) -> None:
    """Ask the next service whether the epoch was committed; it takes the memory back if so.

    Only `NOT_COMMITTED` ends the doubt. Any other failure may succeed the next time, and giving
    up could lose a published epoch: this process may be all that holds it.
    """
    end, reported = time.monotonic() + COMMIT_TIMEOUT_S, ""
    reader.was_committed = False
    while True:
        try:
            reader.rejoin(max(0.0, end - time.monotonic()))
            reader.was_committed = True
            return
        except UnderstudyError as error:
            is_lost = isinstance(error, RemoteError) and error.code == NOT_COMMITTED
            if is_lost or time.monotonic() > end:
                raise
            if error.message != reported:
                reported = error.message
                on_wait(f"not known yet whether epoch {reader.epoch[:8]} is committed: {reported}")
            time.sleep(RETRY_S)


def opened(
    attachment: Attachment, request: msg.AttachMsg, on_wait: OnWait = lambda reason: None
) -> Reader | Writer:
    """The session that `request` is granted; takes `attachment`."""
    with contextlib.ExitStack() as stack:
        stack.callback(attachment.close)
        client, grant = attachment.attach(request, on_wait=on_wait)
        stack.pop_all()
    if isinstance(grant, msg.WritingMsg):
        return Writer(attachment, client, request, grant, on_wait)
    return Reader(attachment, client, request, grant)


def restaged(writer: Writer, on_wait: OnWait) -> Reader | Writer:
    """A reader of what `writer` (taken) has copied from the host copy that stands for its weights;
    the writer itself where that copy is out of reach: then the weights are loaded."""
    at, end = writer.attachment, time.monotonic() + COPY_BACK_S
    while True:
        left_s = max(0.0, end - time.monotonic())
        try:
            copy = open_copy(at.directory, at.device, writer.request, writer.source_epoch, left_s)
        except UnderstudyError as error:
            if isinstance(error, UnreachableError) and left_s > RETRY_S:
                time.sleep(RETRY_S)
                continue
            on_wait(f"the weights are loaded again: {error.message}")
            return writer
        with contextlib.ExitStack() as stack:
            stack.callback(writer.close)  # unless its commit succeeds
            with copy:
                reader = writer.restage(copy)
            stack.pop_all()
            return reader


def open_copy(
    directory: str,
    device: str,
    request: msg.AttachMsg,
    epoch: str | None = None,
    wait_s: float = 0.0,
) -> Reader:
    """Attach to the host copy of the weights of `device`: to `epoch`, if given.

    Raises:
        UnderstudyError: `gms.no_copy`, there is none of the identity of `request`.
        UnreachableError: its server is away.
    """
    attachment = Attachment(directory, names.offload_device(device), HostMemory())
    wanted = replace(request, mode="ro", wait_ms=round(wait_s * 1000))
    try:
        copy = opened(attachment, wanted)
    except UnreachableError:
        raise
    except UnderstudyError as error:
        raise UnderstudyError(
            "gms.no_copy", f"host memory has no copy of the weights of {device}: {error.message}"
        ) from error
    if isinstance(copy, Reader) and epoch in (None, copy.epoch):
        return copy
    copy.close()
    raise UnderstudyError(
        "gms.no_copy", f"the copy in host memory is epoch {copy.epoch}, not {epoch}"
    )


def release(reader: Reader, keeper: Keeper) -> Offloaded:
    """Unmap a reader's weights, once this process holds their host copy; closes `keeper`, its own.

    Raises:
        UnderstudyError: `gms.no_copy`. Nothing has changed, and `keeper` goes on.
    """
    request = replace(reader.request, identity=reader.identity)
    try:
        copy = open_copy(reader.attachment.directory, reader.attachment.device, request)
    except UnreachableError as error:
        raise UnderstudyError(
            "gms.no_copy", f"no server of copies in host memory answers: {error.message}"
        ) from error
    with contextlib.ExitStack() as stack:
        stack.callback(copy.close)
        if copy.layout != reader.layout:
            raise UnderstudyError(
                "gms.no_copy", f"the host copy {copy.epoch} has another layout than these weights"
            )
        copy_keeper = Keeper(copy, on_change=logger.warning)
        copy_keeper.start()
        stack.callback(copy_keeper.close)
        keeper.close()
        session = reader.leave()
        stack.pop_all()
    return Offloaded(reader, copy, copy_keeper, session)


class Offloaded:
    """A reader that has nothing mapped, and the host copy from which it comes back."""

    def __init__(
        self, reader: Reader, copy: Reader, keeper: Keeper, session: BlockingClient
    ) -> None:
        """Takes all but `reader`; `session` is what the reader had."""
        self.reader, self.copy = reader, copy
        self._keeper = keeper
        self._session: BlockingClient | None = session

    def free(self) -> int:
        """Have the device's memory freed; returns how much the kernel says is free.

        Raises:
            RemoteError: `gms.epoch_mapped`: another engine still maps it, and frees it when it
                offloads in turn; `gms.no_copy`, …: it stays as it is.
            UnreachableError, WaitTimeoutError: not known.
        """
        session, self._session = self._session, None
        try:
            answer = self._ask(session or self.reader.attachment.connect())
        except UnreachableError:
            if session is None:
                raise
            answer = self._ask(self.reader.attachment.connect())  # the service was restarted
        assert isinstance(answer, msg.OffloadedMsg), answer
        return answer.size_bytes

    def restage(self, deadline_s: float, on_wait: OnWait = lambda reason: None) -> None:
        """Map the weights again where they were, from the device or from the copy. The reader then
        needs a keeper; this object is done with.

        Raises:
            UnreachableError, WaitTimeoutError: not within `deadline_s`; may be repeated.
            UnderstudyError: `gms.stale_copy`, `gms.stale_layout`, …: fatal to the engine.
        """
        end = time.monotonic() + deadline_s
        while True:
            try:
                self.reader.remap(max(0.0, end - time.monotonic()), self.copy)
                break
            except (UnreachableError, RemoteError) as error:
                # A service that died after the copy and before its commit has lost that alone.
                may_repeat = isinstance(error, UnreachableError) or error.code == NOT_COMMITTED
                if not may_repeat or time.monotonic() + RETRY_S > end:
                    raise
                on_wait(f"the weights are not restored yet: {error.message}")
                time.sleep(RETRY_S)
        self.close()

    def close(self) -> None:
        """Let the copy go; the service keeps it."""
        if self._session is not None:
            self._session.close()
        self._keeper.close()
        self.copy.close()

    def _ask(self, client: BlockingClient) -> Message:
        """Closes `client`. On the reader's own session it says that the reader has left, too."""
        with contextlib.closing(client):
            return client.request(msg.OffloadMsg(), timeout_s=FREE_TIMEOUT_S).message
