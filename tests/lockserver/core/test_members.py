"""Groups of members: when they are one supervisor to the machine, and when they are over."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core import member_events as me
from lockserver.core.leases import Leases
from lockserver.core.lock import LockState
from lockserver.core.machine import Machine
from lockserver.core.member_wants import MEMBERS_KNOWN_MAX
from lockserver.core.members import Members, is_virtual
from lockserver.core.patience import STALL_MS
from lockserver.core.terms import LeaseTerms, MemberId
from lockserver.witness import WitnessFile, name_of
from understudy.errors import InvariantError

LEASE_MS, MARGIN_MS, SILENT_MS = 5000, 1000, 3000.0
A0, A1 = "engine-0-00000000000000a0", "engine-0-00000000000000a1"
A0_NEXT, A1_NEXT = "engine-0-0000000000000aa0", "engine-0-0000000000000aa1"
B = "engine-1-000000000000000b"
S0, S1, S1_OTHER, SB = "50" * 8, "51" * 8, "52" * 8, "5b" * 8


class Shell:
    """The machine, its members and its leases, and what everybody was told."""

    def __init__(self, record: ev.Record | None = None, **options) -> None:
        self.now_ms = 0.0
        self.machine = Machine(record or ev.Record(), 0.0, silent_ms=SILENT_MS)
        self.leases = Leases(0.0, lease_ms=LEASE_MS, margin_ms=MARGIN_MS, **options)
        self.members = Members(self.leases, self.machine.locks, 0.0, silent_ms=SILENT_MS)
        self.disk = record or ev.Record()
        self.told: list[tuple[int, object]] = []
        self.fed: list[ev.Input] = []
        self.happened: list[str] = []
        self.progress = 0

    def hear(self, event: me.MemberInput) -> None:
        for output in self.members.handle(event, self.now_ms):
            self._do(output)
        self.probe()

    def _do(self, output: me.MemberOutput) -> None:
        if isinstance(output, me.Feed):
            self.fed.append(output.event)
            self.feed(output.event)
        elif isinstance(output, ev.Happened):
            self.happened.append(output.type)
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
        base = me.MemberWanted(
            conn=conn,
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
        self.hear(replace(base, **fields))

    def beat(self, *conns) -> None:
        for conn in conns:
            self.progress += 1
            self.hear(me.MemberBeaten(conn, self.progress))

    def pass_ms(self, ms, beating=()) -> None:
        for number in range(round(ms / 100)):
            self.now_ms += 100
            self.hear(ev.Tick())
            self.feed(ev.Tick())
            if number % 5 == 4:
                self.beat(*beating)

    def heard(self, conn, kind) -> list:
        return [message for to, message in self.told if to == conn and isinstance(message, kind)]

    def granted(self, conn) -> list[tuple[str, int]]:
        return [(m.incarnation, m.token) for m in self.heard(conn, me.SendGranted)]

    def lost(self, conn) -> list[tuple[str, int]]:
        return [(m.incarnation, m.member) for m in self.heard(conn, me.SendMemberLost)]

    def refused(self, conn) -> list[str]:
        return [refusal.code for refusal in self.heard(conn, ev.Refuse)]

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
    """engine-0 holds with token 1 and says so; engine-1, of one member, waits on connection 20."""
    shell = whole()
    whole(shell, tokens={"active": 1})
    shell.want(20, SB, B, 0, 1)
    assert shell.active.holder.incarnation == A0
    assert [w.engine for w in shell.active.waiters] == ["engine-1"]
    return shell


# ---------------------------------------------------------------------- one supervisor


def test_group_forms_when_all_are_here_and_each_is_granted_as_itself():
    """Goal: one grant for all nodes, to each in its own name. Method: two members, one after the
    other; the lease is answered before the grant that it is needed for."""
    shell = Shell()
    shell.want(10, S0, A0, 0)
    assert not shell.fed
    assert shell.active.state is LockState.FREE
    shell.want(11, S1, A1, 1)
    assert shell.granted(10) == [(A0, 1)]
    assert shell.granted(11) == [(A1, 1)]
    kinds = [type(message).__name__ for to, message in shell.told if to == 11]
    assert kinds == ["SendRenewed", "SendGranted"]
    holder = shell.disk.holders["active"]
    assert holder.lease == LeaseTerms(LEASE_MS, (MemberId(S0, A0), MemberId(S1, A1)))
    assert holder.witness == WitnessFile(name_of(A0), 0, 0)
    assert shell.machine.supervisors[S0].process == "lease"


def test_group_wants_a_fenced_lock_once_all_do_and_a_plain_one_once_any_does():
    """Goal: nobody is active before each node is ready. Method: every pair of wants."""
    for first in ((), ("active",), ("loader",), ("active", "loader")):
        for second in ((), ("active",), ("loader",), ("active", "loader")):
            shell = Shell()
            shell.want(10, S0, A0, 0, locks=first)
            shell.want(11, S1, A1, 1, locks=second)
            wanted = set(shell.machine.supervisors[S0].locks)
            both, either = set(first) & set(second), set(first) | set(second)
            assert wanted == (both & {"active"}) | (either & {"loader"})


def test_group_with_a_plain_lock_tells_only_the_members_that_want_it():
    """Goal: nobody has a token of a lock that it does not want. Method: one of two wants the loader
    lock; both hear of another engine's grants."""
    shell = Shell()
    shell.want(10, S0, A0, 0, locks=())
    shell.want(11, S1, A1, 1, locks=("loader",))
    assert shell.granted(10) == []
    assert shell.granted(11) == [(A1, 1)]
    told = shell.members.fan_out(
        ev.SendGrant(
            -1, "active", ev.Holder("engine-1", B, SB, WitnessFile(name_of(B), 1, 2), 5, 0.0)
        )
    )
    assert [(m.conn, m.incarnation) for m in told] == [(10, B), (11, B)]


