"""The engine that requests go to: whom the lock server has granted, and what it says of itself.

An engine that is granted is greeted, and gets no request before it has answered: its hello says
what it can continue and how large a body it takes. Tokens compare within an era only.
"""

from __future__ import annotations

from gateway.core.events import EngineGranted, GreetEngine, HelloCame
from plumbing.gateway_protocol import Hello

UNHEARD = "the lock server has not reported yet which engine is active"
GREET_AGAIN_MS = 50.0  # an engine that is granted answers within milliseconds of serving


class LaneTarget:
    """Of one lane. `greet_at_ms`: when the engine is to be greeted again; None: it is not."""

    def __init__(self) -> None:
        self.grant: EngineGranted | None = None  # the newest
        self.granted_ms = 0.0  # when it was heard of
        self.idle: str | None = None  # why no engine is known to hold the lock, once that was said
        self.idle_ms = 0.0  # since when
        self.hello: Hello | None = None  # of the engine that is granted
        self.last_hello: Hello | None = None  # of any engine so far
        self.greet_at_ms: float | None = None
        self._no_hello = ""  # why it has not answered the last greeting
        self.greeting = 0  # the number of the last one, while its answer counts

    @property
    def is_granted(self) -> bool:
        """Whether an engine holds the lock, as far as is known."""
        return self.grant is not None and self.idle is None

    @property
    def waits_for(self) -> str:
        """What a request waits for now, "" if only for its turn."""
        if self.grant is None or self.idle is not None:
            return self.idle or UNHEARD
        if self.hello is not None:
            return ""
        why = f" ({self._no_hello})" if self._no_hello else ""
        return f"waiting for {self.grant.engine} to answer{why}"

    def take(self, grant: EngineGranted, now_ms: float) -> bool:
        """Note this grant. Whether it is another engine's, or another life's of the same one:
        what is late changes nothing, nor does what is said again, also by a lock server that has
        lost its file and was told of it."""
        old = self.grant
        if old is not None and old.era == grant.era and grant.token < old.token:
            return False
        if old is None or (old.token, old.era) != (grant.token, grant.era):
            self.granted_ms = now_ms
        self.grant, self.idle = grant, None
        if old is not None and (old.engine, old.token) == (grant.engine, grant.token):
            return False
        self.hello = None
        return True

    def lose(self, reason: str, now_ms: float) -> None:
        """No engine holds the lock."""
        if self.idle is None:
            self.idle_ms = now_ms
        self.idle = reason

    def part(self) -> None:
        """The engine must be greeted anew before it gets a request."""
        self.hello, self.greet_at_ms = None, None
        self.greeting = 0  # what an earlier greeting brings is about the past

    def greet(self, number: int) -> GreetEngine:
        assert self.grant is not None
        self.greet_at_ms = None
        self.greeting = number
        return GreetEngine(number, self.grant.engine, self.grant.token)

    def greeted(self, event: HelloCame, greet_at_ms: float) -> None:
        """The answer to a greeting. If it is not the granted engine's, greet again then."""
        if event.greeting != self.greeting or self.grant is None:
            return
        hello, self._no_hello = event.hello, event.problem
        if hello is not None:
            if (hello.engine, hello.token) == (self.grant.engine, self.grant.token):
                self.hello = self.last_hello = hello.as_understood()
                return
            self._no_hello = f"{hello.engine} answered, under token {hello.token}"
        self.greet_at_ms = greet_at_ms
