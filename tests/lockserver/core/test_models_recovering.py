"""State lost in a pod with models: what one model's engines do is no doubt about another's lock."""

from __future__ import annotations

from dataclasses import replace

from lockserver.core import recovery
from lockserver.core.lock import Lock, LockState, Signal, kinds_of
from lockserver.core.names import ServingFile, serving_name_of
from tests.lockserver.test_state_file import HOLDER


def test_serving_file_of_a_known_holder_keeps_no_other_model_waiting_and_is_not_sealed():
    """Goal: a model whose holder is known serves on, rests and wakes; another model's lock is free
    once nothing else is held. Method: one claimed lock, one unknown; the holder's file is held."""
    locks = {name: Lock(name, is_fenced) for name, is_fenced in kinds_of(("a", "b")).items()}
    for lock in locks.values():
        lock.state = LockState.RECOVERING
    file = ServingFile(serving_name_of(HOLDER.incarnation), 5, 6)
    locks["active:b"].fire(Signal.CLAIMED, 0.0, replace(HOLDER, serving=file))
    assert recovery.kept_serving(locks) == {file.name}
    assert "active:a" in recovery.scan_frees(locks, {}, (), {file.name})
    stranger = serving_name_of("e-00112233445566bb")
    assert "active:a" not in recovery.scan_frees(locks, {}, (), {file.name, stranger})
