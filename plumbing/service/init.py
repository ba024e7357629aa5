"""The first process of a container: starts one program, restarts it when it dies, ends with it.

    python -I -S init.py [--replaceable] /path/to/PROGRAM ARGUMENT…  (what `understudy-init` runs)

The container of a program that dies stays up and Ready, without the kubelet's back-off. Before a
restart, init kills and reaps all that the program has left. `Restarter` decides, and is pure. One
init runs beside each program (PSS under 8 MiB), so it imports little. It passes SIGTERM on.

SIGHUP replaces a replaceable program: init starts a second one, with the first one's pid in
SUCCEEDS_ENV; the first ends by itself. Init restarts the newest that has sent READY=1.

The watchdog follows systemd's protocol: the program sends READY=1, and from then on WATCHDOG=1, to
NOTIFY_SOCKET. A program that sends YIELD_MS with READY=1 is restarted that much later: a start of
Python takes 0.3 s of CPU, which the engine that takes over needs.
The surprising thing: silence is counted in ticks that init itself got on time. A pod that is frozen
or starved of CPU delays init too, and then nothing counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import signal
import socket
import sys
import time

TICK_S = 0.1
LATE_S = 0.05  # a tick that comes later proves that init itself had to wait
SILENT_TICKS = 30  # 3 s: programs send every 0.5 s (plumbing/service/notify.py)
BACKOFF_S, BACKOFF_S_MAX, GOOD_START_S = 0.5, 10.0, 5.0  # an exit sooner than that has failed
FAILED_STARTS_MAX = 10  # in a row: about a minute of back-off
SHORTAGE = 75  # EX_TEMPFAIL: descriptors, processes or memory are short; retried for ever
RESTARTED = (1, 70, SHORTAGE)  # 70, EX_SOFTWARE: a bug; any other exit ends init, too
CRASH_LOOP = 69  # EX_UNAVAILABLE: no further start can help; init uses it, too
KILL_DEADLINE_S = 30.0  # a process with 80 GiB of memory takes ten seconds to end
KILL_POLL_S, KILL_POLL_S_MAX = 0.002, 0.02  # a takeover needs the CPU meanwhile
TERMINATION_LOG = "/dev/termination-log"
ENDING = (signal.SIGTERM, signal.SIGINT)
FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
PARENT_PID_ENV = "UNDERSTUDY_PARENT_PID"  # as plumbing/service/process.py
RESTARTS_ENV = "UNDERSTUDY_RESTARTS"  # how often init has restarted the program
SUCCEEDS_ENV = "UNDERSTUDY_SUCCEEDS"  # if it is replaceable: which pid it replaces, "" for none
REPLACEABLE = "--replaceable"
FIRST_START_ENV = "UNDERSTUDY_FIRST_START"  # "final": an exit with a code before READY=1 is final


class Program:
    """One life of the program: whether it is ready, and, from then on, whether it hangs. Pure."""

    def __init__(self, pid: int = 0) -> None:
        self.pid = pid
        self.ready_s: float | None = None
        self.yield_s = 0.0
        self._silent_ticks = 0

    def told(self, message: bytes, now_s: float) -> None:
        """It has sent `message` (sd_notify(3))."""
        self._silent_ticks = 0
        told = dict(line.partition(b"=")[::2] for line in message.split(b"\n"))
        if told.get(b"READY") == b"1" and self.ready_s is None:
            self.ready_s = now_s
            yield_ms = told.get(b"YIELD_MS", b"")[:9]
            self.yield_s = min(int(yield_ms) / 1000 if yield_ms.isdigit() else 0.0, BACKOFF_S_MAX)

    def ticked(self, late_s: float, is_blocked: bool = False) -> bool:
        """A tick came `late_s` after it was due. True: the program hangs and must be killed."""
        self._silent_ticks = 0 if late_s > LATE_S or is_blocked else self._silent_ticks + 1
        return self.ready_s is not None and self._silent_ticks >= SILENT_TICKS


class Restarter:
    """Whether and when the program is restarted. Pure: events in, decisions out."""

    def __init__(self, is_first_start_final: bool = False) -> None:
        self.restarts = self.failed_starts = 0  # the latter in a row
        self.exit_code = 0  # init's own, once `ended` returned None
        self.is_ending = False
        self._is_first_start_final = is_first_start_final

    def ended(self, code: int, program: Program, now_s: float) -> float | None:
        """The program exited with `code`, or died by signal `-code`. The seconds until its restart;
        None: init ends, with `exit_code`."""
        self.exit_code = code if code >= 0 else 128 - code
        ready_s = program.ready_s
        self._is_first_start_final &= ready_s is None
        is_final = code not in RESTARTED or self._is_first_start_final
        if self.is_ending or (code >= 0 and is_final):
            return None
        if ready_s is not None and (code < 0 or now_s - ready_s >= GOOD_START_S):
            self.failed_starts = 0
            self.restarts += 1
            return program.yield_s
        self.failed_starts += 1
        if self.failed_starts >= FAILED_STARTS_MAX and code != SHORTAGE:
            self.exit_code = CRASH_LOOP
            return None
        self.restarts += 1
        return min(BACKOFF_S * 2.0 ** min(self.failed_starts - 1, 9), BACKOFF_S_MAX)


class Init:
    """One program, from its first start to init's own end."""

    def __init__(self, command: list[str], restarter: Restarter, can_replace: bool = False) -> None:
        self.command, self.restarter, self._can_replace = command, restarter, can_replace
        self.programs: list[Program] = []  # the oldest first; two while one replaces the other
        self._start_s: float | None = 0.0  # when the next one is started
        self._due_s = 0.0  # the next tick
        self._wake, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (*FORWARDED, signal.SIGCHLD):
            signal.signal(number, lambda *_: None)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        # An abstract address needs no directory. The pod shares it, so senders are checked.
        name = f"understudy-init-{os.urandom(8).hex()}"
        self._notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._notify.setblocking(False)
        self._notify.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self._notify.bind(f"\0{name}")
        os.environ[PARENT_PID_ENV] = str(os.getpid())
        os.environ["NOTIFY_SOCKET"] = f"@{name}"
        os.environ["WATCHDOG_USEC"] = str(round(SILENT_TICKS * TICK_S * 1e6))
        self._poll = select.poll()
        for each in (self._wake, self._notify.fileno()):
            self._poll.register(each, select.POLLIN)

    def run(self) -> int:
        """Keep the program until it ends for good; init's exit code."""
        while self.programs or self._start_s is not None:
            if self._start_s is not None and time.monotonic() >= self._start_s:
                self._start()
            self._wait()
            self._tick()
            for pid, code in reap() or ():
                for program in [each for each in self.programs if each.pid == pid]:
                    self._ended(program, code)
        return self.restarter.exit_code

    def _main(self) -> Program | None:
        """The program that init restarts: the newest that is ready, else the oldest."""
        ready = [each for each in self.programs if each.ready_s is not None]
        return next(iter(ready[-1:] or self.programs[:1]), None)

    def _start(self) -> None:
        main, self._start_s = self._main(), None
        os.environ[RESTARTS_ENV] = str(self.restarter.restarts)
        if self._can_replace:
            os.environ[SUCCEEDS_ENV] = str(main.pid if main else "")
        path, default = self.command[0], (signal.SIGPIPE,)  # which Python ignores
        pid, code = 0, 127
        try:
            pid = os.posix_spawn(path, self.command, os.environ, setpgroup=0, setsigdef=default)
        except OSError as error:
            say(f"error: {path} cannot be started: {error}")
            code = SHORTAGE if error.errno in (errno.EAGAIN, errno.ENOMEM) else code
        self.programs.append(Program(pid))
        if not pid:
            self._ended(self.programs[-1], code)

    def _ended(self, program: Program, code: int) -> None:
        """It has ended: what becomes of init."""
        is_main, how = program is self._main(), f"exited with code {code}"
        how = how if code >= 0 else f"died of signal {-code}"
        self.programs.remove(program)
        if not is_main or any(each.ready_s is None for each in self.programs):
            say(f"pid {program.pid} {how}; pid {self.programs[-1].pid} runs")
            return
        if not self.programs:
            kill_rest()
            self._wait(0.0)  # for a SIGTERM that came meanwhile
        delay_s = self.restarter.ended(code, program, time.monotonic())
        self.restarter.is_ending |= delay_s is None
        if self.restarter.exit_code == CRASH_LOOP != code:
            why = f"{self.command[0]} {how}; its last {FAILED_STARTS_MAX} starts failed"
            say(f"error: {why} [init.crash_loop]")
            with contextlib.suppress(OSError), open(TERMINATION_LOG, "r+") as log:
                log.write(f"{why}\n")
        elif delay_s is not None:
            restarts = self.restarter.restarts
            say(f"{self.command[0]} {how}; restart {restarts} in {delay_s:g} s")
            self._start_s = time.monotonic() + delay_s

    def _tick(self) -> None:
        late_s = time.monotonic() - self._due_s
        if late_s < 0:
            return
        self._due_s += late_s + TICK_S
        for each in self.programs:
            if each.ready_s is not None and each.ticked(late_s, is_blocked(each.pid)):
                say(f"{self.command[0]} (pid {each.pid}) hangs: SIGKILL")
                os.kill(each.pid, signal.SIGKILL)

    def _wait(self, timeout_s: float | None = None) -> None:
        """Wait for a signal, a message, a tick or the next start, and handle the first two."""
        if timeout_s is None:
            dues = [] if self._start_s is None else [self._start_s]
            dues += [self._due_s] if any(each.ready_s is not None for each in self.programs) else []
            timeout_s = max(0.0, min(dues) - time.monotonic()) if dues else None
        self._poll.poll(timeout_s and timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake, 256):
                self._signalled(number)
        with contextlib.suppress(BlockingIOError):
            while True:
                message, more, _, _ = self._notify.recvmsg(4096, socket.CMSG_SPACE(12))
                sender = int.from_bytes(more[0][2][:4], sys.byteorder) if more else 0
                for each in self.programs:
                    if each.pid == sender:
                        each.told(message, time.monotonic())

    def _signalled(self, number: int) -> None:
        if number in ENDING:
            self.restarter.is_ending, self._start_s = True, None
        if number == signal.SIGHUP and self._can_replace:
            if len(self.programs) == 1 and not self.restarter.is_ending:
                self._start()
            else:
                say("SIGHUP: no replacement is started while another one is under way")
        elif number != signal.SIGCHLD:
            for each in self.programs:
                os.kill(each.pid, number)  # ours, and not reaped yet


