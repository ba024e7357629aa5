"""A small random model, made once."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.backends.reference.random_model import write_random_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_random_model(str(directory))
    return directory