def test_group_is_as_alive_as_its_slowest_member():
    """Goal: one member's heartbeat does not speak for another. Method: one beats, then both; a
    count that stands still renews nothing."""
    shell = whole()
    shell.beat(10, 10, 10)
    assert not [event for event in shell.fed if isinstance(event, ev.Beaten)]
    shell.beat(11)
    assert [e for e in shell.fed if isinstance(e, ev.Beaten)] == [ev.Beaten(-1, 1)]
    answered = len(shell.heard(11, me.SendRenewed))
    shell.hear(me.MemberBeaten(11, shell.progress))
    assert len(shell.heard(11, me.SendRenewed)) == answered


def test_members_that_wait_keep_their_place_while_they_are_heard_and_lose_it_when_cut():
    """Goal: waiters that cannot be granted are not in line. Method: a waiting group, cut."""
    shell = Shell()
    shell.want(20, SB, B, 0, 1)
    whole(shell)
    assert [w.engine for w in shell.active.waiters] == ["engine-0"]
    shell.hear(me.MemberClosed(11))
    assert not shell.active.waiters
    assert "lock.member_missing" in shell.happened
    shell.want(12, S1, A1, 1)
    assert [w.engine for w in shell.active.waiters] == ["engine-0"]


# ---------------------------------------------------------------------- what befalls member 1


def cut(shell):
    shell.hear(me.MemberClosed(11))


def back(shell, incarnation=A1, **fields):
    cut(shell)
    shell.pass_ms(1000, beating=(10, 20))
    shell.want(12, S1, incarnation, 1, **fields)


def silence(shell, ms):
    shell.pass_ms(ms, beating=(10, 20))


