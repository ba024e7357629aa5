"""Checkpoints in plain memory: what shared memory does for the real process."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from engine.backends.reference.checkpoint import Checkpoint, open_checkpoint
from engine.backends.reference.decoder import Decoder, KVCache, weights_from
from engine.backends.reference.generation import Generator, NewToken, SamplingParams, TokenRequest
from engine.backends.reference.ranks import Array, Peers

GOLDEN = os.path.join(os.path.dirname(__file__), "golden")
GOLDEN_NAMES = sorted(os.listdir(GOLDEN))
GREEDY = SamplingParams(temperature=0)


def golden(name: str) -> str:
    return os.path.join(GOLDEN, name)


def copy_of(name: str, target: Any) -> str:
    """A golden checkpoint in a directory of its own, to be damaged."""
    directory = os.path.join(str(target), name)
    shutil.copytree(golden(name), directory)
    return directory


def load(checkpoint: Checkpoint) -> dict[str, memoryview]:
    memory: dict[str, memoryview] = {}

    def place(name: str, nbytes: int, shape: tuple[int, ...], dtype: str) -> memoryview:
        assert dtype == "float32"
        memory[name] = memoryview(bytearray(nbytes))
        return memory[name][:]

    checkpoint.load_into(place, lambda done, total: None)
    return memory


def decoder_of(directory: str) -> Decoder:
    checkpoint = open_checkpoint(directory)
    memory = load(checkpoint)
    config = checkpoint.config
    return Decoder(config, weights_from(config, memory.__getitem__), Peers())


def cache_for(decoder: Decoder, slots: int = 4, max_context: int = 128) -> KVCache:
    """KV memory full of NaN: a slot that reads before it is written would show it."""
    nbytes = KVCache.bytes_needed(decoder.config, slots, max_context)
    return KVCache(decoder.config, bytearray(b"\xff" * nbytes), slots, max_context)


class Spy(Decoder):
    """Keeps the logits of every step, or of those in `slot`."""

    def __init__(self, decoder: Decoder, slot: int | None = None) -> None:
        self.__dict__ = dict(decoder.__dict__)
        self.seen: list[tuple[int, bytes]] = []
        self.slot = slot

    def forward(self, cache: KVCache, slot: int, tokens: Sequence[int], start: int) -> Array:
        logits = super().forward(cache, slot, tokens, start)
        if self.slot in (None, slot):
            self.seen.append((start + len(tokens), logits.tobytes()))
        return logits


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    source = random.Random(f"{length} {seed}")
    return tuple(source.randrange(3, 128) for _ in range(length))


def run(generator: Generator, requests: Iterable[TokenRequest] = ()) -> dict[int, list[NewToken]]:
    """Submit, step until nothing is left, and collect by request."""
    for request in requests:
        generator.submit(request)
    made: dict[int, list[NewToken]] = {}
    while generator.has_work:
        produced = generator.step()
        if produced is not None:
            made.setdefault(produced.request, []).append(produced)
    return made


def tokens_of(made: list[NewToken]) -> list[int]:
    return [produced.token for produced in made]


def edit_header(path: str, change: Callable[[dict[str, Any]], Any]) -> None:
    """Rewrite a safetensors header in place of the old one, tensors unchanged."""
    with open(path, "rb") as file:
        (size,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        rest = file.read()
    change(header)
    encoded = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded + rest)
