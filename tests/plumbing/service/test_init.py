"""Init with real processes: kills, stops, orphans, signals, as a subreaper and as PID 1. And its
decisions in virtual time."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plumbing.service import init, procfs
from plumbing.service.init import Program, Restarter
from tests.helpers import NAMESPACE, can_unshare, until

ROOT = str(Path(__file__).parents[3])
PROGRAM = str(Path(__file__).with_name("init_program.py"))
INIT = (sys.executable, "-I", "-S", init.__file__)
PSS_MAX_KIB = 8 * 1024


class Run:
    """One init and its program, which notes each of its lives in a file."""

    def __init__(
        self, folder: Path, words: tuple[str, ...], before: tuple[str, ...], flags: tuple[str, ...]
    ) -> None:
        self.path = folder / "lives"
        self.errors = folder / "errors"
        environ = {**os.environ, "PYTHONPATH": ROOT, "PYTHONDEVMODE": "", "PYTHONWARNINGS": ""}
        with open(self.errors, "ab") as stderr:
            self.process = subprocess.Popen(
                [*before, *INIT, *flags, sys.executable, PROGRAM, str(self.path), *words],
                env=environ,
                stderr=stderr,
            )

    @property
    def pid(self) -> int:
        """Of init, by the number that this process knows."""
        name = procfs.name(self.process.pid)
        return procfs.children(self.process.pid)[0] if name == "unshare" else self.process.pid

    def lives(self) -> list[tuple[int, int]]:
        """The pid, as the program knows it, and the restarts of every life that began."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [(int(pid), int(count)) for pid, count, _ in map(str.split, lines)]

    def replaced(self) -> list[str]:
        """Whom each life replaces."""
        return [line.split()[2] for line in self.path.read_text().splitlines()]

    def life(self, count: int) -> int:
        """Wait for the program's life after `count` restarts; its pid as this process knows it."""
        until(lambda: len(self.lives()) > count, f"life {count}: {self.errors.read_text()}")
        assert [restarts for _, restarts in self.lives()] == list(range(len(self.lives())))
        return procfs.children(self.pid)[0]

    def end(self, number: int = signal.SIGTERM) -> int:
        os.kill(self.pid, number)
        return self.process.wait(30)


@contextmanager
def running(
    folder: Path, *words: str, before: tuple[str, ...] = (), flags: tuple[str, ...] = ()
) -> Iterator[Run]:
    run = Run(folder, words, before, flags)
    try:
        yield run
    finally:
        for pid in reversed(procfs.descendants(run.process.pid)):
            os.kill(pid, signal.SIGKILL)
        run.process.kill()
        run.process.wait()


@pytest.fixture(params=["subreaper", "pid 1"])
def before(request: pytest.FixtureRequest) -> tuple[str, ...]:
    """What starts init: directly, or as PID 1 of a namespace."""
    if request.param == "subreaper":
        return ()
    if not can_unshare():
        pytest.skip("this machine does not let us create a PID namespace")
    return NAMESPACE


def test_program_killed_ten_times_in_a_row_is_back_each_time_and_init_lives(tmp_path, before):
    with running(tmp_path, "ready", before=before) as run:
        for count in range(10):
            os.kill(run.life(count), signal.SIGKILL)
        run.life(10)
        assert run.process.poll() is None
        assert run.end() == 0


def test_what_the_program_leaves_is_killed_before_its_restart(tmp_path, before):
    """Goal: no process of the last life is alive when the next one begins, in whatever session.
    Method: kill the program; its child's pid is gone in the next life."""
    with running(tmp_path, "ready", "child", before=before) as run:
        program = run.life(0)
        (child,) = procfs.children(program)
        pidfd = os.pidfd_open(child)
        try:
            os.kill(program, signal.SIGKILL)
            run.life(1)
            with pytest.raises(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, 0)
        finally:
            os.close(pidfd)


def test_pid_1_kills_what_was_executed_from_outside(tmp_path):
    """Goal: nobody of the namespace outlives a restart, also who is no child of init. Method: a
    process that enters the namespace, as `kubectl exec` does."""
    if not can_unshare():
        pytest.skip("this machine does not let us create a PID namespace")
    with running(tmp_path, "ready", before=NAMESPACE) as run:
        program = run.life(0)
        inside = ["nsenter", f"--pid=/proc/{run.pid}/ns/pid", "sleep", "1000"]
        visitor = subprocess.Popen(inside)
        until(lambda: procfs.children(visitor.pid), "the visitor")
        os.kill(program, signal.SIGKILL)
        assert visitor.wait(30) != 0
        run.life(1)


def test_as_a_subreaper_init_kills_nothing_but_its_descendants(tmp_path):
    neighbour = subprocess.Popen(["sleep", "1000"])
    try:
        with running(tmp_path, "ready", "child") as run:
            os.kill(run.life(0), signal.SIGKILL)
            run.life(1)
            assert neighbour.poll() is None
    finally:
        neighbour.kill()
        neighbour.wait()