# what happens: (event, is the group over, the lock's state while it was held)
FATES = {
    "its connection is lost": (cut, False, "releasing"),
    "it comes back as it was": (back, False, "held"),
    "it comes back, holding": (lambda s: back(s, tokens={"active": 1}), None, "held"),
    "it comes back as another": (lambda s: back(s, A1_NEXT), True, "releasing"),
    "it is reaped": (lambda s: s.want(11, S1, None, 1), True, "releasing"),
    "it is another at once": (lambda s: s.want(11, S1, A1_NEXT, 1), True, "releasing"),
    "it is silent": (lambda s: silence(s, 3500), False, "releasing"),
    "its lease runs out": (lambda s: silence(s, 6500), True, "releasing"),
    "its supervisor is another": (lambda s: (cut(s), s.want(13, S1_OTHER, None, 1)), False,
                                  "releasing"),
}  # fmt: skip


@pytest.mark.parametrize("fate", FATES)
def test_holder_group_by_what_befalls_a_member(fate):
    """Goal: each fate of a member of a holder. Method: the table: whether the group is over, and
    then the other member hears it in its own name; the lock is nobody else's in any of them."""
    event, is_over, state = FATES[fate]
    shell = held()
    event(shell)
    assert shell.group.is_over is bool(is_over)
    assert shell.lost(10) == ([(A0, 1)] if is_over else [])
    assert str(shell.active.state) == state
    assert shell.active.holder.incarnation == A0
    assert [token for _, token in shell.granted(20)] in ([], [1])  # the news of who holds


@pytest.mark.parametrize("fate", FATES)
def test_waiting_group_by_what_befalls_a_member(fate):
    """Goal: a group that has served together is over with any of its incarnations; one that only
    waits survives an outage of any length. Method: the same table, nothing held."""
    event, is_over, _ = FATES[fate]
    shell = Shell()
    shell.want(20, SB, B, 0, 1)
    whole(shell)
    if is_over is None:  # a claim of a lock that is another's
        is_over = True
    elif fate == "its lease runs out":
        is_over = False
    event(shell)
    assert shell.group.is_over is is_over
    assert shell.lost(10) == ([(A0, 1)] if is_over else [])


def test_holder_group_is_free_when_the_last_member_has_reaped_and_not_before():
    """Goal: the lock is free when the last is gone. Method: member 1 reaps, then member 0."""
    shell = held()
    shell.want(11, S1, None, 1)
    shell.want(11, S1, A1_NEXT, 1)  # it may prepare its next launch meanwhile
    shell.pass_ms(20_000, beating=(10, 11, 20))
    assert shell.granted(20) == [(A0, 1)]
    shell.want(10, S0, None, 0)
    assert shell.granted(20)[-1] == (B, 2)
    shell.want(10, S0, A0_NEXT, 0)
    assert [w.incarnation for w in shell.active.waiters] == [A0_NEXT]
    assert "lock.members_whole" in shell.happened


def test_holder_group_that_falls_silent_is_free_when_its_leases_have_run_out():
    """Goal: nobody waits for ever, and nobody too little. Method: no member beats any more."""
    shell = held()
    shell.pass_ms(LEASE_MS + MARGIN_MS - 100, beating=(20,))
    assert shell.granted(20) == [(A0, 1)]
    shell.pass_ms(100, beating=(20,))
    assert shell.granted(20)[-1] == (B, 2)
    assert shell.happened.count("lock.lease_expired") == 2


def test_spent_incarnation_hears_again_that_it_is_over_and_is_never_granted():
    """Goal: the seal. Method: the leases ran out, and all come back with what they had."""
    shell = held()
    shell.pass_ms(7000, beating=(20,))
    shell.want(30, S0, A0, 0)
    shell.want(31, S1, A1, 1)
    assert [who for who, _ in shell.lost(30)] == [A0]
    assert [who for who, _ in shell.lost(31)] == [A1]
    shell.want(20, SB, None, 0, 1)
    assert shell.active.state is LockState.FREE
    shell.want(30, S0, A0_NEXT, 0)
    assert not shell.granted(30)  # the other one is still spent
    shell.want(31, S1, A1_NEXT, 1)
    assert shell.granted(30) == [(A0_NEXT, 3)]


