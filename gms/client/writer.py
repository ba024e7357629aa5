"""A writer's session: a staging epoch, from the first tensor to the commit.

It owns how a commit ends, also when the service dies during it. `Suballocator` decides where
tensors go: few large slabs side by side, tensors one after the other in them. It computes numbers;
the writer opens the slabs. A place is an offset from the start of the epoch, because its slabs are
mapped side by side. With few slabs, attaching takes one request and one frame of descriptors. A
slab is as large as the largest of 64 MiB, the weights ÷ 128 and the largest tensor. For a writer
that does not announce its total, slabs grow with what it has placed, so that their number stays
small too.

Only a tensor larger than the slab limit (`slab_bytes_cap`: some drivers fail with large handles)
spans slabs; a smaller one never crosses an edge.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from gms import messages as msg
from gms.client.reader import Reader
from gms.client.sessions import Attachment, OnWait, Opening, WeightsSession
from gms.manifest import TensorRecord, encode, layout_hash
from gms.questions import unexpected_answer
from plumbing.errors import InvariantError, RemoteError, UnderstudyError, UnreachableError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import close_all

# The longest that sealing and journalling may take: 2.3 ms per GiB, and a disk that is full for
# a while (the server tries again every second).
COMMIT_TIMEOUT_S = 120.0
DOUBT_POLL_S = 0.05  # a server is restarted in half a second


class Writer(WeightsSession):
    """A staging epoch: place tensors, write them, commit. Closing it before loses the load."""

    def __init__(
        self,
        opening: Opening,
        client: BlockingClient,
        attachment: Attachment,
        request: msg.AttachMsg,
        grant: msg.WritingMsg,
        on_wait: OnWait = lambda reason: None,
    ) -> None:
        """`on_wait` is called with a sentence while a slab waits for memory."""
        super().__init__(opening, client, attachment, request)
        self.epoch = grant.epoch
        self.source_epoch = grant.copy  # the host copy that stands for the requested weights
        self._grant = grant
        self._on_wait = on_wait
        self._places = Suballocator(
            grant.granularity_bytes, grant.free_bytes, opening.memory.allocation_bytes_max
        )
        self._records: dict[str, TensorRecord] = {}
        self._source: Reader | None = None  # what this epoch is a copy of

    def plan(self, total_bytes: int, tensor_bytes_max: int, slab_bytes: int | None = None) -> None:
        """Announce how much will be placed, and the size of the largest tensor.

        Args:
            slab_bytes: the size of slabs, instead of what follows from the other two.
        """
        self._places.plan(total_bytes, tensor_bytes_max, slab_bytes)

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
        if name in self._records:
            raise InvariantError(f"tensor {name!r} was placed before")
        offset = self._places.place(nbytes)
        while isinstance(offset, NeedSlab):  # several times, for a tensor that spans slabs
            self._open_slab(offset.size_bytes)
            offset = self._places.place(nbytes)
        layout = None if strides is None else tuple(strides)
        self._records[name] = TensorRecord(name, offset, nbytes, tuple(shape), dtype, layout)
        return self._attachment.range.address + offset

    def alias(self, name: str, of: str) -> None:
        """Let `name` be the tensor `of` too, in the same bytes: weights that are tied."""
        if name in self._records:
            raise InvariantError(f"tensor {name!r} was placed before")
        self._records[name] = replace(self._records[of], name=name)

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

    def copy(self, source: Reader) -> None:
        """Make this epoch, in which nothing is placed, the same as `source`: slabs, tensors, bytes.

        Raises:
            RemoteError: `gms.out_of_memory`, …; the session is over.
        """
        if self._records or self._places.slab_sizes:
            raise InvariantError("a copy is made of a whole epoch, into an empty one")
        for size_bytes in source.slab_sizes:
            self._open_slab(size_bytes)
        for first, piece in source.pieces():
            self._attachment.range.write(first, piece)
            self.progress(first + len(piece), source.size_bytes)
        self._source = source

    @property
    def tensors(self) -> Mapping[str, TensorRecord]:
        """The tensors that were placed so far, by name."""
        return self._records if self._source is None else self._source.tensors

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        """Report that the load proceeds; without it, the writer's deadline runs out."""
        self._client.notify(msg.ProgressMsg(done_bytes, total_bytes))

    def commit(self, identity: Mapping[str, Any], *, restaged_from: str | None = None) -> Reader:
        """Publish the epoch and go on as its reader: same session, same addresses, read-only.

        Args:
            restaged_from: the host copy that stands for the device's weights, if this is its copy.

        Raises:
            RemoteError: `gms.still_writable`, `gms.identity_changed`, …; the load is lost.
        """
        sizes, source = self._places.slab_sizes, self._source
        manifest = encode(self._records.values()) if source is None else source.manifest.encoded
        computed = layout_hash(sizes, manifest)
        self._attachment.make_read_only()
        commit = msg.CommitMsg(dict(identity), manifest, computed, restaged_from)
        is_answered = self._request_commit(commit)
        epoch = msg.EpochAttachedMsg(
            epoch=self.epoch,
            identity=dict(identity),
            layout_hash=computed,
            slab_sizes=tuple(sizes),
            manifest=manifest,
        )
        self.is_closed = True  # the reader owns everything from here on
        # The digest of a restaged epoch is known: it is the copy's.
        is_author = restaged_from is None
        reader = Reader(
            self.opening, self._client, self._attachment, self.request, epoch, is_author=is_author
        )
        if not is_answered:
            with contextlib.ExitStack() as stack:
                stack.callback(reader.close)
                _resolve_doubt(reader, self._on_wait)
                stack.pop_all()
        return reader

    def _request_commit(self, commit: msg.CommitMsg) -> bool:
        """Whether it was answered: a service that died may have committed or not."""
        try:
            message = self._client.request(commit, timeout_s=COMMIT_TIMEOUT_S).message
        except UnreachableError:
            return False
        if not isinstance(message, msg.CommittedMsg) or message.epoch != self.epoch:
            raise unexpected_answer(message.TYPE, "commit")
        return True

    def _open_slab(self, size_bytes: int) -> None:
        # As long as a commit: the server may have to wait for memory that is being freed.
        reply = self._client.request(msg.AllocateMsg(size_bytes), timeout_s=COMMIT_TIMEOUT_S)
        while isinstance(reply.message, msg.WaitingMsg):
            self._on_wait(reply.message.message)
            reply = self._client.receive(COMMIT_TIMEOUT_S)
        message = reply.message
        if not isinstance(message, msg.AllocatedMsg) or message.slab != len(self._attachment.slabs):
            close_all(reply.fds)
            raise unexpected_answer(message.TYPE, "allocate")
        self._attachment.adopt(reply.fds, [message.size_bytes], writable=True)
        self._places.slab_opened(message.size_bytes)


