"""The tables of sessions, epochs, borrowers and pools, and messages at the wrong moment."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import SESSIONS, WRITER_STATES, Input, S
from plumbing.errors import ProtocolError, UnderstudyError
from plumbing.wire.messages import Message
from tests.gms.core.driver import IDENTITY, Bench


def at(state: S) -> Bench:
    """A machine whose session 1 is in `state`, by a history that leads there."""
    bench = Bench(auto=False)
    if state is S.WAITING:
        bench.auto = True
        bench.attach(2)
        bench.attach(1)
        bench.auto = False
        return bench
    steps = [
        (S.WRITING, lambda: bench.attach(1)),
        (S.ALLOCATING, lambda: bench.allocate(1)),
        (None, bench.drain),
        (S.SEALING, lambda: bench.commit(1)),
        (S.JOURNALLING, lambda: bench.complete(bench.pending.pop(0))),
        (S.READING, bench.drain),
    ]
    for reached, step in steps:
        step()
        if reached is state:
            break
    return bench


MESSAGES: dict[type[Message], ev.Received] = {
    msg.AttachMsg: ev.Received(1, 9, msg.AttachMsg("e", "i", "ro")),
    msg.AllocateMsg: ev.Received(1, 9, msg.AllocateMsg(4096)),
    msg.ProgressMsg: ev.Received(1, 0, msg.ProgressMsg(5, 10)),
    msg.CommitMsg: ev.Received(1, 9, msg.CommitMsg(IDENTITY, b"")),
    msg.HandBackMsg: ev.Received(
        1, 9, msg.HandBackMsg("e", "i", "a" * 32, (), epoch=msg.HeldEpoch(True, {}))
    ),
    msg.CondemnMsg: ev.Received(1, 0, msg.CondemnMsg("wrong tokens")),
    msg.DigestMsg: ev.Received(1, 0, msg.DigestMsg("0" * 64)),
}
LIVE = sorted(WRITER_STATES | {S.WAITING, S.READING})


@pytest.mark.parametrize("state", LIVE)
@pytest.mark.parametrize("kind", MESSAGES)
def test_peer_message_at_the_wrong_moment_changes_nothing(state: S, kind: Input):
    """In every live state every message that the table lacks is refused, the machine as before."""
    bench = at(state)
    assert bench.device.sessions[1].state is state
    if SESSIONS.target(state, kind) is not None:
        return
    before: Any = copy.deepcopy((bench.device.sessions, bench.device.regions))
    with pytest.raises(ProtocolError, match=r"gms\.unexpected_message"):
        bench.tell(MESSAGES[kind])
    assert (bench.device.sessions, bench.device.regions) == before


def test_bad_commits_are_refused_and_change_nothing():
    """A changed identity, an impossible identity: each named, none moves."""
    bench = at(S.WRITING)
    for identity, code in (
        ({"model": "other"}, "gms.identity_changed"),
        ({"model": b"bytes"}, "gms.bad_identity"),
    ):
        with pytest.raises(UnderstudyError, match=code):
            bench.commit(1, identity)
    assert bench.device.sessions[1].state is S.WRITING
