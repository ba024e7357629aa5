"""Shared by the tests of members: a shell around the machine, its members and its leases, and the
groups that most of them begin with. No clock and no socket: time passes when a test says so."""

from __future__ import annotations

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core.machine import LockMachine
from lockserver.core.names import name_of
from lockserver.members import group as me
from lockserver.members.leases import Leases
from lockserver.members.members import Members, is_virtual
from lockserver.messages import GrantedMsg, MemberLostMsg, WantMsg

LEASE_MS, MARGIN_MS, SILENT_MS = 5000, 1000, 3000.0
A0, A1 = "engine-0-00000000000000a0", "engine-0-00000000000000a1"
A0_NEXT, A1_NEXT = "engine-0-0000000000000aa0", "engine-0-0000000000000aa1"
B = "engine-1-000000000000000b"
S0, S1, S1_OTHER, SB = "50" * 8, "51" * 8, "52" * 8, "5b" * 8


class Shell:
    """The machine, its members and its leases, and every message that was sent."""

    def __init__(self, record: ev.LockRecord | None = None, **options) -> None:
        self.now_ms = 0.0
        self.machine = LockMachine(record or ev.LockRecord(), 0.0, silent_ms=SILENT_MS)
        self.leases = Leases(0.0, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, **options)
        self.members = Members(self.leases, self.machine.locks, 0.0, silent_ms=SILENT_MS)
        self.disk = record or ev.LockRecord()
        self.told: list[tuple[int, object]] = []
        self.fed: list[ev.Input] = []
        self.happened: list[str] = []
        self.progress = 0

    def hear(self, event: ev.Input) -> None:
        for output in self.members.handle(event, self.now_ms):
            self._do(output)
        self.probe()

    def _do(self, output: ev.LockEffect) -> None:
        if isinstance(output, me.Feed):
            self.fed.append(output.event)
            self.feed(output.event)
        elif isinstance(output, ev.Happened):
            self.happened.append(output.type)
        elif isinstance(output, me.SendMsg):
            self.told.append((output.conn, output.message))
        else:
            self.told.append((output.conn, output))

    def feed(self, event: ev.Input) -> None:
        for effect in self.machine.handle(event, self.now_ms):
            if isinstance(effect, ev.Persist):
                self.disk = effect.record
                self.feed(ev.Persisted())
            elif isinstance(effect, ev.Happened):
                self.happened.append(effect.type)
            elif is_virtual(getattr(effect, "conn", 0)):
                for output in self.members.fan_out(effect):
                    self._do(output)

    def probe(self) -> None:
        for lock, holder in evidence.probes_due(self.machine.locks, self.machine.supervisors):
            if holder.lease is not None and self.leases.is_free(holder.lease):
                self.leases.seal(holder.lease)
                self.feed(ev.WitnessFree(lock, holder.incarnation))
        is_due = evidence.scan_is_due(self.machine.locks)
        if is_due and self.leases.may_free_unknown(self.machine.locks):
            self.feed(ev.DirectoryScanned(frozenset()))

    def want(self, conn, supervisor, incarnation, member=0, members=2, **fields) -> None:
        self.progress += 1
        engine = fields.pop("engine", "engine-1" if supervisor == SB else "engine-0")
        base = WantMsg(
            supervisor=supervisor,
            engine=engine,
            member=member,
            members=members,
            incarnation=incarnation,
            witness=name_of(incarnation) if incarnation else None,
            locks=("active",) if incarnation else (),
            tokens={},
            progress=self.progress,
        )
        self.hear(me.MemberWanted(conn, replace(base, **fields)))

    def beat(self, *conns) -> None:
        for conn in conns:
            self.progress += 1
            self.hear(ev.Beaten(conn, self.progress))

    def pass_ms(self, ms, beating=()) -> None:
        for number in range(round(ms / 100)):
            self.now_ms += 100
            self.hear(ev.TimePassed())
            self.feed(ev.TimePassed())
            if number % 5 == 4:
                self.beat(*beating)

    def heard(self, conn, kind) -> list:
        return [message for to, message in self.told if to == conn and isinstance(message, kind)]

    def granted(self, conn) -> list[tuple[str, int]]:
        return [(m.incarnation, m.token) for m in self.heard(conn, GrantedMsg)]

    def lost(self, conn) -> list[tuple[str, int]]:
        return [(m.incarnation, m.member) for m in self.heard(conn, MemberLostMsg)]

    def refused(self, conn) -> list[str]:
        return [refusal.code for refusal in self.heard(conn, ev.RefuseConnection)]

    def closed(self, conn) -> bool:
        return bool(self.heard(conn, ev.Close))

    @property
    def active(self):
        return self.machine.locks["active"]

    @property
    def group(self):
        return self.members.groups.get("engine-0")


def whole(shell: Shell | None = None, **fields) -> Shell:
    """Both members of engine-0, on connections 10 and 11."""
    shell = shell or Shell()
    shell.want(10, S0, A0, 0, **fields)
    shell.want(11, S1, A1, 1, **fields)
    return shell


def held() -> Shell:
    """engine-0 holds with token 1 and claims it; engine-1, of one member, waits on connection
    20."""
    shell = whole()
    whole(shell, tokens={"active": 1})
    shell.want(20, SB, B, 0, 1)
    assert shell.active.holder.incarnation == A0
    assert [w.engine for w in shell.active.waiters] == ["engine-1"]
    return shell


def cut(shell):
    """The connection of member 1 of engine-0 is lost."""
    shell.hear(ev.ConnectionClosed(11))
