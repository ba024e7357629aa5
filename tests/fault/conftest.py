"""One pod for all tests of this directory: none of these faults may damage it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.e2e.pods import PodHome, make_model

# A restarted lock server calls a silent holder unresponsive after this; it changes nothing else.
WINDOW_MS = 300
# An engine without a heartbeat for this long is skipped and reported; four heartbeats, so that one
# that waits for a CPU is not.
SILENT_MS = 2000
# Longer than any test: clients in the backlog must be answered by an engine.
HOLD_MS = 600_000


@pytest.fixture(scope="package")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PodHome]:
    base = tmp_path_factory.mktemp("fault")
    limits = {"WINDOW_MS": WINDOW_MS, "SILENT_MS": SILENT_MS, "HOLD_MS": HOLD_MS}
    env = {f"UNDERSTUDY_{name}": str(limit) for name, limit in limits.items()}
    with closing(PodHome(base, make_model(base / "model"), env=env)) as found:
        yield found
