"""What the kernel knows of processes: trees, memory, open files, flocks, and CPU pressure.

Every answer from /proc is a moment old: "gone" is an answer here, never an error, and a process
that /proc hides (another PID namespace, another uid) is left out. A pid does not prove identity:
where that matters, use a pidfd. Not psutil: it would cost every supervisor and the lock server
1.4 MiB, and has no list of children without gaps, no spent processes, no flocks.

The surprising thing: a process that has no descriptor or memory left to look cannot tell whether
another one is there. That is raised as an OSError; only what is merely shown to users (`name`,
`rss_bytes`, `holders_of`, `listener_pid`) is left out instead.

`CpuPressure` is the share of time in which a process that could run had to wait for a CPU, from the
kernel's pressure stall information (Documentation/accounting/psi.rst): that of this process's own
control group, which sees its CPU limit too, otherwise the machine's, otherwise None. It never
raises and never blocks: it keeps the file open, so a process without descriptors can read it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Sequence

from plumbing.errors import is_shortage

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
READINGS_MAX = 8  # of a list that changes all the time, before every process is looked at
TCP_LISTEN = "0A"  # include/net/tcp_states.h


def pids() -> Iterator[int]:
    """Every process visible here."""
    for name in os.listdir("/proc"):
        if name.isdigit():
            yield int(name)


def is_alive(pid: int) -> bool:
    """Whether `pid` runs; a zombie does not."""
    fields = _stat(pid)
    return fields is not None and fields[0] not in "ZX"


def is_spent(pid: int) -> bool:
    """Whether no thread of `pid` has memory or a descriptor any more.

    A dying process has released both before the kernel reports its end; on a busy machine it waits
    for a core in between, for tens of milliseconds. What is hidden counts as present: only root
    sees that a process without memory has no descriptors either.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError as error:
        raise_shortage(error)
        return True
    return all(_is_spent_thread(f"/proc/{pid}/task/{thread}") for thread in threads)


def name(pid: int) -> str:
    """The command name of `pid`, "" if it is gone."""
    return _shown(f"/proc/{pid}/comm").strip()


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped `pid`; one that a debugger holds is not."""
    fields = _stat(pid)
    return fields is not None and fields[0] == "T"


def halted(pid: int) -> str | None:
    """What keeps `pid` from running, in one word, where it shows; None if nothing does.

    Under a cgroup v1 freezer a process is in state D, and a SIGKILL waits until it is thawed.
    """
    with contextlib.suppress(OSError):
        fields = _stat(pid)
        if fields is not None and fields[0] in "Tt":
            return "stopped"
        if fields is not None and _is_frozen(pid):
            return "frozen"
        if fields is not None and fields[0] == "D":
            return "uninterruptible"
    return None


def _is_frozen(pid: int) -> bool:
    """Whether the freezer of a cgroup that is mounted here, of either version, has frozen `pid`."""
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "freezer" in controllers.split(","):
            if _read(f"/sys/fs/cgroup/freezer{path}/freezer.state").strip() == "FROZEN":
                return True
        elif not controllers and "frozen 1" in _read(f"/sys/fs/cgroup{path}/cgroup.events"):
            return True
    return False


def parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def rss_bytes(pid: int) -> int | None:
    """Resident memory of `pid`."""
    fields = _shown(f"/proc/{pid}/statm").split()
    return int(fields[1]) * PAGE_BYTES if len(fields) > 1 else None


def private_bytes(pid: int) -> int | None:
    """Resident memory of `pid` that no file or memfd is behind."""
    fields = _shown(f"/proc/{pid}/statm").split()
    return (int(fields[1]) - int(fields[2])) * PAGE_BYTES if len(fields) > 2 else None


def children(pid: int) -> list[int]:
    """The processes whose parent is `pid`, zombies included; no living one is missed.

    The kernel's list skips a process when another is reaped while it is read (proc(5)). That
    other one was in the list and is not in the next, so two equal readings have missed none.
    """
    last = _children_once(pid)
    for _ in range(READINGS_MAX):
        again = _children_once(pid)
        if again is not None and again == last:
            return again
        last = again
    return [each for each in pids() if parent(each) == pid]


def descendants(pid: int) -> list[int]:
    """The whole tree under `pid`, parents before children, without `pid` itself."""
    found: list[int] = []
    seen = {pid}
    pending = [pid]
    while pending:
        for child in children(pending.pop()):
            if child not in seen:
                seen.add(child)
                found.append(child)
                pending.append(child)
    return found


def holders_of(dev: int, ino: int) -> list[int]:
    """The processes that have the file (st_dev, st_ino) open, where they are visible."""
    with contextlib.suppress(OSError):
        return [pid for pid in pids() if any(_is_file(pid, fd, dev, ino) for fd in fds(pid))]
    return []


def flock_held(pid: int, fd: int, dev: int | None = None, ino: int | None = None) -> bool:
    """Whether descriptor `fd` of `pid` carries a flock (and is that file, where one is given)."""
    if dev is not None and ino is not None and not _is_file(pid, fd, dev, ino):
        return False
    lines = _read(f"/proc/{pid}/fdinfo/{fd}").splitlines()
    return any(line.startswith("lock:") and "FLOCK" in line.split() for line in lines)


def holds_flock(pid: int, dev: int, ino: int) -> bool:
    """Whether `pid` has a flock on the file (st_dev, st_ino), on whichever descriptor."""
    return any(flock_held(pid, fd, dev, ino) for fd in fds(pid))


def listener_pid(port: int) -> int | None:
    """The process that listens on TCP `port` here, if it is visible."""
    inodes = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _shown(table).splitlines()[1:]:
            fields = line.split()
            if fields[3] == TCP_LISTEN and int(fields[1].rpartition(":")[2], 16) == port:
                inodes.add(fields[9])
    return next(iter(owners_of(inodes).values()), None)


def owners_of(inodes: Collection[str]) -> dict[str, int]:
    """A process that has each of these sockets open, of those that are visible."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError):
        for pid in pids() if inodes else ():
            for fd in fds(pid):
                with contextlib.suppress(OSError):  # closed meanwhile
                    kind, _, inode = os.readlink(f"/proc/{pid}/fd/{fd}").rstrip("]").partition(":[")
                    if kind == "socket" and inode in inodes:
                        found.setdefault(inode, pid)
    return found