def _resolve_doubt(reader: Reader, on_wait: OnWait) -> None:
    """Ask the next service whether the epoch was committed; it takes the memory back if so.

    Only `gms.not_committed` ends the doubt. Any other failure may succeed the next time, and giving
    up could lose a published epoch: this process may be all that holds it.
    """
    end, reported = time.monotonic() + COMMIT_TIMEOUT_S, ""
    while True:
        try:
            reader.rejoin(max(0.0, end - time.monotonic()), was_committed=False)
            return
        except UnderstudyError as error:
            is_lost = isinstance(error, RemoteError) and error.code == "gms.not_committed"
            if is_lost or time.monotonic() > end:
                raise
            if error.message != reported:
                reported = error.message
                on_wait(f"not known yet whether epoch {reader.epoch[:8]} is committed: {reported}")
            time.sleep(DOUBT_POLL_S)


SLAB_BYTES_MIN = 64 << 20
SLABS_WANTED = 128  # half of what one frame carries, so that odd tensor sizes cannot exceed it
GROWTH_DIVISOR = 32  # unplanned: each slab at least 1/32 of what lies before it; 1 TiB in < 250
ALIGNMENT_BYTES = 256  # what cudaMalloc gives and vectorised kernels expect


class NeedSlab(Struct, frozen=True):
    """Open a slab of `size_bytes`, report it with `slab_opened`, then ask again."""

    size_bytes: int


class _Slab(Struct):
    """One slab: `start` from the start of the epoch, and how much of it is placed."""

    start: int
    size_bytes: int
    used_bytes: int = 0


