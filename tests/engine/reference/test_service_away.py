"""While the memory service is away: how long a rank waits for it, at its start and at its end."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.memory_session import RESTART_WAIT_S
from engine.backends.reference.decoder import Peers
from engine.backends.reference.model_process import REPORT_WAIT_S, Rank
from engine.core.relaunch import DEATHS_MAX, DEATHS_WINDOW_MS


class Keeper:
    """One whose service is away, or there."""

    def __init__(self, *, is_attached: bool) -> None:
        self.is_attached = is_attached
        self.calls: list[Any] = []

    def report_canary_failure(self, detail: str) -> None:
        self.calls.append(detail)

    def wait_until_reported(self, timeout_s: float) -> bool:
        self.calls.append(0 < timeout_s <= REPORT_WAIT_S)
        return self.is_attached


@pytest.mark.parametrize("is_attached", [True, False])
def test_failed_canary_is_waited_for_until_it_is_reported(
    caplog: pytest.LogCaptureFixture, is_attached: bool
):
    """Reported first, then waited for, not for ever; a report in vain is in the log."""
    rank, keeper = Rank.__new__(Rank), Keeper(is_attached=is_attached)
    kept = SimpleNamespace(discard=keeper.calls.append)
    rank.__dict__.update(
        _weights=SimpleNamespace(keeper=keeper),
        peers=Peers(),
        kept=kept,
        _settings=SimpleNamespace(rank=3),
    )
    with caplog.at_level(logging.WARNING):
        rank.distrust()
    assert keeper.calls == ["a canary failed", "rank 3: a canary failed", True]
    assert ("no memory service" in caplog.text) == (not is_attached)


def test_waiting_for_a_service_is_no_crash_loop():
    """However often an engine waits in vain and dies of it, it does not die often enough."""
    assert RESTART_WAIT_S * 1000 * (DEATHS_MAX - 1) > DEATHS_WINDOW_MS
