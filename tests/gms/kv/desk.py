"""A machine of KV memory whose driver and kernel answer when they are told to."""

from __future__ import annotations

import itertools

import pytest

from gms import messages as msg
from gms.core import events as ev
from gms.core.events import Received
from gms.core.kv import KvMachine
from plumbing.errors import UnderstudyError
from tests.sim.gms_device import told

SIZE, INDEX, WAIT_MS = 4096, 64, 1000


class Desk:
    """A machine whose driver and kernel answer when they are told to."""

    def __init__(self, **arguments):
        ids = itertools.count(1)
        self.machine = KvMachine(new_pool_id=lambda: f"{next(ids):032x}", **arguments)
        self.now_ms = 0.0
        self.effects: list[ev.Effect] = []
        self.tell("deadline_passed")

    def tell(self, *said):
        found = told(self.machine, self.now_ms, *said)
        self.effects += found
        return found

    def borrow(self, session, token=1, *, era="e", size=SIZE, incarnation=""):
        claim = msg.BorrowPoolMsg(
            f"engine-{token}", incarnation or f"i-{token}", token, era, size, INDEX, WAIT_MS
        )
        return self.tell(Received(session, 1, claim, 100 + session))

    def make(self, error=None):
        """Complete the making of a pool."""
        return self.done(ev.MakePool, (SIZE,), error)[0].region

    def done(self, kind, result=None, error=None):
        """Complete the last call of this kind; the effect, and what follows."""
        effect = [each for each in self.effects if isinstance(each, kind)][-1]
        return effect, self.tell("done", effect, result, error)

    def take(self, session):
        """The descriptors' message."""
        return of(self.tell(Received(session, 2, msg.TakeMsg())), ev.SendRegion)

    def hold(self, session, token=1):
        """A pool, made for and taken by `session`."""
        self.borrow(session, token)
        pool = self.make()
        self.take(session)
        return pool

    def mark(self, session, *marks):
        for mark in marks:
            self.tell(Received(session, 0, msg.MarkMsg(mark)))

    def last_to(self, session):
        """The last answer to a session: a message, an error or an effect that sends one."""
        answers = [e for e in self.effects if isinstance(e, ev.Respond) and e.session == session]
        last = answers[-1]
        if isinstance(last, ev.RefuseRequest):
            return last.error
        return last.message if isinstance(last, ev.SendMessage) else last


def of(effects, kind):
    (found,) = [each for each in effects if isinstance(each, kind)]
    return found


def hand_back(pool, token=1, *, mark="", discarded="", size=SIZE, slabs=(SIZE,)):
    held = msg.HeldPool(token, "e", size, INDEX, mark, discarded)
    return msg.HandBackMsg(f"engine-{token}", f"i-{token}", pool, slabs, pool=held)


def refused(desk, event):
    before = desk.machine.waiting, desk.machine.all_holders
    with pytest.raises(UnderstudyError) as caught:
        desk.tell(event)
    assert (desk.machine.waiting, desk.machine.all_holders) == before
    return caught.value
