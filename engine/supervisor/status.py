"""What an engine reports about itself: one document, for /status, the CLI and the state file, and
the answers to probes.

Owns the document's keys, which are documented and only ever grow. Reads the engine's parts,
changes none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import msgspec

from engine import schema
from engine.core import probes
from engine.core.events import Shall, State, by_whom
from engine.core.health import stretch
from engine.core.lifecycle import tier_of
from engine.supervisor.engine import Engine, patience_of
from engine.supervisor.state_file import EngineStateFile, to_text
from plumbing.pod.messages import Tier
from plumbing.service.http import HttpServer, Probe
from plumbing.service.notify import restarts
from plumbing.text import duration
from plumbing.wire.server import Server

SERVING = frozenset({State.WAKING, State.ACTIVE})


class EngineStatus:
    """The status of `engine`, written to `state_file` whenever it changes."""

    def __init__(self, engine: Engine, state_file: EngineStateFile) -> None:
        self._engine = engine
        self._state_file = state_file
        self.sockets: Sequence[Server | HttpServer] = ()  # whose problems are reported
        engine.listeners.append(self._changed)

    def _changed(self) -> None:
        saved = self._engine.history.saved
        urgent = saved.goal, saved.generation, saved.number, saved.was_standby
        self._state_file.write(self.document, urgent)

    def document(self) -> dict[str, Any]:
        """The status document."""
        engine, history = self._engine, self._engine.history
        now, newest = engine.lifecycle.now, engine.log.newest()
        found = schema.EngineDocument(
            schema=1,
            **newest,
            engine=self._about(),
            goal=schema.EngineGoal(
                tier=tier_of(now.state, is_away=now.is_away).value,
                goal=now.shall.goal.value,
                by=now.shall.by or None,
                generation=to_text(now.generation) or None,
                can_rest=now.can_rest,
            ),
            lock=self._lock(),
            backend=self._backend(),
            inflight=history.in_flight,
            budget=schema.EngineBudget(
                history.budget_ms, round(history.spent_ms, 3), history.is_budget_spent
            ),
            stop=schema.EngineStop(
                is_told=now.is_leaving,
                drain_ms=engine.settings.budgets_ms[State.DRAINING],
                streams="hand_over" if engine.lock.is_continued else "finish",
            ),
            health=self._health(),
            deaths=list(history.deaths),
            relaunch=engine.plan,
            last_failover=history.last_takeover,
            problems=self._problems(),
            memory=history.saved,
        )
        document: dict[str, Any] = msgspec.to_builtins(found)
        return document

    def _about(self) -> schema.EngineEngine:
        engine, history = self._engine, self._engine.history
        now, settings = engine.lifecycle.now, engine.settings
        return schema.EngineEngine(
            id=settings.engine,
            role=settings.role.value,
            state=now.state.value,
            step=now.step.value if now.step else None,
            since=history.since,
            reason=self._reason(),
            incarnation=now.incarnation,
            number=now.number,
            model=settings.model or None,
            pid=os.getpid(),
            restarts=restarts(),
            is_healthy=history.is_healthy,
            was_standby=history.saved.was_standby,
        )

    def _lock(self) -> schema.EngineLock:
        now, lock = self._engine.lifecycle.now, self._engine.lock
        lease = lock.lease
        return schema.EngineLock(
            server=self._engine.settings.lockserver_socket,
            connected=lock.is_connected,
            token=now.token,
            waiting_since=self._engine.history.since if now.state is State.STANDBY else None,
            other=lock.other,
            address=lock.address,
            is_behind_gateway=lock.listener.path is not None,
            problem=lock.first_problem,
            lease=schema.EngineLease(**lease) if lease is not None else None,
        )

    def _backend(self) -> schema.EngineBackend:
        incarnation = self._engine.incarnation
        prepared = incarnation.prepared if incarnation else None
        return schema.EngineBackend(
            name=self._engine.settings.backend,
            pids=incarnation.tree.pids() if incarnation else {},
            started_at=self._engine.history.launched_at,
            exit=incarnation.exit if incarnation else None,
            weights_bytes=prepared.weights_bytes if prepared else None,
            kv_bytes=prepared.kv_bytes if prepared else None,
            kv=self._kv(),
            epoch=prepared.epoch if prepared else None,
            serves_on=self._serves_on(),
            last_canary=incarnation.last_canary if incarnation else None,
        )

    def _kv(self) -> schema.EngineKv | None:
        """Since the wake: whose memory the KV cache is in, and what it began with."""
        incarnation, counts = self._engine.incarnation, self._engine.counts()
        woken = incarnation.woken if incarnation else None
        if woken is None:
            return None
        return schema.EngineKv(
            memory=woken.kv_memory,
            adopted_blocks=woken.adopted_blocks,
            published_blocks=counts.published,
            kept_blocks=counts.kept,
            note=woken.kv_note or None,
        )

    def _serves_on(self) -> str | None:
        """Where the backend accepts, or will once it is awake; None while it is not to."""
        incarnation, state = self._engine.incarnation, self._engine.lifecycle.state
        if incarnation is None or state not in SERVING or not incarnation.is_wake_asked:
            return None
        return incarnation.private_path or self._engine.lock.address

    def _health(self) -> schema.EngineHealth:
        engine, watch = self._engine, self._engine.watch
        signs, patience = engine.signs(), patience_of(engine.settings)
        is_known = watch is not None
        return schema.EngineHealth(
            cpu_pressure=round(signs.pressure, 3) if signs.pressure is not None else None,
            stretch=round(stretch(signs.pressure), 2),
            has_standby=signs.has_standby if is_known else None,
            is_continued=engine.lock.is_continued if is_known else None,
            hang_budget_ms=round(patience.budget_ms(signs)) if is_known else None,
            hang_budget=patience.explain(signs) if is_known else None,
            answer_late_ms=round(watch.late_ms) if watch is not None else None,
        )

    def _problems(self) -> list[str]:
        engine, running, fault = self._engine, self._engine.incarnation, self._engine.machine_fault
        problems = [
            self._state_file.problem,
            fault and f"{fault}; it is the machine's fault, and tried again each second",
            engine.predecessor,
            engine.lock.first_problem,
            *(server.problem for server in self.sockets),
        ]
        if running is not None:
            problems += [running.problem, running.waiting, running.note]
            problems += running.prepared.warnings if running.prepared is not None else ()
        return [problem for problem in problems if problem]

    def _reason(self) -> str:
        """Why the engine is in its state, and what it waits for."""
        now, incarnation = self._engine.lifecycle.now, self._engine.incarnation
        if now.state is State.INIT and incarnation is not None:
            if incarnation.loads:
                return f"waiting for the loader lock: {incarnation.loader.problem}"
            return incarnation.waiting or "loading the model"
        if now.state is State.STANDBY:
            other = self._engine.lock.other
            holder = f", {other.engine} holds it" if other else ""
            return f"waiting for the lock{holder}{self._disconnected() or self._without_lease()}"
        if now.state is State.DEAD and now.shall.goal is Tier.COLD:
            return cold_because(now.shall, self._engine.log.source, is_reaped=now.is_reaped)
        if now.state is State.RESTING:
            return f"asleep ({now.shall.goal}), holds the lock; requested{by_whom(now.shall)}"
        watch = self._engine.watch
        if watch is not None and watch.late_ms > 0:
            return f"{now.reason}; the backend's answer is {duration(watch.late_ms)} late"
        return now.reason

    def _disconnected(self) -> str:
        client = self._engine.lock
        if client.is_connected:
            return ""
        why = f": {client.problem}" if client.problem else ""
        return f" (the lock server cannot be reached{why})"

    def _without_lease(self) -> str:
        lease = self._engine.lock.lease
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
            is_crash_loop=engine.verdict is not None,
            is_cold=engine.lifecycle.now.shall.goal is Tier.COLD,
        )
        objection = probes.objection(endpoint, view)
        details = {
            "state": state.value,
            "message": self._reason(),
            "since_s": round(history.spent_ms / 1000, 3),
            "rule": probes.TABLE[endpoint][state].value,
        }
        return Probe(not objection, objection or state.value, details)


def cold_because(shall: Shall, engine: str, *, is_reaped: bool) -> str:
    """Why no backend runs, and what starts one."""
    if not is_reaped:
        return f"being made cold{by_whom(shall)}: its processes are being ended"
    how = f"; `understudy wake {engine}` starts it" if shall.generation is None else ""
    return f"made cold{by_whom(shall)}: no backend runs{how}"
