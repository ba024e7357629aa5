"""What people name wrongly on their first day: each is answered with the way out, never a trace."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from understudy.pod.bundle import collect


@pytest.mark.parametrize("name", ["log", "l" * 300])
def test_bundle_without_its_logs_says_how_to_name_them(tmp_path: Path, name: str):
    """Goal: logs that are elsewhere are not missed in silence, and a folder that cannot be read
    costs itself alone. Method: a folder that is not there, and one that no call takes."""
    said: list[str] = []
    asyncio.run(collect(tmp_path, tmp_path / name, tmp_path / "b.tar.gz", said.append))
    (line,) = [line for line in said if line.startswith("missing: log: ")]
    assert name in line
    assert line.endswith("--log-dir says")
