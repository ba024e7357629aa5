"""Goal: what was told is found again after a restart, and what may be older than that never is.

Method: the file itself, whole and damaged as by a power cut, a newer version, or a hand.
"""

import os

import msgspec
import pytest

from plumbing.errors import UnderstudyError
from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core.model import Costs, Leaving
from pool.core.saved import PoolSnapshot
from pool.core.states import (
    COUNT_MAX,
    MODELS_MAX,
    NAME_CHARS_MAX,
    EngineSizes,
    GoalGeneration,
    ModelState,
)
from pool.pool_file import DEVICES_MAX, MODEL_SETTINGS
from pool.server.server import FORMAT, SLOT_BYTES, PoolStateFile
from tests.pool.core.pod import Pod, rules


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


def loaded(directory):
    file = PoolStateFile(directory)
    try:
        return file
    finally:
        file.close()


@pytest.mark.parametrize("slot", [0, 1])
def test_lost_slot_makes_the_other_one_unbelievable(directory, slot):
    """Goal: goals that were told later do not come back with an older number. Method: one byte of a
    slot, whichever is the newer one."""
    file = PoolStateFile(directory)
    for number in range(3):
        file.write({"number": number})
    file.close()
    with open(file.path, "r+b") as raw:
        raw.seek(slot * SLOT_BYTES + 200)
        raw.write(b"X")
    found = loaded(directory)
    assert found.record is None
    assert "1 of its 2 slots" in found.problem
    assert os.path.exists(found.aside)
    assert loaded(directory).problem is None  # a fresh file has taken its place


def test_record_of_a_newer_version_is_put_aside(directory):
    file = PoolStateFile(directory)
    file.close()
    os.unlink(file.path)
    FORMAT.create(file.path, b'{"schema":9,"record":{}}')
    assert "schema 9" in loaded(directory).problem


def test_directory_in_its_place_is_named_and_left_alone(directory):
    os.mkdir(os.path.join(directory, "pool.json"))
    with pytest.raises(UnderstudyError, match="it is a directory; remove it") as refused:
        PoolStateFile(directory)
    assert refused.value.code == "pool.state_unwritable"
    assert os.listdir(directory) == ["pool.json"]


def test_only_what_must_survive_a_power_cut_waits_for_the_disk(directory, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    file = PoolStateFile(directory)
    file.write({"number": 1}, survives_power_cut=False)
    assert not synced
    file.write({"number": 2})
    assert len(synced) == 1
    file.close()
    assert loaded(directory).record == {"number": 2}


BYTES = 2**40  # more than any device has
MS = 12_345_678_901.123456  # of a machine that runs for months
TEXT = "\U0001f4a5" * 4096  # the longest fault that an engine can report


def largest_pool():
    """The longest value of everything."""
    devices = tuple(f"GPU-{n:08d}-aaaa-bbbb-cccc-123456789012" for n in range(DEVICES_MAX))
    names = [f"{n:03d}".ljust(NAME_CHARS_MAX, "-") for n in range(MODELS_MAX)]
    pod = Pod(dict.fromkeys(names, rules(devices=devices)), engines=2)
    facts, size = pod.pool.facts, dict.fromkeys(devices, BYTES)
    facts.number = facts.door_number = COUNT_MAX
    for model in facts.models.values():
        model.is_unknown = model.is_wanted = model.is_serving = model.has_failed = False
        model.is_again = model.is_permanent = model.pinned = model.is_unload_ordered = False
        model.goal = model.floor = model.falls_to = Tier.OFFLOADED
        model.leaving, model.running = Leaving.ORDER, ev.Running.FINISH
        model.frees = ModelState.UNLOADING
        model.fault = model.reason = TEXT
        model.faults_ms = (MS, MS, MS)
        model.load_ordered_ms = model.last_request_ms = model.awake_since_ms = MS
        model.drained_ms, model.costs = MS, Costs(*[123_456_789.1] * 6)
        model.door_number, model.door = COUNT_MAX, ev.OpenDoor(f"{model.name}-0", COUNT_MAX)
        model.sizes = EngineSizes(size, size, size)
        for engine in model.engines:
            engine.goal = Tier.OFFLOADED
            engine.generation = GoalGeneration("0123456789abcdef", 1_000_000, COUNT_MAX)
        for key in model.keys:
            facts.ledger.settle(key, BYTES)
    changed = dict.fromkeys(names, dict.fromkeys(MODEL_SETTINGS, "123456s"))
    return {"pool": pod.pool.snapshot(), "changed": changed}


def test_largest_pool_fits_the_file_whatever_its_engines_report(directory):
    """Else it would decide nothing from then on."""
    file, record = PoolStateFile(directory), largest_pool()
    file.write(record)
    file.write(record)
    file.close()
    found = msgspec.convert(loaded(directory).record["pool"], PoolSnapshot)
    assert len(found.models) == MODELS_MAX


def test_what_a_longer_record_has_left_in_a_slot_is_gone(directory):
    file = PoolStateFile(directory)
    for text in ("long" * 1000, "longer" * 1000, "short", "shorter"):
        file.write({"text": text})
    file.close()
    assert loaded(directory).record == {"text": "shorter"}
    with open(file.path) as raw:
        assert "long" not in raw.read()
