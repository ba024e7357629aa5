"""The first process of a container: starts one program, restarts it when it dies, ends with it.

    python -I -S init.py /path/to/PROGRAM ARGUMENT…          (what `understudy-init` executes)

The container of a program that dies stays up and Ready, without the kubelet's back-off. Before a
restart, init kills and reaps all that the program has left. `Restarter` decides, and is pure. One
init runs beside each program (PSS under 8 MiB), so it imports little.

The watchdog follows systemd's protocol: the program sends READY=1 and WATCHDOG=1 to NOTIFY_SOCKET.
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
NO_CHILD = 1 << 16  # no exit code
MINE = str(os.getpid())
TERMINATION_LOG = "/dev/termination-log"
ENDING = (signal.SIGTERM, signal.SIGINT)
FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
PARENT_PID_ENV = "UNDERSTUDY_PARENT_PID"  # as plumbing/service/process.py
RESTARTS_ENV = "UNDERSTUDY_RESTARTS"  # how often init has restarted the program
FIRST_START_ENV = "UNDERSTUDY_FIRST_START"  # "final": an exit with a code before READY=1 is final


class Restarter:
    """When the program is restarted and when it is killed. Pure: events in, decisions out."""

    def __init__(self, is_first_start_final: bool = False) -> None:
        self.restarts = self.failed_starts = 0  # the latter in a row
        self.exit_code = 0  # init's own, once `ended` returned None
        self.is_ending = self.is_crash_loop = False
        self._is_first_start_final = is_first_start_final
        self.started()

    def started(self) -> None:
        self._ready_s: float | None = None
        self.is_watching = False  # from the first WATCHDOG=1 on
        self._silent_ticks = 0

    def told(self, message: bytes, now_s: float) -> None:
        """The program has sent `message` (sd_notify(3))."""
        lines = message.split(b"\n")
        self._silent_ticks = 0
        self.is_watching |= b"WATCHDOG=1" in lines
        if b"READY=1" in lines and self._ready_s is None:
            self._ready_s, self._is_first_start_final = now_s, False

    def ticked(self, late_s: float, is_blocked: bool = False) -> bool:
        """A tick came `late_s` after it was due. True: the program hangs and must be killed."""
        self._silent_ticks = 0 if late_s > LATE_S or is_blocked else self._silent_ticks + 1
        return self.is_watching and self._silent_ticks >= SILENT_TICKS

    def ended(self, code: int, now_s: float) -> float | None:
        """The program exited with `code`, or died by signal `-code`. The seconds until its restart;
        None: init ends, with `exit_code`."""
        self.exit_code = code if code >= 0 else 128 - code
        is_final = code not in RESTARTED or self._is_first_start_final
        if self.is_ending or (code >= 0 and is_final):
            return None
        ready_s = self._ready_s
        if ready_s is not None and (code < 0 or now_s - ready_s >= GOOD_START_S):
            self.failed_starts = 0
            self.restarts += 1
            return 0.0
        self.failed_starts += 1
        if self.failed_starts >= FAILED_STARTS_MAX and code != SHORTAGE:
            self.is_crash_loop, self.exit_code = True, CRASH_LOOP
            return None
        self.restarts += 1
        return min(BACKOFF_S * 2.0 ** min(self.failed_starts - 1, 9), BACKOFF_S_MAX)


class Init:
    """One program, from its first start to init's own end."""

    def __init__(self, command: list[str], restarter: Restarter) -> None:
        self.command, self.restarter = command, restarter
        self.program = 0  # its pid; 0: it does not run
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
        while True:
            code = self._live_once()
            kill_rest()
            self._wait(0.0)  # for a SIGTERM that came meanwhile
            delay_s = self.restarter.ended(code, time.monotonic())
            how = f"exited with code {code}" if code >= 0 else f"died of signal {-code}"
            if self.restarter.is_crash_loop:
                why = f"{self.command[0]} {how}; its last {FAILED_STARTS_MAX} starts failed"
                say(f"error: {why} [init.crash_loop]")
                with contextlib.suppress(OSError), open(TERMINATION_LOG, "r+") as log:
                    log.write(f"{why}\n")
            elif delay_s is not None:
                say(f"{self.command[0]} {how}; restart {self.restarter.restarts} in {delay_s:g} s")
            end_s = time.monotonic() + (delay_s or 0.0)
            while not self.restarter.is_ending and (left_s := end_s - time.monotonic()) > 0:
                self._wait(left_s)
            if delay_s is None or self.restarter.is_ending:
                return self.restarter.exit_code

    def _live_once(self) -> int:
        """One life of the program: its exit code, negative for a signal."""
        self.restarter.started()
        os.environ[RESTARTS_ENV] = str(self.restarter.restarts)
        path, default = self.command[0], (signal.SIGPIPE,)  # which Python ignores
        try:
            pid = os.posix_spawn(path, self.command, os.environ, setpgroup=0, setsigdef=default)
        except OSError as error:
            say(f"error: {path} cannot be started: {error}")
            return SHORTAGE if error.errno in (errno.EAGAIN, errno.ENOMEM) else 127
        self.program = pid
        due_s = time.monotonic() + TICK_S
        while (code := reap(self.program)) is None:
            self._wait(max(0.0, due_s - time.monotonic()) if self.restarter.is_watching else None)
            late_s = time.monotonic() - due_s
            if late_s >= 0:
                due_s += late_s + TICK_S
                if self.restarter.ticked(late_s, is_blocked(self.program)):
                    say(f"{path} (pid {self.program}) hangs: SIGKILL")
                    os.kill(self.program, signal.SIGKILL)
        self.program = 0
        return code

    def _wait(self, timeout_s: float | None) -> None:
        """Wait for a signal or a message, and handle it."""
        self._poll.poll(None if timeout_s is None else timeout_s * 1000)
        with contextlib.suppress(BlockingIOError):
            for number in os.read(self._wake, 256):
                self.restarter.is_ending |= number in ENDING
                if number != signal.SIGCHLD and self.program:
                    os.kill(self.program, number)  # ours, and not reaped yet
        with contextlib.suppress(BlockingIOError):
            while True:
                message, more, _, _ = self._notify.recvmsg(4096, socket.CMSG_SPACE(12))
                sender = int.from_bytes(more[0][2][:4], sys.byteorder) if more else 0
                if sender == self.program != 0:
                    self.restarter.told(message, time.monotonic())


