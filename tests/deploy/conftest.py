"""The image, built once for all tests that run containers; a place for overlays of one's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.container_image import build
from tests.deploy.manifests import DEPLOY


@pytest.fixture(scope="session")
def image() -> str:
    """The id of the CPU image, made from this working tree."""
    return build()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A directory with ours beside it, as an overlay of a user's own has: paths are relative."""
    (tmp_path / "deploy").symlink_to(DEPLOY)
    place = tmp_path / "own"
    place.mkdir()
    return place
