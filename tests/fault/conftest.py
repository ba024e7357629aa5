"""One pod for all tests of this directory: none of these faults may leave a mark on it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.pods import PodHome, make_model

# A restarted lock server calls a silent holder unresponsive after this; it changes nothing else.
WINDOW_MS = 300
# Longer than any test: whoever waits in the backlog shall be answered by an engine.
HOLD_MS = 600_000


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodHome]:
    base = tmp_path_factory.mktemp("fault")
    env = {"UNDERSTUDY_WINDOW_MS": str(WINDOW_MS), "UNDERSTUDY_HOLD_MS": str(HOLD_MS)}
    found = PodHome(base, make_model(base / "model"), env=env)
    try:
        yield found
    finally:
        found.close()
