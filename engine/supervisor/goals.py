"""The engine's goal: who may set it, and who is told what the engine is.

Owns the refusals of a goal, and the connections that are told of every change. What follows from a
goal is `engine/core`.
"""

from __future__ import annotations

from engine.core.events import Shall, State
from engine.core.lifecycle import HOLDING, tier_of
from engine.messages import PreparedMsg
from engine.supervisor.engine import Engine
from engine.supervisor.pool_word import PoolWords
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import EngineReportMsg, SetGoalMsg, Tier
from plumbing.wire.connection import Connection

WHAT_COUNTS = ("state", "tier", "goal", "can_rest", "fault", "incarnation", "pool")  # of an `am`
FAULT_CHARS_MAX = 4096


class Goals:
    """Answers `shall`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._seen = 0
        self._watchers: set[Connection] = set()
        self._told: tuple[object, ...] = ()
        self._pool = PoolWords(engine)
        # Before it is written down: a pool waits for it.
        engine.changes.listeners.insert(0, self._changed)
        engine.history.on_idle = self._idle  # a pool that heard of requests waits for their end

    def shall(self, conn: Connection, message: SetGoalMsg, request_id: int) -> None:
        """Take a goal, if there is one, and tell `conn` of every change from now on.

        Raises:
            UnderstudyError: `engine.other_model`, `engine.cannot_rest`, `engine.no_such_tier`.
        """
        pool = message.pool
        if pool is not None:
            self._check_model(pool.model)
        if message.goal is not None:
            self._check(message.goal)
            self._seen += 1
            self._engine.post(
                Shall(
                    message.goal,
                    message.by or "an unnamed client",
                    pool.generation if pool is not None else None,
                    pool is not None and pool.is_kill,
                )
            )
        self._watchers.discard(conn)
        self._changed()  # for the others; this one hears it once, as the answer
        conn.send(self.am(), request_id)
        self._watchers.add(conn)

    def leave(self, conn: Connection) -> None:
        self._watchers.discard(conn)

    def am(self) -> EngineReportMsg:
        """What the engine is now."""
        engine, now = self._engine, self._engine.lifecycle.now
        incarnation = engine.incarnation
        woken = incarnation.residency.woken if incarnation is not None else None
        return EngineReportMsg(
            engine=engine.settings.engine,
            incarnation=now.incarnation or "",
            token=now.token,
            state=now.state.value,
            tier=tier_of(now.state, is_away=now.is_away),
            goal=now.shall.goal,
            goal_by=now.shall.by,
            goal_seen=self._seen,
            since_ms=round(engine.history.spent_ms),
            kv_bytes=woken.kv_bytes if woken is not None else 0,
            in_flight=engine.history.in_flight,
            can_rest=now.can_rest and self._objection() is None,
            fault=self._fault()[:FAULT_CHARS_MAX],
            pool=self._pool.word(),
        )

    def _changed(self) -> None:
        am = self.am()
        said = tuple(getattr(am, name) for name in WHAT_COUNTS)
        if said == self._told:
            return
        self._told = said
        self._tell(am)

    def _idle(self) -> None:
        self._tell(self.am())

    def _tell(self, am: EngineReportMsg) -> None:
        for conn in tuple(self._watchers):
            conn.send(am)

    def _check_model(self, model: str) -> None:
        settings = self._engine.settings
        if model != settings.model:
            of = f"is an engine of {settings.model}" if settings.model else "has no model's name"
            raise UnderstudyError(
                "engine.other_model",
                f"{settings.engine} {of}, not of {model}: start it with --model-name {model}, or"
                " name another engine in the pool file",
            )

    def _check(self, goal: Tier) -> None:
        if goal is Tier.AWAKE:
            return
        objection = self._hindrance() if goal is Tier.COLD else self._objection()
        if objection is not None:
            raise UnderstudyError("engine.cannot_rest", objection)
        who, prepared = self._engine.settings.engine, self._prepared
        if goal is Tier.OFFLOADED and prepared is not None and not prepared.can_offload:
            reason = prepared.cannot_offload or "its backend cannot release its weights"
            why = f"{who} can be `warm` or `awake`: {reason}"
            raise UnderstudyError("engine.no_such_tier", why)

    @property
    def _prepared(self) -> PreparedMsg | None:
        incarnation = self._engine.incarnation
        return incarnation.prepared if incarnation is not None else None

    def _objection(self) -> str | None:
        """Why this engine cannot rest, as far as is known yet."""
        who, incarnation = self._engine.settings.engine, self._engine.incarnation
        is_known = incarnation is not None and incarnation.prepared is not None
        if incarnation is not None and is_known and not incarnation.can_rest:
            backend = self._engine.settings.backend
            return self._hindrance() or (
                f"{who} cannot rest: its {backend} backend does not say that it can"
            )
        return self._hindrance()

    def _hindrance(self) -> str | None:
        """Why no engine could rest here, nor be cold."""
        engine, settings = self._engine, self._engine.settings
        who = settings.engine
        if settings.is_remote:
            return f"{who} reaches its lock server over TCP, and can only rest beside it"
        if engine.lock.address is not None and not engine.lock.is_behind_gateway:
            return (
                f"{who} cannot rest: no gateway would let its requests wait; start the lock server"
                " without --direct"
            )
        return None

    def _fault(self) -> str:
        """Why it is not at its goal; "" while it is, or is on its way."""
        now = self._engine.lifecycle.now
        if now.state is State.DEAD:
            is_meant = now.is_leaving or now.is_handed_over or now.shall.goal is Tier.COLD
            return "" if is_meant else now.reason
        if now.shall.goal is not Tier.AWAKE and now.state in HOLDING:
            return self._objection() or self._note()
        return self._note()

    def _note(self) -> str:
        """What keeps the weights from being offloaded."""
        incarnation = self._engine.incarnation
        return incarnation.placing.note if incarnation is not None else ""
