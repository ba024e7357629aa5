"""The server of one device's KV memory; `gms/server/memory_server.py` says what such a server is.

It is a process of its own, so that nothing that happens to it touches the weights. It has no memory
before the first claim. It files the newest claims for a restarted server: best effort, since the
kernel and the lock server protect the memory without them.

What answers an engine that wakes and never blocks (copies of descriptors of host memory) needs no
thread: on a machine whose CPUs are all busy, each change of threads may wait for milliseconds.
"""

from __future__ import annotations

import logging
import os
import uuid
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from gms import epoch_file, names
from gms import kv_messages as msg
from gms.core import events as ev
from gms.core import kv_events as kv
from gms.core.kv_events import Claimant
from gms.core.kv_machine import KvMachine, kv_snapshot, pools_in_full, state_of
from gms.server.driver_thread import attempt
from gms.server.memory_server import MemoryServer, MemoryWatch, is_held
from gms.server.slab_store import KvStore
from gms.vmm.interface import DeviceMemory
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.files import write_atomic
from plumbing.service.procfs import holders_of
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message


class KvServer(MemoryServer[KvMachine]):
    """The KV memory of one device."""

    tag, service, catalogue = names.KV, "gms-kv", msg.CATALOGUE
    threads: ClassVar[Sequence[str]] = ("driver", "closer")

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        capacity_bytes: int | None,
        *,
        restarts_total: int = 0,
    ) -> None:
        """`capacity_bytes`: as in `KvStore`."""
        path, source = names.kv_socket_path(directory, device), f"gms-{device}-{names.KV}"
        super().__init__(directory, device, memory, path, source, restarts_total)
        self.capacity_bytes = capacity_bytes

    def _begin(self) -> str:
        self._token_path = names.kv_token_path(self.directory, self.device)
        self._store = KvStore(self.memory, self.directory, self.device, self.capacity_bytes)
        self._watch = MemoryWatch(
            self.clock,
            self._driver,
            self._store.path,
            lambda pool: self._handle(kv.PoolFree(pool)),
            lambda pool, pids: self._handle(kv.PoolHoldersSeen(pool, pids)),
            lambda pool, why: self.log.record("gms.kv_file", why, "warning", {"pool": pool}),
            what="KV pool",
            blocked="use the KV memory",
            look=lambda path: not epoch_file.is_held(path),
        )
        found = names.pools_on_disk(self.directory, self.device)
        self.machine = KvMachine(
            new_pool_id=lambda: uuid.uuid4().hex,
            orphans={pool: epoch_file.is_discarded(self._store.path(pool)) for pool in found},
            newest=read_tokens(self._token_path),
        )
        self._handle(ev.DeadlinePassed())  # watches what is there
        return state_of(self.machine)

    async def close(self) -> None:
        await super().close()
        self._store.close()

    def _snapshot(self) -> dict[str, Any]:
        return {**kv_snapshot(self.machine, self._at), "capacity_bytes": self.capacity_bytes}

    def _in_full(self) -> dict[str, Any]:
        return {"pools": pools_in_full(self.machine)}

    def _feed(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        event = ev.Received(conn.id, request_id, message, conn.peer.pid)
        match message:
            case msg.BorrowPoolMsg():
                self._watch_process(conn)
            case msg.TakeMsg():
                self._check_held(self.machine.borrowers.get(event).pool)
            case msg.HandBackMsg():
                self._watch_process(conn)
                self._check_survivor(message, len(fds))
                self._take_offered(conn.id, fds)
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
        if not is_held(self._store.path(pool)):
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
        path = self._store.path(pool.id)
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

    # ------------------------------------------------------------------ effects

    def _perform(self, effect: ev.DeviceEffect) -> None:
        match effect:
            case ev.SendMessage(session, _, message):
                if isinstance(message, msg.PoolKeptMsg):
                    self._forget_offer(session)  # this survivor's copies were not needed
                self._respond(effect, message)
            case ev.RefuseRequest():
                self._refuse(effect, effect.error)
            case kv.GrantPool(_, _, pool):
                file = names.pool_file(self.device, pool)
                self._respond(effect, msg.PoolGrantedMsg(pool, file))
            case kv.SendPool():
                self._send_pool(effect)
            case kv.MakePool(pool, size_bytes, index_bytes):
                self._driver.submit(
                    lambda: self._store.make(pool, size_bytes, index_bytes),
                    lambda sizes: self._handle(kv.PoolMade(pool, sizes)),
                    lambda error: self._handle(kv.PoolNotMade(pool, error)),
                )
            case kv.TakePoolBack(pool, session, sizes, index_bytes):
                fds = self._offered.pop(session, [])
                self._driver.submit(
                    lambda: self._store.take_back(pool, fds, sizes, index_bytes),
                    lambda _: self._handle(kv.PoolTakenBack(pool)),
                    lambda error: self._handle(kv.PoolNotTakenBack(pool, session, error)),
                )
            case kv.ReleasePool(pool):
                self._driver.submit(
                    lambda: self._store.take(pool),
                    lambda slabs: self._close_slabs(
                        "pool", pool, slabs, lambda: self._handle(kv.PoolReleased(pool))
                    ),
                )
            case kv.WatchPool(pool):
                self._watch.add(pool)
            case kv.UnwatchPool(pool):
                self._watch.discard(pool)
            case kv.MarkDiscarded(pool):
                self._driver.submit(
                    lambda: epoch_file.mark_discarded(self._store.path(pool)),
                    failed=self._warn("gms.kv_file", "mark a discarded pool's file"),
                )
            case kv.KeepTokens(newest):
                # Here, before their owner is granted anything: on disk before it has memory.
                try:
                    attempt(lambda: write_tokens(self._token_path, newest))
                except UnderstudyError as error:
                    self._warn("gms.kv_file", "keep the newest token")(error)
            case ev.RecordEvent():
                self._record(effect)

    def _send_pool(self, effect: kv.SendPool) -> None:
        def export() -> list[OwnedFd]:
            return self._store.export(effect.pool, writable=True)

        def failed(error: UnderstudyError) -> None:
            self._refuse(effect, error)

        if not self._store.exports_at_once:
            self._driver.submit(export, lambda fds: self._sent(effect, fds), failed)
            return
        try:
            self._sent(effect, attempt(export))
        except UnderstudyError as error:
            failed(error)

    def _sent(self, effect: kv.SendPool, fds: list[OwnedFd]) -> None:
        pool = self.machine.pools.by_id.get(effect.pool)
        if pool is None:
            self._closer.submit(lambda: close_all(fds))
            return
        answer = msg.PoolTakenMsg(pool.id, pool.slab_sizes, pool.index_bytes, effect.is_fresh)
        self._respond(effect, answer, fds)


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
