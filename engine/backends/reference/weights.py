"""Weights in place: written into the GPU memory service by the first engine, mapped by the next.

Owns the order in which a rank comes to its weights: identity, leave to load, session with its own
device, load and commit or map, report. Knows neither HTTP nor KV memory. The surprising thing:
which of the two happens is the memory service's answer, not a setting; both end with the same
read-only mapping.
"""

from __future__ import annotations

import logging
import mmap
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engine.backends.process import Member
from engine.backends.reference.binding import check_bound
from engine.backends.reference.checkpoint import (
    DTYPE,
    Checkpoint,
    identity,
    same_on_every_rank,
)
from understudy.errors import UnderstudyError, UnreachableError

if TYPE_CHECKING:
    from gms.client import Reader, Writer

logger = logging.getLogger(__name__)

# Another engine may be reading a large checkpoint from a slow disk: the design's budget for that.
WAIT_S = 2 * 3600.0
# A memory service that died is restarted, and with it dead every engine relaunches: those that are
# back before it wait instead of dying again. Its start takes a second; a kubelet's pause before it
# grows to five minutes, and its image may have to be fetched anew. Each wait in vain is a death of
# this engine, and five of them within ten minutes count as a crash loop, which is not its fault.
RESTART_WAIT_S = 600.0
RESTART_POLL_S = 0.05
SOCKET_DIR_ENV = "GMS_SOCKET_DIR"
ALIGN_BYTES = 64  # a cache line, as numpy's own allocator gives


@dataclass(frozen=True)
class Weights:
    """A committed epoch, mapped. `view(name)` is one tensor's bytes; `session` None: private."""

    epoch: str
    identity: dict[str, Any]
    view: Callable[[str], Any]
    session: Reader | None = None


def device_of(rank: int) -> str:
    """The device whose memory service has the weights of `rank`."""
    return f"HOST-{rank}"


def shared(checkpoint: Checkpoint, member: Member) -> Weights:
    """Map the weights through the memory service; load them first if we are the one who may.

    Raises:
        UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
    """
    from gms.client import Writer

    rank, ranks = checkpoint.rank, checkpoint.ranks
    mine = identity(checkpoint.directory, rank=rank, size=ranks)
    leave = member.may_load(WAIT_S, rank, ranks)
    session = _attach(member, leave.mode, mine, rank)
    try:
        reader = _load(checkpoint, session, mine) if isinstance(session, Writer) else session
    except UnreachableError as error:
        raise UnderstudyError(
            "engine.gms_lost",
            f"the memory service of {device_of(rank)} ended while the weights were being loaded"
            f" ({error.message}), and what was written is lost; this engine starts anew",
        ) from error
    check_bound(checkpoint.tensors, reader.epoch, reader.tensors)
    member.attached(reader.epoch, same_on_every_rank(mine), rank)
    return Weights(reader.epoch, mine, reader.view, reader)


def _attach(member: Member, mode: str, mine: dict[str, Any], rank: int) -> Reader | Writer:
    """Open the session; a service that cannot be reached is waited for, for a while."""
    from gms.client import open_session

    end, is_told = time.monotonic() + RESTART_WAIT_S, False
    while True:
        try:
            return open_session(
                os.environ[SOCKET_DIR_ENV],
                device_of(rank),
                engine=member.engine,
                incarnation=member.incarnation,
                mode=mode,
                identity=mine,
                rank=rank,
                wait_s=WAIT_S,
                on_wait=lambda reason: logger.info("waiting for weights: %s", reason),
            )
        except UnreachableError as error:
            if time.monotonic() > end:
                raise
            if not is_told:
                logger.warning("%s; waiting up to %g s for it", error.message, RESTART_WAIT_S)
                is_told = True
            time.sleep(RESTART_POLL_S)


def _load(checkpoint: Checkpoint, writer: Writer, before: dict[str, Any]) -> Reader:
    def place(name: str, nbytes: int, shape: tuple[int, ...], dtype: str) -> memoryview:
        writer.place(name, nbytes, shape, dtype)
        return writer.view(name)

    start = time.monotonic()
    writer.plan(checkpoint.weights_bytes, max(item.nbytes for item in checkpoint.tensors))
    try:
        checkpoint.load_into(place, writer.progress)
    except UnderstudyError as error:
        raise _explained(error, checkpoint) from error
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
        device_of(checkpoint.rank),
        time.monotonic() - start,
    )
    return reader


def _explained(error: UnderstudyError, checkpoint: Checkpoint) -> UnderstudyError:
    """A device that is full now may have room later; one that is too small never will."""
    capacity_bytes = error.details.get("capacity_bytes")
    if error.code != "gms.out_of_memory" or not isinstance(capacity_bytes, int):
        return error
    if capacity_bytes >= checkpoint.weights_bytes:
        return error
    return UnderstudyError(
        "gms.larger_than_device",
        f"the weights of {checkpoint.directory} need {checkpoint.weights_bytes / 2**20:.2f} MiB as"
        f" {DTYPE} and the device has {capacity_bytes / 2**20:.2f} MiB; choose a smaller model, or"
        " give gms a larger --device-bytes",
        weights_bytes=checkpoint.weights_bytes,
        capacity_bytes=capacity_bytes,
    )


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
