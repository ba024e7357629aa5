"""The pool: who is awake, who yields, what is booked. Events in, effects out.

    neighbours ──▶ inputs.py ──▶ facts ──▶ world.py (steps) ──▶ model.py (phase) ──▶ goals, doors
                                  │             ▲
                                  └──▶ planning.py (views) ──▶ policy.py, victims.py

After every event the facts about each model are followed until nothing more follows, then the
policy is asked, and again, until nothing changes. So no message depends on another one, and every
wait has an event or a deadline that ends it (`due_ms`).

What is surely true at every step:

- An effect that tells somebody something comes after `SaveState`: what a neighbour was told is on
  file, so the file is never behind the world.
- Memory is booked before a goal that takes it is told, and booked out by `reservations.py` alone.
- A goal has a generation of its own. One that was superseded is never said again.
- A door is shut before the goal of an engine behind it is lowered: QUIET needs every gateway to
  obey the shut door first, and so does the unloading of a model that loads or wakes again after a
  death, whoever asks for it.

Must not know of clocks, sockets or files. `recovery.py` has its restarts.
"""

from __future__ import annotations

from plumbing.errors import InvariantError
from plumbing.pod.messages import Tier
from pool.core import events as ev
from pool.core import policy, recovery
from pool.core.doors import door_key, door_of, is_other_door
from pool.core.inputs import hear
from pool.core.model import KnownModel
from pool.core.planning import Planner, decide, ticket_of
from pool.core.recovery import PoolSnapshot, recover, saved
from pool.core.reservations import Entries
from pool.core.states import FALLING, RISING, EntryKind, ModelState
from pool.core.view import Leaving
from pool.core.world import HEADLESS_MS, PoolSetup, deadline_ms, may_break_off, next_step

