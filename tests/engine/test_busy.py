"""A busy machine kills nobody: an engine that answers late lives as long as it makes tokens, and
one that does not is found, at once where another engine can take over."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.pod import Engine, LoopThread, stub_lock
from tests.engine.stub_lock import StubLock
from tests.helpers import until

QUICK = ("--backoff-first-ms", "50", "--yield-ms", "50")
# Hung after 0.3 s with a standby, and without one only long after the end of any test.
IMPATIENT = ("--answer-ms", "100", "--hang-ms", "300", "--hang-alone-ms", "3600000")
LATE_MS = 2_000  # more than twice the stretched budget


@pytest.fixture
def lock(directory: Path):
    with stub_lock(directory, auto=("loader", "active")) as lock:
        yield lock


@pytest.fixture
def late(directory: Path) -> Path:
    """While this file exists the backend answers no health check."""
    return directory / "late"


def engine_of(pod, late: Path, *switches: str) -> Engine:
    engine: Engine = pod.engine(
        "e-0", "--answer-late-if", str(late), *switches, flags=(*QUICK, *IMPATIENT)
    )
    engine.until("active")
    return engine


def tell(lock: tuple[StubLock, LoopThread], engine: Engine, *, is_ready: bool) -> None:
    stub, thread = lock
    thread.call(stub.tell_standby, is_ready)
    until(lambda: engine.status()["health"]["has_standby"] is is_ready, "the news of a standby")


def is_late(engine: Engine) -> bool:
    return engine.status()["health"]["answer_late_ms"] > LATE_MS


def last_death(engine: Engine) -> str:
    deaths = until(lambda: engine.status()["deaths"], "a death")
    assert deaths[-1]["cause"] == "unhealthy"
    return str(deaths[-1]["message"])


@pytest.mark.slow
def test_engine_that_makes_tokens_lives_however_late_it_answers(pod, lock, late):
    """Goal: progress is life. Method: a standby is ready, the backend's main thread answers
    nothing for many times hang_ms, and another one goes on making tokens."""
    engine = engine_of(pod, late, "--advance")
    tell(lock, engine, is_ready=True)
    late.touch()
    until(lambda: is_late(engine), "an answer that is late")
    assert "late" in engine.status()["engine"]["reason"]
    late.unlink()
    until(lambda: engine.status()["health"]["answer_late_ms"] == 0, "the late answer")
    assert (engine.state, engine.status()["deaths"]) == ("active", [])


def test_engine_that_neither_answers_nor_makes_tokens_is_hung(pod, lock, late, directory):
    """Goal: a hang is found although the page was in use before. Method: as above, and then the
    tokens end, too."""
    hang = directory / "hang"
    engine = engine_of(pod, late, "--advance", "--hang-generation-if", str(hang))
    tell(lock, engine, is_ready=True)
    hang.touch()
    late.touch()
    assert "did not answer and made no token" in last_death(engine)


@pytest.mark.slow
def test_engine_that_is_alone_is_judged_once_a_standby_is_ready(pod, lock, late):
    """Goal: without a standby no kill makes an outage certain. Method: a backend that shows
    nothing at all, alone for many times hang_ms; then a standby appears."""
    engine = engine_of(pod, late)
    health = engine.status()["health"]
    assert health["has_standby"] is False
    assert health["hang_budget_ms"] == 3_600_000
    assert health["hang_budget"].endswith("no standby is ready")
    late.touch()
    until(lambda: is_late(engine), "an answer that is late")
    assert engine.state == "active"
    stub, thread = lock
    thread.call(stub.tell_standby, True)
    assert "(budget 0." in last_death(engine)


def test_engine_without_a_lock_server_is_alone(pod, lock, late):
    """Goal: what an absent server said does not count. Method: a standby, then no server."""
    engine = engine_of(pod, late)
    tell(lock, engine, is_ready=True)
    stub, thread = lock
    thread.run(stub.stop())
    until(lambda: not engine.status()["health"]["has_standby"], "the loss to be seen")
    assert engine.state == "active"


def test_pressure_and_budgets_are_shown(pod, lock, late):
    """Goal: an operator sees what stretches which budget. Method: the status document, on a machine
    as busy as it may be, with or without pressure information."""
    engine = engine_of(pod, late)
    tell(lock, engine, is_ready=True)

    def known() -> dict[str, Any] | None:
        health: dict[str, Any] = engine.status()["health"]
        is_known = health["cpu_pressure_file"] is None or health["cpu_pressure"] is not None
        return health if is_known else None

    health = until(known, "the pressure")
    assert 0 <= (health["cpu_pressure"] or 0) <= 1
    assert 1 <= health["stretch"] <= 2.5
    assert health["hang_budget_ms"] == pytest.approx(300 * health["stretch"], abs=2)
