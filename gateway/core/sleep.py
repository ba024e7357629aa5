"""When the engine that holds the lock sleeps, and when it wakes.

Two rules, and the door that both need:

    idle     nothing was in flight in any gateway for `sleep_after_ms` → goal `warm`
    demand   a request waits while the goal is below `awake`         → goal `awake`

                  quiet for so long            both gateways obey, still quiet: goal warm
          open ─────────────────────▶ closing ─────────────────────────────────────▶ shut
           ▲ ◀────── a request, or late ──┘                                            │
           └──────────── it wakes; it is lost, or another engine holds the lock ───────┘

*Gateways* are this one, and the one that it has replaced, which has requests in the engine as
long as it lives. The door makes sleep safe for requests: sending stops *before* the goal is sent,
so no request is on its way to an engine that stops accepting. A goal from the command line has no
door: the engine drains then, and the door follows what it reports. When in doubt, the door opens:
if the engine cannot be heard, requests are sent as usual, and those that fail are retried. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from gateway.core.events import DoorSet, GatewayDoor
from plumbing.errors import InvariantError
from plumbing.pod.messages import Tier
from plumbing.text import duration


class SleepRules(Struct, frozen=True):
    """The settings of `SleepPolicy`."""

    sleep_after_ms: float = 0.0  # of quiet; 0: the gateway lets no engine rest
    wakes_on_request: bool = True


# -------------------------------------------------------------------------------------- events


class SleepEvent(Struct, frozen=True):
    """What has happened, for `SleepPolicy.handle`."""


class HolderIs(SleepEvent, frozen=True):
    """The lock server names who holds the lock; "" and 0: nobody. Repeats change nothing."""

    engine: str
    token: int


class HolderSaid(SleepEvent, frozen=True):
    """What the holder says of itself (`plumbing.pod.messages.EngineReportMsg`). `is_answer`: to
    the last goal that it was sent."""

    token: int
    state: str
    goal: Tier
    can_rest: bool
    for_ms: float = 0.0  # in this state
    is_answer: bool = False


class HolderLost(SleepEvent, frozen=True):
    """It cannot be heard now: what it said counts no longer."""


class GoalRefused(SleepEvent, frozen=True):
    """It does not take the goal, and says why."""

    reason: str


class LoadSaid(SleepEvent, frozen=True):
    """What there is. `door`: the number of the last `DoorSet` that this gateway has obeyed."""

    gateway: int
    door: int
    in_flight: int  # requests, with those that wait
    wanting: int  # that wait for an engine, or to be resumed
    quiet_ms: float  # since nothing was in flight


class GatewayEnded(SleepEvent, frozen=True):
    gateway: int


class SleepTick(SleepEvent, frozen=True):
    pass


# ------------------------------------------------------------------------------------- effects


class SleepEffect(Struct, frozen=True):
    """What the shell does, in the order given; a `DoorSet` is one too: it tells all gateways."""


class SendGoal(SleepEffect, frozen=True):
    """Answered by a `HolderSaid` that `is_answer`, by `GoalRefused`, or by `HolderLost`."""

    goal: Tier


class HolderWoke(SleepEffect, frozen=True):
    """The engine is awake, `ms` after the gateway sent the goal."""

    ms: float


class SleepTold(SleepEffect, frozen=True):
    """For the event log."""

    kind: str
    message: str
    severity: str = "info"


# For both gateways to obey, which takes a millisecond; one that is stopped is killed after 3 s.
CLOSING_MS = 1_000.0
# The states of an engine that holds the lock; first those in which it must get no request.
WAY_DOWN = frozenset({"draining", "releasing", "resting"})
HOLDING = WAY_DOWN | {"waking", "active"}


class _GatewayView(Struct):
    """One gateway, as of its last beat."""

    door: int
    in_flight: int
    wanting: int
    quiet_since_ms: float


class SleepPolicy:
    """One gateway's rule. `now_ms` never goes back."""

    def __init__(self, rules: SleepRules) -> None:
        self.rules = rules
        self.engine = ""
        self.token = 0
        self.said: HolderSaid | None = None  # the last word of this holder
        self.door = DoorSet(0, 0, GatewayDoor.OPEN)
        self.pending_goal: Tier | None = None  # that it has not answered yet
        self._gateways: dict[int, _GatewayView] = {}
        self._awake_since_ms = 0.0  # or since when it was last found not to be quiet
        self._closing_since_ms = 0.0
        self._woken_ms: float | None = None  # when it was told to wake, until it is awake
        self._out: list[SleepEffect | DoorSet] = []

    # ------------------------------------------------------------------ looking

    @property
    def goal(self) -> Tier | None:
        """The holder's goal, as far as it is known."""
        if self.pending_goal is not None:
            return self.pending_goal
        return self.said.goal if self._is_heard and self.said is not None else None

    @property
    def wanting(self) -> int:
        """Requests that wait behind the present door; older beats say nothing about it."""
        views = self._gateways.values()
        return sum(each.wanting for each in views if each.door == self.door.number)

    def quiet_ms(self, now_ms: float) -> float:
        """For how long nothing was in flight, as far as gateways have said."""
        if any(each.in_flight for each in self._gateways.values()):
            return 0.0
        since_ms = [each.quiet_since_ms for each in self._gateways.values()]
        return max(0.0, now_ms - max([self._awake_since_ms, *since_ms]))

    @property
    def _is_heard(self) -> bool:
        """Whether the holder of the lock has spoken as such, under the grant that is known here."""
        said = self.said
        return said is not None and said.state in HOLDING and said.token == self.token

    # ------------------------------------------------------------------ what happens

    def handle(self, event: SleepEvent, now_ms: float) -> list[SleepEffect | DoorSet]:
        """What follows from `event`."""
        match event:
            case HolderIs():
                if (event.engine, event.token) != (self.engine, self.token):
                    self.engine, self.token = event.engine, event.token
                    self._lose(now_ms)
            case HolderSaid():
                self._hear(event, now_ms)
            case HolderLost():
                self._lose(now_ms)
            case GoalRefused():
                self.pending_goal, self._awake_since_ms = None, now_ms
                message = f"{self.engine} refuses the goal: {event.reason}"
                self._out.append(SleepTold("goal_refused", message, "warning"))
            case LoadSaid():
                self._gateways[event.gateway] = _GatewayView(
                    event.door, event.in_flight, event.wanting, now_ms - event.quiet_ms
                )
            case GatewayEnded():
                self._gateways.pop(event.gateway, None)
            case SleepTick():
                pass
            case _:
                raise InvariantError(f"{event} is not known here")
        self._decide(now_ms)
        out, self._out = self._out, []
        return out

    def _hear(self, said: HolderSaid, now_ms: float) -> None:
        was_active = self.said is not None and self.said.state == "active"
        self.said = said
        if said.is_answer:
            self.pending_goal = None
        if said.state != "active":
            return
        if not was_active:
            self._awake_since_ms = now_ms
        if self._woken_ms is not None and self.goal is Tier.AWAKE:
            self._out.append(HolderWoke(now_ms - self._woken_ms))
            self._woken_ms = None

    def _lose(self, now_ms: float) -> None:
        self.said = self.pending_goal = self._woken_ms = None
        self._awake_since_ms = now_ms

    # ------------------------------------------------------------------ what follows

    def _decide(self, now_ms: float) -> None:
        if self._must_be_shut:
            self._set(GatewayDoor.SHUT)
        elif (
            self.door.door is GatewayDoor.CLOSING
            and self.door.token == self.token
            and self._is_heard
        ):
            self._close(now_ms)
        elif self._is_idle(now_ms):
            self._closing_since_ms = now_ms
            self._set(GatewayDoor.CLOSING)
        else:
            self._set(GatewayDoor.OPEN)
        if self.door.door is GatewayDoor.SHUT:
            self._wake(now_ms)

    @property
    def _must_be_shut(self) -> bool:
        if not self._is_heard or self.said is None:
            return False
        # One that cannot rest stays awake, whatever it was told.
        return self.said.state in WAY_DOWN or (self.said.can_rest and self.goal is not Tier.AWAKE)

    def _is_idle(self, now_ms: float) -> bool:
        said, after_ms = self.said, self.rules.sleep_after_ms
        if not after_ms or not self._is_heard or said is None or not self._gateways:
            return False
        may_rest = said.can_rest and said.state == "active" and self.pending_goal is None
        return may_rest and self.quiet_ms(now_ms) >= after_ms

    def _close(self, now_ms: float) -> None:
        """The gateways send nothing now, so nothing can begin: is all quiet?"""
        is_late = now_ms - self._closing_since_ms >= CLOSING_MS
        if is_late or not self._is_idle(now_ms):
            if is_late:
                self._awake_since_ms = now_ms
            self._set(GatewayDoor.OPEN)
        elif all(each.door == self.door.number for each in self._gateways.values()):
            quiet = duration(self.quiet_ms(now_ms))
            self._out.append(
                SleepTold("sleep", f"no request for {quiet}: putting {self.engine} to sleep")
            )
            self._send(Tier.WARM)
            self._set(GatewayDoor.SHUT)

    def _wake(self, now_ms: float) -> None:
        if not self.rules.wakes_on_request or self.goal is Tier.AWAKE or not self.wanting:
            return
        waiting = f"{self.wanting} requests wait" if self.wanting > 1 else "a request waits"
        self._out.append(SleepTold("wake", f"{waiting}: waking {self.engine}"))
        self._woken_ms = now_ms
        self._send(Tier.AWAKE)
        self._set(GatewayDoor.SHUT)  # as before; but it will open

    def _send(self, goal: Tier) -> None:
        self.pending_goal = goal
        self._out.append(SendGoal(goal))

    def _set(self, door: GatewayDoor) -> None:
        """Tell the gateways if anything about the door has changed."""
        old = self.door
        does_open = (
            door is not GatewayDoor.SHUT or self.rules.wakes_on_request or self.goal is Tier.AWAKE
        )
        reason = self._reason(does_open=does_open) if door is GatewayDoor.SHUT else ""
        new = DoorSet(old.number, self.token, door, does_open, reason)
        if new == old:
            return
        # A number is what gateways confirm to have obeyed: only for what changes what they do.
        is_same = (new.door, new.token) == (old.door, old.token)
        number = old.number + (not is_same)
        self.door = DoorSet(number, self.token, door, does_open, reason)
        self._out.append(self.door)

    def _reason(self, *, does_open: bool) -> str:
        state = self.said.state if self.said is not None else "resting"
        if self.goal is Tier.AWAKE:
            return f"{self.engine} is {state}; requests wait until an engine is awake"
        if does_open:
            return f"{self.engine} is {state}; a request wakes it"
        return f"{self.engine} is {state}; wake it with `understudy wake`"
