"""What a drill has seen: a clean one of kills, of the memory service, and an upgrade."""

from __future__ import annotations

from msgspec.structs import replace

from understudy.drill.records import (
    End,
    EngineKill,
    Exchange,
    MemoryKill,
    MemoryUse,
    Records,
    Upgrade,
)

ANSWER = Exchange(
    "p", 0, End.DONE, 5, 200, "engine-0", 1, 1, 4, text="hello", finish_reason="length", chunks=5
)
EXPECTED = {"p": ANSWER}
KILL = EngineKill(
    "backend-http",
    "engine-0",
    old_token=1,
    killed_ms=100,
    detected_ms=101,
    fenced_ms=111,
    granted_ms=113,
    active_ms=130,
    new_token=2,
    new_engine="engine-1",
)


def served(token: int, sent: float, first: float, last: float | None = None, **more) -> Exchange:
    values = {
        "sent_ms": sent,
        "token": token,
        "first_token_ms": first,
        "last_token_ms": last or first,
        "ended_ms": last or first,
        "first_turn": int(first),
        "last_turn": int(last or first),
    }
    return replace(ANSWER, **{**values, **more})


def good_records() -> Records:
    return Records(
        exchanges=[
            served(1, sent=0, first=50, last=60),
            replace(served(1, sent=90, first=95), end=End.CUT, text="he", ended_ms=101),
            served(2, sent=101, first=140),
        ],
        kills=[KILL],
        expected=EXPECTED,
        grants_checked=1,
    )


def memory_records() -> Records:
    """Two kills of memory servers under requests that all came through; 100 bytes on each of two
    devices, and never more than that."""
    kills = [
        MemoryKill(f"HOST-{number}", "weights", 7, "e", frozenset(), killed, killed + 30)
        for number, killed in enumerate((100, 200))
    ]
    return Records(
        exchanges=[served(1, sent=0, first=50), served(1, sent=90, first=250)],
        expected=EXPECTED,
        memory_kills=kills,
        memory=MemoryUse(committed_bytes=200, device_bytes_min=100, peak_bytes=200),
    )


def upgraded() -> Records:
    """Two engines with another configuration, and answers on both sides of the switchover."""
    return Records(
        exchanges=[served(1, sent=0, first=50, last=60), served(2, sent=70, first=140)],
        expected=EXPECTED,
        grants_checked=1,
        upgrade=Upgrade(
            "A=1", {"engine-0": True, "engine-1": True}, "engine-0", "engine-1", 1, 2, 30.0
        ),
    )
