"""The server of one device's KV memory; `gms/server/memory_server.py` says what such a server is.

It is a process of its own, so that nothing that happens to it touches the weights. It has no memory
before the first claim.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from typing import Any

from gms import epoch_file, names, pool_file
from gms import kv_messages as msg
from gms.core import events as device_events
from gms.kv.core import events as ev
from gms.kv.core.machine import KvMachine
from gms.kv.core.snapshot import kv_snapshot, pools_in_full, state_of
from gms.kv.performer import KvPerformer
from gms.kv.token_file import read_tokens
from gms.kv.vault import PoolVault
from gms.server.driver_thread import DriverThread
from gms.server.memory_server import MemoryServer, is_held
from gms.server.watch import MemoryWatch
from gms.vmm.interface import DeviceMemory
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.service.procfs import holders_of
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
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
        """`capacity_bytes`: as in `PoolVault`."""
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
        self._vault = PoolVault(self.memory, self.directory, self.device, self.capacity_bytes)
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