def test_plain_lock_outlives_a_cut_connection():
    """Goal: an engine that loads for minutes is not thrown out by a packet. Method: the loader lock
    held, the connection cut and back with its token."""
    shell = whole(locks=("loader",))
    shell.hear(me.MemberClosed(10))
    shell.want(12, S0, A0, 0, locks=("loader",), tokens={"loader": 1})
    assert shell.granted(12) == [(A0, 1)]
    assert not shell.refused(12)
    shell.pass_ms(7000)
    assert shell.machine.locks["loader"].state is LockState.FREE


def test_stalled_server_buries_nobody():
    """Goal: a stop of the server is nobody's silence. Method: a leap in time, then beats again."""
    shell = held()
    shell.now_ms += STALL_MS + 60_000
    shell.hear(ev.Tick())
    shell.feed(ev.Tick())
    shell.pass_ms(5000, beating=(10, 11, 20))
    assert shell.active.state is LockState.HELD
    assert not shell.closed(10)


# ---------------------------------------------------------------------- who is taken


def test_newer_connection_replaces_the_older_and_what_it_overtook_is_refused():
    """Goal: the newest truth counts, in whatever order it arrives. Method: a connection of the same
    supervisor; then what the old one had sent before arrives on a third."""
    shell = held()
    old = shell.progress
    shell.want(12, S1, A1, 1)
    assert shell.closed(11)
    assert shell.active.state is LockState.HELD
    shell.hear(me.MemberClosed(11))
    assert shell.active.state is LockState.HELD
    shell.want(13, S1, None, 1, progress=old - 1)
    assert shell.refused(13) == ["lock.stale_want"]
    assert not shell.group.is_over


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        ("lock.bad_engine_id", {"engine": "../x"}),
        ("lock.bad_want", {"tokens": {"loader": 1}}),
        ("lock.bad_supervisor", {"supervisor": "\N{GRINNING FACE}" * 16}),
        ("lock.bad_member", {"member": 2}),
        ("lock.bad_member", {"incarnation": A0, "witness": name_of(A0)}),
        ("lock.member_mismatch", {"members": 3}),
        ("lock.engine_id_taken", {"supervisor": S1_OTHER}),
        ("lock.identity_changed", {"conn": 10}),
        ("lock.stale_want", {"progress": 1}),
    ],
)
def test_member_that_cannot_be_who_it_says_is_refused(code, fields):
    """Goal: what is wrong costs its connection, nobody else's. Method: each way to be wrong."""
    shell = held()
    shell.want(11, S1, A1, 1)
    before = (shell.group.conn, shell.active.state, dict(shell.members.roll.known))
    fields = dict(fields)
    conn = fields.pop("conn", 40)
    who = fields.pop("supervisor", S1), fields.pop("incarnation", A1)
    shell.want(conn, *who, **{"member": 1, **fields})
    assert shell.refused(conn) == [code]
    assert (shell.group.conn, shell.active.state, dict(shell.members.roll.known)) == before


def test_another_supervisor_waits_until_the_lease_has_run_out_then_takes_the_place():
    """Goal: a member lost for good can be replaced. Method: a second supervisor asks again and
    again; it is told how long; an idle one that is still connected keeps the place too."""
    shell = held()
    cut(shell)
    shell.want(40, S1_OTHER, None, 1)
    assert shell.heard(40, ev.Refuse)[0].details["left_ms"] == 6000
    shell.pass_ms(6000, beating=(10, 20))
    shell.want(41, S1_OTHER, None, 1)
    assert not shell.refused(41)
    shell.want(42, S1, None, 1)
    assert shell.refused(42) == ["lock.engine_id_taken"]
    assert "left_ms" not in shell.heard(42, ev.Refuse)[0].details


def test_member_whose_lease_runs_out_is_not_connected_any_more():
    """Goal: a lease that is over has to be begun anew by a want. Method: a server for which silence
    lasts longer than a lease."""
    shell = held()
    shell.members.silent_ms = 60_000.0
    shell.pass_ms(LEASE_MS + MARGIN_MS, beating=(20,))
    assert shell.closed(10)
    assert shell.closed(11)
    assert not shell.closed(20)


