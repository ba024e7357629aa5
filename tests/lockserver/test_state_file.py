"""The two-slot file: what survives torn writes, truncation, deletion and a full disk."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from lockserver.core.events import Holder, LockRecord
from lockserver.core.lock import locks_of
from lockserver.messages import TOKEN_CLAIMED_MAX
from lockserver.state_file import FORMAT, NAME, LockStateFile, read
from plumbing.errors import UnderstudyError
from plumbing.pod.models import MODELS_MAX
from tests.helpers import free_witness, open_fds, run_command

LOCKS = ("active",)
SLOT_BYTES = FORMAT.slot_bytes
ERA = "0123456789abcdef"
HOLDER = Holder(
    engine="engine-0",
    incarnation="engine-0-00112233445566aa",
    supervisor="0" * 16,
    dev=3,
    ino=4,
    token=7,
    since_mono_ms=12.5,
    lease_ms=5000,
    serving_id=(3, 5),
)


def record(token):
    return LockRecord(token, {"active": HOLDER}, frozenset(), ERA)


def write(directory, *tokens):
    state = LockStateFile(directory, LOCKS)
    for token in tokens:
        state.write(record(token))
    state.close()


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


def path_of(directory):
    return os.path.join(directory, "lockserver.json")


def test_state_file_first_start_is_empty_and_known(directory):
    """Goal: a fresh pod grants at once. Method: no file, no witness."""
    assert read(directory, LOCKS) is None
    state = LockStateFile(directory, LOCKS)
    assert state.loaded.is_first
    first = state.loaded.record
    assert first == LockRecord(era=first.era)
    state.close()


def test_state_file_missing_with_witnesses_is_unknown(directory):
    """Goal: a deleted file is not taken for a fresh pod. Method: leave a witness in the
    directory."""
    free_witness(directory, HOLDER.incarnation)
    state = LockStateFile(directory, LOCKS)
    assert state.loaded.record.unknown == {"active"}
    assert not state.loaded.is_first
    state.close()
    again = read(directory, LOCKS)
    assert again is not None
    assert again.record.unknown == {"active"}


@pytest.mark.parametrize("size", [0, 1, 100, SLOT_BYTES, SLOT_BYTES + 1, 2 * SLOT_BYTES - 1])
def test_state_file_truncated_anywhere_is_unknown_and_kept_aside(directory, size):
    """Goal: a partial file is never half-believed. Method: cut it, open, look."""
    write(directory, 5, 6, 7)
    os.truncate(path_of(directory), size)
    state = LockStateFile(directory, LOCKS)
    assert state.loaded.record.unknown == {"active"}
    assert state.loaded.record.holders == {}
    assert state.loaded.aside == path_of(directory) + ".unreadable-1"
    assert os.path.getsize(state.loaded.aside) == size
    state.close()


@pytest.mark.parametrize("slot", [0, 1])
@pytest.mark.parametrize("offset", [0, 20, 60, 120, 200])
def test_state_file_one_bad_slot_skips_a_token(directory, slot, offset):
    """Goal: the next token is above every token ever granted. Method: flip a byte in either
    slot."""
    write(directory, 5, 6)
    with open(path_of(directory), "r+b") as file:
        file.seek(slot * SLOT_BYTES + offset)
        byte = file.read(1)[0]
        file.seek(slot * SLOT_BYTES + offset)
        file.write(bytes([byte ^ 0x55]))
    found = read(directory, LOCKS)
    assert found is not None
    # 5 is in slot 0, 6 in slot 1; the token after the readable one is skipped.
    token = (6 if slot == 0 else 5) + 1
    assert found.record == LockRecord(token=token, unknown=frozenset(LOCKS), era=ERA)


def eras(directory):
    """The era of the server that starts here now, and what a reader finds after it."""
    state = LockStateFile(directory, LOCKS)
    era = state.loaded.record.era
    state.close()
    found = read(directory, LOCKS)
    assert found is not None
    return era, found.record.era


@pytest.mark.parametrize("lost", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
def test_state_file_era_changes_only_if_no_slot_could_be_read(directory, lost):
    """Goal: where tokens begin again, whoever remembers one can tell; where they go on, nothing
    changes. Method: damage either slot, or both."""
    write(directory, 5, 6)
    with open(path_of(directory), "r+b") as file:
        for slot in lost:
            file.seek(slot * SLOT_BYTES + 30)
            file.write(b"damage")
    era, on_disk = eras(directory)
    assert era == on_disk
    assert (era == ERA) == (len(lost) == 1)
    assert eras(directory) == (era, era)


def test_state_file_token_survives_losing_a_slot_repeatedly(directory):
    """Goal: no token is reused, however often the newest slot is lost. Method: lose it after each
    write."""
    used = []
    write(directory, 5)
    for _ in range(5):
        state = LockStateFile(directory, LOCKS)
        token = state.loaded.record.token + 1
        assert token not in used
        used.append(token)
        state.write(record(token))
        newest = state._file._sequence % 2
        state.close()
        with open(path_of(directory), "r+b") as file:
            file.seek(newest * SLOT_BYTES)
            file.write(b"\0" * 64)
    assert used == sorted(used)


@pytest.mark.parametrize("slots", [(0,), (1,), (0, 1)], ids=["first", "second", "both"])
@pytest.mark.parametrize("version", [4, 10])
def test_state_file_of_a_later_layout_is_refused_and_left_alone(directory, slots, version):
    """Goal: where the tokens cannot be read, none is granted again. Method: a later version's
    number in one slot or in both, with nothing behind it that this version could read."""
    write(directory, 5, 6)
    with open(path_of(directory), "r+b") as file:
        for slot in slots:
            file.seek(slot * SLOT_BYTES)
            file.write(b"understudy-lock %d \x00binary, with the token somewhere\x00" % version)
    before = Path(path_of(directory)).read_bytes()
    with pytest.raises(UnderstudyError) as caught:
        LockStateFile(directory, LOCKS)
    assert caught.value.code == "lock.state_newer"
    assert caught.value.details == {"path": path_of(directory), "version": version}
    assert os.listdir(directory) == ["lockserver.json"]
    assert Path(path_of(directory)).read_bytes() == before
    found = read(directory, LOCKS)
    assert found is not None
    assert found.record.unknown == set(LOCKS)
    assert f"version {version}" in str(found.problem)


def test_state_file_failed_write_is_repeated_into_the_same_slot(directory, monkeypatch):
    """Goal: the good slot is never touched while the other is in doubt. Method: fail one sync."""
    state = LockStateFile(directory, LOCKS)
    state.write(record(1))
    real = os.fdatasync

    def fail(fd):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input"):
        state.write(record(2))
    monkeypatch.setattr(os, "fdatasync", real)
    state.write(record(2))
    state.close()
    with open(path_of(directory), "rb") as file:
        assert file.read().count(b'"token":1,') == 1


def test_state_file_directory_in_its_place_or_full_disk_is_one_clear_error(directory):
    """Goal: a failed start reports its cause. Method: a directory in the file's place; a file-size
    limit."""
    os.mkdir(path_of(directory))
    with pytest.raises(UnderstudyError, match=r"lock\.state_unwritable"):
        LockStateFile(directory, LOCKS)
    os.rmdir(path_of(directory))
    script = (
        "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "from lockserver.state_file import LockStateFile\n"
        "from plumbing.errors import UnderstudyError\n"
        "try: LockStateFile(sys.argv[1], ('active',))\n"
        "except UnderstudyError as error: print(error.code)"
    )
    ran = run_command([sys.executable, "-c", script, directory])
    assert ran.stdout == "lock.state_unwritable\n", ran.stderr
    assert os.listdir(directory) == []


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_state_file_removed_while_open_is_recreated_by_the_next_write(directory, how):
    """Goal: no grant is written to an unlinked file, because a restart would grant it again.
    Method: remove or replace the file between two writes, then read it as a new server."""
    path = os.path.join(directory, NAME)
    state = LockStateFile(directory, LOCKS)
    state.write(record(3))
    os.unlink(path)
    if how == "replaced":
        with open(path, "wb") as file:
            file.write(b"x" * 2 * SLOT_BYTES)
    before = len(open_fds())
    state.write(record(4))
    state.write(record(5))
    assert len(open_fds()) == before
    found = read(directory, LOCKS)
    assert found is not None
    assert (found.record.token, found.problem) == (5, None)
    with pytest.raises(UnderstudyError, match=r"lock\.state_in_use"):
        LockStateFile(directory, LOCKS)
    state.close()


MODELS = ("chat", "coder")
NAMES = locks_of(MODELS)


def test_pod_gets_models_and_loses_them_and_keeps_its_record(directory):
    """Goal: no token and no holder is lost where a pod gets models. Method: a file without them,
    opened with them, and without them again."""
    write(directory, 5, 6)
    for models, known in ((MODELS, ()), ((), MODELS), ((), ())):
        state = LockStateFile(directory, locks_of(models), models=models)
        assert (state.loaded.record, state.loaded.models) == (record(6), known)
        state.write(record(6))
        state.close()


def test_slot_costs_what_the_record_has(directory):
    """Goal: a grant waits for the disk as shortly as it can. Method: what the write of a server
    that has just started gives to the kernel."""
    write(directory, 5)
    state = LockStateFile(directory, LOCKS)
    assert max(state._file._used_bytes) < 4096
    state.close()


def test_version_is_recognised_by_either_first_line(directory):
    """Goal: a spoiled beginning costs no token, and a later version's slot starts no server.
    Method: spoil the first line of the first slot; then put another number on the second one."""
    state = LockStateFile(directory, NAMES, models=MODELS)
    state.write(record(7))
    state.close()  # in the first slot; the second one has the record from before
    with open(state.path, "r+b") as file:
        file.write(b"?" * 20)
    found = read(directory, NAMES)
    assert found is not None
    assert found.record.era == state.loaded.record.era
    with open(state.path, "r+b") as file:
        file.seek(SLOT_BYTES)
        file.write(b"understudy-lock 4 ")
    with pytest.raises(UnderstudyError, match=r"lock\.state_newer"):
        LockStateFile(directory, NAMES, models=MODELS)


def test_largest_pod_fits_its_file(directory):
    """Goal: what is granted can be written. Method: as many models as there may be, each with a
    holder that takes as much as any can."""
    models = tuple(f"{number:03}".ljust(25, "m") for number in range(MODELS_MAX))
    names = locks_of(models)
    state = LockStateFile(directory, names, models=models)
    engine, most = "e" * 63, 2**64 - 1
    longest = replace(
        HOLDER,
        engine=engine,
        incarnation=f"{engine}-00112233445566aa",
        dev=most,
        ino=most,
        token=TOKEN_CLAIMED_MAX,
        since_mono_ms=1e12 + 0.001,
        lease_ms=3_600_000,
        serving_id=(most, most),
    )
    holders = dict.fromkeys(names, longest)
    state.write(LockRecord(TOKEN_CLAIMED_MAX, holders, frozenset(), "0" * 16))
    state.close()
    found = read(directory, names)
    assert found is not None
    assert found.record.holders == holders
    assert found.models == models


def test_record_that_does_not_fit_is_an_error_of_the_disk_and_not_a_crash(directory):
    """Goal: holders of models that were removed cannot end the server. Method: one that is larger
    than a slot."""
    state = LockStateFile(directory, NAMES, models=MODELS)
    large = replace(HOLDER, engine="e" * SLOT_BYTES)
    with pytest.raises(OSError, match="does not fit"):
        state.write(LockRecord(7, {"active:chat": large}, frozenset(), "0" * 16))
    state.close()