def reap(program: int = 0) -> int | None:
    """Reap what has ended: the program's exit code if it has, NO_CHILD if no child is left."""
    try:
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == program:
                return os.waitstatus_to_exitcode(ended[1])
    except ChildProcessError:
        return NO_CHILD
    return None


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
    while reap() != NO_CHILD or (is_first and others()):
        with contextlib.suppress(OSError):
            if is_first:
                os.kill(-1, signal.SIGKILL)
            else:
                kill_children()
        if time.monotonic() > end_s:
            say("error: not every process can be killed; ending [init.not_killed]")
            os._exit(CRASH_LOOP)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, KILL_POLL_S_MAX)


def kill_children() -> None:
    """The list may lack one while another is reaped (proc(5)); the caller looks again."""
    with open("/proc/thread-self/children") as stream:
        pids = [int(pid) for pid in stream.read().split()]
    for pid in pids:
        pidfd = os.pidfd_open(pid)  # ours, so its number is its own until we reap it
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def others() -> list[str]:
    """Every other process that is visible."""
    return [name for name in os.listdir("/proc") if name.isdigit() and name != MINE]


def say(line: str) -> None:
    with contextlib.suppress(OSError):
        if select.select((), (2,), (), 0)[1]:  # never wait for the log's reader
            os.write(2, f"understudy-init: {line}\n".encode(errors="replace"))


def main(command: list[str]) -> int:
    """Run `command`, whose first word is a path; die with the parent if that asks for it."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, ctypes.c_ulong(1), 0, 0, 0)
    if (parent := os.environ.pop(PARENT_PID_ENV, None)) is not None:
        libc.prctl(PR_SET_PDEATHSIG, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent):
            return 128 + signal.SIGKILL
    return Init(command, Restarter(os.environ.pop(FIRST_START_ENV, "") == "final")).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
