"""Why a model of several ranks has failed: one report for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engine.backends.reference.link import RANK_LOST, FailedMsg

# The lost rank's own report was sent, or its link closed, before its loss was noticed.
CAUSE_WAIT_S = 0.5


class Cause:
    """Why a model of several ranks has failed.

    A rank that fails reports why and ends; those that computed with it report `engine.rank_lost`.
    All of that may have arrived before any of it is read, in any order.
    """

    def __init__(self, on_failed: Callable[[FailedMsg], None]) -> None:
        self._on_failed = on_failed
        self._is_reported = False

    def failed(self, failed: FailedMsg) -> None:
        """Report it, unless it is a loss: then a cause that arrives soon goes first."""
        if failed.code == RANK_LOST:
            asyncio.get_running_loop().call_later(CAUSE_WAIT_S, self._report, failed)
        else:
            self._report(failed)

    def _report(self, failed: FailedMsg) -> None:
        if not self._is_reported:
            self._is_reported = True
            self._on_failed(failed)
