"""What the engine says of itself: one document, for /status, the CLI, the state file and probes.

Owns its keys, which are documented and only ever grow. Reads the supervisor's parts, changes none.
"""

from __future__ import annotations

from collections import deque
from dataclasses import asdict, dataclass, field
from typing import Any

from engine.core.events import State
from engine.core.lifecycle import Situation
from engine.supervisor.launch import Launch
from engine.supervisor.lock_side import LockSide
from engine.supervisor.settings import Settings
from engine.supervisor.state_file import Memory
from engine.supervisor.takeover import Takeovers

SCHEMA = 1
DEATHS_SHOWN = 10


@dataclass(slots=True)
class Budget:
    """How long the present state may last; None where it may last for ever."""

    since_ms: float
    budget_ms: int | None

    def spent_ms(self, now_ms: float) -> float:
        return now_ms - self.since_ms

    def is_spent(self, now_ms: float) -> bool:
        return self.budget_ms is not None and self.spent_ms(now_ms) >= self.budget_ms


@dataclass(slots=True)
class Facts:
    """What happened, as far as people may ask for it."""

    since: str
    cause: str = "not_launched"
    launched_at: str | None = None
    deaths: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=DEATHS_SHOWN))
    in_flight: int = 0
    is_healthy: bool = True

    def remember_death(self, now: Situation, took_ms: float, *, is_rehearsed: bool) -> None:
        """The engine is dead since `since`, and its last process was gone `took_ms` later."""
        self.in_flight = 0
        self.deaths.append(
            {
                "incarnation": now.incarnation,
                "number": now.number,
                "cause": self.cause,
                "message": now.reason,
                "at": self.since,
                "is_rehearsed": is_rehearsed,
                "reaped_in_ms": round(took_ms, 3),
            }
        )


def reason_of(now: Situation, launch: Launch | None, lock: LockSide) -> str:
    """Why the engine is where it is, with what it waits for."""
    if now.state is State.INIT and launch is not None and launch.loading.is_waiting:
        return "waiting for the loader lock" + (_unless_connected(lock) or ": another engine loads")
    if now.state is State.INIT and launch is not None and launch.waiting is not None:
        return launch.waiting
    if now.state is State.STANDBY:
        holder = f", {lock.other.engine} has it" if lock.other else ""
        return f"waiting for the lock{holder}" + (_unless_connected(lock) or _unless_leased(lock))
    return now.reason


def _unless_connected(lock: LockSide) -> str:
    if lock.client.is_connected:
        return ""
    why = lock.client.unreachable
    return " (the lock server cannot be reached" + (f": {why})" if why else ")")


def _unless_leased(lock: LockSide) -> str:
    lease = lock.client.lease
    if lease is None or lease["valid_for_ms"] > 0:
        return ""
    return (
        ", and could not be granted it now: the lock server's answers come too late or not at all"
    )


def document(
    settings: Settings,
    now: Situation,
    launch: Launch | None,
    lock: LockSide,
    budget: Budget,
    facts: Facts,
    memory: Memory,
    *,
    takeovers: Takeovers,
    relaunch: dict[str, Any] | None,
    pid: int,
    now_ms: float,
    newest: dict[str, Any],
    problems: list[str],
) -> dict[str, Any]:
    """The status document."""
    other = lock.other
    return {
        "schema": SCHEMA,
        **newest,
        "engine": {
            "id": settings.engine,
            "role": settings.role.value,
            "state": now.state.value,
            "step": now.step.value if now.step else None,
            "since": facts.since,
            "reason": reason_of(now, launch, lock),
            "incarnation": now.incarnation,
            "number": now.number,
            "pid": pid,
            "is_healthy": facts.is_healthy,
            "was_standby": memory.was_standby,
            "member": settings.member,
            "members": settings.members,
        },
        "lock": {
            "server": settings.lockserver_socket,
            "connected": lock.client.is_connected,
            "token": now.token,
            "waiting_since": takeovers.wanted_since if now.state is State.STANDBY else None,
            "other": {"engine": other.engine, "token": other.token} if other else None,
            "address": lock.address,
            "problem": lock.problem,
            "lease": lock.client.lease,
        },
        "backend": _backend(settings, launch, facts),
        "inflight": facts.in_flight,
        "budget": {
            "ms": budget.budget_ms,
            "spent_ms": round(budget.spent_ms(now_ms), 3),
            "is_spent": budget.is_spent(now_ms),
        },
        "deaths": list(facts.deaths),
        "relaunch": relaunch,
        "last_failover": asdict(takeovers.last) if takeovers.last else None,
        "problems": problems,
        "memory": asdict(memory),
    }


def _backend(settings: Settings, launch: Launch | None, facts: Facts) -> dict[str, Any]:
    prepared = launch.prepared if launch else None
    return {
        "name": settings.backend,
        "pids": launch.tree.pids() if launch else {},
        "started_at": facts.launched_at,
        "exit": launch.exit if launch else None,
        "weights_bytes": prepared.weights_bytes if prepared else None,
        "kv_bytes": prepared.kv_bytes if prepared else None,
        "epoch": prepared.epoch if prepared else None,
        "last_canary": launch.last_canary if launch else None,
    }