def test_stopped_program_is_replaced(tmp_path, before):
    with running(tmp_path, "ready", before=before) as run:
        stopped = run.life(0)
        began = time.monotonic()
        os.kill(stopped, signal.SIGSTOP)
        assert run.life(1) != stopped
        assert time.monotonic() - began > init.TICK_S * (init.SILENT_TICKS - 10)


def test_pod_that_stands_still_loses_nothing(tmp_path):
    """Goal: no restart after seconds in which nobody ran, more than a hang takes. Method: SIGSTOP
    to init and to the program, SIGCONT to init first, which is the worst order; five times the
    beat's period."""
    with running(tmp_path, "ready") as run:
        program = run.life(0)
        for pid in (program, run.pid):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(init.TICK_S * init.SILENT_TICKS + 1)  # what is tested is that time passes
        for pid in (run.pid, program):
            os.kill(pid, signal.SIGCONT)
        time.sleep(5 * 0.5)
        assert run.life(0) == program


def test_sigterm_prevents_the_restart_of_a_program_that_is_killed_meanwhile(tmp_path, before):
    with running(tmp_path, "ready", "deaf", before=before) as run:
        program = run.life(0)
        os.kill(run.pid, signal.SIGTERM)
        os.kill(program, signal.SIGKILL)
        assert run.process.wait(30) != 0
        assert len(run.lives()) == 1


def test_sigterm_during_the_back_off_prevents_the_restart(tmp_path, before):
    with running(tmp_path, "exit=1", before=before) as run:
        until(lambda: "restart 3 in 2 s" in run.errors.read_text(), "the third back-off")
        assert run.end() == 1
        assert len(run.lives()) == 3


def test_other_signals_are_forwarded(tmp_path):
    with running(tmp_path, "ready") as run:
        run.life(0)
        os.kill(run.pid, signal.SIGUSR1)  # whose default action ends the program
        run.life(1)


REPLACEABLE = (init.REPLACEABLE,)


def with_successor(run: Run) -> tuple[int, int]:
    """The first one and its successor, after SIGHUP."""
    first = run.life(0)
    os.kill(run.pid, signal.SIGHUP)
    until(lambda: len(run.lives()) == 2, "the successor")
    (second,) = set(procfs.children(run.pid)) - {first}
    return first, second


def test_sighup_starts_a_successor_and_the_first_one_ends_by_itself(tmp_path, before):
    """Goal: replacing costs no life. Method: SIGHUP; both run; a second SIGHUP starts no third; the
    first one ends; then the successor is what init restarts."""
    with running(tmp_path, "ready", before=before, flags=REPLACEABLE) as run:
        first, second = with_successor(run)
        assert run.replaced() == ["-", str(run.lives()[0][0])]
        os.kill(run.pid, signal.SIGHUP)
        until(lambda: "no replacement is started" in run.errors.read_text(), "the refusal")
        os.kill(first, signal.SIGTERM)
        until(lambda: procfs.children(run.pid) == [second], "the first one's end")
        os.kill(second, signal.SIGKILL)
        until(lambda: len(run.lives()) == 3, "its restart")
        assert run.lives()[2][1] == 1
        assert run.end() == 0


def test_restart_of_a_successor_leaves_alone_what_finishes_beside_it(tmp_path, before):
    """Goal: the death of the new one cuts no request of the old one. Method: kill the successor;
    the next one replaces the old one, which still runs; SIGTERM ends all."""
    with running(tmp_path, "ready", before=before, flags=REPLACEABLE) as run:
        first, second = with_successor(run)
        os.kill(second, signal.SIGKILL)
        until(lambda: len(run.lives()) == 3, "the next successor")
        assert procfs.is_alive(first)
        assert run.replaced()[2] == str(run.lives()[0][0])
        assert run.end() == 0


def test_successor_that_fails_changes_nothing(tmp_path):
    """Goal: a replacement that cannot start is no outage. Method: one that exits with 2."""
    with running(tmp_path, "ready", "bad-successor", flags=REPLACEABLE) as run:
        first = run.life(0)
        for count in (1, 2):
            os.kill(run.pid, signal.SIGHUP)
            until(lambda c=count: run.errors.read_text().count("code 2") == c, "its failure")
        assert procfs.children(run.pid) == [first]
        assert run.end() == 0


def test_program_dies_with_an_init_that_is_killed(tmp_path):
    with running(tmp_path, "ready") as run:
        program = run.life(0)
        os.kill(run.pid, signal.SIGKILL)
        until(lambda: not procfs.is_alive(program), "the program's end")


