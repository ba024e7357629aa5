"""Which waits a lock reports in which state: pure, on the machine and what a look has shown.

`SCENES` has every state that can last while a server runs; test_silent_server.py has the others.
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.core.leases import Leases
from lockserver.core.names import ServingFile, WitnessState, serving_name_of
from lockserver.core.supervisors import LEASE
from lockserver.status.reasons import Here, MissingGateway, Seen, waits_of
from tests.lockserver.core.shell import A, B, Shell, held_by_a, want

ALIVE = Seen(probe=WitnessState.HELD, processes=[{"pid": 12, "name": "backend", "halted": None}])


class Frozen:
    """The machine's time, for the sentences."""

    def __init__(self, shell: Shell) -> None:
        self.now_ms = lambda: shell.now_ms


def here(shell: Shell, **around) -> Here:
    reach = around.pop("reach", SimpleNamespace(problem=None, problem_ms=0.0, is_short=False))
    nothing = {"service": None, "no_gateway": None, **around}
    return Here(shell.machine, Frozen(shell), "/run/x", reach, **nothing)


def cut():
    shell = held_by_a()
    shell.feed(ev.ConnectionClosed(1))
    return shell


def released_too_early():
    shell = held_by_a()
    shell.feed(want(1, None, engine="engine-0"))
    return shell


def supervisor_dead():
    shell = held_by_a()
    shell.feed(ev.ProcessGone(f"{'engine-0':0>16}"))
    return shell


def restarted(ms):
    shell = Shell(held_by_a().disk)
    shell.pass_ms(ms)
    return shell


def silent_holder():
    shell = held_by_a()
    for beat in range(8):
        shell.pass_ms(500)
        shell.feed(ev.Beaten(2, beat))
    return shell


def silent_waiter(is_held):
    shell = held_by_a() if is_held else Shell(ev.LockRecord(unknown=frozenset({"active"})))
    shell.feed(want(2, B, "active"))
    for beat in range(8):
        shell.pass_ms(500)
        shell.feed(ev.Beaten(1, beat))
    return shell


def switchover(timeout_ms):
    shell = held_by_a()
    shell.feed(ev.SwitchOverAsked(1, 77, "active", None, timeout_ms, frozenset({B})))
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


def leased(is_restarted):
    shell = Shell(leases=Leases(0.0))
    event = want(1, A, "active", pid=0, process=LEASE)
    shell.feed(replace(event, witness_file=None))
    if is_restarted:
        return Shell(shell.disk, leases=Leases(0.0))
    shell.feed(ev.ConnectionClosed(1))
    return shell


def handed_over():
    shell, file = Shell(), ServingFile(serving_name_of(A), 1, 2)
    shell.feed(want(1, A, "active", serving=file))
    shell.feed(want(2, B, "active"))
    shell.feed(want(1, A, "active", serving=file, over={"active": 1}))
    return shell


def replace_seen(**changes) -> Seen:
    return dataclasses.replace(ALIVE, **changes)


SCENES = {
    # name: (the machine, what shows of the holder, (reason, engine, is_fault) in order)
    "held, one waits": (held_by_a, ALIVE, [("queue", "engine-1", False)]),
    "cut": (
        cut,
        ALIVE,
        [("releasing", "engine-0", True), ("queue", "engine-1", False)],
    ),
    "released too early": (
        released_too_early,
        ALIVE,
        [("releasing", "engine-0", True), ("queue", "engine-1", False)],
    ),
    "supervisor dead": (
        supervisor_dead,
        ALIVE,
        [("releasing", "engine-0", True), ("queue", "engine-1", False)],
    ),
    "in the window": (lambda: restarted(1000), ALIVE, [("recovering", "engine-0", True)]),
    "after the window": (lambda: restarted(11_000), ALIVE, [("unresponsive", "engine-0", True)]),
    "silent holder": (
        silent_holder,
        ALIVE,
        [("unresponsive", "engine-0", True), ("queue", "engine-1", False)],
    ),
    "silent waiter": (
        lambda: silent_waiter(True),
        ALIVE,
        [("waiter_silent", "engine-1", False)],
    ),
    "asked to hand over": (
        lambda: switchover(60_000),
        ALIVE,
        [("switchover", "engine-0", False), ("queue", "engine-1", False)],
    ),
    "asked for too long": (
        lambda: switchover(500),
        ALIVE,
        [("switchover", "engine-0", True), ("queue", "engine-1", False)],
    ),
    "no engine": (nobody, Seen(), [("nobody_asks", None, False)]),
    "no engine is prepared": (
        lambda: nobody("engine-0", "engine-1"),
        Seen(),
        [("nobody_asks", None, False)],
    ),
    "full disk": (disk_full, Seen(), [("write_failed", "engine-0", True)]),
    "over TCP, cut": (
        lambda: leased(False),
        Seen(left_ms=4000.0),
        [("releasing", "engine-0", True)],
    ),
    "over TCP, on file": (
        lambda: leased(True),
        Seen(left_ms=4000.0),
        [("recovering", "engine-0", True)],
    ),
    "lost state": (
        lambda: Shell(ev.LockRecord(unknown=frozenset({"active"}))),
        Seen(strangers_ms=4000.0, strangers={"witness_x": ALIVE.processes}),
        [("unknown_holder", None, True)],
    ),
    "witness removed or replaced": (
        held_by_a,
        replace_seen(is_same_file=False),
        [("witness_lost", "engine-0", True), ("queue", "engine-1", False)],
    ),
    "witness that cannot be sealed": (
        supervisor_dead,
        replace_seen(probe=WitnessState.FREE),
        [("witness_unsealed", "engine-0", True), ("queue", "engine-1", False)],
    ),
    "handed over, and still held": (
        handed_over,
        ALIVE,
        [("releasing", "engine-0", True), ("queue", "engine-1", False)],
    ),
}
AWAY = SimpleNamespace(address="127.0.0.1:8000", problem="in use by pid 7 (x)", is_away=True)
AROUND = {
    "address_away": {"service": AWAY},
    "no_gateway": {"no_gateway": MissingGateway("127.0.0.1:8000", 0.0, ["g1 waits"], True)},
    "unreachable": {"reach": SimpleNamespace(problem="a file", problem_ms=0.0, is_short=False)},
}
SCENES |= {
    reason: (nobody, Seen(), [("nobody_asks", None, False), (reason, None, True)])
    for reason in AROUND
}


@pytest.mark.parametrize("scene", SCENES)
def test_every_state_that_lasts_names_engine_evidence_and_fix(scene):
    """Goal: no silent waits. Method: each state; every wait has its evidence and its fix."""
    build, seen, expected = SCENES[scene]
    shell = build()
    found = waits_of(shell.active, here(shell, **AROUND.get(scene, {})), seen, shell.now_ms)
    assert [(each.reason, each.engine, each.is_fault) for each in found] == expected
    for each in found:
        assert each.evidence
        assert all(each.evidence)
        assert each.message
        assert each.fix
        assert each.since_ms <= shell.now_ms


def test_commands_in_a_fix_name_the_processes_and_no_process_0():
    """Goal: what is pasted kills what is meant. Method: a dead supervisor, whose tree lives; a
    waiter whose process is not visible."""
    (wait, _) = waits_of(
        supervisor_dead().active, here(supervisor_dead()), ALIVE, supervisor_dead().now_ms
    )
    assert "kill -9 12" in wait.fix
    shell = silent_waiter(True)
    shell.machine.supervisors[f"{'engine-1':0>16}"].pid = 0
    (silent,) = waits_of(shell.active, here(shell), ALIVE, shell.now_ms)
    assert "kill -9" not in silent.fix
