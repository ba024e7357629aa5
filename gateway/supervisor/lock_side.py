"""Listens to the lock server for a gateway, and keeps what is known while it is away.

It may be away for as long as it likes: the children go on with the engine that was granted last,
and the socket stays here. Only a takeover waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gateway.core.events import EngineGranted, NobodyGranted
from gateway.supervisor.child_processes import ChildProcesses
from lockserver.client import Borrower, BorrowerCallbacks
from plumbing.errors import UnderstudyError
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from plumbing.wire.fds import OwnedFd


@dataclass(frozen=True, slots=True)
class Grant:
    """The newest one that was heard of."""

    engine: str
    token: int
    era: str
    since_ms: float


class GatewayLockSide:
    """One gateway's connection to the lock server."""

    def __init__(
        self,
        path: str,
        lock: str,
        children: ChildProcesses,
        clock: Clock,
        log: EventLog,
        on_granted: Callable[[str, int], None],
    ) -> None:
        """`on_granted(engine, token)` is called after the children are told."""
        self.lock = lock
        self.grant: Grant | None = None
        self.model_grants: dict[str, Grant] = {}  # of a pool's models
        self.idle: str | None = None  # why no engine is known to serve, if so
        self.is_final = False  # and that none will: every engine was told to end
        self.changed_ms = clock.now_ms()  # connected, or lost
        self.idle_ms = clock.now_ms()  # since when it is idle, if it is
        self._children, self._clock, self._log = children, clock, log
        self._on_granted = on_granted
        self.is_served = False  # connected, and not refused
        self.refusal: str | None = None
        self._borrower = Borrower(
            path,
            BorrowerCallbacks(
                on_service=self._lent,
                on_granted=self._granted,
                on_idle=self._is_idle,
                on_lost=self._lost,
                on_refused=self._refused,
                on_model_granted=self._model_granted,
                on_model_idle=self._model_idle,
            ),
            lock=lock,
        )

    @property
    def problem(self) -> str | None:
        """Why the lock server is of no use now."""
        if self.refusal is not None:
            return f"the lock server refuses this gateway: {self.refusal}"
        if self.is_served:
            return self._borrower.problem
        return f"no lock server: {self._borrower.problem or 'not connected yet'}"

    def set_accepting(self, is_accepting: bool) -> None:
        self._borrower.set_accepting(is_accepting)

    async def run(self) -> None:
        await self._borrower.run()

    def _lent(self, fd: OwnedFd, address: str) -> None:
        self._heard()
        message = f"the lock server has lent {address}"
        self._log.record("gateway.socket_lent", message, data={"lock": self.lock})
        self._children.lent(fd, address)

    def _granted(self, engine: str, token: int, era: str) -> None:
        self._heard()
        is_new = self.grant is None or (self.grant.token, self.grant.era) != (token, era)
        if is_new:
            self.grant = Grant(engine, token, era, self._clock.now_ms())
            data = {"engine_id": engine, "token": token}
            message = f"requests go to {engine} (token {token})"
            self._log.record("gateway.engine", message, data=data)
        self.idle, self.is_final = None, False
        self._children.tell(EngineGranted(engine, token, era))
        self._on_granted(engine, token)

    def _model_granted(self, model: str, engine: str, token: int, era: str) -> None:
        """Of a model of a pool. Whether it is awake, the pool knows."""
        self._heard()
        old = self.model_grants.get(model)
        if old is None or (old.token, old.era) != (token, era):
            self.model_grants[model] = Grant(engine, token, era, self._clock.now_ms())
            data = {"model": model, "engine_id": engine, "token": token}
            message = f"{engine} now serves {model} (token {token})"
            self._log.record("gateway.engine", message, data=data)
        self.is_final = False
        self._children.tell(EngineGranted(engine, token, era, model))

    def _model_idle(self, model: str, reason: str, is_final: bool) -> None:
        self._heard()
        self.is_final = is_final
        self._children.tell(NobodyGranted(reason, model, is_final))

    def _is_idle(self, reason: str, is_final: bool) -> None:
        self._heard()
        if self.idle is None:
            self.idle_ms = self._clock.now_ms()
            message = f"no engine is known to serve: {reason}"
            self._log.record("gateway.no_engine", message, "info" if is_final else "warning")
        self.idle, self.is_final = reason, is_final
        self._children.tell(NobodyGranted(reason, is_final=is_final))

    def _heard(self) -> None:
        """The server takes this gateway: a connection alone may be refused, and again and again."""
        if not self.is_served:
            self.is_served, self.refusal = True, None
            self.changed_ms = self._clock.now_ms()
            self._log.record("gateway.lock_server", "connected to the lock server")

    def _lost(self, reason: str) -> None:
        if self.is_served:
            self.is_served, self.changed_ms = False, self._clock.now_ms()
            message = (
                f"lost the lock server ({reason}); requests are served, a takeover waits for it"
            )
            self._log.record("gateway.lock_server_lost", message, "warning")

    def _refused(self, error: UnderstudyError) -> None:
        if self.refusal != error.message:  # it is repeated at every attempt
            self.refusal = error.message
            message = f"the lock server refuses this gateway: {error.message}"
            self._log.record("gateway.refused", message, "error", {"error_code": error.code})
