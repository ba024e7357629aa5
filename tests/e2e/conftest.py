"""One model and one pod, shared by the tests of this directory that leave a pod complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.pods import home_with, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint."""
    return make_model(tmp_path_factory.mktemp("e2e") / "model")


home = home_with()
