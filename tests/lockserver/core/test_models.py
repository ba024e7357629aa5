"""A pod with models: an engine's locks are those of one model, and one model's engines are no doubt
about another's lock. And names that none can misuse."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core import recovery
from lockserver.core.lock import Lock, LockState, Signal, locks_of
from lockserver.core.names import INCARNATION, name_of, new_incarnation, serving_name_of
from plumbing.errors import UsageError
from tests.lockserver.test_state_file import HOLDER


def test_lock_on_file_outlives_the_removal_of_its_model():
    """Goal: who holds it may live. Method: on file, with a lock that older servers had for loading,
    which is none any more."""
    record = ev.LockRecord(holders={"active:gone": HOLDER, "loader:b": HOLDER})
    assert locks_of(("a", "b"), record) == ("active:a", "active:b", "active:gone")


def test_serving_file_of_a_known_holder_keeps_no_other_model_waiting_and_is_not_sealed():
    """Goal: a model whose holder is known serves on, rests and wakes; another model's lock is free
    once nothing else is held. Method: one claimed lock, one unknown; the holder's file is held. A
    third one's holder has no such file."""
    locks = {name: Lock(name) for name in locks_of(("a", "b", "c"))}
    for lock in locks.values():
        lock.state = LockState.RECOVERING
    file = serving_name_of(HOLDER.incarnation)
    locks["active:b"].fire(Signal.CLAIMED, 0.0, replace(HOLDER, serving_id=(5, 6)))
    locks["active:c"].fire(Signal.CLAIMED, 0.0, replace(HOLDER, serving_id=None))
    assert recovery.kept_serving(locks) == {file}
    assert "active:a" in recovery.scan_frees(locks, {}, (), {file})
    stranger = serving_name_of("e-00112233445566bb")
    assert "active:a" not in recovery.scan_frees(locks, {}, (), {file, stranger})


def test_new_incarnation_is_an_incarnation_of_its_engine():
    """Goal: ids that `name_of` accepts, each new. Method: two for one engine."""
    one, other = new_incarnation("engine-0"), new_incarnation("engine-0")
    assert one != other
    assert [INCARNATION.fullmatch(each)["engine"] for each in (one, other)] == ["engine-0"] * 2
    assert name_of("engine-0-00112233445566aa") == "witness_engine-0_00112233445566aa"


@pytest.mark.parametrize("bad", ["", "-a", "a/b", "a" * 64, "a b"])
def test_bad_engine_id_has_no_incarnation(bad):
    """Goal: no path tricks through engine ids. Method: invalid ones."""
    with pytest.raises(UsageError) as caught:
        new_incarnation(bad)
    assert caught.value.code == "engine.bad_id"
