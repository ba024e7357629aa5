"""Safetensors files: headers read and checked, bytes read in bounded pieces.

Owns the container format (https://huggingface.co/docs/safetensors: 8 bytes little-endian header
length, a JSON header, raw tensors); the library's numpy reader has no bfloat16 and copies every
tensor. The surprising thing: offsets come from a file that may be truncated or forged, so each is
checked against the file's real size before anything is read.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, BinaryIO, NoReturn

import msgspec
from msgspec import Meta, Struct

from plumbing.errors import UnderstudyError, UsageError, is_disk_fault, is_shortage

JSON_MAX_BYTES = 64 << 20  # the largest tokenizer.json seen is 33 MB; config files are a few KB
HEADER_MAX_BYTES = 100_000_000  # the limit of the safetensors library itself
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}

# The sample of a tensor's bytes in the identity: evenly spread windows, both ends included. Two
# fine-tunes differ nearly everywhere in the tensors that they trained (headers do not differ).
SAMPLE_WINDOWS = 4
SAMPLE_WINDOW_BYTES = 1024
FILE_SAMPLE_WINDOWS = 1024  # of a file whose tensors are not known: 1 MiB

Size = Annotated[int, Meta(ge=0, lt=1 << 48)]


class Entry(Struct, frozen=True):
    """What a header says of one tensor."""

    dtype: str
    shape: tuple[Size, ...]
    data_offsets: tuple[Size, Size]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies: `offset` is absolute in the shard, `nbytes` as stored there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One safetensors file; `header_hash` is SHA-256 over its header, hex."""

    path: str
    header_hash: str
    tensors: tuple[StoredTensor, ...]

    def sample_hash(self) -> str:
        """SHA-256 over a few windows of each tensor's bytes, hex. Raises as `reading`."""
        digest = hashlib.sha256()
        with reading(self.path) as file:
            for tensor in self.tensors:
                for start, size in _windows(tensor.nbytes):
                    digest.update(os.pread(file.fileno(), size, tensor.offset + start))
        return digest.hexdigest()


@contextlib.contextmanager
def reading(path: str) -> Iterator[BinaryIO]:
    """A file of the checkpoint, unbuffered, to be read in the block.

    Raises:
        UsageError: `model.missing`, `model.broken`.
        UnderstudyError: `model.shortage`, `model.unreadable`: it may well be fine, and cannot be
            read now. Neither ends the engine for good.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            yield file
    except (FileNotFoundError, NotADirectoryError):
        directory = os.path.dirname(path)
        problem = f"{path} does not exist; download the checkpoint again."
        if not os.path.isdir(directory):
            problem = (
                f"{directory} is not a directory; give the directory of a Hugging Face checkpoint "
                "(config.json, *.safetensors, tokenizer.json)."
            )
        raise UsageError("model.missing", problem) from None
    except OSError as error:
        if is_disk_fault(error):
            text = f"{path} cannot be read: {error.strerror}; check the disk"
            raise UnderstudyError("model.unreadable", text) from error
        if not is_shortage(error):
            broken(path, f"it cannot be read ({error.strerror})")
        raise UnderstudyError(
            "model.shortage",
            f"{path} cannot be opened now: {error.strerror}; raise the limit of open files "
            "(ulimit -n), or find what uses them up.",
        ) from None


def read_json(path: str) -> dict[str, Any]:
    """A JSON object from a file of the checkpoint. Raises as `reading`."""
    try:
        return msgspec.json.decode(read_file(path), type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        broken(path, f"it is no valid JSON object ({error})")


def read_file(path: str) -> bytes:
    """A small file of the checkpoint. Raises as `reading`."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > JSON_MAX_BYTES:
            broken(path, f"it is larger than {JSON_MAX_BYTES >> 20} MiB")
        return file.read()