def test_beat_before_want_and_want_that_never_comes_cost_the_connection():
    """Goal: a connection says whose it is. Method: a beat first; nothing at all."""
    shell = Shell()
    shell.beat(10)
    assert shell.refused(10) == ["lock.want_first"]
    shell.hear(me.MemberOpened(11))
    shell.hear(me.MemberOpened(12))
    shell.hear(me.MemberClosed(12))
    shell.pass_ms(SILENT_MS + 100)
    assert shell.closed(11)
    assert not shell.closed(12)


def test_members_known_are_bounded_and_those_that_are_gone_forgotten():
    """Goal: nothing grows for ever. Method: one engine too many; then all leave."""
    shell = Shell()
    for number in range(MEMBERS_KNOWN_MAX):
        shell.want(100 + number, f"{number:016x}", None, 0, 1, engine=f"engine-{number}")
    shell.want(10, S0, None, 0, 1, engine="engine-x")
    assert shell.refused(10) == ["lock.too_many_members"]
    for number in range(MEMBERS_KNOWN_MAX):
        shell.hear(me.MemberClosed(100 + number))
    shell.pass_ms(100)
    assert not shell.members.roll.known


def test_unknown_event_is_our_own_fault():
    """Goal: no event is lost in silence. Method: one that does not exist."""
    with pytest.raises(InvariantError):
        Shell().hear(object())


# ---------------------------------------------------------------------- restarts


def restarted(shell: Shell, **options) -> Shell:
    return Shell(shell.disk, **options)


def test_restart_gives_the_whole_group_the_same_grant_again():
    """Goal: a restarted server causes no failover. Method: both come back, claiming."""
    shell = restarted(held())
    shell.want(20, SB, B, 0, 1)
    shell.want(30, S0, A0, 0, tokens={"active": 1})
    assert not shell.granted(30)
    shell.want(31, S1, A1, 1, tokens={"active": 1})
    assert shell.granted(30) == [(A0, 1)]
    assert shell.granted(31) == [(A1, 1)]
    assert shell.active.state is LockState.HELD


def test_restart_waits_for_who_is_not_heard_and_not_for_who_says_that_it_reaped():
    """Goal: neither too early nor longer than it must. Method: member 1 has reaped; member 0 is not
    heard, then says the same."""
    shell = restarted(held())
    shell.want(20, SB, B, 0, 1)
    shell.want(31, S1, None, 1)
    shell.pass_ms(5000, beating=(20, 31))
    assert shell.active.state is LockState.RECOVERING
    shell.want(30, S0, None, 0)
    assert shell.granted(20) == [(B, 2)]


@pytest.mark.parametrize("heard", [False, True])
def test_restart_waits_a_lease_and_its_margin_for_a_member_that_is_not_heard(heard):
    """Goal: who was answered a moment before the restart has its time. Method: nobody comes back,
    or one of two does, which is then told that the other is lost."""
    shell = restarted(held())
    shell.want(20, SB, B, 0, 1)
    if heard:
        shell.want(30, S0, A0, 0, tokens={"active": 1})
    beating = (20, 30) if heard else (20,)
    shell.pass_ms(LEASE_MS + MARGIN_MS - 100, beating)
    assert shell.active.state is LockState.RECOVERING
    shell.pass_ms(100, beating)
    if heard:
        assert shell.lost(30) == [(A0, 1)]
        shell.want(30, S0, None, 0)
    assert shell.granted(20) == [(B, 2)]


def test_restart_refuses_another_supervisor_for_a_member_on_file():
    """Goal: only its own supervisor vouches for a launch. Method: another says it is reaped."""
    shell = restarted(held())
    shell.want(30, S0, None, 0)
    shell.want(31, S1_OTHER, None, 1)
    assert shell.refused(31) == ["lock.engine_id_taken"]
    assert shell.active.state is LockState.RECOVERING


