"""The image, built once for all tests of this directory that run containers."""

from __future__ import annotations

import pytest

from tests.deploy.image import build


@pytest.fixture(scope="session")
def image() -> str:
    """The id of the CPU image, made from this working tree."""
    return build()
