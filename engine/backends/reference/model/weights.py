"""Weights in place: written into the GPU memory service by the first engine, mapped by the next.

Owns the order in which a rank comes to its weights: identity, leave to load, session with its own
device, load and commit or map, report. Knows neither HTTP nor KV memory. The surprising thing:
which of the two happens is the memory service's answer, not a setting; both end with the same
read-only mapping.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.backends.process import Member
from engine.backends.reference.model.binding import check_bound
from engine.backends.reference.model.checkpoint import (
    DTYPE,
    Checkpoint,
    identity,
    same_on_every_rank,
)
from engine.backends.session import WAIT_S, attach, host_device, loading
from plumbing.errors import UnderstudyError

if TYPE_CHECKING:
    from gms.client import Reader, Writer

logger = logging.getLogger(__name__)

ALIGN_BYTES = 64  # a cache line, as numpy's own allocator gives


@dataclass(frozen=True)
class Weights:
    """A committed epoch, mapped. `view(name)` is one tensor's bytes; `session` None: private."""

    epoch: str
    identity: dict[str, Any]
    view: Callable[[str], Any]
    session: Reader | None = None


def shared(checkpoint: Checkpoint, member: Member) -> Weights:
    """Map the weights through the memory service; load them first if we are the one who may.

    Raises:
        UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
    """
    from gms.client import Writer

    rank, ranks = checkpoint.rank, checkpoint.ranks
    mine = identity(checkpoint.directory, rank=rank, size=ranks)
    leave = member.may_load(WAIT_S, rank, ranks)
    device = host_device(rank)
    session = attach(member, device, leave.mode, mine, rank)
    with loading(device, checkpoint.directory, DTYPE, checkpoint.weights_bytes):
        reader = _load(checkpoint, session, mine) if isinstance(session, Writer) else session
    check_bound(checkpoint.tensors, reader.epoch, reader.tensors)
    member.attached(reader.epoch, same_on_every_rank(mine), rank)
    return Weights(reader.epoch, mine, reader.view, reader)


def _load(checkpoint: Checkpoint, writer: Writer, before: dict[str, Any]) -> Reader:
    def place(name: str, nbytes: int, shape: tuple[int, ...], dtype: str) -> memoryview:
        writer.place(name, nbytes, shape, dtype)
        return writer.view(name)

    start = time.monotonic()
    writer.plan(checkpoint.weights_bytes, max(item.nbytes for item in checkpoint.tensors))
    checkpoint.load_into(place, writer.progress)
    after = identity(checkpoint.directory, rank=checkpoint.rank, size=checkpoint.ranks)
    if after != before:
        changed = sorted(key for key in before if before[key] != after.get(key))
        writer.abort()
        raise UnderstudyError(
            "model.changed",
            f"{checkpoint.directory} changed while it was read ({', '.join(changed)}); nothing was"
            " published, and the next attempt reads it anew.",
        )
    reader = writer.commit(after)
    logger.info(
        "loaded and committed %d MiB on %s in %.1f s",
        checkpoint.weights_bytes >> 20,
        host_device(checkpoint.rank),
        time.monotonic() - start,
    )
    return reader


def private(checkpoint: Checkpoint) -> Weights:
    """Weights in this process's own memory: for trying the decoder without the rest of the pod."""
    offsets, end = {}, 0
    for tensor in checkpoint.tensors:
        offsets[tensor.name] = (end, end + tensor.nbytes)
        end += -(-tensor.nbytes // ALIGN_BYTES) * ALIGN_BYTES
    memory = memoryview(mmap.mmap(-1, end, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))

    def view(name: str) -> memoryview:
        start, stop = offsets[name]
        return memory[start:stop]

    checkpoint.load_into(lambda name, nbytes, shape, dtype: view(name), lambda done, total: None)
    mine = identity(checkpoint.directory, rank=checkpoint.rank, size=checkpoint.ranks)
    return Weights("private", mine, view)
