"""The owner of one device's KV memory: sockets on one side, the machine in the middle, the driver
behind. A process of its own, so that nothing that happens to it touches the weights.

It decides nothing and maps nothing. It has no memory before the first claim, and all that it holds
can be lost with it: whoever maps the pool hands it back to the next server.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from datetime import timedelta
from typing import Any

from gms import epoch_file, names
from gms import kv_messages as msg
from gms.core import events as device_events
from gms.kv.core import events as ev
from gms.kv.core.machine import KvMachine
from gms.kv.core.snapshot import kv_snapshot, pools_in_full, state_of
from gms.kv.performer import KvPerformer
from gms.kv.token_file import read_tokens
from gms.kv.vault import PoolVault
from gms.server.driver_thread import DriverThread
from gms.server.watch import EpochWatch
from gms.shortage import open_fds
from gms.vmm.interface import DeviceMemory
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.part.observers import Observers
from plumbing.service.clock import Clock, SystemClock, rfc3339
from plumbing.service.events import EventLog
from plumbing.service.procfs import holders_of
from plumbing.shortage import explain
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from plumbing.wire.server import Server

CLOSE_TIMEOUT_S = 5.0  # for calls under way; freeing continues in the kernel when we exit


class KvServer:
    """Serves the KV memory of `device` in `directory` until it is closed."""

    def __init__(
        self,
        directory: str,
        device: str,
        memory: DeviceMemory,
        capacity_bytes: int | None,
        *,
        restarts_total: int = 0,
        clock: Clock | None = None,
        log: EventLog | None = None,
    ) -> None:
        """`capacity_bytes`: as in `PoolVault`."""
        self.directory, self.device = directory, device
        self.memory, self.capacity_bytes = memory, capacity_bytes
        self.restarts_total = restarts_total
        self.clock = clock or SystemClock()
        self.log = log or EventLog(f"gms-{device}-{names.KV}", self.clock)
        self._started = self.clock.wall()
        path = names.kv_socket_path(directory, device)
        self._server = Server(path, msg.CATALOGUE, self, service="gms-kv")
        self._conns: dict[int, Connection] = {}
        self._observers = Observers(self.log, self.status)
        self._timer: asyncio.TimerHandle | None = None
        self._protocol_errors_total = 0

    async def start(self) -> None:
        """Take the path, find what an earlier server left, serve.

        Raises:
            UnderstudyError: `wire.address_in_use`, another server has this device here.
        """
        await self._server.start()
        loop = asyncio.get_running_loop()
        self._threads = (
            DriverThread(f"kv-driver-{self.device}", loop),
            DriverThread(f"kv-closer-{self.device}", loop),
        )
        self._vault = PoolVault(self.memory, self.directory, self.device, self.capacity_bytes)
        self._watch = EpochWatch(
            self.clock,
            self._threads[0],
            self._vault.path,
            lambda pool: self._handle(ev.PoolFree(pool)),
            lambda pool, pids: self._handle(ev.PoolHoldersSeen(pool, pids)),
            lambda pool, why: self.log.record("gms.kv_file", why, "warning", {"pool": pool}),
            what="KV pool",
            look=lambda path: not epoch_file.is_held(path),
        )
        found = names.pools_on_disk(self.directory, self.device)
        self.machine = KvMachine(
            new_pool_id=lambda: uuid.uuid4().hex,
            orphans={pool: epoch_file.is_history(self._vault.path(pool)) for pool in found},
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
        """Stop serving; sessions end, and memory lives on where a process maps it."""
        await self._server.close()
        for thread in self._threads:
            await asyncio.to_thread(thread.close, CLOSE_TIMEOUT_S)
        self._watch.close()
        if self._timer is not None:
            self._timer.cancel()
        self._performer.close()
        self._vault.close()

    def status(self) -> dict[str, Any]:
        """What `gms status` shows of this device's KV memory."""
        return {
            "device_uuid": self.device,
            "tag": names.KV,
            "memory": self.memory.kind,
            "driver": self.memory.facts(),
            "pid": os.getpid(),
            "since": rfc3339(self._started),
            "restarts_total": self.restarts_total,
            **self.log.newest(),
            **kv_snapshot(self.machine, self._at),
            "capacity_bytes": self.capacity_bytes,
            "problem": self._watch.problem or self._server.problem,
            "protocol_errors_total": self._protocol_errors_total
            + self._performer.protocol_errors_total,
            "open_fds": open_fds(),
        }

    # ------------------------------------------------------------------ as the wire's handler

    def opened(self, conn: Connection) -> None:
        self._conns[conn.id] = conn

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        try:
            match message:
                case msg.StatusMsg():
                    conn.send(msg.StatusReplyMsg(self.status()), request_id)
                case msg.InspectMsg():
                    document = {**self.status(), "pools": pools_in_full(self.machine)}
                    conn.send(msg.InspectReplyMsg(document), request_id)
                case msg.WatchMsg(since):
                    self._observers.join(conn, since, request_id)
                case _:
                    self._feed(conn, message, request_id, fds)
        except ProtocolError:
            self._protocol_errors_total += 1
            raise  # the wire answers with it and closes the connection
        finally:
            close_all(fds)  # what was not kept

    def closed(self, conn: Connection, reason: str) -> None:
        if conn.state is not None:
            asyncio.get_running_loop().remove_reader(conn.state)
        del self._conns[conn.id]
        self._observers.leave(conn)
        self._performer.forget(conn.id)
        self._handle(device_events.Closed(conn.id, reason))

    def _feed(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        """Check what only the kernel knows, then hand the message to the machine."""
        event = device_events.Received(conn.id, request_id, message, conn.peer.pid)
        match message:
            case msg.BorrowPoolMsg():
                self._watch_process(conn)
            case msg.TakeMsg():
                session = self.machine.borrowers.get(event)
                self._check_held(session.pool)
            case msg.HandBackMsg():
                self._watch_process(conn)
                self._check_survivor(message, len(fds))
                self._performer.offer(conn.id, [OwnedFd(fd.detach()) for fd in fds])
            case msg.DropPoolMsg():
                self._check_unmapped()
        try:
            self._handle(event)
        except BaseException:
            self._performer.forget(conn.id)
            raise

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
        if not self._is_held(pool):
            raise ProtocolError(
                "gms.kv_pool_not_held", "hold a shared flock on the pool's file first"
            )

    def _is_held(self, pool: str) -> bool:
        """Whether any process holds the pool's file.

        Raises:
            UnderstudyError: `gms.server_exhausted`, the file cannot be opened.
        """
        path = self._vault.path(pool)
        try:
            return epoch_file.is_held(path)
        except OSError as error:
            why = explain(error.errno, "the memory service")
            raise UnderstudyError(
                "gms.server_exhausted", f"the memory service cannot open {path}: {why}"
            ) from error

    def _check_unmapped(self) -> None:
        """A process may map the pool although its session has ended.

        Raises:
            UnderstudyError: `gms.kv_held`; `gms.server_exhausted`, the file cannot be opened.
        """
        pool = self.machine.pools.current
        if pool is None or self.machine.borrowers.holders or not self._is_held(pool.id):
            return
        file = os.stat(self._vault.path(pool.id))
        pids = ", ".join(f"pid {pid}" for pid in holders_of(file.st_dev, file.st_ino))
        raise UnderstudyError(
            "gms.kv_held",
            f"the KV memory is still mapped by {pids or 'a process that is not visible here'}"
            + (f", which was lent to {pool.holder}" if pool.holder else "")
            + "; it can be dropped once that process has exited",
        )

    def _watch_process(self, conn: Connection) -> None:
        """A session ends with the process that opened it, even if a forked child has its socket."""
        if conn.peer.pidfd is not None and conn.state is None:
            conn.state = conn.peer.pidfd.fileno()
            asyncio.get_running_loop().add_reader(conn.state, conn.close, "its process is gone")

    # ------------------------------------------------------------------ the machine

    def _handle(self, event: device_events.DeviceEvent) -> None:
        self._performer.perform(self.machine.handle(event, self.clock.now_ms()))
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_ms = self.machine.next_deadline_ms()
        if due_ms is not None:
            delay_s = max(0.0, due_ms - self.clock.now_ms()) / 1000
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._deadline_passed)

    def _deadline_passed(self) -> None:
        self._timer = None
        self._handle(device_events.DeadlinePassed())

    def _at(self, instant_ms: float) -> str:
        ago = timedelta(milliseconds=self.clock.now_ms() - instant_ms)
        return rfc3339(self.clock.wall() - ago)
