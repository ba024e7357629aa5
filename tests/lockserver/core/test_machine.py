"""The machine's rules, one by one: what it answers to whom, and when it lets nobody in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core.lock import LockState
from lockserver.core.machine import Machine
from lockserver.core.roster import SUPERVISORS_MAX
from lockserver.witness import Probe, WitnessFile, name_of
from understudy.errors import InvariantError

A = "engine-0-000000000000000a"
A2 = "engine-0-00000000000000a2"
B = "engine-1-000000000000000b"


class Shell:
    """Feeds a machine and does what a shell does with `Persist`; keeps every effect."""

    def __init__(self, record: ev.Record | None = None, **options: float) -> None:
        self.now_ms = 0.0
        self.machine = Machine(record or ev.Record(), 0.0, **options)
        self.disk = record or ev.Record()
        self.disk_error: str | None = None
        self.effects: list[ev.Effect] = []

    def feed(self, event: ev.Input) -> list[ev.Effect]:
        done: list[ev.Effect] = []
        effects = self.machine.handle(event, self.now_ms)
        done += effects
        for effect in effects:
            if isinstance(effect, ev.Persist):
                assert effect is effects[-1]
                if self.disk_error is None:
                    self.disk = effect.record
                    done += self.feed(ev.Persisted())
                else:
                    done += self.feed(ev.PersistFailed(self.disk_error))
        self.effects += done
        return done

    def pass_ms(self, ms: float) -> list[ev.Effect]:
        done: list[ev.Effect] = []
        for _ in range(round(ms / 100)):
            self.now_ms += 100
            done += self.feed(ev.Tick())
        return done

    @property
    def active(self):
        return self.machine.locks["active"]

    def due(self) -> list[str]:
        found = evidence.probes_due(self.machine.locks, self.machine.supervisors)
        return [holder.incarnation for _, holder in found]


def want(conn, incarnation, *locks, engine=None, supervisor=None, **fields) -> ev.Wanted:
    engine = engine or (incarnation or "engine-0-x").rpartition("-")[0]
    supervisor = supervisor or f"{engine:0>16}"
    witness = name_of(incarnation) if incarnation else None
    base = ev.Wanted(
        conn=conn,
        supervisor=supervisor,
        engine=engine,
        incarnation=incarnation,
        witness=witness,
        locks=locks,
        tokens={},
        witness_file=WitnessFile(witness, 1, hash(witness) % 1000) if witness else None,
        witness_state=Probe.HELD,
        pid=100 + sum(supervisor.encode()),  # one supervisor, one process
        process="SO_PEERPIDFD",
    )
    return replace(base, **fields)


def sent(effects) -> list[tuple[int, str, int]]:
    return [(e.conn, e.holder.incarnation, e.holder.token) for e in effects if _is(e, "SendGrant")]


def refused(effects) -> list[str]:
    return [effect.code for effect in effects if isinstance(effect, ev.Refuse)]


def happened(effects) -> list[str]:
    return [effect.type for effect in effects if isinstance(effect, ev.Happened)]


def _is(effect, name) -> bool:
    return type(effect).__name__ == name


def held_by_a(**options) -> Shell:
    shell = Shell(**options)
    shell.feed(want(1, A, "active"))
    shell.feed(want(2, B, "active"))
    assert shell.active.holder.incarnation == A
    return shell


# ---------------------------------------------------------------------- granting


def test_grant_is_on_disk_before_it_is_sent_and_the_socket_is_prepared_first():
    """Goal: tokens on disk before sent. Method: the order of effects."""
    effects = Shell().feed(want(1, A, "active"))
    names = [type(effect).__name__ for effect in effects]
    order = ["PrepareService", "Persist", "SendGrant", "Announce"]
    assert [name for name in names if name in order] == order


def test_grant_failed_write_is_sent_to_nobody_and_retried_every_second():
    """Goal: a grant that cannot be written is no grant. Method: a disk that fails, then not."""
    shell = Shell()
    shell.disk_error = "Input/output error"
    effects = shell.feed(want(1, A, "active"))
    assert not sent(effects)
    assert happened(effects).count("lock.write_failed") == 1
    assert "Input/output error" in shell.machine.ledger.problem
    assert not happened(shell.pass_ms(5000)).count("lock.write_failed")
    shell.feed(ev.Beaten(1, 1))
    shell.disk_error = None
    effects = shell.pass_ms(1100)
    assert sent(effects) == [(1, A, 1)]
    assert shell.machine.ledger.problem is None


def test_grant_while_one_is_being_written_is_an_invariant():
    """Goal: nothing happens between choosing and writing. Method: an event in between."""
    machine = Machine(ev.Record(), 0.0)
    machine.handle(want(1, A, "active"), 0.0)
    with pytest.raises(InvariantError):
        machine.handle(ev.Tick(), 0.0)


def test_want_again_by_the_holder_gets_the_same_grant():
    """Goal: a lost grant costs nothing. Method: the same want without a token, and with it."""
    shell = held_by_a()
    assert sent(shell.feed(want(1, A, "active"))) == [(1, A, 1)]
    assert sent(shell.feed(want(1, A, "active", tokens={"active": 1}))) == [(1, A, 1)]


def test_newcomer_is_told_who_holds():
    """Goal: one hears that another holds, also when coming late. Method: a second supervisor."""
    shell = Shell()
    shell.feed(want(1, A, "active"))
    assert sent(shell.feed(want(2, B, "active"))) == [(2, A, 1)]


def test_newest_connection_replaces_the_older_one_and_keeps_the_place():
    """Goal: one connection per supervisor. Method: the holder and the waiter connect again."""
    shell = held_by_a()
    effects = shell.feed(want(3, A, "active", tokens={"active": 1}))
    assert [e.conn for e in effects if isinstance(e, ev.Close)] == [1]
    assert sent(effects) == [(3, A, 1)]
    shell.feed(ev.ConnectionClosed(1))
    assert shell.active.state is LockState.HELD
    shell.feed(want(4, B, "active"))
    shell.feed(ev.ConnectionClosed(2))
    assert [w.incarnation for w in shell.active.waiters] == [B]


def test_older_connection_that_is_read_late_takes_nothing_back():
    """Goal: a reconnect may overtake what was said before. Method: connection 2 is read first; then
    what the same supervisor had said on connection 1, before it had launched anything."""
    shell = Shell()
    shell.feed(want(2, A, "active"))
    effects = shell.feed(want(1, None, engine="engine-0"))
    assert [e.conn for e in effects if isinstance(e, ev.Close)] == [1]
    assert shell.active.state is LockState.HELD
    shell.feed(ev.ConnectionClosed(1))
    assert shell.active.state is LockState.HELD
    assert sent(shell.feed(want(2, A, "active", tokens={"active": 1}))) == [(2, A, 1)]


# ---------------------------------------------------------------------- losing


def test_closed_connection_alone_frees_nothing_and_tries_nothing():
    """Goal: the connection says when to look, not what is true. Method: cut the holder's."""
    shell = held_by_a()
    shell.feed(ev.ConnectionClosed(1))
    assert shell.active.state is LockState.RELEASING
    assert shell.due() == []
    assert shell.feed(ev.WitnessFree("active", A)) == []
    assert sent(shell.feed(want(5, A, "active", tokens={"active": 1}))) == [(5, A, 1)]
    assert shell.active.state is LockState.HELD


