"""A witness that the server could not look at: neither free nor held nor gone. Nobody is let in,
and nobody who is here is put out, until it could."""

from __future__ import annotations

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.names import WitnessState
from tests.lockserver.core.shell import (
    A,
    B,
    Shell,
    _is,
    happened,
    held_by_a,
    refused,
    restarted,
    sent,
    want,
)

UNSEEN = {"witness_state": WitnessState.UNSEEN}


def to_repeat(effects) -> list[ev.Wanted]:
    return [effect.want for effect in effects if isinstance(effect, ev.LookAgain)]


def looked(wanted: ev.Wanted, state=WitnessState.HELD, **fields) -> ev.Wanted:
    """The same want as the shell hands it in once it could look."""
    return replace(wanted, witness_state=state, is_repeat=True, **fields)


def waiting(shell: Shell) -> list[str]:
    return [each.incarnation for each in shell.active.waiters]


def test_waiter_that_asks_again_unseen_keeps_its_place_and_is_granted():
    """Goal: a healthy standby is not evicted. Method: it repeats its want while nothing can be
    looked at, not even its file's name; then the holder dies."""
    shell = held_by_a()
    assert waiting(shell) == [B]
    asked = replace(want(2, B, "active", **UNSEEN), witness_file=None)
    effects = shell.feed(asked)
    assert not refused(effects)
    assert to_repeat(effects) == [asked]
    assert waiting(shell) == [B]
    shell.feed(ev.ProcessGone(f"{'engine-0':0>16}"))
    effects = shell.feed(ev.WitnessFree("active", A))
    assert sent(effects)[0] == (2, B, 2)
    assert shell.active.holder.witness == want(2, B, "active").witness_file


def test_new_launch_asked_for_unseen_gives_up_the_place_of_the_old_one():
    """Goal: what the want itself says counts at once. Method: a waiter names a new incarnation that
    cannot be looked at, whose name cannot be found either."""
    shell = held_by_a()
    fresh = "engine-1-00000000000000b2"
    asked = replace(want(2, fresh, "active", **UNSEEN), witness_file=None)
    assert to_repeat(shell.feed(asked)) == [asked]
    assert waiting(shell) == []
    assert shell.machine.supervisors[asked.msg.supervisor].witness is None


def test_holder_that_returns_unseen_is_confirmed_at_once():
    """Goal: its own want is enough for the holder. Method: a restart, then the holder, unseen."""
    shell = restarted(held_by_a())
    effects = shell.feed(want(7, A, "active", tokens={"active": 1}, **UNSEEN))
    assert sent(effects) == [(7, A, 1)]
    assert not to_repeat(effects)


def test_claim_on_lost_state_waits_for_a_look_and_frees_nothing():
    """Goal: with the state lost, a living holder keeps its lock. Method: it claims its token
    unseen, and everything else is free."""
    shell = Shell(ev.LockRecord(token=5, unknown=frozenset({"active", "loader"})))
    asked = want(1, A, "active", tokens={"active": 5}, **UNSEEN)
    effects = shell.feed(asked)
    assert not refused(effects)
    assert to_repeat(effects) == [asked]
    shell.feed(ev.DirectoryScanned(frozenset({asked.msg.witness})))
    assert shell.active.is_unknown
    assert sent(shell.feed(looked(asked))) == [(1, A, 5)]


def test_stale_claim_is_refused_without_a_look():
    """Goal: what no look could change is answered at once. Method: a claim on a lock whose holder
    is on file."""
    shell = held_by_a()
    effects = shell.feed(want(2, B, "active", tokens={"active": 3}, **UNSEEN))
    assert refused(effects) == ["lock.stale_claim"]
    assert not to_repeat(effects)


def test_plain_lock_needs_the_name_of_the_witness_only():
    """Goal: the loader is not held up by a shortage. Method: ask for it unseen, with and without
    the file's identity."""
    shell = Shell()
    asked = want(1, A, "loader", **UNSEEN)
    assert to_repeat(shell.feed(replace(asked, witness_file=None)))
    effects = shell.feed(asked)
    assert [effect.lock for effect in effects if _is(effect, "SendGrant")] == ["loader"]
    assert not to_repeat(effects)


def test_repeated_want_is_no_sign_of_life():
    """Goal: the server's own retry does not hide a silent engine. Method: an engine asks unseen and
    says nothing more; its want is handed in again after it has fallen silent."""
    shell = Shell()
    (again,) = to_repeat(shell.feed(want(1, A, "active", **UNSEEN)))
    assert "lock.silent" in happened(shell.pass_ms(3500))
    effects = shell.feed(looked(again))
    assert "lock.heard" not in happened(effects)
    assert sent(effects) == []
    assert waiting(shell) == [A]
    assert sent(shell.feed(ev.Beaten(1, 1))) == [(1, A, 1)]