def read_shards(directory: str) -> tuple[Shard, ...]:
    """The headers of `model.safetensors`, or of every shard that the index names.

    Raises:
        UsageError: `model.missing` or `model.broken`; the message names the file and the fix.
    """
    index_path = os.path.join(directory, INDEX_NAME)
    if os.path.exists(os.path.join(directory, SINGLE_NAME)):
        names = [SINGLE_NAME]
    elif os.path.exists(index_path):
        names = _shard_names(index_path)
    else:
        raise UsageError(
            "model.missing",
            f"{directory} holds neither {SINGLE_NAME} nor {INDEX_NAME}; download the safetensors "
            "files of the checkpoint (PyTorch .bin files are not read).",
        )
    return tuple(read_shard(os.path.join(directory, name)) for name in names)


def _shard_names(index_path: str) -> list[str]:
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        broken(index_path, "it has no weight_map")
    for name in weight_map.values():
        if not isinstance(name, str) or os.path.basename(name) != name:
            broken(index_path, f"its weight_map names {name!r}, which is not a plain file name")
    return sorted(set(weight_map.values()))


def identity_of(shards: Iterable[Shard]) -> dict[str, Any]:
    """Header and sample of each, by name."""
    return {
        os.path.basename(each.path): {"header": each.header_hash, "sample": each.sample_hash()}
        for each in shards
    }


def same_on_every_rank(identity: dict[str, Any]) -> dict[str, Any]:
    """The part of an identity in which the ranks of one engine must not differ."""
    return {name: value for name, value in identity.items() if name != "rank"}


def digest_of(facts: Any) -> str:
    """What processes compare in place of `facts`, which are JSON but for what has a text."""
    text = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def read_shard(path: str) -> Shard:
    """One file's header, checked against the file's size. Raises as `reading`."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        prefix = os.pread(file.fileno(), 8, 0)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if header_bytes > HEADER_MAX_BYTES:
            broken(path, f"its header claims {header_bytes} bytes: this is not a safetensors file")
        base = 8 + header_bytes
        if base > size:
            broken(path, f"it is truncated: {size} of at least {base} bytes")
        raw = os.pread(file.fileno(), header_bytes, 8)
    try:
        header = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        header.pop("__metadata__", None)
        entries = {name: msgspec.json.decode(each, type=Entry) for name, each in header.items()}
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        broken(path, f"its header is not valid JSON of a safetensors file ({error})")
    stored = (_stored(path, name, entry, base) for name, entry in entries.items())
    # Empty ones lie before their neighbour.
    tensors = sorted(stored, key=lambda tensor: (tensor.offset, tensor.nbytes))
    for before, after in pairwise(tensors):
        if before.offset + before.nbytes > after.offset:
            broken(path, f"tensors {before.name} and {after.name} overlap")
    end = max((tensor.offset + tensor.nbytes for tensor in tensors), default=base)
    if end > size:
        broken(path, f"it is truncated: {size} of {end} bytes")
    return Shard(path, hashlib.sha256(raw).hexdigest(), tuple(tensors))


def _stored(path: str, name: str, entry: Entry, base: int) -> StoredTensor:
    dtype, shape, (start, end) = entry.dtype, entry.shape, entry.data_offsets
    if dtype in ITEM_BYTES and end - start != math.prod(shape) * ITEM_BYTES[dtype]:
        broken(path, f"tensor {name} claims {end - start} bytes for {dtype} {list(shape)}")
    return StoredTensor(name, dtype, shape, path, base + start, end - start)


def sample_of(path: str) -> str:
    """SHA-256 over the size and a few windows of a file that is not a safetensors file, hex. Raises
    as `reading`."""
    with reading(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(b"%d" % size)
        for start, length in _windows(size, FILE_SAMPLE_WINDOWS):
            digest.update(os.pread(file.fileno(), length, start))
    return digest.hexdigest()


def _windows(nbytes: int, windows: int = SAMPLE_WINDOWS) -> list[tuple[int, int]]:
    """(start, size) of the sampled stretches of a tensor of `nbytes` bytes."""
    if nbytes <= windows * SAMPLE_WINDOW_BYTES:
        return [(0, nbytes)]
    last = nbytes - SAMPLE_WINDOW_BYTES
    return [(last * index // (windows - 1), SAMPLE_WINDOW_BYTES) for index in range(windows)]


def broken(path: str, reason: str) -> NoReturn:
    raise UsageError("model.broken", f"{path}: {reason}; download the file again.", file=path)