def test_ended_process_needs_the_witness_too():
    """Goal: both pieces of evidence. Method: pidfd first, then the witness."""
    shell = held_by_a()
    shell.feed(ev.ConnectionClosed(1))
    assert not sent(shell.feed(ev.ProcessGone(f"{'engine-0':0>16}")))
    assert shell.due() == [A]
    assert sent(shell.feed(ev.WitnessFree("active", A))) == [(2, B, 2)]
    assert ev.Discard((WitnessFile(name_of(A), 1, hash(name_of(A)) % 1000),)) in shell.effects


def test_without_pidfd_the_closed_connection_stands_for_the_process():
    """Goal: older kernels. Method: the holder has no pidfd."""
    shell = Shell()
    shell.feed(want(1, A, "active", process="none"))
    assert shell.due() == []
    shell.feed(ev.ConnectionClosed(1))
    assert shell.due() == [A]


def test_own_word_needs_the_witness_but_not_the_process():
    """Goal: relaunch without a failed pidfd. Method: the want no longer names the incarnation."""
    shell = held_by_a()
    shell.feed(want(1, None, engine="engine-0"))
    assert (shell.active.state, shell.active.cause) == (LockState.RELEASING, "not_wanted")
    assert shell.due() == [A]
    assert sent(shell.feed(ev.WitnessFree("active", A))) == [(2, B, 2)]


