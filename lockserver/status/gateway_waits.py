"""What requests wait for in gateway mode: a gateway that accepts, and one that is heard.

Engines are granted their locks all the same, so these are no lock's problems, but shown beside
them. Looks into /proc for what keeps a silent gateway from running; decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockserver.status.silent import FIXES
from lockserver.status.wait import LockWait
from plumbing.service import procfs


@dataclass(frozen=True, slots=True)
class MissingGateway:
    """No gateway accepts on a service address. `connected`: a sentence on each that could;
    `is_overdue`: that is a fault, and no slow start of the pod."""

    address: str
    since_ms: float
    connected: Sequence[str]
    is_overdue: bool


def no_gateway_wait(missing: MissingGateway, directory: str) -> LockWait:
    """No request reaches an engine."""
    fix = f"start one: gateway serve --dir {directory}; without gateways: lockserver serve --direct"
    if missing.connected:
        fix = f"see why: gateway status --dir {directory}"
    return LockWait(
        "no_gateway",
        f"no gateway accepts connections on {missing.address}",
        missing.since_ms,
        tuple(missing.connected) or ("no gateway is connected",),
        fix,
        is_fault=missing.is_overdue,
    )


@dataclass(frozen=True, slots=True)
class SilentGateway:
    """One that sends no heartbeats since `heard_ms`; `is_late`: nor does its child accept."""

    name: str
    lock: str
    pid: int
    heard_ms: float
    is_late: bool

    def wait(self) -> LockWait:
        halted = procfs.halted(self.pid) if self.pid else None
        process = f"its process is {halted}" if halted else "its process is not seen to be stopped"
        served = "connections wait" if self.is_late else "no connection waits for it"
        if self.pid:
            kill = f"if it stays so, kill it: kill -9 {self.pid}; its child ends with it"
            fix = FIXES.get(halted or "", kill).format(pid=self.pid)
        else:
            fix = "restart its container; connections wait meanwhile"
        return LockWait(
            "gateway_silent",
            f"{self.name} is silent: its child may serve, and no takeover reaches it",
            self.heard_ms,
            (process, served),
            fix,
        )