class Suballocator:
    """Places tensors in slabs. Nothing is ever freed: an epoch is written once."""

    def __init__(
        self, granularity_bytes: int, free_bytes: int, slab_bytes_cap: int | None = None
    ) -> None:
        """`free_bytes` of the device: a small device gets small slabs."""
        self.granularity_bytes = granularity_bytes
        self.free_bytes = free_bytes
        # Rounded down, because slabs are rounded up to the granularity.
        self.slab_bytes_cap = slab_bytes_cap and slab_bytes_cap // granularity_bytes * (
            granularity_bytes
        )
        self.slab_sizes: list[int] = []
        self.placed_bytes = 0
        self._roomy: list[_Slab] = []  # those that are not full, in order
        self._end = 0
        self._planned_bytes: int | None = None
        self._slab_bytes = SLAB_BYTES_MIN

    def plan(self, total_bytes: int, tensor_bytes_max: int, slab_bytes: int | None = None) -> None:
        """Announce what is coming: slabs get the size of the rule, and the last one what remains.

        Args:
            slab_bytes: overrides the rule.
        """
        self._planned_bytes = total_bytes
        by_rule = max(SLAB_BYTES_MIN, total_bytes // SLABS_WANTED, tensor_bytes_max)
        self._slab_bytes = slab_bytes or by_rule

    def place(self, nbytes: int) -> int | NeedSlab:
        """The offset of a tensor of `nbytes`, or the next slab that it needs first."""
        needed = _round_up(nbytes, ALIGNMENT_BYTES)
        if self.slab_bytes_cap is not None and needed > self.slab_bytes_cap:
            return self._place_spanning(needed)
        for slab in self._roomy:
            if slab.used_bytes + needed <= slab.size_bytes:
                return self._take(slab, needed)
        return NeedSlab(self._next_slab_bytes(needed))

    def slab_opened(self, size_bytes: int) -> None:
        """A slab of `size_bytes` was opened."""
        self.slab_sizes.append(size_bytes)
        self._roomy.append(_Slab(self._end, size_bytes))
        self._end += size_bytes
        self.free_bytes = max(0, self.free_bytes - size_bytes)

    def _take(self, slab: _Slab, needed: int) -> int:
        offset = slab.start + slab.used_bytes
        slab.used_bytes += needed
        self.placed_bytes += needed
        if slab.used_bytes == slab.size_bytes:
            self._roomy.remove(slab)
        return offset

    def _place_spanning(self, needed: int) -> int | NeedSlab:
        """Place it in the free space at the end of the epoch, if that suffices."""
        run = self._end_run()
        at_hand_bytes = sum(slab.size_bytes - slab.used_bytes for slab in run)
        if at_hand_bytes < needed:
            return NeedSlab(self._next_slab_bytes(needed - at_hand_bytes, at_hand_bytes))
        offset = run[0].start + run[0].used_bytes
        for slab in run:
            part = min(needed, slab.size_bytes - slab.used_bytes)
            if part:
                self._take(slab, part)
                needed -= part
        return offset

    def _end_run(self) -> list[_Slab]:
        """The slabs in which the free bytes up to the end of the epoch lie, in order."""
        run: list[_Slab] = []
        end = self._end
        for slab in reversed(self._roomy):
            if slab.start + slab.size_bytes != end:
                break
            run.insert(0, slab)
            end = slab.start
            if slab.used_bytes:
                break
        return run

    def _next_slab_bytes(self, needed: int, at_hand_bytes: int = 0) -> int:
        wanted = self._slab_bytes
        if self._planned_bytes is None:
            wanted = max(wanted, self.placed_bytes // GROWTH_DIVISOR)
        else:
            # What remains, and a little for alignment; if that is short, the next slab is small.
            remaining = self._planned_bytes - self.placed_bytes - at_hand_bytes
            wanted = min(wanted, remaining + remaining // 64)
        # Never below what is needed: then the server refuses it, with its explanation.
        size = max(needed, min(wanted, self.free_bytes), 1)
        if self.slab_bytes_cap is not None:
            size = min(size, self.slab_bytes_cap)
        return _round_up(size, self.granularity_bytes)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
