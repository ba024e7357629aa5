"""A supervisor that is asked to hand over: it drains, reaps, gives up, and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine import messages as m
from lockserver.messages import HandOverMsg
from tests.engine.pod import Engine, LoopThread, stub_lock
from tests.engine.stub_lock import StubLock
from tests.helpers import until

QUICK = ("--backoff-first-ms", "20", "--backoff-max-ms", "20", "--yield-ms", "20")


@pytest.fixture
def lock(directory: Path) -> Iterator[tuple[StubLock, LoopThread]]:
    """A lock server that grants everything at once."""
    with stub_lock(directory, auto=("loader", "active")) as found:
        yield found


def hand_over(stub: StubLock) -> None:
    assert stub.want is not None
    incarnation = stub.want.incarnation
    assert incarnation is not None
    for conn in stub.server.connections:
        conn.send(HandOverMsg("active", incarnation, "e-1"))


def states(engine: Engine) -> list[str]:
    """Every state so far, in order."""
    with engine.client() as client:
        reply = client.request(m.WatchMsg(0)).message
        assert isinstance(reply, m.StatusReplyMsg)
        found: list[str] = []
        while True:
            record = client.receive().message
            assert isinstance(record, m.EventMsg)
            if record.record["type"] == "engine.state":
                found.append(record.record["data"]["to"])
            if record.record["id"] >= reply.document["as_of_event_id"]:
                return found


@pytest.mark.slow
def test_hand_overs_are_no_crash_loop(pod, lock):
    """Goal: a hand-over is no failure. Method: more hand-overs than deaths make a loop; each
    time the incarnation is named until it is reaped, and the next one is not backed off."""
    stub, loop = lock
    engine = pod.engine("e-0", flags=(*QUICK, "--deaths-max", "2"))
    for number in (1, 2, 3):
        engine.until("active", number=number)
        loop.call(hand_over, stub)
    document = engine.until("active", number=4)
    assert [death["cause"] for death in document["deaths"]] == ["drained"] * 3
    named = [(want.incarnation, "active" in want.locks) for want in stub.wants]
    first = named[0][0]
    assert named.index((None, False)) > max(
        at for at, (incarnation, _) in enumerate(named) if incarnation == first
    )


def test_hand_over_while_waking_begins_once_it_is_active(pod, directory):
    """Goal: a request that comes early is kept. Method: the grant and the hand-over in one breath,
    so that the engine is waking when the second arrives."""
    with stub_lock(directory, auto=("loader",)) as (stub, loop):
        engine = pod.engine("e-0", flags=QUICK)
        until(lambda: stub.want is not None and "active" in stub.want.locks, "the want of active")

        def grant_and_ask() -> None:
            assert stub.want is not None
            stub.grant("active", "e-0", str(stub.want.incarnation))
            hand_over(stub)

        loop.call(grant_and_ask)
        engine.until("standby", number=2)
        main_line = ["init", "standby", "waking", "active", "draining", "dead", "init", "standby"]
        assert states(engine) == main_line


def test_hand_over_has_the_drains_budget(pod, lock):
    """Goal: a drain that never ends is cut, and the engine comes back. Method: a backend that hangs
    in it, and a short budget."""
    stub, loop = lock
    flags = (*QUICK, "--drain-ms", "200", "--deaths-max", "1")
    engine = pod.engine("e-0", "--hang-at", "drain", flags=flags)
    engine.until("active")
    loop.call(hand_over, stub)
    document = engine.until("active", number=2)
    assert document["deaths"][-1]["cause"] == "budget_exceeded"


@pytest.mark.slow
def test_sigterm_in_a_hand_over_ends_the_engine(pod, lock):
    """Goal: SIGTERM wins. Method: a drain that hangs, then SIGTERM, and the budget."""
    stub, loop = lock
    engine = pod.engine("e-0", "--hang-at", "drain", flags=("--drain-ms", "2000"))
    engine.until("active")
    loop.call(hand_over, stub)
    engine.until("draining")
    engine.terminate()
    assert engine.wait() == 0
