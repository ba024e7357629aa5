"""A pod that does nothing but obey the policy, in virtual time: models of any size on unequal
devices, requests at random, every raise and release of a known length. No faults: what is measured
is how long a ticket waits."""

import math
import random

from plumbing.pod.messages import Tier
from pool.core.doors import bound
from pool.core.policy import plan
from pool.core.states import ModelState
from pool.core.view import DeviceView, Leaving, ModelRules, ModelView, Raise, TicketView, Yield
from tests.pool.core.views import NO_MARGIN

S = ModelState
RAISE_MS = {Tier.WARM: 300.0, Tier.OFFLOADED: 1_500.0, Tier.COLD: 6_000.0}
RELEASE_MS = 100.0
UP = (S.WAKING, S.LOADING, S.AWAKE)
DOWN = (S.DRAINING, S.RELEASING, S.UNLOADING)


class PolicyModel:
    """One model. `since_ms`: from when its oldest request counts; None: nobody waits."""

    def __init__(self, name, rng, devices):
        self.name = name
        on = rng.sample(devices, rng.choice([1, 1, 2]) if len(devices) > 1 else 1)
        self.rules = ModelRules(
            devices=tuple(on), priority=rng.choice([0, 0, 1]), min_runtime_ms=5_000.0
        )
        base, weights, kv = rng.randint(0, 1), rng.randint(0, 3), rng.randint(1, 5)
        sizes = {Tier.COLD: 0, Tier.OFFLOADED: base, Tier.WARM: base + weights}
        sizes[Tier.AWAKE] = base + weights + kv
        self.needs = {tier: dict.fromkeys(on, size) for tier, size in sizes.items()}
        self.has_copy = rng.random() < 0.7
        self.state, self.tier, self.until_ms = S.COLD, Tier.COLD, math.inf
        self.booked = self.needs[Tier.COLD]
        self.since_ms = self.awake_ms = self.busy_until_ms = self.drained_ms = None
        self.last_ms, self.has_plan, self.leaving = 0.0, False, None
        # How often somebody asks, and for how long it is then at work: some are never idle.
        self.pause_ms = rng.choice([0.0, 2_000.0, 30_000.0])
        self.service_ms = rng.choice([500.0, 8_000.0, 60_000.0])
        self.asks_ms = rng.uniform(0.0, 5_000.0)

    def view(self, now_ms):
        ticket = None if self.since_ms is None else TicketView(self.rules.priority, self.since_ms)
        state = (
            S.PENDING
            if ticket is not None and self.state in (S.OFFLOADED, S.WARM)
            else (self.state)
        )
        is_busy = self.busy_until_ms is not None and self.state in (S.AWAKE, S.DRAINING)
        return ModelView(
            self.name,
            self.rules,
            state,
            self.tier,
            self.needs,
            booked=self.booked,
            ticket=ticket,
            awake_since_ms=self.awake_ms if self.state is S.AWAKE else None,
            last_request_ms=self.last_ms,
            in_flight=int(is_busy),
            is_raised_for_ticket=self.state in (S.WAKING, S.LOADING),
            has_plan=self.has_plan,
            has_copy=self.has_copy,
            leaving=self.leaving,
            switch_ms=RAISE_MS[Tier.WARM],
            load_ms=RAISE_MS[Tier.COLD],
            release_ms=RELEASE_MS,
        )


