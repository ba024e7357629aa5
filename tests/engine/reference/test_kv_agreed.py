"""Sizes are agreed, not measured: the KV cache of two engines with the same
settings is the same to the byte, whatever memory each of them happens to find free."""

from __future__ import annotations

import pytest

from engine.backends import free_memory
from engine.backends.free_memory import RESERVE_BYTES, Room
from engine.backends.reference.config import read_config
from engine.backends.reference.kv_blocks import size_kv
from engine.backends.reference.link import ConfigureMsg
from plumbing.errors import UnderstudyError
from tests.engine.reference.support import golden

MIB = 1 << 20


def prepared_kv_bytes(monkeypatch: pytest.MonkeyPatch, room: Room, **more: int) -> int:
    """The KV size that an engine reports before it has any KV memory."""
    monkeypatch.setattr(free_memory, "read_room", lambda *_: room)
    fields = {"slots": 4, "max_context": None, "kv_bytes": None, **more}
    directory = golden("untied-gqa-bf16")
    return size_kv(read_config(directory), ConfigureMsg(directory=directory, **fields)).kv_bytes


def test_row_10_kv_size_follows_from_settings_and_model_alone(monkeypatch: pytest.MonkeyPatch):
    """Two engines that find 2 MiB more or less free (the difference that broke the peer's
    adoption), or almost nothing: the same size, or a refusal that names both; never a smaller
    cache."""
    limit = 1 << 40
    rooms = [Room(free, limit, "this machine") for free in (1 << 36, (1 << 36) - 2 * MIB, MIB)]
    assert len({prepared_kv_bytes(monkeypatch, room) for room in rooms}) == 1
    capped = {prepared_kv_bytes(monkeypatch, room, kv_bytes=100_000) for room in rooms}
    assert len(capped) == 1
    assert max(capped) <= 100_000
    with pytest.raises(UnderstudyError, match=r"engine\.kv_too_large") as caught:
        prepared_kv_bytes(monkeypatch, Room(0, RESERVE_BYTES, "this container"))
    assert set(caught.value.details) == {"needed_bytes", "limit_bytes"}
