"""What a gateway is told while nobody serves: of a machine and a clock under the test's control."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest

from lockserver.core import events as ev
from lockserver.messages import BorrowMsg, GrantedMsg
from lockserver.server.gateways import START_MS, TELL_MS, GatewayDesk
from lockserver.server.settings import LockSettings
from tests.lockserver.core.shell import A, B, Shell, restarted, want


class Conn:
    """A connection that keeps what is sent."""

    def __init__(self) -> None:
        self.id, self.state = 7, None
        self.peer = SimpleNamespace(pid=1)
        self.sent: list[Any] = []

    def send(self, message: Any) -> None:
        self.sent.append(message)


class Desk:
    """A desk over `shell`'s machine, with one gateway."""

    def __init__(self, shell: Shell, *, is_accepting: bool = True) -> None:
        self.shell, self.conn = shell, Conn()
        self.is_waited_for = False
        self.happened: list[str] = []
        services: Any = SimpleNamespace(
            sockets={"active": SimpleNamespace(address="h:1")},
            lend_missing=lambda names, conn: None,
            has_waiting=lambda name: self.is_waited_for,
        )
        clock: Any = SimpleNamespace(now_ms=lambda: shell.now_ms)
        settings = LockSettings("/d")
        self.desk = GatewayDesk(
            shell.machine, services, clock, lambda event: self.happened.append(event.type), settings
        )
        conn: Any = self.conn
        self.desk.borrow(conn, BorrowMsg("active", "0" * 16, is_accepting))

    def news(self) -> list[str]:
        """What it was told since the last call: the engine of each grant, the state of the lock in
        each sentence."""
        sent, self.conn.sent = self.conn.sent, []
        return [
            each.engine
            if isinstance(each, GrantedMsg)
            else re.findall(r"lock is (\w+)", each.reason)[0]
            for each in sent
        ]

    def pass_ms(self, ms: float) -> list[str]:
        for _ in range(round(ms / 100)):
            for effect in self.shell.pass_ms(100):
                if isinstance(effect, ev.Announce):
                    holder = effect.holder
                    who = (holder.engine, holder.incarnation, holder.token)
                    self.desk.announce(GrantedMsg("active", *who, effect.era))
            self.desk.tick(self.shell.now_ms)
        return self.news()


def test_gateway_is_told_a_reason_once_and_a_changed_one_at_most_once_a_second():
    """Goal: a gateway can always say why it waits, and a lock that flaps floods nobody. Method:
    nobody holds it; an engine takes it, releases it slowly, and frees it at once."""
    shell = Shell()
    desk = Desk(shell)
    assert desk.news() == ["free"]
    assert desk.pass_ms(3000) == []
    shell.feed(want(1, A, "active"))
    assert desk.pass_ms(500) == []  # its grant was announced: here by nobody
    desk.desk.announce(GrantedMsg("active", "engine-0", A, 1))
    assert desk.news() == ["engine-0"]
    shell.feed(want(1, None, engine="engine-0"))
    assert desk.pass_ms(200) == ["releasing"]
    shell.feed(ev.WitnessFree("active", A))
    assert desk.pass_ms(TELL_MS - 200) == []
    assert desk.pass_ms(200) == ["free"]


def test_gateway_goes_by_the_holder_on_file_until_its_silence_is_reported():
    """Goal: the lock server's restart takes no engine from a gateway, and one that never returns
    is not taken for active. Method: a gateway that connects before the holder does; the window
    passes; the holder returns."""
    held = Shell()
    held.feed(want(1, A, "active"))
    shell = restarted(held, window_ms=1000.0)
    desk = Desk(shell)
    assert desk.news() == ["engine-0"]
    assert desk.pass_ms(900) == []
    assert desk.pass_ms(500) == ["recovering"]
    (announced,) = [
        each for each in shell.feed(want(1, A, "active")) if isinstance(each, ev.Announce)
    ]
    desk.desk.announce(GrantedMsg("active", "engine-0", A, announced.holder.token))
    assert desk.news() == ["engine-0"]
    assert desk.pass_ms(3000) == []


def test_takeover_within_a_tick_is_only_its_grant():
    """Goal: no gateway parks new requests for a pause that is over. Method: between two ticks the
    holder's end and the next grant."""
    shell = Shell()
    shell.feed(want(1, A, "active"))
    shell.feed(want(2, B, "active"))
    desk = Desk(shell)
    assert desk.news() == ["engine-0"]
    shell.feed(want(1, None, engine="engine-0"))
    for effect in shell.feed(ev.WitnessFree("active", A)):
        if isinstance(effect, ev.Announce):
            desk.desk.announce(GrantedMsg("active", "engine-1", B, effect.holder.token))
    assert desk.pass_ms(2000) == ["engine-1"]


def test_silent_gateway_accepts_until_connections_have_waited_for_hold_ms():
    """Goal: a stopped parent whose child serves loses no request, and one whose child is stopped,
    too, leaves nobody without an answer. Method: let it fall silent; connections wait, are taken,
    and wait for `hold_ms`; then it is heard."""
    shell = Shell()
    desk = Desk(shell)
    gateways, conn = desk.desk, desk.conn
    hold_ms = LockSettings("/d").hold_ms

    def is_accepting() -> bool:
        return gateways.is_accepting("active")

    for progress in range(10):  # it is heard: longer than the limit of silence
        desk.pass_ms(500)
        gateways.beaten(conn, progress)
    desk.is_waited_for = True  # a busy child may have a backlog
    desk.pass_ms(2900)
    gateways.beaten(conn, 9)  # the same count again
    assert is_accepting()
    assert gateways.problem is None
    desk.pass_ms(200)
    assert desk.happened.count("lock.gateway_silent") == 1
    assert not is_accepting()
    desk.is_waited_for = False
    desk.pass_ms(100)
    assert is_accepting()
    assert "is silent" in (gateways.problem or "")
    desk.is_waited_for = True
    desk.pass_ms(hold_ms)
    assert "lock.gateway_missing" not in desk.happened
    desk.pass_ms(100)
    assert desk.happened[-1] == "lock.gateway_missing"
    desk.is_waited_for = False  # the server has answered
    desk.pass_ms(1000)
    assert not is_accepting()
    gateways.beaten(conn, 10)
    assert is_accepting()
    assert gateways.problem is None
    assert desk.happened[-1] == "lock.gateway_heard"


@pytest.mark.parametrize("was_here", [True, False])
def test_slow_start_is_no_fault_and_a_gateway_that_never_comes_or_is_gone_is_one(was_here):
    """Goal: one error for a gateway that is missing, none for one that has not started yet. Method:
    one that has accepted and leaves, and one that leaves before that, after their deadlines."""
    desk = Desk(Shell(), is_accepting=was_here)
    conn: Any = desk.conn
    desk.desk.left(conn, "its end")
    deadline_ms = LockSettings("/d").hold_ms if was_here else START_MS
    desk.pass_ms(deadline_ms - 100)
    assert "lock.gateway_missing" not in desk.happened
    assert desk.desk.problem is None
    desk.pass_ms(200)
    desk.pass_ms(START_MS)
    assert desk.happened.count("lock.gateway_missing") == 1
    assert "no gateway accepts connections" in (desk.desk.problem or "")


def test_gateways_are_not_silent_because_the_server_was_stopped():
    """Goal: no false alarm after a pause of the machine. Method: a tick 5 s after the last one."""
    shell = Shell()
    desk = Desk(shell)
    shell.now_ms += 5000
    desk.desk.tick(shell.now_ms)
    assert desk.desk.silent() == []
