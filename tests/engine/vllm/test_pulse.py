"""A load that goes on is told of, one that hangs is not."""

from __future__ import annotations

from engine.backends.vllm.worker.pulse import ALIVE_CPU_S, Meter, Pulse
from plumbing.errors import UnreachableError
from tests.helpers import until


class Writer:
    """Keeps what it is told; `is_gone` is a service that has died."""

    def __init__(self) -> None:
        self.told: list[tuple[int, int]] = []
        self.is_gone = False

    def progress(self, done_bytes: int, total_bytes: int) -> None:
        if self.is_gone:
            raise UnreachableError("wire.closed", "gone")
        self.told.append((done_bytes, total_bytes))


class Tensor:
    nbytes = 100


def pulse_of(writer: Writer) -> tuple[Meter, Pulse]:
    meter = Meter(writer)  # type: ignore[arg-type]  # a stand-in
    return meter, Pulse(meter)


def test_computing_is_a_sign_of_life_and_waiting_is_not():
    """The thread that loads burns time: a beat. It sleeps in a poll: none, and nothing is said."""
    writer = Writer()
    _, pulse = pulse_of(writer)
    until(lambda: sum(range(300_000)) and pulse.beat(), "a sign of life from who computes")
    pulse.beat()
    told = len(writer.told)
    signs = pulse._signs()
    pulse._signs = lambda: (signs[0] + ALIVE_CPU_S / 2, signs[1])  # type: ignore[method-assign]  # what the kernel reports
    pulse._seen = signs
    assert not pulse.beat()
    assert len(writer.told) == told


def test_reported_progress_only_grows():
    """The service takes nothing else for progress: also where nothing is counted."""
    writer = Writer()
    meter, pulse = pulse_of(writer)
    meter.expect(150)
    assert list(meter.counted(iter([("a", Tensor()), ("b", Tensor())])))
    meter.report()
    for beat in range(3):
        pulse._signs = lambda beat=beat: (1e9 + beat, 0)  # type: ignore[misc]  # the same
        assert pulse.beat()
    done = [each[0] for each in writer.told]
    assert done == sorted(set(done))
    assert done[0] == 200
    assert all(total >= each for each, total in writer.told)


def test_service_that_dies_ends_the_pulse_and_not_the_load(monkeypatch):
    """The thread leaves; who loads finds out when it next asks the service."""
    monkeypatch.setattr("engine.backends.vllm.worker.pulse.PERIOD_S", 0.001)
    writer = Writer()
    _, pulse = pulse_of(writer)
    writer.is_gone = True
    # This thread waits below, and waiting is no sign of life: without one nothing is reported.
    pulse._signs = lambda: (1e9, 0)  # type: ignore[method-assign]  # what the kernel reports
    with pulse:
        until(lambda: not pulse._thread.is_alive(), "the thread to leave")
    assert writer.told == []