def raise_shortage(error: OSError) -> None:
    """Raise `error` unless it means that what was looked at is gone or hidden."""
    if is_shortage(error):
        raise error


def _children_once(pid: int) -> list[int] | None:
    """One reading; None where the kernel has no such list (CONFIG_PROC_CHILDREN)."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children") as stream:
                found += [int(child) for child in stream.read().split()]
    except FileNotFoundError:
        # A thread that ended leaves its children to another, a process to another process.
        return None if os.path.exists(f"/proc/{pid}") else []
    except OSError as error:
        raise_shortage(error)
        return []
    return found


def _is_spent_thread(path: str) -> bool:
    try:
        with open(f"{path}/statm") as stream:
            has_memory = not stream.read().startswith("0 ")
        return not has_memory and not os.listdir(f"{path}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return True  # it has ended since
    except OSError:
        return False


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/pid/stat from the third (state) on: the name may hold anything."""
    text = _read(f"/proc/{pid}/stat")
    return text.rpartition(")")[2].split() if text else None


def fds(pid: int) -> list[int]:
    """The open descriptors of `pid`."""
    try:
        return [int(name) for name in os.listdir(f"/proc/{pid}/fd")]
    except OSError as error:
        raise_shortage(error)
        return []


def _is_file(pid: int, fd: int, dev: int, ino: int) -> bool:
    try:
        status = os.stat(f"/proc/{pid}/fd/{fd}")
    except OSError as error:
        raise_shortage(error)
        return False
    return (status.st_dev, status.st_ino) == (dev, ino)


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError as error:
        raise_shortage(error)
        return ""


def _shown(path: str) -> str:
    """As `_read`, for what is only shown."""
    with contextlib.suppress(OSError):
        return _read(path)
    return ""


CGROUP_ROOTS = ("/sys/fs/cgroup", "/sys/fs/cgroup/unified")  # the second: beside version 1
MACHINE = "/proc/pressure/cpu"
FILE_BYTES_MAX = 4096
WINDOW_MS = 2_000.0  # of our own measurement, which sees at once that a machine has become busy
_SOME = re.compile(rb"^some avg10=([\d.]+) .*\btotal=(\d+)", re.MULTILINE)


class CpuPressure:
    """The pressure of the last seconds: the larger one of the last window's and the kernel's own
    average of ten seconds, which remembers it for longer than any budget that it stretches."""

    def __init__(self, paths: Sequence[str] | None = None) -> None:
        """`paths`: candidates, the best one first."""
        self.share: float | None = None  # 0 to 1; None: unknown
        self._fd = -1
        self._began: tuple[float, int] | None = None  # of the window: when, and the total then
        self._of_window = 0.0  # the last one's share
        for path in candidates() if paths is None else paths:
            if self._open(path):
                break

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def sample(self, now_ms: float) -> float | None:
        """The pressure, once a window has passed."""
        found = self._read()
        if found is None:
            self.share = self._began = None
            return None
        average, total_us = found
        began_ms, began_us = self._began or (now_ms, total_us)
        if self._began is None or total_us < began_us:  # or a counter that began again
            self._began = (now_ms, total_us)
        elif now_ms - began_ms >= WINDOW_MS:
            self._of_window = min(1.0, (total_us - began_us) / 1000 / (now_ms - began_ms))
            self._began = (now_ms, total_us)
        self.share = max(self._of_window, average)
        return self.share

    def _open(self, path: str) -> bool:
        with contextlib.suppress(OSError):
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if self._read() is not None:
                return True
        self.close()
        return False

    def _read(self) -> tuple[float, int] | None:
        """The average as a share, and the total in microseconds."""
        try:
            found = _SOME.search(os.pread(self._fd, FILE_BYTES_MAX, 0))
        except OSError:  # the kernel was started without it (psi=0), or the control group is gone
            return None
        return (float(found[1]) / 100, int(found[2])) if found else None


def candidates(membership: str = "/proc/self/cgroup") -> list[str]:
    """Where this process's pressure may be found, the best place first."""
    own: list[str] = []
    with contextlib.suppress(OSError, UnicodeDecodeError), open(membership) as lines:
        paths = [line.rstrip("\n")[3:] for line in lines if line.startswith("0::/")]
        own = [f"{root}{path}/cpu.pressure" for path in paths for root in CGROUP_ROOTS]
    return [*(os.path.normpath(path) for path in own), MACHINE]