def test_command_finds_the_program_and_keeps_the_small_interpreter(tmp_path):
    """Goal: what manifests name is one small process of the expected size. Method: the console
    script with a program on PATH; the command line and the memory of what is then init."""
    command = str(Path(sys.executable).parent / "understudy-init")
    process = subprocess.Popen([command, "sleep", "1000"])
    try:
        (sleep,) = until(lambda: procfs.children(process.pid), "the program")
        until(lambda: procfs.name(sleep) == "sleep", "its command")
        line = Path(f"/proc/{process.pid}/cmdline").read_bytes().split(b"\0")
        assert line[1:3] == [b"-I", b"-S"]
        assert line[4].startswith(b"/")
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
        pss = next(each for each in rollup if each.startswith("Pss:"))
        assert int(pss.split()[1]) <= PSS_MAX_KIB
    finally:
        process.terminate()
        assert process.wait(30) == 128 + signal.SIGTERM


KILLED, SOON, LATER = -9, 0.001, init.GOOD_START_S
BACKOFF = [0.5, 1.0, 2.0, 4.0, 8.0, 10.0, 10.0]


def started(ready_s: float | None = 0.0) -> Program:
    program = Program()
    if ready_s is not None:
        program.told(b"READY=1\nWATCHDOG=1", ready_s)
    return program


def ended(restarter: Restarter, code: int, now_s: float, ready_s: float | None = 0.0):
    """What becomes of a program that was ready then, if at all."""
    return restarter.ended(code, started(ready_s), now_s)


@pytest.mark.parametrize(
    ("code", "now_s", "ready_s", "delays"),
    [
        (KILLED, SOON, 0.0, [0.0] * 100),
        *((code, LATER, 0.0, [0.0] * 100) for code in (1, 70, 75)),
        *((code, SOON, 0.0, BACKOFF) for code in (1, 70, 75)),
        *((code, LATER, None, BACKOFF) for code in (1, 70, 75, KILLED)),
        (init.SHORTAGE, SOON, None, [*BACKOFF, *[init.BACKOFF_S_MAX] * 100]),
    ],
)
def test_only_failed_starts_back_off(code, now_s, ready_s, delays):
    restarter = Restarter()
    assert [ended(restarter, code, now_s, ready_s) for _ in delays] == delays
    assert restarter.restarts == len(delays)
    assert ended(restarter, KILLED, SOON) == 0.0
    assert ended(restarter, 1, SOON, None) == 0.5


@pytest.mark.parametrize(
    ("told", "delay_s"),
    [(b"1000", 1.0), (b"0", 0.0), (b"-1", 0.0), (b"soon", 0.0), (b"9" * 99, init.BACKOFF_S_MAX)],
)
def test_restart_leaves_the_machine_to_who_takes_over_for_as_long_as_the_program_said(
    told, delay_s
):
    program = Program()
    program.told(b"READY=1\nYIELD_MS=" + told, 0.0)
    assert Restarter().ended(KILLED, program, SOON) == delay_s


@pytest.mark.parametrize(
    ("code", "own", "is_asked"),
    [*((code, code, False) for code in (0, 2, 69, 126, 137)), (1, 1, True), (-15, 143, True)],
)
def test_end_that_was_asked_for_or_that_no_restart_helps_is_inits_own(code, own, is_asked):
    restarter = Restarter()
    restarter.is_ending = is_asked
    assert ended(restarter, code, 100.0) is None
    assert (restarter.exit_code, restarter.restarts) == (own, 0)


def test_failed_starts_in_a_row_are_a_crash_loop_with_a_code_of_its_own():
    restarter = Restarter()
    ends = [ended(restarter, 1, 0.0, None) for _ in range(init.FAILED_STARTS_MAX)]
    assert (ends[-1], None in ends[:-1]) == (None, False)
    assert restarter.exit_code == init.CRASH_LOOP


def test_exit_before_the_first_ready_is_final_where_a_user_waits_for_it():
    assert ended(Restarter(True), 1, 0.0, None) is None
    assert ended(Restarter(True), KILLED, 0.0, None) == 0.5
    assert ended(Restarter(True), 1, 10.0) == 0.0


@given(
    st.lists(st.sampled_from(["tick", "late", "blocked", "beat"]), max_size=200).filter(
        lambda each: "tick" * 30 not in "".join(each)
    )
)
def test_only_thirty_ticks_in_time_without_a_beat_kill(events):
    """Goal: a beat, a tick that init itself got late, and time in which the kernel blocks the
    program, start the count again; before READY nothing counts."""
    program, unwatched = started(), Program()
    for event in events:
        if event == "beat":
            program.told(b"WATCHDOG=1", 0.0)
        late_s = init.LATE_S + 0.001 if event == "late" else 0.0
        assert not unwatched.ticked(0.0)
        assert event == "beat" or not program.ticked(late_s, event == "blocked")
    program.told(b"WATCHDOG=1", 0.0)
    assert [program.ticked(0.0) for _ in range(30)] == [False] * 29 + [True]
