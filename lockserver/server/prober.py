"""Looks at the evidence: when witnesses and serving files are tried, and when they are removed.

Nothing announces that a witness is free, so `Prober` tries it often: at once, then every 0.2 ms for
20 ms, which is how long small processes take to die, every millisecond for the first second, then
every 10 ms. A try takes microseconds, so it runs on the loop. The serving file of a holder that has
handed over in place is tried likewise. The first 20 ms are slept on the loop, in steps, because
uvloop's timers count whole milliseconds; between two steps the loop serves its connections.

A look that is not possible, for lack of memory, shows nothing and is repeated likewise.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection
from contextlib import suppress

from lockserver import witness
from lockserver.core import recovery
from lockserver.core.machine import LockMachine
from lockserver.core.names import PREFIX, SERVING_PREFIX, WitnessState

DENSE_S = 0.0002
DENSE_FOR_S = 0.020
FAST_S = 0.001
SLOW_S = 0.010
FAST_FOR_S = 1.0


class Prober:
    """Tries the witnesses in `directory` that the machine names, and has `feed` call the machine
    with the outcome."""

    def __init__(self, directory: str, machine: LockMachine, feed: Callable[..., None]) -> None:
        self._directory, self._machine, self._feed = directory, machine, feed
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
        locks = self._machine.locks
        due = recovery.evidence_due(locks, self._machine.supervisors)
        is_scan = recovery.scan_is_due(locks)
        return (due, is_scan) if due or is_scan else None

    def _look(self) -> None:
        self._timer = None
        began_s = time.monotonic()
        self._try_holders()
        if recovery.scan_is_due(self._machine.locks):
            with suppress(OSError):  # a look that is not possible settles nothing
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
        for each in recovery.evidence_due(self._machine.locks, self._machine.supervisors):
            path = os.path.join(self._directory, each.file.name)
            state = witness.probe(path, each.file.dev, each.file.ino, each.seal_at)
            if state is WitnessState.FREE:
                self._feed(self._machine.evidence_gone, each)

    def _try_directory(self) -> None:
        """Look first and seal only if that settles it: new processes may be about to lock."""
        machine, directory = self._machine, self._directory
        if machine.leases.may_have_strangers:
            return
        locks, known = machine.locks, machine.supervisors
        held, _ = witness.scan(directory)
        serves, longest = witness.scan(directory, SERVING_PREFIX)
        if not recovery.scan_frees(locks, known, held, serves):
            return
        # The next token is larger than what is over according to the files, too.
        sealed = max(machine.ledger.token, longest)
        kept = recovery.kept_serving(locks)
        serves, _ = witness.scan(directory, SERVING_PREFIX, sealed, kept)
        kept = recovery.kept_witnesses(known)
        held, _ = witness.scan(directory, PREFIX, witness.SEALED_BYTES, kept)
        self._feed(machine.directory_scanned, held, serves, sealed)


def remove_dead(directory: str, keep: Collection[str]) -> None:
    """Remove the witnesses that no process holds, but those named in `keep`, and the serving files
    beside them: each is held from its birth, so these launches are over. What cannot be removed
    stays until the next time."""
    with suppress(OSError):
        for name in os.listdir(directory):
            path = os.path.join(directory, name)
            found = witness.stat_file(path) if name.startswith(PREFIX) else None
            if found is None or name in keep:
                continue
            if witness.discard(path, found.st_dev, found.st_ino):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(directory, SERVING_PREFIX + name.removeprefix(PREFIX)))