def test_given_up_lock_cannot_be_asked_for_by_the_same_incarnation():
    """Goal: a reaped incarnation stays dead. Method: drop the lock, ask again."""
    shell = held_by_a()
    shell.feed(want(1, A))
    assert refused(shell.feed(want(1, A, "active"))) == ["lock.incarnation_ended"]


def test_silent_holder_is_tried_and_reported_and_keeps_the_lock_while_it_lives():
    """Goal: the server never kills and never guesses. Method: no beat for silent_ms."""
    shell = held_by_a(silent_ms=1000)
    shell.feed(ev.Beaten(2, 1))
    effects = shell.pass_ms(1200)
    assert "lock.unresponsive" in happened(effects)
    assert shell.active.state is LockState.HELD
    assert shell.due() == [A]
    shell.feed(ev.Beaten(1, 1))
    assert shell.due() == []


def test_silent_waiter_is_passed_over_and_keeps_its_place():
    """Goal: a hung standby delays nobody. Method: two waiters, the first is silent."""
    shell = held_by_a(silent_ms=1000)
    c = "engine-2-000000000000000c"
    shell.feed(want(3, c, "active"))
    for beat in range(15):
        shell.feed(ev.Beaten(1, beat))
        shell.feed(ev.Beaten(3, beat))
        shell.pass_ms(100)
    shell.feed(want(1, None, engine="engine-0"))
    assert (3, c, 2) in sent(shell.feed(ev.WitnessFree("active", A)))
    assert [w.incarnation for w in shell.active.waiters] == [B]


def test_same_progress_again_is_no_sign_of_life():
    """Goal: a stuck loop that still sends is silent. Method: beat with one number."""
    shell = held_by_a(silent_ms=1000)
    for _ in range(15):
        shell.feed(ev.Beaten(1, 7))
        shell.pass_ms(100)
    assert shell.machine.supervisors[f"{'engine-0':0>16}"].is_silent


def test_server_that_was_stopped_calls_nobody_silent():
    """Goal: our own stall is not theirs. Method: one tick after a minute."""
    shell = held_by_a()
    shell.now_ms += 60_000
    assert "lock.unresponsive" not in happened(shell.feed(ev.Tick()))


def test_plain_lock_is_free_when_unwanted_or_its_supervisor_is_gone():
    """Goal: the loader lock waits for no witness. Method: both ways to lose it."""
    shell = Shell()
    shell.feed(want(1, A, "loader"))
    shell.feed(want(2, B, "loader"))
    assert sent(shell.feed(want(1, A))) == [(2, B, 2)]
    shell.feed(want(1, A, "loader"))
    assert (1, A, 3) in sent(shell.feed(ev.ProcessGone(f"{'engine-1':0>16}")))


def test_plain_lock_outlives_a_cut_connection():
    """Goal: a loader that reconnects goes on loading. Method: cut and come back."""
    shell = Shell()
    shell.feed(want(1, A, "loader"))
    shell.feed(ev.ConnectionClosed(1))
    assert sent(shell.feed(want(2, A, "loader", tokens={"loader": 1}))) == [(2, A, 1)]


