"""How often a witness is tried: at once, densely while small processes die, then less and less
often."""

from __future__ import annotations

from types import SimpleNamespace

from lockserver.core.events import WitnessFree
from lockserver.core.names import WitnessFile, WitnessState
from lockserver.server import prober
from lockserver.server.prober import DENSE_S, FAST_S, SLOW_S, Prober

HOLDER = SimpleNamespace(
    incarnation="engine-0-0123456789abcdef",
    lease=None,
    witness=WitnessFile("witness_engine-0_0123456789abcdef", 1, 1),
)


class Loop:
    """The prober's loop and clock, driven by hand: records each wait and how it was requested."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.waits: list[float] = []
        self.next: list[object] = []

    def time(self) -> float:
        return self.now_s

    def call_soon(self, callback):
        self.next.append(callback)
        return SimpleNamespace(cancel=lambda: None)

    def call_later(self, delay_s, callback):
        self.slept(delay_s)
        return self.call_soon(callback)

    def slept(self, delay_s) -> None:
        self.waits.append(delay_s)
        self.now_s += delay_s


def tried(monkeypatch, free_after: int) -> tuple[list[float], list[object]]:
    """The waits between tries of a witness that becomes free at try `free_after`; and what was
    fed."""
    loop, fed, results = Loop(), [], iter([WitnessState.HELD] * (free_after - 1))
    monkeypatch.setattr(prober, "time", SimpleNamespace(sleep=loop.slept, monotonic=loop.time))
    probe = lambda *file: next(results, WitnessState.FREE)  # noqa: E731
    monkeypatch.setattr(prober, "witness", SimpleNamespace(probe=probe))
    monkeypatch.setattr(
        prober.evidence, "probes_due", lambda *_: [] if fed else [("active", HOLDER)]
    )
    monkeypatch.setattr(prober.recovery, "scan_is_due", lambda *_: False)
    monkeypatch.setattr(prober, "asyncio", SimpleNamespace(get_running_loop=lambda: loop))
    Prober("/run", SimpleNamespace(locks={}, supervisors={}), fed.append).kick()
    assert len(fed) == (free_after == 1)  # tried within the call itself
    while loop.next:
        loop.next.pop(0)()
    return loop.waits, fed


def test_free_witness_is_found_without_delay(monkeypatch):
    """Goal: no delay if the process is gone already. Method: the witness is free at the first
    try."""
    waits, fed = tried(monkeypatch, free_after=1)
    assert waits == []
    assert fed == [WitnessFree("active", HOLDER.incarnation)]


def test_dying_tree_is_probed_densely_then_less_often(monkeypatch):
    """Goal: a grant follows a death within 0.2 ms, and a hung process costs little. Method: a
    witness that is held for about five seconds of a clock that advances only with the prober's
    waits."""
    waits, fed = tried(monkeypatch, free_after=1500)
    assert waits[:99] == [DENSE_S] * 99
    dense, fast = waits.count(DENSE_S), waits.count(FAST_S)
    # No wait before the first try, nor before the second, which is the loop's next turn.
    assert waits == [DENSE_S] * dense + [FAST_S] * fast + [SLOW_S] * (1498 - dense - fast)
    assert 0.019 < dense * DENSE_S < 0.021
    assert 0.97 < fast * FAST_S < 1.0
    assert len(fed) == 1
