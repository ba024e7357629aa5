"""How a pod without a pool puts its engine to sleep, and wakes it.

*When* an idle engine sleeps is decided in `pool.core.who_sleeps`, as for a model of a pool: this
pod is a pool of one model. Here is how that is done, and when the engine wakes:

    the rule says so, with nothing in flight          → shut the door, goal `warm`
    a request waits while the goal is below `awake`   → goal `awake`; once it wakes, open the door

The door makes sleep safe for requests: it is shut *before* the goal is sent, and in the same turn
of the loop in which nothing was in flight. So no request is on its way to an engine that stops
accepting. A gateway that this one has replaced may have requests in the engine until it has ended:
meanwhile the engine stays awake. A goal from the command line has no door: the engine drains then,
and the door follows what it reports. When in doubt, the door opens: if the engine cannot be heard,
requests are sent as usual, and those that fail are retried. Pure.
"""

from __future__ import annotations

from msgspec import Struct

from gateway.core.events import DoorSet, Told
from gateway.core.machine import NEVER_MS
from plumbing.pod.messages import EngineReportMsg, Tier
from plumbing.text import duration
from pool.core.events import Running, ShutDoor
from pool.core.who_sleeps import sleeps_at_ms


class SleepRules(Struct, frozen=True):
    """`keep_alive_ms`: awake for so long after the last request; 0: for ever."""

    keep_alive_ms: float = 0.0
    wakes_on_request: bool = True


class SendGoal(Struct, frozen=True):
    """Answered by `SleepDoor.heard` with `is_answer`, by `refused`, or by `lost`."""

    goal: Tier


Effects = list[SendGoal | Told | DoorSet]  # what the shell does, in the order given

# The states of an engine that holds the lock; first those in which it must get no request.
WAY_DOWN = frozenset({"draining", "releasing", "resting"})
HOLDING = WAY_DOWN | {"waking", "active"}


class SleepDoor:
    """That of one gateway. Each method is something that has happened, and returns what follows.
    `now_ms` never goes back. `has_predecessor`: the gateway that this one has replaced lives."""

    def __init__(self, rules: SleepRules) -> None:
        self.rules = rules
        self.engine = ""
        self.token = 0
        self.said: EngineReportMsg | None = None  # the last report of this holder
        self.door: ShutDoor | None = None
        self.pending_goal: Tier | None = None  # that it has not answered yet
        self.has_predecessor = False
        self._wanting = 0  # requests that wait behind this door
        self.awake_since_ms = 0.0
        self._woken_ms: float | None = None  # when it was told to wake, until it is awake
        self._out: Effects = []

    @property
    def goal(self) -> Tier | None:
        """The holder's goal, as far as it is known."""
        if self.pending_goal is not None:
            return self.pending_goal
        return self.said.goal if self._is_heard and self.said is not None else None

    @property
    def _is_heard(self) -> bool:
        """Whether the holder of the lock has spoken as such, under the grant that is known here."""
        said = self.said
        return said is not None and said.state in HOLDING and said.token == self.token

    # ------------------------------------------------------------------ what happens

    def holder_is(self, engine: str, token: int, now_ms: float) -> Effects:
        """The lock server names who holds the lock; "" and 0: none. Repeats change nothing."""
        if (engine, token) == (self.engine, self.token):
            return []
        self.engine, self.token = engine, token
        return self.lost(now_ms)

    def heard(self, said: EngineReportMsg, now_ms: float, *, is_answer: bool) -> Effects:
        """A report of the holder. `is_answer`: to the last goal that it was sent."""
        was_active = self.said is not None and self.said.state == "active"
        self.said = said
        if is_answer:
            self.pending_goal = None
        if said.state == "active" and not was_active:
            self.awake_since_ms = now_ms
        is_awake = said.state == "active" and self.goal is Tier.AWAKE
        if self._woken_ms is not None and is_awake:
            woken_ms = now_ms - self._woken_ms
            message = f"{self.engine} is awake after {duration(woken_ms)}"
            self._out.append(Told("woken", message, data={"duration_ms": round(woken_ms, 1)}))
            self._woken_ms = None
        return self._follow()

    def lost(self, now_ms: float) -> Effects:
        """It cannot be heard now: what it said counts no longer."""
        self.said = self.pending_goal = self._woken_ms = None
        self.awake_since_ms = now_ms
        return self._follow()

    def refused(self, reason: str, now_ms: float) -> Effects:
        """It does not take the goal, and says why."""
        self.pending_goal, self.awake_since_ms = None, now_ms
        message = f"{self.engine} refuses the goal: {reason}"
        self._out.append(Told("goal_refused", message, "warning"))
        return self._follow()

    def load(self, wanting: int, quiet_ms: float, now_ms: float) -> Effects:
        """What there is in this very turn of the loop: requests that wait for an engine or to be
        resumed, and the time since there was any request, 0 while there is one."""
        self._wanting = wanting
        said = self.said
        may_sleep = said is not None and self._is_heard and said.can_rest
        if may_sleep and not self.door and not self.has_predecessor:
            self._sleep_if_due(now_ms - quiet_ms, now_ms)
        elif self.door and wanting and self.goal is not Tier.AWAKE:
            self._wake(now_ms)
        return self._follow()

    # ------------------------------------------------------------------ what follows

    def _sleep_if_due(self, last_request_ms: float, now_ms: float) -> None:
        is_awake = self.said is not None and self.said.state == "active"
        keep_alive_ms = self.rules.keep_alive_ms or float("inf")
        if is_awake and now_ms >= sleeps_at_ms(last_request_ms, self.awake_since_ms, keep_alive_ms):
            quiet = duration(now_ms - max(last_request_ms, self.awake_since_ms))
            message = f"no request for {quiet}: putting {self.engine} to sleep"
            self._out.append(Told("sleep", message))
            self._send(Tier.WARM)

    def _wake(self, now_ms: float) -> None:
        if self.rules.wakes_on_request:
            many = self._wanting > 1
            waiting = f"{self._wanting} requests wait" if many else "a request waits"
            self._out.append(Told("wake", f"{waiting}: waking {self.engine}"))
            self._woken_ms = now_ms
            self._send(Tier.AWAKE)

    def _send(self, goal: Tier) -> None:
        """The door first."""
        self.pending_goal = goal
        self._set_door()
        self._out.append(SendGoal(goal))

    def _follow(self) -> Effects:
        self._set_door()
        out, self._out = self._out, []
        return out

    def _set_door(self) -> None:
        said, new = self.said, None
        if said is not None and self._is_heard:
            is_awake = self.goal is Tier.AWAKE
            # One that cannot rest stays awake, whatever it was told. One that was told to wake
            # is on its way there only once it says so.
            is_shut = said.state in WAY_DOWN or (said.can_rest and not is_awake)
            is_shut |= self.door is not None and self.pending_goal is not None
            if is_shut:
                does_open = self.rules.wakes_on_request or is_awake
                expected_ms = None if does_open else NEVER_MS
                reason = self._reason(said, does_open=does_open)
                new = ShutDoor(Running.FINISH, expected_ms, reason)
        if new != self.door:
            if new is None or self.door is None:
                self._wanting = 0  # who waits behind this one says so
            self.door = new
            self._out.append(DoorSet(door=new))

    def _reason(self, said: EngineReportMsg, *, does_open: bool) -> str:
        if self.goal is Tier.AWAKE:
            return f"{self.engine} is {said.state}; requests wait until an engine is awake"
        if does_open:
            return f"{self.engine} is {said.state}; a request wakes it"
        return f"{self.engine} is asleep: run `understudy wake`"
