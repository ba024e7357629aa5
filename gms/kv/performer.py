"""Carries out the effects of a KV machine: frames to clients, calls to the driver.

It decides nothing. Driver calls run on one thread, in order; closes that free memory run on a
second one, so that the memory of a pool that is given up delays nobody. What answers an engine that
wakes and never blocks (copies of descriptors of host memory) needs no thread: on a machine whose
CPUs are all busy, each change of threads may wait for milliseconds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from gms import kv_messages as msg
from gms import names
from gms.core import effects as fx
from gms.kv.core import events as ev
from gms.kv.core.events import Claimant, KvPoolEvent
from gms.kv.core.machine import KvMachine
from gms.kv.token_file import write_tokens
from gms.kv.vault import PoolVault
from gms.server.driver_thread import DriverThread, attempt
from gms.server.memory_performer import MemoryPerformer
from gms.server.watch import MemoryWatch
from gms.vmm.interface import Allocation, release_all
from plumbing.errors import UnderstudyError
from plumbing.service.events import EventLog
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all


class KvPerformer(MemoryPerformer):
    """Performs effects for one device; completions go back to the machine as events."""

    def __init__(
        self,
        machine: KvMachine,
        device: str,
        directory: str,
        connections: Mapping[int, Connection],
        handle: Callable[[KvPoolEvent], None],
        log: EventLog,
        threads: tuple[DriverThread, DriverThread],
        vault: PoolVault,
        watch: MemoryWatch,
    ) -> None:
        """`threads`: for calls to the driver, and for closes."""
        driver, closer = threads
        super().__init__(device, connections, log, closer)
        self._machine, self._handle, self._driver = machine, handle, driver
        self._token_path = names.kv_token_path(directory, device)
        self._vault, self._watch = vault, watch

    def _perform(self, effect: fx.DeviceEffect) -> None:
        match effect:
            case fx.SendMessage(session, _, message):
                if isinstance(message, msg.PoolKeptMsg):
                    self.forget(session)  # this survivor's copies were not needed
                self._respond(effect, message)
            case fx.RefuseRequest():
                self._refuse(effect)
            case ev.GrantPool(_, _, pool):
                file = names.pool_file(self._name, pool)
                self._respond(effect, msg.PoolGrantedMsg(pool, file))
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
                    lambda: self._vault.mark_discarded(pool),
                )
            case ev.KeepTokens(newest):
                self._keep_tokens(newest)
            case fx.RecordEvent():
                self._record(effect)

    # ------------------------------------------------------------------ responses

    def _send_pool(self, effect: ev.SendPool) -> None:
        def failed(error: UnderstudyError) -> None:
            self._refuse(fx.RefuseRequest(effect.session, effect.request_id, error))

        def export() -> list[OwnedFd]:
            return self._vault.export(effect.pool)

        if not self._vault.exports_at_once:
            self._driver.submit(export, lambda fds: self._sent(effect, fds), failed)
            return
        try:
            self._sent(effect, attempt(export))
        except UnderstudyError as error:
            failed(error)

    def _sent(self, effect: ev.SendPool, fds: list[OwnedFd]) -> None:
        pool = self._machine.pools.by_id.get(effect.pool)
        if pool is None:
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.PoolTakenMsg(pool.id, pool.slab_sizes, pool.index_bytes, effect.is_fresh)
        self._respond(effect, answer, fds)

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
            text = f"the driver could not free the memory of KV pool {pool}: {error.message}"
            self._log.record("gms.release", text, severity="error", data={"pool": pool})
            self._handle(ev.PoolReleased(pool))

        self._closer.submit(
            lambda: release_all(parts), lambda _: self._handle(ev.PoolReleased(pool)), failed
        )

    def _keep_tokens(self, newest: tuple[Claimant, ...]) -> None:
        """Here, before their owner is granted anything: they are on disk before it has memory."""
        try:
            attempt(lambda: write_tokens(self._token_path, newest))
        except UnderstudyError as error:
            self._not_kept("keep the newest token", error)

    def _try(self, what: str, work: Callable[[], None]) -> None:
        """Best effort: a failure is only a warning."""
        self._driver.submit(work, failed=lambda error: self._not_kept(what, error))

    def _not_kept(self, what: str, error: UnderstudyError) -> None:
        self._log.record("gms.kv_file", f"could not {what}: {error.message}", "warning")
