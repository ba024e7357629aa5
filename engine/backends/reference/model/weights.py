"""Weights in place: written into the GPU memory service by the first engine, mapped by the next.

Owns the order of preparation of a rank's weights: identity, permission to load, session with its
own device, load and commit or map, report; and the check that every tensor is there, and no other.
Knows neither HTTP nor KV memory. The surprising thing: whether weights are loaded or mapped is the
memory service's answer, not a setting; both end with the same read-only mapping.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from typing import Any

from engine.backends.process import BackendProcess
from engine.backends.reference.model.checkpoint import (
    DTYPE,
    Checkpoint,
    TensorSource,
    identity,
    same_on_every_rank,
)
from engine.backends.session import WAIT_S, attach, host_device, loading
from gms.client import Reader, TensorRecord, Writer
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)


def map_weights(checkpoint: Checkpoint, member: BackendProcess) -> tuple[Reader, dict[str, Any]]:
    """Map the weights through the memory service, after loading them if this engine is first.

    Returns the session, whose `view(name)` is one tensor's bytes, and the identity of the weights.

    Raises:
        UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
    """
    rank, ranks = checkpoint.rank, checkpoint.ranks
    mine = identity(checkpoint.directory, rank=rank, size=ranks)
    leave = member.may_load(WAIT_S, rank, ranks)
    device = host_device(rank)
    session = attach(member, device, leave.mode, mine, rank)
    with loading(device, checkpoint.directory, DTYPE, checkpoint.weights_bytes):
        reader = _load(checkpoint, session, mine) if isinstance(session, Writer) else session
    check_bound(checkpoint.tensors, reader.epoch, reader.tensors)
    member.attached(reader.epoch, same_on_every_rank(mine), rank, device)
    return reader, mine


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
        writer.close()
        raise UnderstudyError(
            "model.changed",
            f"{checkpoint.directory} changed while it was read ({', '.join(changed)}); nothing was"
            " published, and the next attempt reads it again.",
        )
    reader = writer.commit(after)
    logger.info(
        "loaded and committed %d MiB on %s in %.1f s",
        checkpoint.weights_bytes >> 20,
        host_device(checkpoint.rank),
        time.monotonic() - start,
    )
    return reader


def check_bound(
    wanted: Iterable[TensorSource], epoch: str, found: Mapping[str, TensorRecord]
) -> None:
    """Check that `epoch` has exactly the tensors `wanted`, each with the shape and type read here.

    A tensor that the epoch lacks, or one in it that no part of the model reads, belongs to a model
    that computes something else: an error, because a warning would be served.

    Raises:
        UnderstudyError: `model.unbound`, naming the first tensor that is missing, surplus or of
            another shape or type; `details` has all the missing and surplus ones.
    """
    needed = {tensor.name: tensor for tensor in wanted}
    missing = [name for name in needed if name not in found]
    surplus = [name for name in found if name not in needed]
    unlike = [
        name for name in needed if name in found and not _is_as_read(needed[name], found[name])
    ]
    if missing:
        what = f"{missing[0]}{_more(missing)} of the model is not in epoch {epoch}"
    elif surplus:
        what = f"{surplus[0]}{_more(surplus)} of epoch {epoch} is not part of the model"
    elif unlike:
        record, shape = found[unlike[0]], list(needed[unlike[0]].shape)
        there = f"{record.dtype} {list(record.shape)} in epoch {epoch}"
        what = f"{unlike[0]} is {there}, but {DTYPE} {shape} in the model"
    else:
        return
    raise UnderstudyError(
        "model.unbound",
        f"tensor {what}; stop every engine that maps this epoch, so that the next one loads it"
        " again, and run the same release of understudy in every container",
        missing=missing or unlike[:1],
        surplus=surplus,
    )


def _is_as_read(tensor: TensorSource, record: TensorRecord) -> bool:
    there = (record.dtype, tuple(record.shape), record.nbytes, record.strides)
    return there == (DTYPE, tensor.shape, tensor.nbytes, None)


def _more(names: list[str]) -> str:
    return f" and {len(names) - 1} more" if len(names) > 1 else ""
