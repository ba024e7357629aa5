"""Looks at the evidence: when witnesses are tried and pidfds watched, and what waits for a look.

Nothing announces that a witness is free, so `Prober` tries it often: at once, then every 0.2 ms for
20 ms, which is how long small processes take to die, every millisecond for the first second, then
every 10 ms. A try takes microseconds, so it runs on the loop. The serving file of a holder that has
handed over in place is tried likewise. The first 20 ms are slept on the loop, in steps, because
uvloop's timers count whole milliseconds; between two steps the loop serves its connections.

`WitnessDesk` looks at the witnesses and serving files of the directory, also when the server is
short of descriptors. A look that is not possible now is repeated with a descriptor from the
reserve, and then with every tick: the `want` that needed it waits here. So does the removal of a
witness that is not needed any more. Neither decides what a look, or a free file, means.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from lockserver import serving, witness
from lockserver.core import evidence, recovery
from lockserver.core.events import (
    DirectoryScanned,
    Input,
    ServingFileFree,
    Wanted,
    WitnessFree,
)
from lockserver.core.ledger import ENDED_MAX
from lockserver.core.machine import LockMachine
from lockserver.core.names import (
    INCARNATION,
    PREFIX,
    SERVING_PREFIX,
    ServingFile,
    WitnessFile,
    WitnessState,
)
from lockserver.messages import WantMsg
from plumbing.wire.connection import Connection
from plumbing.wire.fds import Reserve

DENSE_S = 0.0002
DENSE_FOR_S = 0.020
FAST_S = 0.001
SLOW_S = 0.010
FAST_FOR_S = 1.0


class Prober:
    """Tries the witnesses that the machine names and hands the outcome to `feed`."""

    def __init__(
        self,
        witnesses: WitnessDesk,
        machine: LockMachine,
        feed: Callable[[Input], None],
    ) -> None:
        self._witnesses = witnesses
        self._machine = machine
        self._feed = feed
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.Handle | None = None
        self._subject: object = None
        self._began_s = 0.0

    def kick(self) -> None:
        """Something has changed: try at once what is due, and repeat until it is settled."""
        if self._timer is None and self._find_subject() is not None:
            self._timer = self._loop.call_soon(self._look)
            self._try_holders()  # not a turn later: more events of a dead process are queued

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _find_subject(self) -> object | None:
        """What is being tried; a change means that a new wait has begun."""
        machine = self._machine
        due = evidence.probes_due(machine.locks, machine.supervisors)
        handed_over = evidence.handed_over(machine.locks)
        is_scan = recovery.scan_is_due(machine.locks)
        is_any = due or handed_over or is_scan
        return (tuple(due), tuple(handed_over), is_scan) if is_any else None

    def _look(self) -> None:
        self._timer = None
        began_s = time.monotonic()
        self._try_holders()
        if recovery.scan_is_due(self._machine.locks):
            self._try_directory()
        subject = self._find_subject()
        now_s = self._loop.time()
        if subject != self._subject:
            self._subject, self._began_s = subject, now_s
        if subject is not None and self._timer is None:
            self._look_again(now_s - self._began_s, time.monotonic() - began_s)

    def _look_again(self, waited_s: float, took_s: float) -> None:
        """After a slow look, over thousands of leftovers, leave the loop as much time."""
        if waited_s < DENSE_FOR_S and took_s < FAST_S:
            time.sleep(DENSE_S)
            self._timer = self._loop.call_soon(self._look)
        else:
            delay_s = FAST_S if waited_s < FAST_FOR_S else SLOW_S
            self._timer = self._loop.call_later(max(delay_s, took_s), self._look)

    def _try_holders(self) -> None:
        for lock, holder in evidence.probes_due(self._machine.locks, self._machine.supervisors):
            if self._witnesses.probe(holder.witness) is WitnessState.FREE:
                self._feed(WitnessFree(lock, holder.incarnation))
        for lock, holder in evidence.handed_over(self._machine.locks):
            assert holder.serving is not None  # or it would not have been named
            state = self._witnesses.probe_serving(holder.serving, holder.token)
            if state is WitnessState.FREE:
                self._feed(ServingFileFree(lock, holder.incarnation, holder.token))

    def _try_directory(self) -> None:
        """Look first and seal only if that settles it: new processes may be about to lock. A look
        that is not possible settles nothing."""
        machine = self._machine
        if machine.leases.may_have_strangers:
            return
        held, serves = self._witnesses.scan(), self._witnesses.scan_serving()
        if held is None or serves is None:
            return
        locks, known = machine.locks, machine.supervisors
        freed = recovery.scan_frees(locks, known, held, serves[0])
        if not freed:
            return
        sealed = 0
        if any(locks[name].is_fenced for name in freed):
            sealed = recovery.seal_at(machine.ledger, serves[1])
            kept = recovery.kept_serving(locks)
            serves = self._witnesses.scan_serving(seal_at=sealed, keep=kept)
        held = self._witnesses.scan(seal=True, keep=recovery.kept_witnesses(known))
        if held is not None and serves is not None:
            self._feed(DirectoryScanned(frozenset(held), frozenset(serves[0]), sealed))


T = TypeVar("T")


class WitnessDesk:
    """The witnesses in `directory`."""

    def __init__(self, directory: str, reserve: Reserve) -> None:
        self._directory = directory
        self._reserve = reserve
        self._unseen: dict[int, Wanted] = {}  # by connection; bounded by their number
        self._unremoved: dict[str, WitnessFile] = {}

    # ------------------------------------------------------------------ looking

    def identify(self, name: str) -> tuple[WitnessFile | None, WitnessState]:
        return self._look(lambda: witness.identify(self._path(name)), lambda found: found[1])

    def probe(self, file: WitnessFile) -> WitnessState:
        path = self._path(file.name)
        return self._look(lambda: witness.probe(path, file.dev, file.ino), lambda state: state)

    def probe_serving(self, file: ServingFile, token: int) -> WitnessState:
        path = self._path(file.name)
        return self._look(lambda: serving.probe(path, file, token), lambda state: state)

    def scan_serving(
        self, *, seal_at: int = 0, keep: frozenset[str] = frozenset()
    ) -> tuple[set[str], int] | None:
        """The serving files that may be held, and the largest length; None: they cannot be read."""
        with self._reserve:
            try:
                return serving.scan(self._directory, seal_at=seal_at, keep=keep)
            except OSError:
                return None

    def scan(self, *, seal: bool = False, keep: frozenset[str] = frozenset()) -> set[str] | None:
        """The names of all witnesses that may be held; None if the directory cannot be read."""
        with self._reserve:
            try:
                return witness.scan(self._directory, seal=seal, keep=keep)
            except OSError:
                return None

    def wanted(self, conn: Connection, want: WantMsg) -> Wanted:
        """A `want` as an event, with what its witness shows and the process of the peer."""
        self.forget(conn.id)
        file, state, serves = None, WitnessState.UNPROVEN, None
        if want.incarnation is not None and INCARNATION.fullmatch(want.incarnation):
            serves = serving.find(self._directory, want.incarnation)
        if want.witness is not None and want.incarnation is not None and "/" not in want.witness:
            file, state = self.identify(want.witness)
        return Wanted(
            conn.id,
            want,
            witness_file=file,
            witness_state=state,
            pid=conn.peer.pid,
            process=conn.peer.pidfd_source,
            serving=serves,
        )

    def _look(self, look: Callable[[], T], state_of: Callable[[T], WitnessState]) -> T:
        found = look()
        if state_of(found) is WitnessState.UNSEEN:
            with self._reserve:
                found = look()
        return found

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    # ------------------------------------------------------------------ what waits for a look

    @property
    def unseen(self) -> list[Wanted]:
        """The wants that wait until their witness can be looked at."""
        return list(self._unseen.values())

    @property
    def is_behind(self) -> bool:
        """Whether anything waits for a look."""
        return bool(self._unseen or self._unremoved)

    def look_again(self, want: Wanted) -> None:
        """Keep `want` until its witness can be looked at."""
        self._unseen[want.conn] = want

    def forget(self, conn: int) -> None:
        """This connection has sent another want, or ends."""
        self._unseen.pop(conn, None)

    def discard(self, files: Iterable[WitnessFile]) -> None:
        """Remove these witnesses, and the serving files beside them, if they are free. One that
        cannot be tried is tried again."""
        for file in files:
            state = self.probe(file)
            if state is WitnessState.FREE:
                with suppress(OSError):
                    os.unlink(self._path(SERVING_PREFIX + file.name.removeprefix(PREFIX)))
                with suppress(OSError):  # a directory that cannot be written to: it stays
                    os.unlink(self._path(file.name))
            elif state is WitnessState.UNSEEN and len(self._unremoved) < ENDED_MAX:
                self._unremoved[file.name] = file

    def tick(self) -> list[Wanted]:
        """Try again; the wants to hand in, now that their witnesses have been looked at."""
        unremoved, self._unremoved = self._unremoved, {}
        self.discard(unremoved.values())
        seen = []
        for want in self.unseen:
            assert want.msg.witness is not None
            file, state = self.identify(want.msg.witness)
            if state is not WitnessState.UNSEEN:
                self.forget(want.conn)
                again = replace(want, witness_file=file, witness_state=state, is_repeat=True)
                seen.append(again)
        return seen
