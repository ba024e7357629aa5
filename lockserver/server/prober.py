"""When to look at the evidence: witnesses are tried, and the pidfds of processes are watched.

Nothing announces that a witness is free, so it is tried often: at once, then every 0.2 ms for
20 ms, which is how long small processes take to die, every millisecond for the first second, then
every 10 ms. A try takes microseconds, so it runs on the loop. The serving file of a holder that has
handed over in place is tried likewise. Where a holder's evidence is a lease, `leases` is asked
instead of the file. Must not decide what a free file means.

The surprising thing: the first 20 ms are slept on the loop, in steps, because uvloop's timers
count whole milliseconds; between two steps the loop serves its connections.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from lockserver.core import evidence
from lockserver.core.events import (
    DirectoryScanned,
    Holder,
    Input,
    ServingFileFree,
    WitnessFree,
)
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessState
from lockserver.members.leases import Leases
from lockserver.server.witness_desk import WitnessDesk

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
        leases: Leases,
        feed: Callable[[Input], None],
    ) -> None:
        self._witnesses = witnesses
        self._machine = machine
        self._leases = leases
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
        is_scan = evidence.scan_is_due(machine.locks)
        is_any = due or handed_over or is_scan
        return (tuple(due), tuple(handed_over), is_scan) if is_any else None

    def _look(self) -> None:
        self._timer = None
        began_s = time.monotonic()
        self._try_holders()
        if evidence.scan_is_due(self._machine.locks):
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
            if self._is_free(holder):
                self._feed(WitnessFree(lock, holder.incarnation))
        for lock, holder in evidence.handed_over(self._machine.locks):
            assert holder.serving is not None  # or it would not have been named
            state = self._witnesses.probe_serving(holder.serving, holder.token)
            if state is WitnessState.FREE:
                self._feed(ServingFileFree(lock, holder.incarnation, holder.token))

    def _is_free(self, holder: Holder) -> bool:
        """Whether no process of this holder can be alive; if so, seal it."""
        if holder.lease is not None:
            is_free = self._leases.is_free(holder.lease)
            if is_free:
                self._leases.seal(holder.lease)
            return is_free
        return self._witnesses.probe(holder.witness) is WitnessState.FREE

    def _try_directory(self) -> None:
        """Look first and seal only if that settles it: new processes may be about to lock. A look
        that is not possible settles nothing."""
        machine = self._machine
        if not self._leases.may_free_unknown(machine.locks):
            return
        held, serves = self._witnesses.scan(), self._witnesses.scan_serving()
        if held is None or serves is None:
            return
        locks, known = machine.locks, machine.supervisors
        freed = evidence.scan_frees(locks, known, held, serves[0])
        if not freed:
            return
        sealed = 0
        if any(locks[name].is_fenced for name in freed):
            sealed = evidence.seal_at(machine.ledger, serves[1])
            kept = evidence.kept_serving(locks)
            serves = self._witnesses.scan_serving(seal_at=sealed, keep=kept)
        held = self._witnesses.scan(seal=True, keep=evidence.kept_witnesses(known))
        if held is not None and serves is not None:
            self._feed(DirectoryScanned(frozenset(held), frozenset(serves[0]), sealed))
