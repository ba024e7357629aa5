"""A Hugging Face checkpoint: its required contents, its identity, and the way into memory.

The first engine writes the weights into the memory service as float32, the next one maps them;
which of the two is the service's answer, not a setting. The surprising thing: nothing is ever held
twice. float32 is read straight into its place; bfloat16 goes through one small scratch buffer,
because a loader that needs a second copy of the weights does not fit beside them. A
tensor-parallel rank reads its own part of each file and nothing else.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import numpy as np
from numpy.typing import NDArray

from engine.backends.memory_session import WAIT_S, attach, commit, host_device, loading
from engine.backends.process import BackendProcess
from engine.backends.reference.config import LlamaConfig, read_config
from engine.backends.shards import (
    Shard,
    StoredTensor,
    identity_of,
    read_json,
    read_shards,
    reading,
)
from gms.client import Reader, Writer
from plumbing import __version__
from plumbing.errors import UsageError

Place = Callable[[str, int, tuple[int, ...], str], memoryview]
"""`place(name, nbytes, shape, dtype)` gives a writable view of exactly `nbytes` bytes."""
Progress = Callable[[int, int], None]
"""`progress(done_bytes, total_bytes)`, in float32 bytes."""
Bytes = NDArray[np.uint8]

READ_BYTES = 4 << 20  # per read: long enough for full disk speed, short enough to report progress
FLOAT_DTYPES = ("F32", "BF16")
DTYPE = "float32"

# Left by old exporters; the decoder computes the same numbers itself.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"


@dataclass(frozen=True, slots=True)
class TensorSource:
    """A tensor that the decoder needs, or one rank's part of it: `nbytes` in float32.

    `origin` is where that part begins in the stored tensor, an index per axis.
    """

    name: str
    shape: tuple[int, ...]
    nbytes: int
    stored: StoredTensor
    origin: tuple[int, ...]

    def runs(self) -> Iterator[tuple[int, int]]:
        """First element and length of each unbroken stretch of the stored tensor, in order."""
        row = self.stored.shape[-1]
        if self.shape[-1] == row:  # whole rows: they lie side by side
            yield self.origin[0] * math.prod(self.shape[1:]), math.prod(self.shape)
        else:
            for index in range(self.origin[0], self.origin[0] + self.shape[0]):
                yield index * row + self.origin[1], self.shape[1]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked directory: every tensor is there, with the right shape and a known dtype.

    `config` and `tensors` are those of one tensor-parallel rank, `rank` of `ranks`.
    """

    directory: str
    config: LlamaConfig
    shards: tuple[Shard, ...]
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
            UsageError: `model.broken` when a file changed or shrank since it was opened.
            UnderstudyError: as `reading`.
        """
        total, done, reported = self.weights_bytes, 0, 0
        scratch = np.empty(READ_BYTES, dtype=np.uint8)
        for shard in self.shards:
            wanted = [tensor for tensor in self.tensors if tensor.stored.shard == shard.path]
            with reading(shard.path) as file:
                for tensor in sorted(wanted, key=lambda tensor: tensor.stored.offset):
                    view = place(tensor.name, tensor.nbytes, tensor.shape, DTYPE)
                    for piece_bytes in _load_tensor(file.fileno(), tensor, view, scratch):
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
            _broken(directory, f"tensor {tensor.name} is in two shards")
    shapes = config.tensor_shapes()
    missing = [name for name in shapes if name not in stored]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        _broken(directory, f"tensor {missing[0]}{more} is in no safetensors file")
    for name in sorted(stored.keys() - shapes.keys()):
        # What is not read is a part of the model that would silently not be computed. Some
        # exporters store the tied tensor twice.
        is_tied = name == "lm_head.weight" and config.tie_embeddings
        if not is_tied and not name.endswith(IGNORED_SUFFIX):
            what = f"tensor {name} is not part of the Llama that config.json describes"
            _unsupported(directory, what)
    for name, shape in shapes.items():
        _check(directory, stored[name], shape)
    tensors = [
        _part(stored[name], shape, rank, ranks) for name, shape in mine.tensor_shapes().items()
    ]
    return Checkpoint(directory, mine, shards, tuple(tensors), rank, ranks)


def identity(directory: str, *, rank: int = 0, size: int = 1) -> dict[str, Any]:
    """The identity of the weights, read from disk; equal for two processes only if they may share.

    Computed before the load and again before commit, so that a checkpoint that is replaced while it
    is read is never published under the old name.
    """
    config = json.dumps(read_json(os.path.join(directory, "config.json")), sort_keys=True)
    blas = cast("dict[str, Any]", np.show_config(mode="dicts"))["Build Dependencies"]["blas"]
    return {
        "model": os.path.basename(os.path.realpath(directory)),
        "config": hashlib.sha256(config.encode()).hexdigest(),
        "shards": identity_of(read_shards(directory)),
        "dtype": DTYPE,
        "quantization": "none",
        "kernels": f"numpy {np.__version__}, {blas['name']} {blas['version']}",
        "architecture": platform.machine(),
        "engine": "reference",
        "engine_version": __version__,
        "tp_rank": rank,
        "tp_size": size,
    }


def same_on_every_rank(identity: dict[str, Any]) -> dict[str, Any]:
    """The part of an identity in which the ranks of one engine must not differ."""
    return {name: value for name, value in identity.items() if name != "tp_rank"}


def _load_tensor(fd: int, tensor: TensorSource, view: memoryview, scratch: Bytes) -> Iterator[int]:
    """Fill `view` piece by piece, widened to float32; yields the float32 bytes of each."""
    stored, target, done = tensor.stored, np.frombuffer(view, dtype=np.float32), 0
    item_bytes = 4 if stored.dtype == "F32" else 2
    for first, length in tensor.runs():
        for start in range(first, first + length, READ_BYTES // 4):
            piece = target[done : done + min(READ_BYTES // 4, first + length - start)]
            raw = scratch[: piece.size * 2] if item_bytes == 2 else piece.view(np.uint8)
            if os.preadv(fd, [raw.data], stored.offset + start * item_bytes) != raw.size:
                raise UsageError(
                    "model.broken",
                    f"{stored.shard} ended inside tensor {stored.name}: it was replaced or cut"
                    " while it was read; load again when it is complete.",
                )
            if stored.dtype == "BF16":
                bits = piece.view(np.uint32)  # bfloat16 is the upper half of a float32
                np.copyto(bits, raw.view("<u2"))
                np.left_shift(bits, 16, out=bits)
            done += piece.size
            yield 4 * piece.size


def _check(directory: str, stored: StoredTensor, shape: tuple[int, ...]) -> None:
    what = f"tensor {stored.name} in {os.path.basename(stored.shard)} has"
    if stored.shape != shape:
        wanted = f"but config.json requires {list(shape)}"
        _broken(directory, f"{what} shape {list(stored.shape)}, {wanted}")
    if stored.dtype not in FLOAT_DTYPES:
        wanted = f"but the reference backend reads only {', '.join(FLOAT_DTYPES)}"
        _unsupported(directory, f"{what} dtype {stored.dtype}, {wanted}")


def _part(stored: StoredTensor, shape: tuple[int, ...], rank: int, ranks: int) -> TensorSource:
    """The part of `stored` that has `shape`: the axis that is shorter there is the one cut."""
    origin = tuple(
        whole * rank // ranks if mine != whole else 0
        for mine, whole in zip(shape, stored.shape, strict=True)
    )
    return TensorSource(stored.name, shape, 4 * math.prod(shape), stored, origin)


def _broken(directory: str, reason: str) -> NoReturn:
    raise UsageError("model.broken", f"{directory}: {reason}; download the checkpoint again.")


def _unsupported(directory: str, reason: str) -> NoReturn:
    raise UsageError(
        "model.unsupported",
        f"{directory}: {reason}; choose another checkpoint or the vllm backend.",
    )


# ---------------------------------------------------------------------- the memory service


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
    member.attached(reader.epoch, same_on_every_rank(mine), rank, device)
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
