"""A shell around the lock machine for tests: it has a disk, and short names."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessFile, WitnessState, name_of
from lockserver.messages import GrantedMsg, WantMsg

A = "engine-0-000000000000000a"
A2 = "engine-0-00000000000000a2"
B = "engine-1-000000000000000b"
BEATS_MAX = 1_000_000  # between two wants


class Shell:
    """Feeds a machine; keeps every effect, and what was written."""

    def __init__(self, record: ev.LockRecord | None = None, **options: float) -> None:
        self.now_ms = 0.0
        self.machine = LockMachine(record or ev.LockRecord(), self.write, 0.0, **options)
        self.disk = record or ev.LockRecord()
        self.written: list[ev.LockRecord] = []
        self.disk_error: str | None = None
        self.effects: list[ev.LockEffect] = []
        self.wants = 0

    def feed(self, event: str | ev.Wanted | ev.SwitchOverAsked, *said: Any) -> list[ev.LockEffect]:
        """`event`: an entry of the machine, with what it is told; or a want, or a switchover."""
        if not isinstance(event, str):
            if isinstance(event, ev.Wanted) and not event.msg.progress:
                self.wants += 1
                progress = self.wants * BEATS_MAX  # as a client counts
                event = replace(event, msg=replace(event.msg, progress=progress))
            said = (event,)
            event = "wanted" if isinstance(event, ev.Wanted) else "switch_over_asked"
        elif event == "beaten":
            said = (said[0], self.wants * BEATS_MAX + said[1])
        done: list[ev.LockEffect] = getattr(self.machine, event)(self.now_ms, *said)
        self.effects += done
        return done

    def write(self, record: ev.LockRecord) -> str | None:
        if self.disk_error is None:
            self.disk = record
            self.written.append(record)
        return self.disk_error

    def pass_ms(self, ms: float) -> list[ev.LockEffect]:
        done: list[ev.LockEffect] = []
        for _ in range(round(ms / 100)):
            self.now_ms += 100
            done += self.feed("time_passed")
        return done

    @property
    def active(self):
        return self.machine.locks["active"]

    def due(self) -> list[str]:
        return [each.incarnation for each in self._due()]

    def _due(self) -> list[recovery.DueEvidence]:
        return recovery.evidence_due(self.machine.locks, self.machine.supervisors)

    def find_free(self, incarnation: str) -> list[ev.LockEffect]:
        """A look finds its witness free."""
        return self.feed("evidence_gone", self.evidence(incarnation))

    def evidence(self, incarnation: str) -> recovery.DueEvidence:
        files = [each.file for each in self._due() if each.incarnation == incarnation]
        file = files[0] if files else WitnessFile(name_of(incarnation), 0, 0)
        return recovery.DueEvidence("active", incarnation, file)


def want(conn, incarnation, lock=None, *, engine=None, supervisor=None, **fields) -> ev.Wanted:
    """`lock`: the one that is wanted, if any is."""
    engine = engine or (incarnation or "engine-0-x").rpartition("-")[0]
    supervisor = supervisor or f"{engine:0>16}"
    witness = (
        WitnessFile(name_of(incarnation), 1, hash(incarnation) % 1000) if incarnation else None
    )
    msg = WantMsg(supervisor, engine, incarnation, lock or "active", lock is not None)
    said = ("token", "continuation", "over", "is_leaving", "succeeds")
    msg = replace(msg, **{key: fields.pop(key) for key in said if key in fields})
    base = ev.Wanted(
        conn,
        msg,
        witness_file=witness,
        witness_state=WitnessState.HELD,
        pid=100 + sum(supervisor.encode()),  # one supervisor, one process
        process="SO_PEERPIDFD",
    )
    return replace(base, **fields)


def sent(effects) -> list[tuple[int, str, int]]:
    return [
        (each.conn, each.message.incarnation, each.message.token)
        for each in effects
        if isinstance(each, ev.Send) and isinstance(each.message, GrantedMsg)
    ]


def messages(effects, kind) -> list[Any]:
    """The messages of this type that are sent, or announced."""
    found = (each.message for each in effects if isinstance(each, ev.Send | ev.Announce))
    return [message for message in found if isinstance(message, kind)]


def refused(effects) -> list[str]:
    return [effect.code for effect in effects if isinstance(effect, ev.RefuseConnection)]


def happened(effects) -> list[str]:
    return [effect.type for effect in effects if isinstance(effect, ev.Happened)]


def held_by_a(**options) -> Shell:
    shell = Shell(**options)
    shell.feed(want(1, A, "active"))
    shell.feed(want(2, B, "active"))
    assert shell.active.holder.incarnation == A
    return shell


def restarted(shell: Shell, **options) -> Shell:
    return Shell(shell.disk, **options)
