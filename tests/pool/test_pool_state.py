"""Goal: what was told is found again after a restart, and what may be older than that never is.

Method: the file itself, whole and damaged as by a power cut, a newer version, or a hand.
"""

import os

import pytest

from plumbing.errors import UnderstudyError
from pool.server.state_file import FORMAT, SLOT_BYTES, PoolStateFile


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
