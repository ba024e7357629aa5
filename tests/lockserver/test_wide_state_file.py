"""The state file of a pod with models: large slots, read as well as the small ones before them."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest

from lockserver.core.events import LockRecord
from lockserver.core.lock import kinds_of
from lockserver.state_file import NAME, WIDE, WIDE_SLOT_BYTES, LockStateFile, read
from plumbing.errors import UnderstudyError
from plumbing.pod.models import MODELS_MAX
from tests.lockserver.test_state_file import HOLDER, record, write

MODELS = ("chat", "coder")
KINDS = kinds_of(MODELS)


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


def head_of(directory):
    with open(os.path.join(directory, NAME), "rb") as file:
        return file.read(len(b"understudy-lock 1"))


def test_file_of_a_pod_without_models_is_rewritten_with_large_slots_once_it_has_models(directory):
    """Goal: no token and no holder is lost by the upgrade, and the way back is closed to a server
    that knows small slots only. Method: write the old file; open it with models, twice; open it
    without models, which reads it and keeps its slots."""
    write(directory, 5, 6)
    assert head_of(directory) == b"understudy-lock 1"
    state = LockStateFile(directory, KINDS, models=MODELS)
    assert (state.loaded.record, state.loaded.problem) == (record(6), None)
    assert os.path.getsize(state.path) == 2 * WIDE_SLOT_BYTES
    state.write(record(7))
    state.close()
    assert head_of(directory) == b"understudy-lock 2"  # which an older server refuses to read
    for models in (MODELS, ()):
        state = LockStateFile(directory, kinds_of(models), models=models)
        assert state.loaded.record == record(7)
        assert state.loaded.models == MODELS
        state.close()
    assert os.path.getsize(state.path) == 2 * WIDE_SLOT_BYTES
    assert not [name for name in os.listdir(directory) if "unreadable" in name]


@pytest.mark.parametrize("slot", [0, 1])
def test_one_bad_large_slot_leaves_the_holders_of_all_models_unknown_and_the_token_known(
    directory, slot
):
    """Goal: as with small slots, a record that may be older is not believed, but its token counts.
    Method: write two records, spoil one."""
    state = LockStateFile(directory, KINDS, models=MODELS)
    state.write(record(7))
    state.write(record(8))
    state.close()
    with open(state.path, "r+b") as file:
        file.seek(slot * WIDE_SLOT_BYTES + 200)
        file.write(b"?")
    found = LockStateFile(directory, KINDS, models=MODELS)
    assert found.loaded.record.unknown == set(KINDS)
    assert found.loaded.record.token in (8, 9)  # one above the one that could be read
    assert found.loaded.aside is not None
    found.close()


def test_large_slots_are_recognised_by_either_first_line(directory):
    """Goal: a spoiled beginning costs no token, and a later version's slot starts no server.
    Method: spoil the first line of the first slot; then put another number on the second one."""
    state = LockStateFile(directory, KINDS, models=MODELS)
    state.write(record(7))
    state.close()  # in the first slot; the second one has the record from before
    with open(state.path, "r+b") as file:
        file.write(b"?" * 20)
    found = read(directory, KINDS)
    assert found is not None
    assert (found.form, found.record.era) == (WIDE, state.loaded.record.era)
    with open(state.path, "r+b") as file:
        file.seek(WIDE_SLOT_BYTES)
        file.write(b"understudy-lock 3 ")
    with pytest.raises(UnderstudyError) as caught:
        LockStateFile(directory, KINDS, models=MODELS)
    assert caught.value.code == "lock.state_newer"


def test_largest_pod_fits_its_file(directory):
    """Goal: what is not refused can be written. Method: as many models as there may be, each with
    two holders that take their whole share."""
    models = tuple(f"{number:03}".ljust(25, "m") for number in range(MODELS_MAX))
    kinds = kinds_of(models)
    state = LockStateFile(directory, kinds, models=models)
    share = state.share_bytes(len(kinds))
    holders = {}
    for name in kinds:
        plain = len(repr(name)) + len(_text(replace(HOLDER, engine="")))
        holders[name] = replace(HOLDER, engine="e" * (share - plain - 4))
    state.write(LockRecord(7, holders, frozenset(), "0" * 16))
    state.close()
    found = read(directory, kinds)
    assert found is not None
    assert found.record.holders == holders
    assert found.models == models
    assert share > 300  # an engine with a name like its model's


def _text(holder):
    return json.dumps(holder.to_dict(), separators=(",", ":"))


def test_record_that_does_not_fit_is_an_error_of_the_disk_and_not_a_crash(directory):
    """Goal: holders of models that were removed cannot end the server. Method: one that is larger
    than a slot."""
    state = LockStateFile(directory, KINDS, models=MODELS)
    large = replace(HOLDER, engine="e" * WIDE.slot_bytes)
    with pytest.raises(OSError, match="do not fit"):
        state.write(LockRecord(7, {"active:chat": large}, frozenset(), "0" * 16))
    state.close()
