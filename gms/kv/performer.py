"""Carries out the effects of a KV machine: frames to clients, calls to the driver.

It decides nothing. Driver calls run on one thread, in order; closes that free memory run on a
second one, so that the memory of a pool that is given up delays nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gms import epoch_file, names
from gms import kv_messages as msg
from gms.core import effects as fx
from gms.core.effects import Effects
from gms.kv.core import events as ev
from gms.kv.core.events import Claimant, PoolEvent
from gms.kv.core.machine import KvMachine
from gms.kv.token_file import write_tokens
from gms.kv.vault import PoolVault
from gms.server.driver_thread import DriverThread
from gms.server.watch import EpochWatch
from gms.vmm.interface import Allocation, release_all
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all


class KvPerformer:
    """Performs effects for one device; completions go back to the machine as events."""

    def __init__(
        self,
        machine: KvMachine,
        device: str,
        directory: str,
        connections: Mapping[int, Connection],
        handle: Callable[[PoolEvent], None],
        log: EventLog,
        threads: tuple[DriverThread, DriverThread],
        vault: PoolVault,
        watch: EpochWatch,
    ) -> None:
        """`threads`: for calls to the driver, and for closes."""
        self.protocol_errors_total = 0
        self._machine, self._device = machine, device
        self._token_path = names.kv_token_path(directory, device)
        self._connections, self._handle, self._log = connections, handle, log
        self._driver, self._closer = threads
        self._vault, self._watch = vault, watch
        self._offered: dict[int, list[OwnedFd]] = {}  # by session, until the driver checks them

    def perform(self, effects: Effects) -> None:
        """Carry out every effect: one that fails costs the session that it answers, and never the
        effects behind it."""
        for effect in effects:
            try:
                self._perform(effect)
            except (UnderstudyError, OSError) as error:
                what = type(effect).__name__
                self._log.record("gms.effect", f"{what} failed: {error}", severity="error")
                if isinstance(effect, fx.Respond) and effect.session in self._connections:
                    conn = self._connections[effect.session]
                    conn.close(f"it cannot be answered: {error}")

    def _perform(self, effect: fx.DeviceEffect) -> None:
        match effect:
            case fx.SendMessage(session, request_id, message):
                if isinstance(message, msg.PoolKeptMsg):
                    self.forget(session)  # this survivor's copies were not needed
                conn = self._connections.get(session)
                if conn is not None:
                    conn.send(message, request_id)
            case fx.RefuseRequest():
                self._refuse(effect)
            case ev.GrantPool(session, request_id, pool):
                conn = self._connections.get(session)
                if conn is not None:
                    file = names.pool_file(self._device, pool)
                    conn.send(msg.PoolGrantedMsg(pool, file), request_id)
            case ev.SendPool():
                self._send_pool(effect)
            case ev.MakePool():
                self._make(effect)
            case ev.TakePoolBack():
                self._take_back(effect)
            case ev.ReleasePool(pool):
                self._driver.submit(
                    lambda: self._vault.take(pool), lambda parts: self._release(pool, parts)
                )
            case ev.WatchPool(pool):
                self._watch.add(pool)
            case ev.UnwatchPool(pool):
                self._watch.discard(pool)
            case ev.MarkDiscarded(pool):
                self._try(
                    "mark a discarded pool's file",
                    lambda: epoch_file.mark_history(self._vault.path(pool)),
                )
            case ev.KeepTokens(newest):
                self._keep_tokens(newest)
            case fx.RecordEvent():
                data = {"device_uuid": self._device, **effect.data}
                self._log.record(effect.type, effect.message, effect.severity, data)

    def offer(self, session: int, fds: list[OwnedFd]) -> None:
        """Keep what a survivor hands back (taken), until it is checked or not needed."""
        self.forget(session)
        self._offered[session] = fds

    def forget(self, session: int) -> None:
        """A connection has ended, or its copies are not needed."""
        fds = self._offered.pop(session, [])
        if fds:
            self._closer.submit(lambda: close_all(fds))

    def close(self) -> None:
        for fds in self._offered.values():
            close_all(fds)
        self._offered.clear()

    # ------------------------------------------------------------------ responses

    def _refuse(self, effect: fx.RefuseRequest) -> None:
        self.protocol_errors_total += isinstance(effect.error, ProtocolError)
        conn = self._connections.get(effect.session)
        if conn is not None:
            conn.fault(effect.error, effect.request_id)

    def _send_pool(self, effect: ev.SendPool) -> None:
        def failed(error: UnderstudyError) -> None:
            self._refuse(fx.RefuseRequest(effect.session, effect.request_id, error))

        self._driver.submit(
            lambda: self._vault.export(effect.pool), lambda fds: self._sent(effect, fds), failed
        )

    def _sent(self, effect: ev.SendPool, fds: list[OwnedFd]) -> None:
        conn = self._connections.get(effect.session)
        pool = self._machine.pools.by_id.get(effect.pool)
        if conn is None or pool is None:
            # These may be the last copies: closing them may free memory, which is not for the loop.
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.PoolTakenMsg(pool.id, pool.slab_sizes, pool.index_bytes, effect.is_fresh)
        conn.send(answer, effect.request_id, fds)

    # ------------------------------------------------------------------ the driver

    def _make(self, effect: ev.MakePool) -> None:
        pool = effect.pool
        self._driver.submit(
            lambda: self._vault.make(pool, effect.size_bytes, effect.index_bytes),
            lambda sizes: self._handle(ev.PoolMade(pool, sizes)),
            lambda error: self._handle(ev.PoolNotMade(pool, error)),
        )

    def _take_back(self, effect: ev.TakePoolBack) -> None:
        pool, fds = effect.pool, self._offered.pop(effect.session, [])
        self._driver.submit(
            lambda: self._vault.take_back(pool, fds, effect.slab_sizes, effect.index_bytes),
            lambda _: self._handle(ev.PoolTakenBack(pool)),
            lambda error: self._handle(ev.PoolNotTakenBack(pool, effect.session, error)),
        )

    def _release(self, pool: str, parts: list[Allocation]) -> None:
        def failed(error: UnderstudyError) -> None:
            text = f"the driver did not take the memory of KV pool {pool} back: {error.message}"
            self._log.record("gms.release", text, severity="error", data={"pool": pool})
            self._handle(ev.PoolReleased(pool))

        self._closer.submit(
            lambda: release_all(parts), lambda _: self._handle(ev.PoolReleased(pool)), failed
        )

    def _keep_tokens(self, newest: tuple[Claimant, ...]) -> None:
        self._try("keep the newest token", lambda: write_tokens(self._token_path, newest))

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """What is best effort: a failure is a warning."""

        def failed(error: UnderstudyError) -> None:
            self._log.record("gms.kv_file", f"could not {what}: {error.message}", "warning")

        self._driver.submit(work, failed=failed)
