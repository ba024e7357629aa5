"""Leases: neighbours that wait for memory, or have it for as long as their processes live.

A lease is known by a file on which every process of the neighbour holds a shared flock. The pool
alone removes it, so it outlives a restart of either side. Who waits is connected; who has been
granted memory need not be: before a grant is told, the pool writes it into that file, so it
outlives the pool's state file, too.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Collection

import msgspec
from msgspec import Struct

from lockserver.client import witness
from plumbing.errors import UnderstudyError
from plumbing.service.clock import Timer
from plumbing.wire.connection import Connection
from pool.core.events import LeaseOver, PoolEvent
from pool.messages import LeaseGrantedMsg, LeaseMsg

LEASES_MAX = 64  # each is an entry of the ledger, and a file that is tried
# A training run ends once in hours, and who waits for its memory has waited longer than this.
TRY_S = 0.1
LEASE_FILE = re.compile("lease_[0-9a-f]{16}")


class HeldLease(Struct, eq=False):
    """One neighbour's file, and who speaks for it: `pid` of the `lease` command, 0 where it is not
    visible. Whether it was granted is in the core."""

    dev: int
    ino: int
    asked: LeaseMsg
    pid: int = 0
    conn: Connection | None = None
    request_id: int = 0


class LeaseDesk:
    """The leases of `directory`."""

    def __init__(
        self, directory: str, devices: Collection[str], feed: Callable[[PoolEvent], None]
    ) -> None:
        self._directory, self._devices, self._feed = directory, devices, feed
        self.leases: dict[str, HeldLease] = {}
        self._timer = Timer(self._look)
        self.close = self._timer.cancel

    def recover(self) -> list[LeaseMsg]:
        """Those that were granted before this pool started. Who has waited asks again."""
        found = []
        for name in filter(LEASE_FILE.fullmatch, os.listdir(self._directory)):
            path = os.path.join(self._directory, name)
            file, _ = witness.identify(path)
            with contextlib.suppress(OSError, msgspec.MsgspecError), open(path, "rb") as stream:
                asked = msgspec.json.decode(stream.read(), type=LeaseMsg)
                if file is not None and path == self._path(asked.lease):
                    self.leases[asked.lease] = HeldLease(file.dev, file.ino, asked)
                    found.append(asked)
        self._arm()
        return found

    def asked(self, conn: Connection, message: LeaseMsg, request_id: int) -> None:
        """
        Raises:
            UnderstudyError: `pool.unknown_device`, `pool.too_many_leases`, `pool.no_lease_file`.
        """
        if message.device not in self._devices:
            why = f"there is no device {message.device} here; there are {', '.join(self._devices)}"
            raise UnderstudyError("pool.unknown_device", why)
        held = self.leases.get(message.lease)
        if held is None:
            held = self.leases[message.lease] = self._new(message)
        held.pid, held.conn, held.request_id = conn.peer.pid, conn, request_id
        conn.state = message.lease
        self._feed(message)
        self._arm()

    def _new(self, message: LeaseMsg) -> HeldLease:
        if len(self.leases) >= LEASES_MAX:
            why = f"there are {LEASES_MAX} leases, the limit"
            raise UnderstudyError("pool.too_many_leases", why)
        path = self._path(message.lease)
        file, state = witness.identify(path)
        if file is None or state is not witness.WitnessState.HELD:
            why = f"no process holds {path}, so this lease would never end"
            raise UnderstudyError("pool.no_lease_file", why)
        return HeldLease(file.dev, file.ino, message)

    def granted(self, lease: str) -> None:
        """
        Raises:
            OSError: the grant could not be written, and is not told.
        """
        held = self.leases.get(lease)
        if held is not None and held.conn is not None:
            with contextlib.suppress(FileNotFoundError), open(self._path(lease), "r+b") as stream:
                stream.write(msgspec.json.encode(held.asked))
            held.conn.send(LeaseGrantedMsg(lease), held.request_id)

    def refused(self, lease: str, why: str) -> None:
        held = self.leases.pop(lease, None)
        if held is not None:
            if held.conn is not None:
                held.conn.fault(UnderstudyError("pool.no_room", why), held.request_id, close=False)
            with contextlib.suppress(OSError):
                os.unlink(self._path(lease))

    def left(self, conn: Connection) -> None:
        """`conn` has closed; harmless where it is no lease's. Its processes may live on."""
        held = self.leases.get(conn.state) if isinstance(conn.state, str) else None
        if held is not None and held.conn is conn:
            held.conn = None
            self._look()

    def _arm(self) -> None:
        if self.leases:
            self._timer.soon(TRY_S)

    def _look(self) -> None:
        """End those whose processes are all dead."""
        for lease, held in tuple(self.leases.items()):
            if witness.discard(self._path(lease), held.dev, held.ino):
                del self.leases[lease]
                self._feed(LeaseOver(lease))
        self._arm()

    def _path(self, lease: str) -> str:
        return os.path.join(self._directory, f"lease_{lease}")
