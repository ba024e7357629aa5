"""A holder over TCP on file: it fits, is read back, and makes an older server grant nothing."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest

from lockserver import witness
from lockserver.core import events as ev
from lockserver.core import evidence
from lockserver.core.events import (
    LEASE_MS_MAX,
    Holder,
    LockRecord,
    unlockable_witness,
)
from lockserver.core.lock import LockState
from lockserver.core.machine import LockMachine
from lockserver.core.names import WitnessFile, WitnessState
from lockserver.messages import TOKEN_CLAIMED_MAX, WantMsg
from lockserver.state_file import FORMAT, LockStateFile
from tests.helpers import free_witness

LOCKS = ("active", "loader")


def leased(engine: str, token: int = 7) -> Holder:
    incarnation = f"{engine}-{1:016x}"
    return Holder(
        engine=engine,
        incarnation=incarnation,
        supervisor="f" * 16,
        witness=unlockable_witness(incarnation),
        token=token,
        since_mono_ms=1234567890123.456789,
        lease_ms=LEASE_MS_MAX,
    )


@pytest.fixture
def directory(tmp_path):
    return str(tmp_path)


def test_the_longest_names_fit_a_slot(directory):
    """Goal: no grant fails because its record is too large. Method: write and read back an id of 63
    characters and the largest numbers, in both locks."""
    holders = {name: leased("e" * 63, TOKEN_CLAIMED_MAX) for name in LOCKS}
    record = LockRecord(TOKEN_CLAIMED_MAX, holders, frozenset(), "f" * 16)
    state = LockStateFile(directory, LOCKS)
    state.write(record)
    state.close()
    again = LockStateFile(directory, LOCKS)
    assert again.loaded.record == record
    assert again.loaded.problem is None
    again.close()


def test_file_from_before_leases_is_readable(directory):
    """Goal: upgrading the server causes no failover. Method: the bytes that the older version
    wrote."""
    text = (
        b'{"schema":1,"token":7,"holders":{"active":{"engine":"e","incarnation":"e-0000000000000001"'
        b',"supervisor":"0123456789abcdef","witness":"witness_e_0000000000000001","dev":3,"ino":4,'
        b'"token":7,"since_mono_ms":12.5}},"unknown":[]}'
    )
    FORMAT.create(os.path.join(directory, "lockserver.json"), text)
    state = LockStateFile(directory, LOCKS)
    holder = state.loaded.record.holders["active"]
    assert holder.witness == WitnessFile("witness_e_0000000000000001", 3, 4)
    assert holder.lease_ms is None
    state.close()


def test_older_server_that_reads_a_lease_grants_and_seals_nothing(directory):
    """Goal: a downgrade causes a visible wait, not two owners. Method: a server without leases
    reads the record, while a free witness of that name is in its directory; another engine waits
    for an hour."""
    holder = leased("engine-0")
    path = free_witness(directory, holder.incarnation)
    as_read = Holder.from_dict({k: v for k, v in holder.to_dict().items() if k != "lease"})
    assert as_read == replace(holder, lease_ms=None)
    machine = LockMachine(LockRecord(7, {"active": as_read}, frozenset()), 0.0)
    other = witness.new_incarnation("engine-1")
    machine.handle(
        ev.Wanted(
            1,
            WantMsg("b" * 16, "engine-1", other, witness.name_of(other), ("active",), {}),
            witness_file=WitnessFile(witness.name_of(other), 1, 2),
            witness_state=WitnessState.HELD,
        ),
        0.0,
    )
    for now_ms in range(0, 3_600_000, 1000):
        machine.handle(ev.TimePassed(), float(now_ms))
        for _, due in evidence.probes_due(machine.locks, machine.supervisors):
            file = due.witness
            assert witness.probe(path, file.dev, file.ino) is WitnessState.UNPROVEN
    assert machine.locks["active"].state is LockState.RECOVERING
    assert os.path.getsize(path) == 0  # not sealed: a process may still join it
