"""The settings of `lockserver serve`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockserver.core.leases import LEASE_MS, MARGIN_MS
from lockserver.core.lock import kinds_of
from lockserver.core.machine import SILENT_MS, WINDOW_MS
from plumbing.wire.tcp import Security
from plumbing.wire.tcp_address import TcpAddress

HOLD_MS = 10_000.0


@dataclass(frozen=True)
class LockSettings:
    """One directory's server."""

    directory: str
    services: Mapping[str, str] = field(default_factory=dict)  # lock → HOST:PORT
    window_ms: float = WINDOW_MS
    hold_ms: float = HOLD_MS
    silent_ms: float = SILENT_MS
    listen: TcpAddress | None = None  # for engines on other hosts; None: this host only
    security: Security | None = None  # of `listen`, which needs it
    lease_ms: float = LEASE_MS
    lease_margin_ms: float = MARGIN_MS
    models: tuple[str, ...] = ()  # each with locks of its own; none: one model without a name

    @property
    def kinds(self) -> dict[str, bool]:
        """The locks, and whether each is fenced."""
        return kinds_of(self.models)
