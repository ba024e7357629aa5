"""The processes of one incarnation: started, watched one by one, killed and reaped together.

Owns pidfds, lifelines and the proof that no process is left: orphans of the tree become children of
the supervisor, which is PID 1 or a child subreaper and starts nothing but backends, so `waitpid`
returning ECHILD means that the whole tree is gone, whatever it forked. Must not know what a death
means for the engine.

The surprising thing: not every process must live, since a backend that starts may run short-lived
programs. Those that must are the main process, those that registered, and everything alive at the
check for standby. Their first death is reported twice: to `on_dying` when a lifeline shows that it
begins, so that the others are killed while the kernel still frees memory, and then to `on_death`.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from engine.lifeline import LifelineWatch
from engine.messages import Counts
from plumbing.errors import InvariantError, UnderstudyError, UsageError
from plumbing.service import procfs
from plumbing.service.signals import blocked_in_children
from plumbing.wire.fds import OwnedFd

MAIN = "main"

# Programs of a backend's tree that never open a device and hold no witness, by a part of their
# command line: Python's multiprocessing starts one that unlinks shared memory after a crash.
HELPERS = ("multiprocessing.resource_tracker",)

# Errors of execve(2) about the program and its arguments: the next launch would get them, too.
NOT_A_PROGRAM = (
    *(errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR, errno.ENOEXEC),
    *(errno.ELOOP, errno.ENAMETOOLONG, errno.E2BIG, errno.EINVAL),
)

# While a tree dies, orphans that no pidfd has announced are looked for: immediately at first, since
# a takeover waits, then less often, since a tree with much memory takes its time.
SWEEP_S_MIN = 0.001
SWEEP_S_MAX = 0.020

DEPTH_MAX = 64  # deeper than any process tree; an end should /proc change during the walk


@dataclass
class _Process:
    pidfd: OwnedFd
    name: str
    must_live: bool
    lifeline: LifelineWatch | None = None


class Tree:
    """One backend's processes. `on_dying` and `on_death` are called for the first death that
    matters, the former only where a lifeline announced it; `on_gone` once, when none is left after
    `kill`; all on the loop."""

    def __init__(
        self,
        on_dying: Callable[[str], None],
        on_death: Callable[[ProcessDeath], None],
        on_gone: Callable[[], None],
    ) -> None:
        self._on_dying = on_dying
        self._on_death = on_death
        self._on_gone = on_gone
        self._loop = asyncio.get_running_loop()
        self._processes: dict[int, _Process] = {}
        self._main: subprocess.Popen[bytes] | None = None
        self._codes: dict[int, int] = {}
        self._sweep: asyncio.TimerHandle | None = None
        self._sweep_s = SWEEP_S_MIN
        self._is_dying = False
        self._announced: int | None = None  # dying by its lifeline, and not yet reported dead
        self.is_gone = False

    # ------------------------------------------------------------------ starting and watching

    def start(
        self, command: Sequence[str], environ: Mapping[str, str], stdin: int, lend: Sequence[int]
    ) -> None:
        """Start the main process in a session of its own, with `stdin` and the descriptors `lend`.

        SIGTERM and SIGINT reach no process of the tree: where a host signals all of them at once,
        the supervisor decides when streams end. It ends the tree with SIGKILL.

        Raises:
            UsageError: `engine.cannot_start`, there is no such program.
            OSError: there is no descriptor, process or memory for it at present.
        """
        try:
            with blocked_in_children():
                self._main = subprocess.Popen(
                    command, stdin=stdin, env=dict(environ), pass_fds=lend, start_new_session=True
                )
        except OSError as error:
            if error.errno not in NOT_A_PROGRAM:
                raise
            raise UsageError(
                "engine.cannot_start",
                f"cannot start the backend {command[0]}: {error.strerror}; check --backend",
                command=list(command),
            ) from error
        self._watch(self._main.pid, MAIN, must_live=True)

    def register(self, name: str, pid: int, lifeline: int | None = None) -> None:
        """From now on `pid` is known as `name` and must live. `lifeline` is lent.

        Raises:
            UnderstudyError: `engine.not_of_this_tree`.
            ProtocolError: this is not a lifeline.
            OSError: there is no descriptor or memory to watch it.
        """
        if not _is_ours(pid):
            raise UnderstudyError(
                "engine.not_of_this_tree",
                f"pid {pid} is no descendant of this engine's supervisor (pid {os.getpid()})",
                pid=pid,
            )
        self._watch(pid, name, must_live=True)
        process = self._processes.get(pid)
        if lifeline is not None and process is not None and process.lifeline is None:
            process.lifeline = LifelineWatch(lifeline, functools.partial(self._dies, pid))

    def scan(self) -> None:
        """Reap orphans and look for new processes.

        Raises:
            OSError: there is no descriptor or memory to look.
        """
        if not self.is_gone:
            self._collect()
            for pid in procfs.descendants(os.getpid()):
                self._watch(pid, procfs.name(pid), must_live=False)

    def counts(self) -> Counts:
        """The sums over its processes."""
        found = [each.lifeline.counts for each in self._processes.values() if each.lifeline]
        sums = (sum(getattr(each, name) for each in found) for name, *_ in Counts._fields_)
        return Counts(*sums)

    def pids(self) -> dict[str, int]:
        """The processes that must live, by name."""
        return {each.name: pid for pid, each in self._processes.items() if each.must_live}

    def stopped(self) -> list[str]:
        """Those that must live and that a signal has stopped, for a sentence."""
        named = self.pids().items()
        return [f"{name} (pid {pid})" for name, pid in named if procfs.is_stopped(pid)]

    def everyone(self) -> list[int]:
        """Every living process of the tree that has been seen."""
        return list(self._processes)

    def check_witness(self, dev: int, ino: int) -> str | None:
        """None if every process of the tree holds the witness on descriptor 0, else which does not.

        Every process alive now must live from here on.

        Raises:
            OSError: there is no descriptor or memory to look, which proves nothing.
        """
        self.scan()
        for pid in procfs.descendants(os.getpid()):
            if not procfs.is_alive(pid) or _is_helper(pid):
                continue
            if not procfs.flock_held(pid, 0, dev, ino):
                return (
                    f"{procfs.name(pid) or 'a process'} (pid {pid}) of the backend does not hold"
                    " the witness on descriptor 0, so its death could not be proven"
                )
            if pid in self._processes:
                self._processes[pid].must_live = True
        return None

    def _watch(self, pid: int, name: str, *, must_live: bool) -> None:
        known = self._processes.get(pid)
        if known is not None:
            if must_live:
                known.name, known.must_live = name, True
            return
        try:
            pidfd = OwnedFd(os.pidfd_open(pid))
        except ProcessLookupError:
            return
        with contextlib.ExitStack() as undo:
            undo.callback(pidfd.close)
            if not _is_ours(pid):  # it may have been reused between the look and the open
                return
            undo.pop_all()
        self._processes[pid] = _Process(pidfd, name, must_live)
        self._loop.add_reader(pidfd.fileno(), self._ended, pid)

    # ------------------------------------------------------------------ killing and reaping

    def signal_one(self, pid: int, signum: signal.Signals) -> None:
        """Send `signum` to one watched process, if it is still alive."""
        process = self._processes.get(pid)
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(process.pidfd.fileno(), signum)

    def kill(self) -> None:
        """SIGKILL to every process, again and again until none is left, then `on_gone`."""
        if self.is_gone:
            raise InvariantError("this tree was reaped already")
        self._is_dying = True
        self._kill_all()

    def _kill_all(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        if self._collect():
            self._finish()
            return
        for pid in list(self._processes):
            self.signal_one(pid, signal.SIGKILL)
        for pid in self._unwatched():
            os.kill(pid, signal.SIGKILL)
        self._sweep = self._loop.call_later(self._sweep_s, self._kill_all)
        self._sweep_s = min(2 * self._sweep_s, SWEEP_S_MAX)

    def _unwatched(self) -> set[int]:
        """Our own children that no pidfd watches; their pids are theirs until we reap them. Orphans
        become our children, so in the end these are everyone. (To look for all descendants at every
        thread of vLLM's takes 2 ms.)"""
        with contextlib.suppress(OSError):  # no memory to look: the next sweep does
            return set(procfs.children(os.getpid())) - self._processes.keys()
        return set()

    def _collect(self) -> bool:
        """Reap every child that has ended; True if there is no child left, dead or alive."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return True
            if pid == 0:
                return False
            code = os.waitstatus_to_exitcode(status)
            if pid in self._processes:  # only codes of watched processes are kept
                self._codes[pid] = code
            if self._main is not None and pid == self._main.pid:
                # Popen must not wait for it, nor warn that it was not waited for.
                self._main.returncode = code

    def _finish(self) -> None:
        self.is_gone = True
        for pid, process in self._processes.items():
            self._forget(process)
            self._explain(pid, process.name)
        self._processes.clear()
        self._loop.call_soon(self._on_gone)

    # ------------------------------------------------------------------ deaths

    def _dies(self, pid: int) -> None:
        process = self._processes[pid]  # or its lifeline would be closed
        if not self._is_dying:
            self._is_dying = True  # `kill` follows, and further deaths are its doing
            self._announced = pid
            self._on_dying(f"{process.name} (pid {pid}) is dying")

    def _ended(self, pid: int) -> None:
        is_last = self._collect()
        process = self._processes.pop(pid)
        self._forget(process)
        self._explain(pid, process.name)
        if self._is_dying:
            if is_last:
                self._kill_all()
            return
        if process.must_live:
            self._is_dying = True
            code = self._codes.pop(pid, None)
            self._on_death(self._first_death() or ProcessDeath(pid, process.name, code))

    def _explain(self, pid: int, name: str) -> None:
        """The end of the death that a lifeline announced."""
        if pid == self._announced:
            self._announced = None
            self._on_death(ProcessDeath(pid, name, self._codes.pop(pid, None)))

    def _first_death(self) -> ProcessDeath | None:
        """The main process's, if it has ended too: its children die with it, so it is the cause."""
        main = self._main
        if main is None or main.pid not in self._codes or main.pid not in self._processes:
            return None
        return ProcessDeath(main.pid, self._processes[main.pid].name, self._codes[main.pid])

    def _forget(self, process: _Process) -> None:
        self._loop.remove_reader(process.pidfd.fileno())
        process.pidfd.close()
        if process.lifeline is not None:
            process.lifeline.close()


def _is_ours(pid: int) -> bool:
    """Whether `pid` is below this process. Parents only ever change towards us."""
    for _ in range(DEPTH_MAX):
        ancestor = procfs.parent(pid)
        if not ancestor or ancestor == os.getpid():
            return bool(ancestor)
        pid = ancestor
    return False


def _is_helper(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as stream:
            line = stream.read().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return False
    return any(helper in line for helper in HELPERS)


@dataclass(frozen=True, slots=True)
class ProcessDeath:
    """A process that must live has ended. `code`: its exit code, or the signal that ended it,
    negative; None where it was not our child."""

    pid: int
    name: str
    code: int | None

    @property
    def signal(self) -> int | None:
        return -self.code if self.code is not None and self.code < 0 else None

    def describe(self) -> str:
        """`http (pid 12) was killed by SIGKILL`."""
        if self.code is None:
            how = "has ended"
        elif self.code < 0:
            how = f"was killed by {signal.Signals(-self.code).name}"
        else:
            how = f"exited with code {self.code}"
        return f"{self.name} (pid {self.pid}) {how}"