NEVER_MS = float("inf")
STEPS_MAX = 24  # of one model, after one event: more than any path through its phases
ROUNDS_MAX = 200  # of steps and plan after one event: each changes at least one model


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
        is_first, self._is_started = not self._is_started, True
        if is_first:
            pool.touch_all()
            recovery.say_again(pool)
        self._settle()
        out, pool.out = pool.out, []
        self._set_doors(says_again=is_first)
        out, pool.out = [*pool.out, *out], []
        self.due_ms = self._next_due_ms()
        is_told = any(not isinstance(effect, ev.PoolRecord) for effect in out)
        is_told |= pool.is_news_for_file
        pool.is_news_for_file = False
        return [ev.SaveState(isinstance(event, ev.Ordered)), *out] if is_told else out

    # ------------------------------------------------------------------ until nothing changes

    def _settle(self) -> None:
        pool = self.situation
        is_due = self.due_ms is not None and self.due_ms <= pool.now_ms
        if is_due:
            is_due = pool.plan_due_ms is not None and pool.plan_due_ms <= pool.now_ms
            self._touch_due()
        for _ in range(ROUNDS_MAX):
            while pool.to_follow:
                names = [name for name in pool.models if name in pool.to_follow]
                for name in names:
                    self._follow(pool.models[name])
            if not (is_due or pool.to_view or pool.is_lease_changed):
                return
            is_due = False
            decide(pool, self._planner)
        raise InvariantError("the pool does not settle")

    def _touch_due(self) -> None:
        """Models about which time alone changes something now."""
        pool = self.situation
        for known in pool.models.values():
            if self._model_due_ms(known) <= pool.now_ms:
                pool.touch(known.name)

    def _follow(self, known: KnownModel) -> None:
        """Do what the facts about it lead to, until nothing more follows."""
        pool = self.situation
        recover(pool, known)
        pool.to_follow.discard(known.name)
        if known.is_unknown:
            return
        for _ in range(STEPS_MAX):
            self._keep_books(known)
            ticket = ticket_of(known, pool.demand, pool.now_ms, pool.rules)
            if next_step(pool, known, is_wanted=ticket is not None):
                continue
            if not (self._unload(known) or self._sleep(known)):
                self._begin_turn(known)
                pool.to_follow.discard(known.name)
                return
        raise InvariantError(f"model {known.name} does not settle in {known.state}")

    def _begin_turn(self, known: KnownModel) -> None:
        """Its protection counts from when its streams have resumed: one that only replays its
        streams in each turn would never get on. What that takes is part of the raise."""
        pool, name = self.situation, known.name
        if known.awake_since_ms is None or known.turn_since_ms is not None:
            return
        is_resuming = pool.demand.is_resuming(name)
        if is_resuming:
            known.has_resumed = True
            if pool.now_ms < known.raise_due_ms:
                return
        known.turn_since_ms = pool.now_ms
        if known.has_resumed:
            known.costs.learn("resume_ms", pool.now_ms - known.awake_since_ms)
        known.has_resumed = False
        pool.to_view.add(name)

    def _unload(self, known: KnownModel) -> bool:
        """An operator's order to unload: obeyed at once, but not behind an open door."""
        pool = self.situation
        is_done = known.state in FALLING and known.held is Tier.COLD
        if not known.is_unload_ordered or is_done or pool.is_sent_to(known):
            return False
        pool.unload(known)
        return True

    def _sleep(self, known: KnownModel) -> bool:
        """An operator's order to sleep, once nobody needs the model."""
        pool, is_awake = self.situation, known.state is ModelState.AWAKE
        if not known.is_sleep_ordered or known.state in RISING:
            return False
        if is_awake and (known.is_wanted or pool.demand.in_flight(known.name)):
            return False
        known.is_sleep_ordered = False
        if not is_awake:
            return False
        rest = Tier.WARM if known.rules.rest is Tier.AWAKE else known.rules.rest
        pool.yields(known, rest, Leaving.ORDER, "an operator puts it to sleep")
        return True

    # ------------------------------------------------------------------ books

    def _keep_books(self, known: KnownModel) -> None:
        pool = self.situation
        wanted = pool.books.entries_at(known, known.goal)
        if known.goal is Tier.OFFLOADED and known.frees is None:
            wanted |= self._reloaded(known)
        before = len(pool.books.ledger.entries)
        falls_to = known.falls_to
        stays = wanted if falls_to is None else pool.books.entries_at(known, falls_to)
        for effect in pool.books.let_go(known, wanted, stays):
            pool.say(effect)
        if len(pool.books.ledger.entries) != before:
            pool.touch(known.name)

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
        if known.state is ModelState.LOADING:
            why = "there is no room to load its weights again"
            if may_break_off(known):
                pool.fall(known, Tier.COLD, why, ModelState.UNLOADING)
            return {}
        for engine in starting:
            if engine in known.shadows():
                engine.cap = Tier.COLD
                pool.aim(known)
        return {}

    # ------------------------------------------------------------------ doors, time

    def _set_doors(self, *, says_again: bool) -> None:
        """Say the doors that have changed; `says_again`: all of them. While a model is recovering
        the door on file stands: nobody knows better."""
        pool = self.situation
        for name in [name for name in pool.models if name in pool.to_show]:
            known = pool.models[name]
            stands = known.door is not None and known.is_recovering
            is_other = not known.is_unknown and not stands and self._is_other_door(known)
            if not (is_other or says_again):
                continue
            if known.door is not None:
                pool.say(ev.SetModelDoor(name, known.door_number, known.door))
        pool.to_show.clear()

    def _is_other_door(self, known: KnownModel) -> bool:
        now_ms = self.situation.now_ms
        door = door_of(known, now_ms)
        if not is_other_door(known, door, now_ms):
            return False
        if not (known.door_key and ev.binds_alike(known.door, door)):
            self.situation.door_number += 1
            known.door_number = self.situation.door_number
        known.door, known.door_key = door, door_key(known, door)
        soon_ms = door.expected_ms if isinstance(door, ev.ShutDoor) else None
        known.door_expected_ms = None if soon_ms is None else now_ms + soon_ms
        return True

    def _next_due_ms(self) -> float | None:
        pool = self.situation
        dues = [self._model_due_ms(known) for known in pool.models.values()]
        if pool.plan_due_ms is not None:
            dues.append(pool.plan_due_ms)
        due_ms = min(dues, default=NEVER_MS)
        return None if due_ms == NEVER_MS else due_ms

    @staticmethod
    def _model_due_ms(known: KnownModel) -> float:
        """When time alone changes something about it."""
        due_ms = deadline_ms(known)
        due_ms = NEVER_MS if due_ms is None else due_ms
        if known.awake_since_ms is not None and known.turn_since_ms is None:
            due_ms = min(due_ms, known.raise_due_ms)
        if known.headless_ms is not None:
            due_ms = min(due_ms, known.headless_ms + HEADLESS_MS)
        if known.ticket_due_ms is not None:
            due_ms = min(due_ms, known.ticket_due_ms)
        return due_ms
