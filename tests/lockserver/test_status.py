"""Which waits a lock reports in which state, and what `lockserver status` prints of them.

`SCENES` has every state that can last while a server runs, on the machine and what a look has
shown; test_silent_server.py has the others.
"""

from __future__ import annotations

import dataclasses
import os
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.leases import Leases
from lockserver.core.names import ServingFile, WitnessState, serving_name_of
from lockserver.core.supervisors import LEASE
from lockserver.schema import LockWaitingFor
from lockserver.status import TEXTS, Here, Seen, waits_of
from tests.lockserver.core.shell import A, B, Shell, held_by_a, want
from tests.lockserver.processes import run_command_of

ALIVE = Seen(probe=WitnessState.HELD, processes=[LockWaitingFor(12, "backend", None)])


class Frozen:
    """The machine's time, for the sentences."""

    def __init__(self, shell: Shell) -> None:
        self.now_ms, self.wall = lambda: shell.now_ms, lambda: datetime.now(UTC)


def here(shell: Shell) -> Here:
    return Here(shell.machine, Frozen(shell), "/run/x")


def cut():
    shell = held_by_a()
    shell.feed("connection_closed", 1)
    return shell


def released_too_early():
    shell = held_by_a()
    shell.feed(want(1, None, engine="engine-0"))
    return shell


def supervisor_dead():
    shell = held_by_a()
    shell.feed("process_gone", f"{'engine-0':0>16}")
    return shell


def restarted(ms):
    shell = Shell(held_by_a().disk)
    shell.pass_ms(ms)
    return shell


def silent_holder():
    shell = held_by_a()
    for beat in range(8):
        shell.pass_ms(500)
        shell.feed("beaten", 2, beat)
    return shell


def silent_waiter():
    shell = held_by_a()
    for beat in range(8):
        shell.pass_ms(500)
        shell.feed("beaten", 1, beat)
    return shell


def switchover(timeout_ms):
    shell = held_by_a()
    shell.feed(ev.SwitchOverAsked(1, 77, "active", None, timeout_ms))
    shell.pass_ms(1000)
    return shell


def nobody(*engines):
    shell = Shell()
    for conn, engine in enumerate(engines):
        shell.feed(want(conn, None, engine=engine))
    return shell


def disk_full():
    shell = Shell()
    shell.disk_error = "full"
    shell.feed(want(1, A, "active"))
    return shell


def lost():
    return Shell(ev.LockRecord(unknown=frozenset({"active"})))


def leased(is_restarted):
    shell = Shell(leases=Leases(0.0))
    event = want(1, A, "active", pid=0, process=LEASE)
    shell.feed(replace(event, witness_file=None))
    if is_restarted:
        return Shell(shell.disk, leases=Leases(0.0))
    shell.feed("connection_closed", 1)
    return shell


def handed_over():
    shell, file = Shell(), ServingFile(serving_name_of(A), 1, 2)
    shell.feed(want(1, A, "active", serving=file))
    shell.feed(want(2, B, "active"))
    shell.feed(want(1, A, "active", serving=file, over=1))
    return shell


QUEUED = ("queue", "engine-1", False)
RELEASING = ("releasing", "engine-0", True)
RECOVERING = ("recovering", "engine-0", True)
UNRESPONSIVE = ("unresponsive", "engine-0", True)
NOT_ASKED = ("nobody_asks", None, False)
LOST = Seen(left_ms=4000.0, strangers={"witness_x": ALIVE.processes})