class PolicyWorld:
    """`run`, then look at `waits`: name, milliseconds, and the bound of that ticket."""

    def __init__(self, seed, planner=plan):
        rng = self.rng = random.Random(seed)
        self.planner = planner
        names = [str(number) for number in range(rng.randint(1, 3))]
        self.models = [PolicyModel(f"m{n}", rng, names) for n in range(rng.randint(2, 6))]
        self.now_ms, self.waits, self.switches = 0.0, [], 0
        awake = [model.needs[Tier.AWAKE] for model in self.models]
        self.totals = {
            name: max(each.get(name, 1) for each in awake) + rng.randint(0, 3) for name in names
        }

    def run(self, until_ms):
        self.limit = {each.name: self._bound(each) for each in self.models}
        while self.now_ms < until_ms:
            due_ms = self._settle()
            times = [due_ms, *(self._next_ms(model) for model in self.models)]
            next_ms = min(each for each in times if each is not None)
            assert next_ms > self.now_ms, "time stands still"
            self.now_ms = next_ms
            for model in self.models:
                self._pass(model)
        for model in self.models:
            if model.since_ms is not None:
                self.waits.append((model.name, self.now_ms - model.since_ms))
        return self

    def _bound(self, model):
        views = [each.view(0.0) for each in self.models]
        return bound(model.name, model.rules.priority, views, NO_MARGIN).total_ms

    def _next_ms(self, model):
        times = [model.until_ms, model.asks_ms]
        if model.busy_until_ms is not None:
            times.append(model.busy_until_ms)
        return min(times)

    def _pass(self, model):
        now = self.now_ms
        if model.busy_until_ms is not None and now >= model.busy_until_ms:
            model.busy_until_ms = None
            model.asks_ms = now + model.pause_ms
            if model.state is S.DRAINING:
                model.until_ms = now
        if now >= model.until_ms:
            self._arrive(model)
        if now >= model.asks_ms:
            model.asks_ms = math.inf
            model.last_ms = now
            if model.state is S.AWAKE:
                model.busy_until_ms = now + model.service_ms
            elif model.since_ms is None:
                model.since_ms = now

    def _arrive(self, model):
        """The end of a raise, of a drain or of a release."""
        now = self.now_ms
        model.until_ms = math.inf
        match model.state:
            case S.WAKING | S.LOADING:
                model.state, model.tier, model.awake_ms = S.AWAKE, Tier.AWAKE, now
                if model.since_ms is not None:
                    self.waits.append((model.name, now - model.since_ms))
                    model.busy_until_ms, model.since_ms = now + model.service_ms, None
            case S.DRAINING:
                if model.busy_until_ms is not None:  # parked, and counted from the drain
                    model.busy_until_ms, model.since_ms = None, model.drained_ms
                model.state, model.until_ms = S.RELEASING, now + RELEASE_MS
            case S.RELEASING | S.UNLOADING:
                at_rest = {Tier.WARM: S.WARM, Tier.OFFLOADED: S.OFFLOADED, Tier.COLD: S.COLD}
                model.state, model.leaving = at_rest[model.tier], None
                model.booked = model.needs[model.tier]

    # ------------------------------------------------------------------ obeying

    def _settle(self):
        while True:
            views = [model.view(self.now_ms) for model in self.models]
            found = self.planner(self.now_ms, views, self.devices(), NO_MARGIN)
            if not self._obey(found):
                return found.due_ms

    def devices(self):
        found = {}
        for name, total in self.totals.items():
            booked = sum(model.booked.get(name, 0) for model in self.models)
            leaving = sum(
                model.booked.get(name, 0) - model.needs[model.tier].get(name, 0)
                for model in self.models
                if model.state in DOWN
            )
            assert booked <= total, f"{booked} of {total} booked on {name}"
            found[name] = DeviceView(name, total, total - booked, leaving)
        return found

    def _obey(self, found):
        """Whether anything has changed."""
        by_name = {model.name: model for model in self.models}
        has_changed = False
        for model in self.models:
            model.has_plan = model.has_plan and model.name in found.decisions
        for name, decision in found.decisions.items():
            model = by_name[name]
            match decision:
                case Raise():
                    model.state = S.LOADING if model.tier is Tier.COLD else S.WAKING
                    model.until_ms = self.now_ms + RAISE_MS[model.tier]
                    model.booked, model.has_plan = model.needs[Tier.AWAKE], False
                    self.switches += 1
                    has_changed = True
                case Yield():
                    model.has_plan = True
                    for victim in decision.victims:
                        self._yield(by_name[victim.model], victim.tier)
                        has_changed = True
        for name in found.unyields:
            model = by_name[name]
            model.state, model.tier, model.until_ms = S.AWAKE, Tier.AWAKE, math.inf
            model.leaving = None
            has_changed = True
        for victim in found.rests:
            self._yield(by_name[victim.model], victim.tier)
            has_changed = True
        return has_changed

    def _yield(self, model, tier):
        model.leaving = Leaving.HEAD
        was, model.tier = model.state, tier
        if was is S.AWAKE:
            model.state, model.drained_ms = S.DRAINING, self.now_ms
            is_busy = model.busy_until_ms is not None
            model.until_ms = self.now_ms + (model.rules.park_ms if is_busy else 0.0)
            if not is_busy:
                self._arrive(model)
        elif was not in DOWN:
            model.state = S.UNLOADING if tier is Tier.COLD else S.RELEASING
            model.until_ms = self.now_ms + RELEASE_MS
