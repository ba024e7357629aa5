"""One pod for all tests of this directory: none of these faults may damage it."""

from __future__ import annotations

from tests.e2e.pods import home_with

# A restarted lock server calls a silent holder unresponsive after this; it changes nothing else.
WINDOW_MS = 300
# An engine without a heartbeat for this long is skipped and reported; four heartbeats, so that one
# that waits for a CPU is not.
SILENT_MS = 2000
# Longer than any test: clients in the backlog must be answered by an engine.
HOLD_MS = 600_000


LIMITS = {"WINDOW_MS": WINDOW_MS, "SILENT_MS": SILENT_MS, "HOLD_MS": HOLD_MS}
home = home_with(env={f"UNDERSTUDY_{name}": str(limit) for name, limit in LIMITS.items()})
