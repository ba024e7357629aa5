"""The pool: who is awake, who yields, what is booked. Events in, effects out.

    neighbours ──▶ hearing.py ──▶ facts ──▶ signals.py ──▶ model.py (the table) ──▶ goals, doors
                                    │                          ▲
                                    └──▶ views.py ──▶ policy ──┘ planning.py

After every event each model's table is fired until it agrees with the facts, then the policy is
asked, and again, until nothing changes. So no message depends on another one, and every wait has
an event or a deadline that ends it (`due_ms`).

What is surely true at every step:

- An effect that tells somebody something comes after `SaveState`: what a neighbour was told is on
  file, so the file is never behind the world.
- Memory is booked before a goal that takes it is told, and booked out by `books.py` alone.
- A goal has a generation of its own. One that was superseded is never said again.
- A door is shut before the goal of an engine behind it is lowered: QUIET needs every gateway to
  obey the shut door first, and where a death has made it yield at once, doors are said first.

Must not know of clocks, sockets or files. `snapshot.py` and `recovery.py` have its restarts.
"""

from __future__ import annotations

from collections.abc import Iterator

from plumbing.errors import InvariantError
from plumbing.part.tier import Tier
from pool.core import events as ev
from pool.core import policy, recovery
from pool.core.books import Entries
from pool.core.budgets import HEADLESS_MS, deadline_ms
from pool.core.doors import door_key, door_of
from pool.core.hearing import hear
from pool.core.known import KnownModel
from pool.core.model_table import ModelSignal
from pool.core.planning import Planner, decide
from pool.core.recovery import recover
from pool.core.signals import DueSignal, next_signal
from pool.core.situation import PoolSetup
from pool.core.snapshot import PoolSnapshot, saved
from pool.core.states import EntryKind, ModelState
from pool.core.view import Leaving
from pool.core.views import ticket_of

SIGNALS_MAX = 24  # of one model, after one event: longer than any path through the table
ROUNDS_MAX = 200  # of signals and plan after one event: each changes at least one model


class ModelPool:
    """The machine: `handle` is its only way to change."""

    def __init__(
        self,
        setup: PoolSetup,
        now_ms: float,
        era: str,
        snapshot: PoolSnapshot | None = None,
        planner: Planner = policy.plan,
    ) -> None:
        """`era`: random, for a pool that finds no state of its own; `snapshot` has another one."""
        self.situation = recovery.begin(setup, now_ms, era, snapshot)
        self._planner = planner
        self._is_started = False
        self.due_ms: float | None = now_ms

    def snapshot(self) -> PoolSnapshot:
        """What `SaveState` writes."""
        return saved(self.situation)

    def handle(self, event: ev.PoolEvent, now_ms: float) -> list[ev.PoolEffect]:
        """What follows from `event`, to be performed in order.

        Raises:
            WrongMessage: its sender's fault; nothing has changed.
            OrderRefused: nothing has changed.
        """
        pool = self.situation
        pool.now_ms, pool.out = now_ms, []
        hear(pool, event)
        if not self._is_started:
            self._is_started = True
            recovery.say_again(pool)
        self._settle()
        out, pool.out = pool.out, []
        self._set_doors()
        out, pool.out = [*pool.out, *out], []
        self.due_ms = self._next_due_ms()
        is_told = any(not isinstance(effect, ev.PoolRecord) for effect in out)
        return [ev.SaveState(), *out] if is_told else out

    # ------------------------------------------------------------------ until nothing changes

    def _settle(self) -> None:
        pool = self.situation
        for _ in range(ROUNDS_MAX):
            for known in pool.models.values():
                recover(pool, known)
                if not known.is_unknown:
                    self._follow(known)
            before = pool.changes
            decide(pool, self._planner)
            if pool.changes == before:
                return
        raise InvariantError("the pool does not come to rest")

    def _follow(self, known: KnownModel) -> None:
        """Fire its table until it agrees with the facts."""
        pool = self.situation
        for _ in range(SIGNALS_MAX):
            self._keep_books(known)
            ticket = ticket_of(known, pool.demand, pool.now_ms, pool.rules)
            due = next_signal(
                known, pool.demand, pool.books, pool.now_ms, is_wanted=ticket is not None
            )
            if due is not None:
                pool.fire(known, due)
            elif not self._sleep(known):
                return
        raise InvariantError(f"model {known.name} does not come to rest in {known.model.state}")

    def _sleep(self, known: KnownModel) -> bool:
        """An operator's order to sleep, once nobody needs the model."""
        pool, model = self.situation, known.model
        if not known.is_sleep_ordered:
            return False
        if model.state in (ModelState.LOADING, ModelState.WAKING):
            return False
        if model.state is ModelState.AWAKE and (
            model.is_wanted or pool.demand.in_flight(known.name)
        ):
            return False
        known.is_sleep_ordered = False
        if model.state is not ModelState.AWAKE:
            return False
        rest = Tier.WARM if known.rules.rest is Tier.AWAKE else known.rules.rest
        pool.yields(known, rest, Leaving.ORDER, "an operator sends it to sleep")
        return True

    # ------------------------------------------------------------------ books

    def _keep_books(self, known: KnownModel) -> None:
        pool, model = self.situation, known.model
        wanted = pool.books.entries_at(known, model.goal)
        if model.goal is Tier.OFFLOADED and model.state is not ModelState.RELEASING:
            wanted |= self._reloaded(known)
        before = len(pool.books.ledger.entries)
        is_draining = model.state is ModelState.DRAINING
        stays = pool.books.entries_at(known, model.floor) if is_draining else wanted
        for effect in pool.books.let_go(known, wanted, stays):
            pool.say(effect)
        if len(pool.books.ledger.entries) != before:
            pool.changes += 1

    def _reloaded(self, known: KnownModel) -> Entries:
        """Weights of an offloaded model, one of whose engines starts again: it maps them before it
        can let them go. Without room for that it may not start."""
        pool = self.situation
        starting = [
            engine
            for engine in known.engines
            if not engine.is_gone and engine.cap is not Tier.COLD and not engine.is_without_weights
        ]
        weights = {
            key: size
            for key, size in pool.books.entries_at(known, Tier.WARM).items()
            if key.kind is EntryKind.WEIGHTS
        }
        if not starting or pool.books.book(weights):
            return weights if starting else {}
        if known.model.state is ModelState.LOADING:
            why = "there is no room to load its weights again"
            if known.model.may(ModelSignal.YIELD, Tier.COLD):
                pool.fire(known, DueSignal(ModelSignal.YIELD, why, Tier.COLD))
            return {}
        for engine in starting:
            if engine in known.shadows():
                engine.cap = Tier.COLD
                pool.aim(known)
        return {}

    # ------------------------------------------------------------------ doors, time

    def _set_doors(self) -> None:
        pool = self.situation
        for known in pool.models.values():
            if known.is_unknown or (known.model.is_recovering and known.door is not None):
                continue
            door = door_of(known, pool.now_ms)
            key = door_key(known, door)
            if key != known.door_key:
                pool.door_number += 1
                known.door, known.door_key, known.door_number = door, key, pool.door_number
                pool.say(ev.SetModelDoor(known.name, pool.door_number, door, known.model.state))

    def _next_due_ms(self) -> float | None:
        pool = self.situation
        dues = [pool.plan_due_ms, *self._deadlines()]
        return min((ms for ms in dues if ms is not None), default=None)

    def _deadlines(self) -> Iterator[float | None]:
        for known in self.situation.models.values():
            yield deadline_ms(known)
            if known.headless_ms is not None:
                yield known.headless_ms + HEADLESS_MS