def test_restart_without_a_tcp_address_waits_for_leases_all_the_same():
    """Goal: a flag that was dropped frees nothing. Method: a leased holder on file, no listener."""
    shell = restarted(held(), listens=False)
    shell.pass_ms(LEASE_MS + MARGIN_MS - 100)
    assert shell.active.state is LockState.RECOVERING
    shell.pass_ms(100)
    assert shell.active.state is LockState.FREE


LOST = ev.Record(token=9, unknown=frozenset({"active", "loader"}))


def test_lost_state_claim_of_the_whole_group_is_accepted():
    """Goal: a lost file costs no failover. Method: both members claim."""
    shell = whole(Shell(LOST), tokens={"active": 8})
    assert shell.active.state is LockState.HELD
    assert shell.active.holder.token == 8
    assert shell.active.holder.lease is not None
    assert shell.granted(11)[-1] == (A1, 8)


def test_lost_state_waits_for_members_and_ends_those_that_are_not_completed():
    """Goal: with the state lost, half a group is told to end, and then somebody is granted. Method:
    member 0 claims, member 1 never comes, another engine waits."""
    shell = Shell(LOST)
    shell.want(20, SB, B, 0, 1)
    shell.want(30, S0, A0, 0, tokens={"active": 8})
    shell.pass_ms(LEASE_MS + MARGIN_MS - 100, beating=(20, 30))
    assert not shell.lost(30)
    shell.pass_ms(100, beating=(20, 30))
    assert shell.lost(30) == [(A0, 0)]
    shell.pass_ms(5000, beating=(20, 30))  # it is reaping: it lives and beats
    assert shell.active.state is LockState.RECOVERING
    assert shell.lost(30) == [(A0, 0)]
    shell.want(30, S0, None, 0)
    assert shell.granted(20) == [(B, 10)]


def test_claim_of_a_lock_that_is_not_its_own_is_over_whoever_is_missing():
    """Goal: who wrongly believes that it holds is told so, without waiting for its other members.
    Method: a claim while another engine holds, and one of a lock that is free."""
    shell = Shell()
    shell.want(30, S0, A0, 0, tokens={"active": 8})
    assert shell.lost(30) == [(A0, 0)]
    shell.want(20, SB, B, 0, 1)
    shell.want(31, S1, A1, 1, tokens={"active": 8})
    assert shell.lost(31) == [(A1, 1)]


# ---------------------------------------------------------------------- what the machine says


def test_words_of_the_machine_reach_the_members_they_are_for():
    """Goal: nothing is said to the wrong node. Method: each effect on a virtual connection: a
    hand-over goes to member 0, an end to all, a loan to nobody."""
    shell = held()
    conn = shell.group.conn
    told = shell.members.fan_out(ev.SendHandOver(conn, "active", A0, "engine-1"))
    assert [(type(m).__name__, m.conn) for m in told] == [("SendHandOver", 10)]
    assert [m.conn for m in shell.members.fan_out(ev.Close(conn, "why"))] == [10, 11]
    assert [m.conn for m in shell.members.fan_out(ev.Refuse(conn, "c", "m"))] == [10, 11]
    assert shell.members.fan_out(ev.Lend(conn)) == []
    assert shell.members.fan_out(ev.Close(-99, "why")) == []
    assert sorted(shell.members.audience("engine-1")) == [10, 11]
    assert shell.members.audience("engine-0") == [20]


def test_member_that_comes_late_is_told_who_holds():
    """Goal: one hears that another holds. Method: the second engine, after the grant."""
    assert held().granted(20) == [(A0, 1)]


def test_lease_of_a_member_without_a_group_runs_out_and_nothing_else():
    """Goal: half a group holds nothing, so nothing ends with it. Method: one of two members, cut
    off, until its lease has run out."""
    shell = Shell()
    shell.want(1, S0, A0)
    shell.hear(me.MemberClosed(1))
    shell.pass_ms(LEASE_MS + MARGIN_MS + 200)
    assert shell.happened.count("lock.lease_expired") == 1
    assert not shell.members.groups
    assert shell.machine.locks["active"].state is LockState.FREE


