"""One model and one pod, shared by the tests of this directory that leave a pod complete."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.e2e.pods import PodHome, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random checkpoint."""
    return make_model(tmp_path_factory.mktemp("e2e") / "model")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[PodHome]:
    """A pod that every test of a module leaves complete."""
    with closing(PodHome(tmp_path_factory.mktemp("pod"), model)) as found:
        yield found
