"""What drills have seen that found nothing wrong: of engines, of memory, of a pool, of a fleet."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from understudy.drill.records import End, Exchange, Kill, Moment, Records, StatedBound

TEXT = "hello"
ANSWER = Exchange(
    "p", 0, End.DONE, 5, 200, "engine-0", 1, 1, 4, text=TEXT, finish_reason="length", chunks=5
)
EXPECTED = {"p": ANSWER}
KILL = Kill(
    "backend-model",
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
    }
    return replace(ANSWER, **{**values, **more})


def stream(*times_ms: float, text: str = TEXT, **more: Any) -> Exchange:
    """A whole answer that got a letter of its text at each of these times, then the rest."""
    count = len(times_ms)
    values = {
        "sent_ms": min(times_ms, default=0) - 1,
        "ended_ms": max(times_ms, default=0),
        "token": 1,
        "text": text,
        "first_token_ms": min(times_ms, default=None),
        "last_token_ms": max(times_ms, default=None),
        "text_ms": list(times_ms),
        "piece_ends": [*range(1, count), len(text)] if count else [],
        "chunks": count,
    }
    return replace(ANSWER, **{**values, **more})


def of_engines() -> Records:
    """One kill."""
    exchanges = [served(1, sent=0, first=50, last=60), served(2, sent=101, first=140)]
    return Records(exchanges, [replace(KILL)], expected=EXPECTED, grants_checked=1)


def of_memory() -> Records:
    """Two kills of memory servers under requests that all came through."""
    kills = [
        Kill("gms", killed_ms=killed, back_ms=killed + 30, device=f"HOST-{number}")
        for number, killed in enumerate((100.0, 200.0))
    ]
    return Records(
        exchanges=[served(1, sent=0, first=50), served(1, sent=90, first=250)],
        kills=kills,
        expected=EXPECTED,
    )


def of_model(model: str, *times_ms: float, **more: Any) -> Exchange:
    times_ms = times_ms or (10.0, 20.0, 30.0, 40.0, 50.0)
    return stream(
        *times_ms,
        prompt=f"{model}/p",
        model=model,
        **{"engine": f"{model}-0", "sent_ms": 0, **more},
    )


def of_pool(*exchanges: Exchange, **more: Any) -> Records:
    """Two models that have answered, with a bound of a second."""
    models = {"a": ("a-0", "a-1"), "b": ("b-0",)}
    return Records(
        exchanges=[of_model("a"), of_model("b"), *exchanges],
        expected={f"{name}/p": of_model(name) for name in models},
        models=models,
        lasted_s=2.0,
        bounds=[StatedBound(0.0, name, 1000.0) for name in models],
        **more,
    )


def of_fleet(*exchanges: Exchange, target: str = "pod") -> Records:
    """A pod is killed under a stream, which goes on at the other one."""
    states = (0.0, "pod-0"), (0.0, "pod-1"), (150.0, "pod-0")
    moments = [Moment(at_ms, pod, "ready") for at_ms, pod in states]
    moments.insert(2, Moment(110.0, "pod-0", "gone"))
    pod = "" if target == "front" else "pod-0"
    return Records(
        exchanges=[
            stream(90, 95, 180, 185, 190, pod="pod-0"),
            stream(90, 101, 109, pod="pod-1"),
            *exchanges,
        ],
        kills=[Kill(target, killed_ms=100, gone_ms=105, back_ms=160, pod=pod, streams=1)],
        expected=EXPECTED,
        moments=list(moments),
        pods=("pod-0", "pod-1"),
        lasted_s=0.2,
    )