# ---------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (want(9, A, "nothing"), "lock.unknown_lock"),
        (want(9, A, "active", witness="witness_x"), "lock.bad_witness_name"),
        (want(9, A, "active", witness="../witness"), "lock.bad_witness_name"),
        (want(9, A, "active", witness=None), "lock.bad_witness_name"),
        (want(9, A, "active", engine="engine-9"), "lock.bad_incarnation"),
        (want(9, A, "active", "active"), "lock.bad_want"),
        (want(9, A, tokens={"active": 3}), "lock.bad_want"),
        (replace(want(9, None), locks=("active",)), "lock.bad_want"),
        (replace(want(9, None), engine="a/b"), "lock.bad_engine_id"),
        (want(9, A, "active", witness_state=Probe.FREE), "lock.witness_unproven"),
        (want(9, A, "active", witness_state=Probe.UNPROVEN), "lock.witness_unproven"),
        (want(9, A, "loader", witness_file=None), "lock.witness_unproven"),
        (want(9, A, "active", tokens={"active": 3}), "lock.stale_claim"),
    ],
)
def test_bad_want_is_refused_by_code_and_changes_no_lock(bad, code):
    """Goal: bad input costs its sender. Method: every kind of bad want on a machine with locks."""
    shell = Shell()
    shell.feed(want(2, B, "active"))
    before = (shell.active.state, shell.active.holder, list(shell.active.waiters))
    effects = shell.feed(bad)
    assert refused(effects) == [code]
    assert (shell.active.state, shell.active.holder, list(shell.active.waiters)) == before
    assert not any(isinstance(effect, ev.Lend) for effect in effects)
    assert len(shell.machine.supervisors) == 1  # whoever was only ever refused is forgotten


def test_second_living_supervisor_of_an_engine_is_refused_until_the_first_is_gone():
    """Goal: two containers with one ENGINE_ID. Method: another supervisor id, same engine."""
    shell = held_by_a()
    twin = want(9, A2, "active", supervisor="f" * 16)
    assert refused(shell.feed(twin)) == ["lock.engine_id_taken"]
    shell.feed(ev.ConnectionClosed(1))  # a cut connection is no death
    assert refused(shell.feed(twin)) == ["lock.engine_id_taken"]
    shell.feed(ev.ProcessGone(f"{'engine-0':0>16}"))
    assert refused(shell.feed(twin)) == []


def test_another_process_cannot_speak_for_a_living_supervisor():
    """Goal: who knows a supervisor's id cannot take its lock away. Method: the same id from
    another pid, while the first lives and after it has gone."""
    shell = Shell()
    shell.feed(want(1, A, "active", pid=10, process="SO_PEERPIDFD"))
    stranger = want(2, None, engine="engine-0", pid=11, process="SO_PEERPIDFD")
    assert refused(shell.feed(stranger)) == ["lock.identity_changed"]
    assert shell.active.state is LockState.HELD
    again = want(3, A, "active", pid=10, process="SO_PEERPIDFD")
    assert not refused(shell.feed(again))


def test_connection_cannot_change_its_identity():
    """Goal: one connection, one supervisor. Method: say another id, another engine."""
    shell = held_by_a()
    other = want(1, B, "active", supervisor="e" * 16)
    assert refused(shell.feed(other)) == ["lock.identity_changed"]
    moved = want(7, "engine-9-000000000000000a", "active", supervisor=f"{'engine-0':0>16}")
    assert refused(shell.feed(moved)) == ["lock.identity_changed"]


def test_beat_before_want_is_refused_and_supervisors_are_limited():
    """Goal: bounds. Method: a beat from nowhere; one supervisor too many."""
    shell = Shell()
    assert refused(shell.feed(ev.Beaten(5, 1))) == ["lock.want_first"]
    for number in range(SUPERVISORS_MAX):
        shell.feed(want(number, f"e{number}-000000000000000a", "active"))
    late = want(SUPERVISORS_MAX, "late-000000000000000a", "active")
    assert refused(shell.feed(late)) == ["lock.too_many_waiters"]


def test_restart_holder_on_file_is_heard_although_a_crowd_came_first():
    """Goal: the limit refuses newcomers, not who is in the right. Method: a restart, as many
    strangers as there is room for, then the holder."""
    shell = restarted(held_by_a())
    for number in range(SUPERVISORS_MAX):
        shell.feed(want(number, f"e{number}-000000000000000a", "active"))
    shell.feed(want(SUPERVISORS_MAX, A, "active", tokens={"active": 1}))
    assert shell.active.state is LockState.HELD


# ---------------------------------------------------------------------- after a restart


def restarted(shell: Shell, **options) -> Shell:
    return Shell(shell.disk, **options)


def test_restart_holder_on_file_same_grant_again():
    """Goal: no failover by a restart. Method: the holder wants with its token, and without."""
    for tokens in ({}, {"active": 1}):
        shell = restarted(held_by_a())
        assert shell.active.state is LockState.RECOVERING
        shell.feed(want(2, B, "active"))
        assert shell.active.state is LockState.RECOVERING
        assert sent(shell.feed(want(1, A, "active", tokens=tokens))) == [(1, A, 1)]
        assert shell.active.state is LockState.HELD