def reap() -> list[tuple[int, int]] | None:
    """Reap what has ended: its pid and exit code each; None if no child is left."""
    ended = []
    try:
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            ended.append((found[0], os.waitstatus_to_exitcode(found[1])))
    except ChildProcessError:
        return ended or None
    return ended


def is_blocked(pid: int) -> bool:
    """Whether `pid` waits for a disk, or for what else no signal ends; the state is D."""
    with open(f"/proc/{pid}/stat", "rb") as stream:
        return stream.read().rpartition(b")")[2].split()[0] == b"D"


def kill_rest() -> None:
    """Kill and reap what the program has left; init ends if the deadline passes.

    PID 1 of a namespace kills all of it, also what was executed from outside. Elsewhere init kills
    its own descendants and nothing else, ever: as a subreaper it becomes the parent of each.
    """
    end_s, is_first, pause_s = time.monotonic() + KILL_DEADLINE_S, os.getpid() == 1, KILL_POLL_S
    while reap() is not None or (
        is_first and any(name.isdigit() and name != "1" for name in os.listdir("/proc"))
    ):
        with contextlib.suppress(OSError):
            if is_first:
                os.kill(-1, signal.SIGKILL)
            # The list may lack one while another is reaped (proc(5)): then the next look has it.
            with open("/proc/thread-self/children") as stream:
                for pid in stream.read().split():
                    os.kill(int(pid), signal.SIGKILL)  # ours, so its number is its own until reaped
        if time.monotonic() > end_s:
            say("error: not every process can be killed; ending [init.not_killed]")
            os._exit(CRASH_LOOP)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, KILL_POLL_S_MAX)


def say(line: str) -> None:
    with contextlib.suppress(OSError):
        if select.select((), (2,), (), 0)[1]:  # never wait for the log's reader
            os.write(2, f"understudy-init: {line}\n".encode(errors="replace"))


def main(command: list[str]) -> int:
    """Run `command`, a path and arguments; die with the parent if that asks for it."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    if (parent := os.environ.pop(PARENT_PID_ENV, None)) is not None:
        libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent):
            return 128 + signal.SIGKILL
    restarter = Restarter(os.environ.pop(FIRST_START_ENV, "") == "final")
    is_flagged = command[:1] == [REPLACEABLE]
    return Init(command[is_flagged:], restarter, is_flagged).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
