"""Switchovers that are asked for, and what came of them."""

from __future__ import annotations

from msgspec.structs import replace

from lockserver.core import events as ev
from lockserver.messages import HandOverMsg, SwitchedOverMsg
from tests.lockserver.core.shell import Shell, messages, want

A = "engine-0-000000000000000a"
A2 = "engine-0-00000000000000a2"
B = "engine-1-000000000000000b"
C = "engine-2-000000000000000c"
ASKED = ev.SwitchOverAsked(
    ask=1, pid=77, lock="active", to=None, timeout_ms=10_000, whole=frozenset({A, A2, B, C})
)


def pod(*waiting: str, **options: float) -> Shell:
    """Engine 0 holds `active`, `waiting` wait in this order on connections 2, 3 …"""
    shell = Shell(**options)
    shell.feed(want(1, A, "active"))
    for conn, incarnation in enumerate(waiting, 2):
        shell.feed(want(conn, incarnation, "active"))
    assert shell.active.holder.incarnation == A
    return shell


def ask(shell: Shell, **changes) -> list[ev.LockEffect]:
    return shell.feed(replace(ASKED, **changes))


def told(effects) -> list[str]:
    return [f"{each.incarnation} to {each.to}" for each in messages(effects, HandOverMsg)]


def answers(effects) -> list[tuple[int, str]]:
    """Which connections were answered, and with what: an engine's id, or a code."""
    return [
        (e.ask, e.answer.engine if isinstance(e.answer, SwitchedOverMsg) else e.answer.code)
        for e in effects
        if isinstance(e, ev.AnswerSwitchOver)
    ]


def give_up(shell: Shell, conn: int = 1, engine: str = "engine-0") -> list[ev.LockEffect]:
    """The holder has drained and reaped: it names no incarnation, and its witness is free."""
    incarnation = shell.active.holder.incarnation
    effects = shell.feed(want(conn, None, engine=engine))
    return effects + shell.feed(ev.WitnessFree("active", incarnation))
