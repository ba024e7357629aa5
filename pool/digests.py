"""Digests of a pool file's settings: whether what runs is what the file says now."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec.structs import replace

from pool.settings import PoolFile

DIGITS = 12


def digests(file: PoolFile) -> dict[str, str]:
    """By model, and of the rest under `""`. `defaults` are in the models' own settings already."""
    whole = replace(file, models={}, defaults={})
    return {"": _digest(whole)} | {name: _digest(each) for name, each in file.models.items()}


def _digest(settings: msgspec.Struct) -> str:
    text = msgspec.json.encode(settings, enc_hook=str, order="sorted")  # times and sizes by `str`
    return hashlib.sha256(text).hexdigest()[:DIGITS]
