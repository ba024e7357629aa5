"""Schedules make and drop whole worlds, each a web of cycles: the collector comes less often, and
leaves what the tests before have made."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

ALLOCATIONS = 5_000  # between two collections; with more the dropped worlds outgrow the caches


@pytest.fixture(autouse=True, scope="package")
def _collects_seldom() -> Iterator[None]:
    before = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(ALLOCATIONS, *before[1:])
    yield
    gc.set_threshold(*before)
    gc.unfreeze()
