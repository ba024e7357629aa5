"""Who continues the streams of an engine that was told to end, as its supervisor finds out.

Two engines meet here through the lock server. The one that leaves says so in its want, and waits
until the lock server knows of a successor that stays, or that there is none. The successor vouches
for it: it hears that the holder leaves, waits `SETTLE_MS`, and says in its own want that it knows,
unless it was told to end meanwhile. Where a whole pod is told to end, no engine vouches.

Owns these two words of the want (`is_leaving`, `succeeds`), and the deadlines of the answer.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.core.events import EngineEvent, Leave, Linger, Succession

# A host tells all processes of a pod to end within milliseconds of each other; on a busy machine a
# process needs more to notice. The streams run on meanwhile.
SETTLE_MS = 200.0
# For the answer: `SETTLE_MS` and the time of a busy machine. Without one streams are finished.
ANSWER_MS = 1_000.0
# A gateway asks an engine within some 100 ms of its grant for the streams that wait for it.
LINGER_MS = 1_000.0


class SuccessionSide:
    """One supervisor's part in it; it posts `Succession`."""

    def __init__(
        self,
        post: Callable[[EngineEvent], None],
        after: Callable[[str, float, Callable[[], None]], None],
        on_change: Callable[[], None],
    ) -> None:
        """`after(name, ms, callback)` starts a timer; `on_change`: the want has changed."""
        self.is_leaving = False
        self.succeeds = 0  # the token of the holder that it vouches for
        self._post, self._after, self._on_change = post, after, on_change

    def perform(self, effect: Leave | Linger) -> None:
        """Say that this engine leaves, or wait for streams that wait for it."""
        if isinstance(effect, Linger):
            self._after("succession", LINGER_MS, lambda: self.settled(resume=False))
            return
        self.is_leaving, self.succeeds = True, 0
        if effect.asks:
            self._after("succession", ANSWER_MS, lambda: self.settled(resume=False))
        self._on_change()

    def settled(self, *, resume: bool) -> None:
        """There is an answer: whether a successor stays. Ignored where none is waited for."""
        self._post(Succession(resume))

    def may_succeed(self, token: int) -> None:
        """The holder under `token` was told to end: was this engine, too?"""
        if not self.is_leaving and token != self.succeeds:
            self._after("vouch", SETTLE_MS, lambda: self._vouch(token))

    def _vouch(self, token: int) -> None:
        if not self.is_leaving:
            self.succeeds = token
            self._on_change()
