"""What a restarted server knows, from its file and from the supervisors that connect."""

from __future__ import annotations

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.machine import WINDOW_MS
from lockserver.core.names import WitnessState, name_of
from tests.lockserver.core.shell import (
    A2,
    A,
    B,
    Shell,
    happened,
    held_by_a,
    refused,
    restarted,
    want,
)


def test_restart_earlier_waiters_are_sent_the_returning_holder():
    """Goal: every waiter learns which engine holds. Method: a waiter is back before the holder on
    file, and before one that claims a lock whose record is lost."""
    shell = restarted(held_by_a())
    shell.feed(want(2, B, "active"))
    told = [e for e in shell.feed(want(1, A, "active")) if isinstance(e, ev.Announce)]
    assert [(each.message.lock, each.message.incarnation) for each in told] == [("active", A)]
    assert not any(isinstance(e, ev.Announce) for e in shell.feed(want(1, A, "active")))  # no news

    shell = Shell(ev.LockRecord(token=8, unknown=frozenset({"active"})))
    shell.feed(want(2, B, "active"))
    told = shell.feed(want(1, A, "active", token=7))
    assert [e.message.token for e in told if isinstance(e, ev.Announce)] == [7]


MODELS = ("a", "b")
LOST = ev.LockRecord(token=8, unknown=frozenset({"active", "active:a", "active:b"}))


def test_restart_reports_the_last_holder_of_each_recovering_lock():
    """Goal: no wait is silent. Method: the events at start, with a holder on file or not."""
    shell = restarted(held_by_a())
    (told,) = shell.machine.begin()
    assert told.type == "lock.recovering"
    assert A in told.message
    first, second = Shell(LOST, models=MODELS).machine.begin()
    assert {first.data["lock"], second.data["lock"]} == {"active:a", "active:b"}
    assert "is not on file" in first.message


def test_restart_of_two_that_hold_different_locks_the_first_one_stays():
    """Goal: they do not evict each other for ever. Method: one id twice, the locks of two models on
    file, in either order."""
    first, twin = f"{'engine-0':0>16}", "f" * 16
    for order in ((first, twin), (twin, first)):
        shell = Shell(models=MODELS)
        shell.feed(want(1, A, "active:a", process="none"))
        shell.feed("connection_closed", 1)
        shell.feed(want(2, A2, "active:b", supervisor=twin, process="none"))
        shell = restarted(shell, models=MODELS)
        wants = {
            first: want(3, A, "active:a", token=1),
            twin: want(4, A2, "active:b", token=2, supervisor=twin),
        }
        shell.feed(wants[order[0]])
        for again in (5, 6):
            late = replace(wants[order[1]], conn=again)
            assert refused(shell.feed(late)) == ["lock.engine_id_taken"]
        assert list(shell.machine.supervisors) == [order[0]]


def test_unknown_file_keeps_what_connected_supervisors_name():
    """Goal: a scan does not seal the witness of a starting engine. Method: two connected, one
    left."""
    shell = Shell(LOST)
    shell.feed(want(1, A, "active"))
    shell.feed(want(2, B, "active"))
    shell.feed(want(3, None, engine="engine-2"))
    shell.feed("connection_closed", 1)
    assert recovery.scan_is_due(shell.machine.locks)
    assert recovery.kept_witnesses(shell.machine.supervisors) == {name_of(B)}


def test_unknown_file_claim_of_a_free_witness_is_refused():
    """Goal: a token does not prove life. Method: claim with a witness that no process holds."""
    shell = Shell(LOST)
    claim = want(1, A, "active", token=12, witness_state=WitnessState.FREE)
    assert refused(shell.feed(claim)) == ["lock.stale_claim"]


def test_unknown_file_without_evidence_is_reported_once():
    """Goal: an operator sees what a lock waits for. Method: nobody connects, and no look ends."""
    shell = Shell(LOST)
    assert happened(shell.pass_ms(2 * WINDOW_MS)).count("lock.waiting_evidence") == 1
