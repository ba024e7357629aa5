"""The device check of the fence finds a process that writes on, which no driver here would show."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest

from hack.device import fence
from hack.device.part import Part
from tests.standin import build


@pytest.mark.slow
def test_a_write_after_the_fence_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A process that is taken for dead and is not: the claim does not hold."""
    for name, value in build.environment().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(fence, "_kill_and_wait", lambda victim, witness: time.monotonic())
    part = Part(
        device=build.GPU_A,
        directory=str(tmp_path),
        limit_s=60,
        bytes_max=256 << 20,
        kills_max=1,
        still_s=0.02,
    )
    with contextlib.closing(part):
        fence.fence(part)
    assert part.claims == {"no_write_follows_the_fence": False}
    assert part.figures["with_a_write_after_the_fence"] == 1
