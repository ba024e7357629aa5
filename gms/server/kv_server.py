"""The server of one device's KV memory; `gms/server/memory_server.py` says what such a server is.

It is a process of its own, so that nothing that happens to it touches the weights. It has no memory
before the first claim. It files the newest claims for a restarted server: best effort, since the
kernel and the lock server protect the memory without them.

`KvPerformer` carries out the effects of the KV machine. It decides nothing. Driver calls run on one
thread, in order; closes that free memory run on a second one, so that the memory of a pool that is
given up delays nobody. What answers an engine that wakes and never blocks (copies of descriptors of
host memory) needs no thread: on a machine whose CPUs are all busy, each change of threads may wait
for milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import os
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from gms import epoch_file, names
from gms import epoch_file as pool_file
from gms import kv_messages as msg
from gms.core import events as device_events
from gms.core import events as fx
from gms.core import kv_events as ev
from gms.core.kv_events import Claimant, KvPoolEvent
from gms.core.kv_machine import KvMachine, kv_snapshot, pools_in_full, state_of
from gms.server.driver_thread import DriverThread, attempt
from gms.server.memory_server import MemoryPerformer, MemoryServer, MemoryWatch, is_held
from gms.server.slab_store import KvSlabStore
from gms.vmm.interface import Allocation, DeviceMemory, release_all
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.events import EventLog
from plumbing.service.files import write_atomic
from plumbing.service.procfs import holders_of
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message


class KvServer(MemoryServer[KvMachine]):
    """Serves the KV memory of `device` in `directory` until it is closed."""

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        capacity_bytes: int | None,
        *,
        restarts_total: int = 0,
    ) -> None:
        """`capacity_bytes`: as in `KvSlabStore`."""
        super().__init__(
            names.kv_socket_path(directory, device),
            msg.CATALOGUE,
            "gms-kv",
            f"gms-{device}-{names.KV}",
            device,
            names.KV,
            memory,
            restarts_total,
        )
        self.directory, self.capacity_bytes = directory, capacity_bytes

    async def start(self) -> None:
        await self._server.start()
        loop = asyncio.get_running_loop()
        self._threads = (
            DriverThread(f"kv-driver-{self.device}", loop),
            DriverThread(f"kv-closer-{self.device}", loop),
        )
        self._vault = KvSlabStore(self.memory, self.directory, self.device, self.capacity_bytes)
        self._watch = MemoryWatch(
            self.clock,
            self._threads[0],
            self._vault.path,
            lambda pool: self._handle(ev.PoolFree(pool)),
            lambda pool, pids: self._handle(ev.PoolHoldersSeen(pool, pids)),
            lambda pool, why: self.log.record("gms.kv_file", why, "warning", {"pool": pool}),
            what="KV pool",
            blocked="use the KV memory",
            look=lambda path: not epoch_file.is_held(path),
        )
        found = names.pools_on_disk(self.directory, self.device)
        self.machine = KvMachine(
            new_pool_id=lambda: uuid.uuid4().hex,
            orphans={pool: pool_file.is_discarded(self._vault.path(pool)) for pool in found},
            newest=read_tokens(names.kv_token_path(self.directory, self.device)),
        )
        self._performer = KvPerformer(
            self.machine,
            self.device,
            self.directory,
            self._conns,
            self._handle,
            self.log,
            self._threads,
            self._vault,
            self._watch,
        )
        self._handle(device_events.DeadlinePassed())  # watches what is there
        serving = f"serving the KV memory of {self.device}: {state_of(self.machine)}"
        self.log.record("gms.serving", serving, data={"device_uuid": self.device})

    async def close(self) -> None:
        await super().close()
        self._vault.close()

    def _snapshot(self) -> dict[str, Any]:
        return {**kv_snapshot(self.machine, self._at), "capacity_bytes": self.capacity_bytes}

    def _in_full(self) -> dict[str, Any]:
        return {"pools": pools_in_full(self.machine)}

    def _feed(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        event = device_events.Received(conn.id, request_id, message, conn.peer.pid)
        match message:
            case msg.BorrowPoolMsg():
                self._watch_process(conn)
            case msg.TakeMsg():
                self._check_held(self.machine.borrowers.get(event).pool)
            case msg.HandBackMsg():
                self._watch_process(conn)
                self._check_survivor(message, len(fds))
                self._performer.take_offered(conn.id, fds)
            case msg.DropPoolMsg():
                self._check_unmapped()
        self._handle(event)

    def _check_survivor(self, message: msg.HandBackMsg, fd_count: int) -> None:
        if not names.is_epoch_id(message.pool):
            raise ProtocolError("gms.bad_offer", f"{message.pool[:64]!r} is not a pool's id")
        if fd_count != len(message.slab_sizes) + 1:
            raise ProtocolError(
                "gms.bad_offer",
                f"a pool of {len(message.slab_sizes)} slabs came with {fd_count} descriptors",
            )
        if message.pool in self.machine.pools.by_id:  # else its file may have been removed
            self._check_held(message.pool)

    def _check_held(self, pool: str) -> None:
        """No memory before the flock: without it, nothing would show that the memory is in use.

        Raises:
            ProtocolError: `gms.kv_pool_not_held`.
            UnderstudyError: `gms.server_exhausted`, the file cannot be opened.
        """
        if not is_held(self._vault.path(pool)):
            raise ProtocolError(
                "gms.kv_pool_not_held", "hold a shared flock on the pool's file first"
            )

    def _check_unmapped(self) -> None:
        """A process may map the pool although its session has ended.

        Raises:
            UnderstudyError: `gms.kv_held`; `gms.server_exhausted`, the file cannot be opened.
        """
        pool = self.machine.pools.current
        if pool is None or self.machine.borrowers.holders:
            return
        path = self._vault.path(pool.id)
        if not is_held(path):
            return
        file = os.stat(path)
        pids = ", ".join(f"pid {pid}" for pid in holders_of(file.st_dev, file.st_ino))
        raise UnderstudyError(
            "gms.kv_held",
            f"the KV memory is still mapped by {pids or 'a process that is not visible here'}"
            + (f", which was lent to {pool.holder}" if pool.holder else "")
            + "; it can be dropped once that process has exited",
        )


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
        vault: KvSlabStore,
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


logger = logging.getLogger(__name__)


class KeptTokens(msgspec.Struct, frozen=True):
    newest: tuple[Claimant, ...] = ()
    schema: int = 1


def read_tokens(path: str) -> tuple[Claimant, ...]:
    """Read what an earlier server wrote; nothing if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return msgspec.json.decode(file.read(), type=KeptTokens).newest
    except FileNotFoundError:
        return ()
    except (OSError, msgspec.DecodeError) as error:
        logger.warning("%s cannot be read, so older tokens are not refused: %s", path, error)
        return ()


def write_tokens(path: str, newest: tuple[Claimant, ...]) -> None:
    """
    Raises:
        OSError: no room, no permission.
    """
    write_atomic(path, msgspec.json.encode(KeptTokens(newest)), survives_power_cut=False)
