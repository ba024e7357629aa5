"""The image, built once for all tests of this directory that run containers."""

from __future__ import annotations

import pytest

from hack import container_image


@pytest.fixture(scope="session")
def image() -> str:
    """The id of the CPU image, made from this working tree."""
    return container_image.build()