def test_restart_free_witness_frees_at_once_and_a_held_one_is_only_reported():
    """Goal: no window to sit out, and no grant at its end. Method: both, with time passing."""
    shell = restarted(held_by_a(), window_ms=1000)
    shell.feed(want(2, B, "active"))
    assert shell.due() == [A]
    effects = shell.pass_ms(5000)
    assert happened(effects).count("lock.unresponsive") == 1
    assert shell.active.state is LockState.RECOVERING
    shell.feed(ev.Beaten(2, 1))
    assert (2, B, 2) in sent(shell.feed(ev.WitnessFree("active", A)))


def test_restart_relaunched_holder_lets_go():
    """Goal: an incarnation no longer named was reaped. Method: the engine comes with a new one."""
    shell = restarted(held_by_a())
    shell.feed(want(1, A2, "active"))
    assert shell.active.state is LockState.RELEASING
    assert (1, A2, 2) in sent(shell.feed(ev.WitnessFree("active", A)))


def test_restart_returning_holder_evicts_who_took_its_name():
    """Goal: the holder on file is in the right. Method: a twin came first."""
    shell = restarted(held_by_a())
    assert refused(shell.feed(want(9, A2, "active", supervisor="f" * 16))) == []
    effects = shell.feed(want(1, A, "active"))
    assert refused(effects) == ["lock.engine_id_taken"]
    assert sent(effects) == [(1, A, 1)]


def test_restart_stale_claim_of_one_lock_leaves_the_other_heard():
    """Goal: a refusal never strands a lock in recovering. Method: loader on file, active stale."""
    shell = Shell()
    shell.feed(want(1, A, "loader"))
    shell = restarted(shell)
    effects = shell.feed(want(1, A, "active", "loader", tokens={"active": 9, "loader": 1}))
    assert refused(effects) == ["lock.stale_claim"]
    shell.feed(ev.ConnectionClosed(1))
    assert shell.machine.locks["loader"].state is LockState.RELEASING


LOST = ev.Record(token=8, unknown=frozenset({"active", "loader"}))


def test_unknown_file_claim_with_a_held_witness_is_believed_and_filed():
    """Goal: state unreadable: claims. Method: one with a token above the readable one."""
    shell = Shell(LOST)
    effects = shell.feed(want(1, A, "active", tokens={"active": 12}))
    assert sent(effects) == [(1, A, 12)]
    assert shell.disk.holders["active"].incarnation == A
    assert shell.disk.unknown == {"loader"}
    shell.feed(want(2, B, "active"))
    shell.feed(want(1, None, engine="engine-0"))
    assert (2, B, 14) in sent(shell.feed(ev.WitnessFree("active", A)))


def test_unknown_file_claim_of_a_free_witness_is_refused():
    """Goal: a token is no proof of life. Method: claim with a witness that nobody holds."""
    shell = Shell(LOST)
    claim = want(1, A, "active", tokens={"active": 12}, witness_state=Probe.FREE)
    assert refused(shell.feed(claim)) == ["lock.stale_claim"]


def test_unknown_file_is_free_only_when_no_stranger_holds_a_witness():
    """Goal: every witness free, or of a connected supervisor that does not claim. Method: scans."""
    shell = Shell(LOST)
    shell.feed(want(2, B, "active"))
    assert not sent(shell.feed(ev.DirectoryScanned(frozenset({name_of(A), name_of(B)}))))
    assert shell.active.is_unknown
    effects = shell.feed(ev.DirectoryScanned(frozenset({name_of(B)})))
    assert (2, B, 9) in sent(effects)


def test_unknown_file_stays_unknown_on_disk_while_another_lock_is_granted():
    """Goal: a grant of one lock files no false freedom of another. Method: loader settles first."""
    shell = Shell(ev.Record(token=8, unknown=frozenset({"active"})))
    shell.feed(want(2, B, "loader"))
    assert shell.disk.holders["loader"].incarnation == B
    assert shell.disk.unknown == {"active"}
    assert restarted(shell).active.is_unknown
