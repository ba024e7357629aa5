"""Engines that are told to end: one of them, or everybody at once, in any order, with any delay.

An order is on its way until its supervisor takes it (`be_told`). The active engine then waits for
the lock server's answer, or no longer; it leaves its streams to a successor or finishes them; it
gives up, reaps and exits. The others give up at once. A supervisor that hears that the holder
leaves vouches at any later time, unless it has taken an order by then.

What an engine does by rule is an attribute here, so that a test can leave it out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockserver.core import events as ev
from tests.sim.lock_parts import Sup

if TYPE_CHECKING:
    from tests.sim.lock_world import World

CONTINUATION = "one model, one release"


class Departures:
    vouches_untold = True  # it vouches for nobody once it was told to end itself
    waits_for_settled = True  # news from before the server knew of the order are no answer

    def __init__(self, world: World) -> None:
        self.world = world
        self.is_everybody_told = False
        self.left = 0  # how often streams were left to a successor
        self.finished = 0

    def moves(self) -> list[tuple[Any, Any]]:
        found: list[tuple[Any, Any]] = []
        for sup in self.world.sups:
            if not sup.is_alive or sup.is_stopped:
                continue
            if sup.is_ordered:
                found.append((self.be_told, sup))
            may_vouch = not sup.is_leaving or not self.vouches_untold
            if may_vouch and sup.knows not in (0, sup.succeeds):
                found.append((self.vouch, sup))
            if sup.awaits_answer:
                found.append((self.stop_waiting, sup))
            elif sup.is_leaving and sup.tree is None:
                found.append((self.exit, sup))
            elif sup.is_leaving and not sup.is_killing:
                found.append((self.finish, sup))
        return found

    def faults(self) -> list[tuple[Any, Any]]:
        if self.is_everybody_told:
            return []
        fresh = [s for s in self.world.sups if s.is_alive and not (s.is_ordered or s.is_leaving)]
        return [(self.tell_all, None), *((self.tell_one, sup) for sup in fresh)]

    # ------------------------------------------------------------------ orders

    def tell_all(self, _: None) -> None:
        """The pod is stopped: nothing that ends is started again."""
        self.is_everybody_told = True
        for sup in self.world.sups:
            sup.is_ordered |= sup.is_alive and not sup.is_leaving

    def tell_one(self, sup: Sup) -> None:
        sup.is_ordered = True

    def be_told(self, sup: Sup) -> None:
        sup.is_ordered, sup.is_leaving = False, True
        if sup.tree is not None and sup.tree.is_told and not sup.is_killing:
            sup.awaits_answer = True
        else:
            self.world.supervisors.give_up(sup)
        self.world.supervisors.say(sup)

    # ------------------------------------------------------------------ the successor

    def heard_leaving(self, sup: Sup, message: ev.SendGrant) -> None:
        if message.lock == sup.active and message.holder.engine != sup.engine:
            sup.knows = message.holder.token

    def vouch(self, sup: Sup) -> None:
        sup.succeeds = sup.knows
        self.world.law.vouches(sup, sup.succeeds)
        self.world.supervisors.say(sup)

    # ------------------------------------------------------------------ the engine that leaves

    def heard_news(self, sup: Sup, news: ev.TellStandby) -> None:
        is_mine = sup.tree is not None and news.holder.incarnation == sup.tree.incarnation
        is_answer = news.is_settled or not self.waits_for_settled
        if is_mine and sup.awaits_answer and is_answer:
            sup.awaits_answer = False
            if news.continues:
                self.left += 1
                self.world.law.left_streams(sup, news.holder.token)

    def stop_waiting(self, sup: Sup) -> None:
        """No answer came in time."""
        sup.awaits_answer = False
        self.finished += 1

    def finish(self, sup: Sup) -> None:
        self.world.supervisors.give_up(sup)

    def exit(self, sup: Sup) -> None:
        self.world.faults.kill_supervisor(sup)
