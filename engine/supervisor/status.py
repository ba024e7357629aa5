"""What an engine reports about itself: one document, for /status, the CLI and the state file, and
the answers to probes.

Owns the document's keys, which are documented and only ever grow. Reads the engine's parts,
changes none.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from engine.core import probes
from engine.core.events import Shall, State
from engine.core.health import stretch
from engine.core.lifecycle import tier_of
from engine.supervisor.cpu_share import cpu_list
from engine.supervisor.engine import Engine
from engine.supervisor.state_file import EngineStateFile, to_text
from engine.supervisor.timers import patience_of
from plumbing.pod.messages import Tier
from plumbing.service.http import Probe
from plumbing.service.notify import restarts
from plumbing.text import duration
from plumbing.wire.server import Server

SCHEMA = 1
SERVING = frozenset({State.WAKING, State.ACTIVE})


class EngineStatus:
    """The status of `engine`, written to `state_file` whenever it changes."""

    def __init__(self, engine: Engine, state_file: EngineStateFile) -> None:
        self._engine = engine
        self._state_file = state_file
        self.http_problem: Callable[[], str | None] = lambda: None
        self.server: Server | None = None  # the control socket's, whose problem is reported
        engine.changes.listeners.append(lambda: state_file.write(self.document()))

    def document(self) -> dict[str, Any]:
        """The status document."""
        engine, settings, history = self._engine, self._engine.settings, self._engine.history
        now, last = engine.lifecycle.now, history.last_takeover
        return {
            "schema": SCHEMA,
            **engine.log.newest(),
            "engine": {
                "id": settings.engine,
                "role": settings.role.value,
                "state": now.state.value,
                "step": now.step.value if now.step else None,
                "since": history.since,
                "reason": self._reason(),
                "incarnation": now.incarnation,
                "number": now.number,
                "model": settings.model or None,
                "pid": os.getpid(),
                "restarts": restarts(),
                "is_healthy": history.is_healthy,
                "was_standby": history.saved.was_standby,
            },
            "goal": {
                "tier": tier_of(now.state, is_away=now.is_away).value,
                "goal": now.shall.goal.value,
                "by": now.shall.by or None,
                "can_rest": now.can_rest,
                "generation": to_text(now.generation) or None,
            },
            "lock": self._lock(),
            "backend": self._backend(),
            "cpus": self._cpus(),
            "inflight": history.in_flight,
            "budget": {
                "ms": history.budget_ms,
                "spent_ms": round(history.spent_ms, 3),
                "is_spent": history.is_budget_spent,
            },
            "stop": {
                "is_told": now.is_leaving,
                "drain_ms": engine.settings.budgets_ms[State.DRAINING],
                "streams": "hand_over" if engine.lock.is_continued else "finish",
            },
            "health": self._health(),
            "deaths": list(history.deaths),
            "relaunch": engine.relauncher.plan,
            "last_failover": asdict(last) if last else None,
            "problems": self._problems(),
            "memory": asdict(history.saved),
        }

    def _lock(self) -> dict[str, Any]:
        now, lock = self._engine.lifecycle.now, self._engine.lock
        wanted_since = self._engine.history.wanted_since
        return {
            "server": self._engine.settings.lockserver_socket,
            "connected": lock.client.is_connected,
            "token": now.token,
            "waiting_since": wanted_since if now.state is State.STANDBY else None,
            "other": asdict(lock.other) if lock.other else None,
            "address": lock.address,
            "is_behind_gateway": lock.listener.path is not None,
            "problem": lock.problem,
            "lease": lock.client.lease,
        }

    def _backend(self) -> dict[str, Any]:
        incarnation = self._engine.incarnation
        prepared = incarnation.prepared if incarnation else None
        return {
            "name": self._engine.settings.backend,
            "pids": incarnation.tree.pids() if incarnation else {},
            "started_at": self._engine.history.launched_at,
            "exit": incarnation.exit if incarnation else None,
            "weights_bytes": prepared.weights_bytes if prepared else None,
            "kv_bytes": prepared.kv_bytes if prepared else None,
            "kv": self._kv(),
            "epoch": prepared.epoch if prepared else None,
            "serves_on": self._serves_on(),
            "last_canary": incarnation.canaries.last if incarnation else None,
        }

    def _kv(self) -> dict[str, Any] | None:
        """Since the wake: whose memory the KV cache is in, and what it began with."""
        incarnation = self._engine.incarnation
        woken = incarnation.residency.woken if incarnation else None
        if woken is None:
            return None
        return {
            "memory": woken.kv_memory,
            "adopted_blocks": woken.adopted_blocks,
            "published_blocks": self._engine.history.published_blocks,
            "torn_blocks": woken.torn_blocks,
            "kept_blocks": self._engine.history.kept_blocks,
            "note": woken.kv_note or None,
        }

    def _serves_on(self) -> str | None:
        """Where the backend accepts, or will once it is awake; None while it is not to."""
        incarnation, state = self._engine.incarnation, self._engine.lifecycle.state
        if incarnation is None or state not in SERVING or not incarnation.residency.is_wake_asked:
            return None
        return incarnation.residency.private_path or self._engine.lock.address

    def _health(self) -> dict[str, Any]:
        engine, pressure = self._engine, self._engine.pressure
        signs, patience = engine.signs(), patience_of(engine.settings)
        watch = engine.watch
        return {
            "cpu_pressure": round(signs.pressure, 3) if signs.pressure is not None else None,
            "cpu_pressure_file": pressure.path,
            "stretch": round(stretch(signs.pressure), 2),
            "has_standby": signs.has_standby if watch is not None else None,
            "is_continued": engine.lock.is_continued if watch is not None else None,
            "hang_budget_ms": round(patience.budget_ms(signs)) if watch is not None else None,
            "hang_budget": patience.explain(signs) if watch is not None else None,
            "answer_late_ms": round(watch.late_ms) if watch is not None else None,
        }

    def _cpus(self) -> dict[str, Any]:
        incarnation = self._engine.incarnation
        limit = incarnation.cpus.limit if incarnation else None
        return {
            "available": cpu_list(os.sched_getaffinity(0)),
            "limit": cpu_list(limit) if limit is not None else None,
        }

    def _problems(self) -> list[str]:
        engine = self._engine
        problems = [
            self._state_file.problem,
            self._machine_fault(),
            engine.predecessor,
            engine.lock.problem,
            engine.layout.note,
            self.http_problem(),
            engine.leftovers.problem,
            self.server.problem if self.server is not None else None,
        ]
        if engine.incarnation is not None:
            problems.append(engine.incarnation.tree.problem)
            problems.append(engine.incarnation.canaries.problem)
            problems.append(engine.incarnation.residency.problem)
            if engine.incarnation.prepared is not None:
                problems += engine.incarnation.prepared.warnings
        return [problem for problem in problems if problem]

    def _machine_fault(self) -> str | None:
        fault = self._engine.machine_fault
        return f"{fault}; it is the machine's fault, and tried again each second" if fault else None

    def _reason(self) -> str:
        """Why the engine is in its state, and what it waits for."""
        now, incarnation = self._engine.lifecycle.now, self._engine.incarnation
        if now.state is State.INIT and incarnation is not None:
            if incarnation.loading.is_waiting:
                why = self._disconnected() or ": another engine is loading"
                return f"waiting for the loader lock{why}"
            cpus = incarnation.cpus
            limited = f", {cpus.describe()} until prepared" if cpus.limit is not None else ""
            return incarnation.waiting or f"loading the model{limited}"
        if now.state is State.STANDBY:
            other = self._engine.lock.other
            holder = f", {other.engine} holds it" if other else ""
            return f"waiting for the lock{holder}{self._disconnected() or self._without_lease()}"
        if now.state is State.DEAD and now.shall.goal is Tier.COLD:
            return cold_because(now.shall, self._engine.log.source, is_reaped=now.is_reaped)
        if now.state is State.RESTING:
            return f"at rest, and holds the lock; {_asked(now.shall)}"
        watch = self._engine.watch
        if watch is not None and watch.late_ms > 0:
            return f"{now.reason}; the backend's answer is {duration(watch.late_ms)} late"
        return now.reason

    def _disconnected(self) -> str:
        client = self._engine.lock.client
        if client.is_connected:
            return ""
        why = f": {client.unreachable}" if client.unreachable else ""
        return f" (the lock server cannot be reached{why})"

    def _without_lease(self) -> str:
        lease = self._engine.lock.client.lease
        if lease is None or lease["valid_for_ms"] > 0:
            return ""
        return ", but cannot be granted it now: the lock server answers too late or not at all"

    def probe(self, endpoint: str) -> Probe:
        """The answer of one line of the probe table, with its reason."""
        engine, history = self._engine, self._engine.history
        state = engine.lifecycle.state
        view = probes.View(
            state=state,
            was_started=history.saved.was_standby or history.saved.was_cold,
            is_budget_spent=history.is_budget_spent,
            is_healthy=history.is_healthy,
            is_crash_loop=engine.relauncher.verdict is not None,
            is_cold=engine.lifecycle.now.shall.goal is Tier.COLD,
        )
        answer = probes.answer(endpoint, view)
        details = {
            "state": state.value,
            "message": self._reason(),
            "since_s": round(history.spent_ms / 1000, 3),
            "rule": answer.rule.value,
        }
        return Probe(answer.ok, answer.reason, details)


def cold_because(shall: Shall, engine: str, *, is_reaped: bool) -> str:
    """Why no backend runs, and what starts one."""
    if not is_reaped:
        return f"becoming cold: its processes are being ended; asked to be cold{_by(shall)}"
    how = f"; `understudy wake {engine}` starts it" if shall.generation is None else ""
    return f"cold because it was asked to be{_by(shall)}: no backend runs{how}"


def _by(shall: Shall) -> str:
    return f" by {shall.by}" if shall.by else ""


def _asked(shall: Shall) -> str:
    return f"asked to be {shall.goal.value}{_by(shall)}; `understudy wake` wakes it"