SCENES = {
    # name: (the machine, what shows of the holder, (reason, engine, is_fault) in order)
    "held, one waits": (held_by_a, ALIVE, [QUEUED]),
    "cut": (cut, ALIVE, [RELEASING, QUEUED]),
    "released too early": (released_too_early, ALIVE, [RELEASING, QUEUED]),
    "supervisor dead": (supervisor_dead, ALIVE, [RELEASING, QUEUED]),
    "in the window": (lambda: restarted(1000), ALIVE, [RECOVERING]),
    "after the window": (lambda: restarted(11_000), ALIVE, [UNRESPONSIVE]),
    "silent holder": (silent_holder, ALIVE, [UNRESPONSIVE, QUEUED]),
    "silent waiter": (silent_waiter, ALIVE, [("waiter_silent", "engine-1", False)]),
    "asked to hand over": (
        lambda: switchover(60_000),
        ALIVE,
        [("switchover", "engine-0", False), QUEUED],
    ),
    "asked for too long": (
        lambda: switchover(500),
        ALIVE,
        [("switchover", "engine-0", True), QUEUED],
    ),
    "no engine": (nobody, Seen(), [NOT_ASKED]),
    "no engine is prepared": (lambda: nobody("engine-0", "engine-1"), Seen(), [NOT_ASKED]),
    "full disk": (disk_full, Seen(), [("write_failed", "engine-0", True)]),
    "over TCP, cut": (lambda: leased(False), Seen(left_ms=4000.0), [RELEASING]),
    "over TCP, on file": (lambda: leased(True), Seen(left_ms=4000.0), [RECOVERING]),
    "lost state": (lost, LOST, [("unknown_holder", None, True)]),
    "witness removed or replaced": (
        held_by_a,
        dataclasses.replace(ALIVE, is_same_file=False),
        [("witness_lost", "engine-0", True), QUEUED],
    ),
    "witness that cannot be sealed": (
        supervisor_dead,
        dataclasses.replace(ALIVE, probe=WitnessState.FREE),
        [("witness_unsealed", "engine-0", True), QUEUED],
    ),
    "handed over, and still held": (handed_over, ALIVE, [RELEASING, QUEUED]),
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_state_that_lasts_names_engine_evidence_and_fix(scene):
    """Goal: no silent waits. Method: each state; every wait has its evidence and its fix."""
    build, seen, expected = SCENES[scene]
    shell = build()
    found = waits_of(shell.active, here(shell), seen)
    assert [(each.reason, each.engine, each.is_fault) for each in found] == expected
    for each in found:
        assert each.evidence
        assert all(each.evidence)
        assert each.message
        assert each.fix


def test_commands_in_a_fix_name_the_processes_and_no_process_0():
    """Goal: what is pasted kills what is meant. Method: a dead supervisor, whose tree lives; a
    waiter whose process is not visible."""
    shell = supervisor_dead()
    (wait, _) = waits_of(shell.active, here(shell), ALIVE)
    assert "kill -9 12" in wait.fix
    shell = silent_waiter()
    waiter = shell.machine.supervisors[f"{'engine-1':0>16}"]
    waiter.want = replace(waiter.want, pid=0)
    (silent,) = waits_of(shell.active, here(shell), ALIVE)
    assert "kill -9" not in silent.fix


ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS = 80
UNREACHABLE = 3


@pytest.mark.slow
def test_status_in_an_80_column_terminal_and_its_exit_codes(pod_dir, start_server, start_engine):
    """Goal: the text is wrapped, names what is waited for, and scripts can rely on the exit code.
    Method: run the command as a process with COLUMNS set, with a server, with only its file, and
    with neither."""
    server = start_server()
    holder = start_engine("engine-0")
    holder.granted()

    def run(columns: int) -> tuple[int, str]:
        environ = {**os.environ, "COLUMNS": str(columns)}
        done = run_command_of(pod_dir, "status", env=environ)
        return done.returncode, done.stdout

    code, text = run(COLUMNS)
    assert code == 0
    assert "active   held        engine-0  token 1  pid " in text
    wide = run(500)[1]
    assert len(wide.splitlines()) < len(text.splitlines())
    server.kill()
    code, text = run(COLUMNS)
    assert (code, "offline view" in text) == (UNREACHABLE, True)
    lines = text.splitlines()
    assert [line for line in lines if len(line) > COLUMNS and len(line.split()) > 2] == []
    plain = " ".join(text.split())
    assert f"engine engine-0 {holder.incarnation} token 1 since 2" in plain
    assert f"is held by pid {min(holder.pids[1:])} (" in plain
    assert f"to do start it: lockserver serve --dir {pod_dir}" in plain
    os.unlink(os.path.join(pod_dir, "lockserver.json"))
    assert run(COLUMNS) == (UNREACHABLE, "")


def test_every_wait_reason_has_a_scene_and_a_line_in_the_reference():
    """Goal: no reason is added without a scene and an entry in the reference. Method: compare the
    table, the scenes, and the table of reference.md."""
    made = {reason for *_, expected in SCENES.values() for reason, *_ in expected}
    made |= {"no_server", "address_away", "no_gateway"}  # test_silent_server.py, test_gateway.py
    page = (ROOT / "docs" / "reference.md").read_text()
    section = page.partition("## Why a lock is waiting")[2].partition("\n## ")[0]
    assert set(TEXTS) == made == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
