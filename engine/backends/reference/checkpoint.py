"""A Hugging Face checkpoint: its required contents, its identity, and the way into memory.

The first engine writes the weights into the memory service as float32, the next one maps them;
which of the two is the service's answer, not a setting. The surprising thing: nothing is ever held
twice, because a loader that needs a second copy of the weights does not fit beside them. The files
are mapped, and widened into place piece by piece. A tensor-parallel rank reads its own part of each
file and nothing else.
"""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from engine.backends.memory_session import attach, commit, host_device, loading
from engine.backends.process import BackendProcess
from engine.backends.reference.config import LlamaConfig, read_config, unsupported
from engine.backends.shards import (
    StoredTensor,
    broken,
    digest_of,
    identity_of,
    read_json,
    read_shards,
    same_on_every_rank,
)
from gms.client import Reader, Writer
from plumbing import __version__

Place = Callable[[str, int, tuple[int, ...], str], memoryview]
"""`place(name, nbytes, shape, dtype)` gives a writable view of exactly `nbytes` bytes."""
Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`, in float32 bytes."""

READ_BYTES = 4 << 20  # per piece: long enough for full disk speed, short enough to report progress
FLOAT_DTYPES = ("F32", "BF16")
DTYPE = "float32"

# Left by old exporters; the decoder computes the same numbers itself.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that the decoder needs, or one rank's `part` of it: `nbytes` in float32."""

    name: str
    shape: tuple[int, ...]
    nbytes: int
    stored: StoredTensor
    part: tuple[slice, ...]

    def load_into(self, view: memoryview) -> Iterator[int]:
        """Fill `view` piece by piece, widened to float32; yields the bytes of each."""
        stored, is_wide = self.stored, self.stored.dtype == "F32"
        try:
            file = np.memmap(
                stored.shard, "<u4" if is_wide else "<u2", "r", stored.offset, stored.shape
            )
        except ValueError:
            broken(stored.shard, "it was replaced or cut while it was read")
        source, target = file[self.part], np.frombuffer(view, np.uint32).reshape(self.shape)
        rows = max(1, READ_BYTES * self.shape[0] // self.nbytes)
        for first in range(0, self.shape[0], rows):
            piece = target[first : first + rows]
            piece[...] = source[first : first + rows]
            if not is_wide:
                piece <<= np.uint32(16)  # bfloat16 is the upper half of a float32
            yield piece.nbytes


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked directory: every tensor is there, with the right shape and a known dtype.

    `config` and `tensors` are those of one tensor-parallel rank, `rank` of `ranks`.
    """

    directory: str
    config: LlamaConfig
    tensors: tuple[TensorSource, ...]
    rank: int = 0
    ranks: int = 1

    @property
    def weights_bytes(self) -> int:
        """Bytes of all tensors of this rank in float32."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def load_into(self, place: Place, progress: Progress) -> None:
        """Write every tensor, as float32, into the view that `place` gives for it.

        Raises:
            UsageError: `model.broken` when a file shrank since it was opened.
        """
        total, done, reported = self.weights_bytes, 0, 0
        for tensor in sorted(
            self.tensors, key=lambda each: (each.stored.shard, each.stored.offset)
        ):
            view = place(tensor.name, tensor.nbytes, tensor.shape, DTYPE)
            for piece_bytes in tensor.load_into(view):
                done += piece_bytes
                if done - reported >= READ_BYTES or done == total:  # not for every row
                    reported = done
                    progress(done, total)
            view.release()  # else the caller could not resize or unmap what is under it


def open_checkpoint(directory: str, rank: int = 0, ranks: int = 1) -> Checkpoint:
    """Read `config.json` and all safetensors headers, check them, and cut them for `rank`.

    Raises:
        UsageError: `model.missing`, `model.broken` or `model.unsupported`, with the cause and the
            fix; `engine.bad_tensor_parallel`.
    """
    config = read_config(directory)
    mine = config.of_rank(rank, ranks)
    shards = read_shards(directory)
    stored: dict[str, StoredTensor] = {}
    for tensor in (tensor for shard in shards for tensor in shard.tensors):
        if stored.setdefault(tensor.name, tensor) is not tensor:
            broken(directory, f"tensor {tensor.name} is in two shards")
    shapes = config.tensor_shapes()
    missing = [name for name in shapes if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        broken(directory, f"tensor {missing[0]}{more} is in no safetensors file")
    for name in sorted(stored.keys() - shapes.keys()):
        # What is not read is a part of the model that would silently not be computed. Some
        # exporters store the tied tensor twice.
        is_tied = name == "lm_head.weight" and config.tie_embeddings
        if not is_tied and not name.endswith(IGNORED_SUFFIX):
            what = f"tensor {name} is not part of the Llama that config.json describes"
            unsupported(directory, what)
    for name, shape in shapes.items():
        _check(directory, stored[name], shape)
    tensors = [
        _part(stored[name], shape, rank, ranks) for name, shape in mine.tensor_shapes().items()
    ]
    return Checkpoint(directory, mine, tuple(tensors), rank, ranks)


def identity(directory: str, *, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """The identity of the weights, read from disk; equal for two processes only if they may share.

    Computed before the load and again before commit, so that a checkpoint that is replaced while it
    is read is never published under the old name.
    """
    blas = cast("dict[str, Any]", np.show_config(mode="dicts"))["Build Dependencies"]["blas"]
    return {
        "model": os.path.basename(os.path.realpath(directory)),
        "config": digest_of(read_json(os.path.join(directory, "config.json"))),
        "shards": identity_of(read_shards(directory)),
        "dtype": DTYPE,
        "quantization": "none",
        "kernels": f"numpy {np.__version__}, {blas['name']} {blas['version']}",
        "architecture": platform.machine(),
        "engine": "reference",
        "engine_version": __version__,
        "rank": rank,
        "tp_size": size,
    }


def _check(directory: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    what = f"tensor {stored.name} in {os.path.basename(stored.shard)} has"
    if stored.shape != shape:
        wanted = f"but config.json requires {list(shape)}"
        broken(directory, f"{what} shape {list(stored.shape)}, {wanted}")
    if stored.dtype not in FLOAT_DTYPES:
        wanted = f"but the reference backend reads only {', '.join(FLOAT_DTYPES)}"
        unsupported(directory, f"{what} dtype {stored.dtype}, {wanted}")


def _part(stored: StoredTensor, shape: tuple[int, ...], rank: int, ranks: int) -> TensorSource:
    """The part of `stored` that has `shape`: the axis that is shorter there is the one cut."""
    starts = (
        whole * rank // ranks if mine != whole else 0
        for mine, whole in zip(shape, stored.shape, strict=True)
    )
    part = tuple(slice(start, start + mine) for start, mine in zip(starts, shape, strict=True))
    return TensorSource(stored.name, shape, 4 * math.prod(shape), stored, part)


# ---------------------------------------------------------------------- the memory service


def map_weights(checkpoint: Checkpoint, member: BackendProcess) -> tuple[Reader, dict[str, Any]]:
    """Map the weights through the memory service, after loading them if this engine is first.

    Returns the session, whose `view(name)` is one tensor's bytes, and the identity of the weights.

    Raises:
        UnderstudyError: with the reason, from the supervisor, the service or the checkpoint.
    """
    rank, ranks = checkpoint.rank, checkpoint.ranks
    mine = identity(checkpoint.directory, rank=rank, size=ranks)
    device = host_device(rank)
    session = attach(member, device, mine, rank, ranks)
    with loading(device, checkpoint.directory, DTYPE, checkpoint.weights_bytes):
        reader = _load(checkpoint, session, mine) if isinstance(session, Writer) else session
    member.attached(same_on_every_rank(mine), rank, device)
    return reader, mine


def _load(checkpoint: Checkpoint, writer: Writer, before: dict[str, Any]) -> Reader:
    def place(name: str, nbytes: int, shape: tuple[int, ...], dtype: str) -> memoryview:
        writer.place(name, nbytes, shape, dtype)
        return writer.view(name)

    start = time.monotonic()
    writer.plan(checkpoint.weights_bytes)
    checkpoint.load_into(place, writer.progress)
    after = identity(checkpoint.directory, rank=checkpoint.rank, size=checkpoint.ranks)
    device = host_device(checkpoint.rank)
    return commit(writer, before, after, checkpoint.directory, device, start)