# ---------------------------------------------------------------------- any order of events

ENGINE_A = {0: (S0, 10), 1: (S1, 11)}
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("launch"), st.sampled_from([0, 1])),
        st.tuples(st.just("say again"), st.sampled_from([0, 1])),
        st.tuples(st.just("reap"), st.sampled_from([0, 1])),
        st.tuples(st.just("cut"), st.sampled_from([0, 1])),
        st.tuples(st.just("beat"), st.sampled_from([0, 1])),
        st.tuples(st.just("pass"), st.sampled_from([100, 500, 900, 3000, 6000])),
        st.tuples(st.just("stall"), st.sampled_from([1001, 9000])),
    ),
    max_size=40,
)


class Heard:
    """What the server was told of engine-0's members, and when: written down apart from it."""

    def __init__(self) -> None:
        self.shell = Shell()
        self.launches = 0
        self.mine: dict[int, str | None] = {0: None, 1: None}
        self.is_connected = {0: False, 1: False}
        self.heard_ms: dict[str, float] = {}
        self.reaped: set[str] = set()

    def say(self, member: int, incarnation: str | None) -> None:
        before, self.mine[member] = self.mine[member], incarnation
        if before not in (None, incarnation):
            self.reaped.add(before)
        supervisor, conn = ENGINE_A[member]
        self.shell.want(conn, supervisor, incarnation, member)
        self.is_connected[member] = True
        if incarnation is not None:
            self.heard_ms[incarnation] = self.shell.now_ms

    def step(self, what: str, which: int) -> None:
        shell = self.shell
        if what == "pass":
            shell.pass_ms(which, beating=(20,))
        elif what == "stall":
            shell.now_ms += which
            shell.hear(ev.Tick())
            shell.feed(ev.Tick())
            shell.beat(20)
        elif what == "launch":
            self.launches += 1
            self.say(which, f"engine-0-{self.launches:016x}")
        elif what == "say again":
            self.say(which, self.mine[which])
        elif what == "reap":
            self.say(which, None)
        elif what == "cut":
            shell.hear(me.MemberClosed(ENGINE_A[which][1]))
            self.is_connected[which] = False
        elif self.is_connected[which] and self.mine[which] is not None:
            answered = len(shell.heard(ENGINE_A[which][1], me.SendRenewed))
            shell.beat(ENGINE_A[which][1])
            if len(shell.heard(ENGINE_A[which][1], me.SendRenewed)) > answered:
                self.heard_ms[self.mine[which]] = shell.now_ms

    def may_live(self, incarnation: str, at_ms: float) -> bool:
        age_ms = at_ms - self.heard_ms[incarnation]
        return incarnation not in self.reaped and age_ms < LEASE_MS + MARGIN_MS


@given(STEPS)
def test_members_in_any_order_nobody_is_granted_while_one_of_the_holder_may_live(steps):
    """Goal: the count of references holds in any order of events. Method: random launches, ends,
    cuts and silences of two members; another engine waits all the time; each time that the lock
    goes to it, no member of the last holder may live by what was written down apart."""
    heard = Heard()
    shell, last = heard.shell, None
    for what, which in [("launch", 0), ("launch", 1), *steps]:
        if heard.shell.machine.supervisors.get(SB) is None:
            shell.want(20, SB, B, 0, 1, locks=())
        heard.step(what, which)
        holder = shell.active.holder
        if holder is not None and holder.engine == "engine-0":
            last = holder.lease
            shell.want(20, SB, B, 0, 1)
        elif holder is not None:
            granted_ms = holder.since_mono_ms
            assert not [w for w in last.members if heard.may_live(w.incarnation, granted_ms)]
            shell.want(20, SB, None, 0, 1)
            last = None
