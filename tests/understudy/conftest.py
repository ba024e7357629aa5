"""A directory for a pod."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    made = tmp_path / "pod"
    made.mkdir(mode=0o700)
    return made
