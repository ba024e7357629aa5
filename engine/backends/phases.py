"""What a backend may be asked in which phase of its life; the table is the enforcer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from enum import StrEnum

from plumbing.errors import ProtocolError

logger = logging.getLogger(__name__)


class Phase(StrEnum):
    PREPARING = "preparing"
    PREPARED = "prepared"
    AWAKE = "awake"
    SERVING = "serving"
    DRAINING = "draining"


# What may be asked in which phase, and the phase after it.
TRANSITIONS: Mapping[tuple[Phase, str], Phase] = {
    (Phase.PREPARING, "ready"): Phase.PREPARED,
    (Phase.PREPARED, "wake"): Phase.AWAKE,
    (Phase.PREPARED, "drain"): Phase.DRAINING,
    (Phase.AWAKE, "run_canary"): Phase.AWAKE,
    (Phase.AWAKE, "serve"): Phase.SERVING,
    (Phase.AWAKE, "drain"): Phase.DRAINING,
    (Phase.SERVING, "run_canary"): Phase.SERVING,
    (Phase.SERVING, "drain"): Phase.DRAINING,
}


class Phases:
    """The phase of one backend."""

    def __init__(self) -> None:
        self.now = Phase.PREPARING

    @property
    def is_parked(self) -> bool:
        """Ready to be woken, and idle until then."""
        return self.now is Phase.PREPARED

    def step(self, request: str) -> None:
        """Go on to the phase after `request`.

        Raises:
            ProtocolError: `engine.backend_phase`; nothing has changed.
        """
        target = TRANSITIONS.get((self.now, request))
        if target is None:
            raise ProtocolError(
                "engine.backend_phase",
                f"{request} makes no sense while the backend is {self.now}",
                phase=str(self.now),
            )
        if target is not self.now:
            logger.info("%s → %s: %s", self.now, target, request)
        self.now = target
