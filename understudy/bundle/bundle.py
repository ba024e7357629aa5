"""`understudy support-bundle`: diagnostics in one file.

Decides what goes in and how much of it. Each source is collected separately: if it fails or hangs,
its entry is missing, and `contents.txt` says why. So it works with any part of the pod down; what
the parts wrote last is in their state files. `redact.py` removes secrets and prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import fnmatch
import io
import os
import platform
import shlex
import stat
import sys
import tarfile
import time
from collections.abc import Callable, Collection, Coroutine
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from plumbing.errors import UnderstudyError, UsageError
from plumbing.service import procfs
from plumbing.service.metrics import build_info
from plumbing.text import one_line, size, table, to_json
from understudy.bundle import redact
from understudy.doctor import ExaminedPod, examine, look
from understudy.host import descriptors, machine, read
from understudy.schema import DoctorDocument
from understudy.status.gather import gather, past_events

Say = Callable[[str], None]

STDOUT = Path("-")

COMMAND_S = 15.0  # a part may hang: that is a reason for a bundle
LOG_TAIL_BYTES = 1 << 20  # ten thousand lines per container: hours, or a crash loop
FILE_BYTES_MAX = 256 << 10  # state files have a few KiB, the journal of a large model more
FILES_MAX = 128  # of one kind; a pod has a dozen, plus stale ones
ENTRY_BYTES_MAX = 4 << 20  # of other entries: a thousand events of ten parts
BUNDLE_BYTES_MAX = 32 << 20  # before compression: the result fits mail and issue trackers


class Bundle:
    """The entries, up to `BUNDLE_BYTES_MAX`, and the reasons for missing ones."""

    def __init__(self) -> None:
        self.entries: dict[str, bytes] = {}
        self.missing: dict[str, str] = {}

    def add(self, name: str, content: str, bytes_max: int = ENTRY_BYTES_MAX) -> None:
        """Add `content`; if it is too long, its end: the latest matters most."""
        raw = redact.text(content).encode(errors="replace")
        if len(raw) > bytes_max:
            raw = b"(truncated at the beginning)\n" + raw[-bytes_max:]
        if self.size_bytes + len(raw) > BUNDLE_BYTES_MAX:
            self.missing[name] = f"the bundle has reached its limit of {size(BUNDLE_BYTES_MAX)}"
            return
        self.entries[name] = raw

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.entries.values()))

    def contents(self) -> list[str]:
        """What is in it and what is missing, as lines."""
        rows = [(name, size(len(raw))) for name, raw in sorted(self.entries.items())]
        missing = (f"missing: {name}: {why}" for name, why in self.missing.items())
        return [one_line(line) for line in (*table(rows), *missing)]


async def collect(directory: Path, log_dir: Path, output: Path | None, say: Say) -> Path:
    """Write a bundle of the pod in `directory` to `output`, or to a new file in the current
    directory; `say` gets its contents and its path.

    Raises:
        UsageError: `bundle.not_written`.
    """
    name = f"understudy-support-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    path = output or Path.cwd() / f"{name}.tar.gz"
    file = _create(path)
    try:
        with file:
            bundle = await _gather(directory, log_dir)
            contents = bundle.contents()
            bundle.entries["contents.txt"] = "".join(f"{line}\n" for line in contents).encode()
            _write(file, name, bundle.entries)
    except BaseException:
        if path != STDOUT:
            path.unlink(missing_ok=True)  # do not leave half a bundle
        raise
    for line in contents:
        say(line)
    written = "written" if path == STDOUT else f"{path}  {size(path.stat().st_size)}"
    say(f"{written}; review it before you share it")
    return path


async def _gather(directory: Path, log_dir: Path) -> Bundle:
    bundle = Bundle()
    pod: ExaminedPod | None = None

    async def entry(name: str, asked: Coroutine[Any, Any, Any]) -> None:
        try:
            async with asyncio.timeout(COMMAND_S):
                found = await asked
            bundle.add(name, found if isinstance(found, str) else to_json(found, indent=1))
        except TimeoutError:
            bundle.missing[name] = f"timed out after {COMMAND_S:g} s"
        except (UnderstudyError, OSError) as error:
            bundle.missing[name] = str(error)

    async def doctor() -> DoctorDocument:
        nonlocal pod
        pod = await look(directory, os.environ)
        return examine(pod)

    # At the same time: a part that hangs is waited for by each that asks it.
    await asyncio.gather(
        entry("status.json", gather(directory)),
        entry("events.jsonl", _events(directory)),
        entry("doctor.json", doctor()),
    )
    if pod is not None and pod.pool_path:
        with contextlib.suppress(OSError):  # then doctor says why
            bundle.add("pool-file.yaml", _tail(Path(pod.pool_path), FILE_BYTES_MAX))
    bundle.add("machine.json", to_json(machine_facts(), indent=1))
    processes = process_facts(pod.pids if pod is not None else ())
    bundle.add("processes.json", to_json(processes, indent=1))
    _add_files(bundle, "state", directory, "*.json*", FILE_BYTES_MAX)
    _add_files(bundle, "log", log_dir, "*.log*", LOG_TAIL_BYTES)
    if not any(name.startswith("log/") for name in (*bundle.entries, *bundle.missing)):
        found = bundle.missing.get("log", f"no logs in {log_dir}")
        bundle.missing["log"] = f"{found}; pass their directory with --log-dir"
    return bundle


async def _events(directory: Path) -> str:
    found = await asyncio.to_thread(past_events, directory)
    return "".join(f"{to_json(each)}\n" for each in found)


def _add_files(bundle: Bundle, kind: str, folder: Path, pattern: str, bytes_max: int) -> None:
    """Add the end of each matching file; the folder may be missing or not readable."""
    try:
        names = fnmatch.filter(sorted(os.listdir(folder)), pattern)
    except OSError as error:
        bundle.missing[kind] = str(error)
        return
    for name in names[:FILES_MAX]:
        entry = f"{kind}/{one_line(name)}"
        try:
            bundle.add(entry, _tail(folder / name, bytes_max), bytes_max)
        except OSError as error:
            bundle.missing[entry] = str(error)


def _tail(path: Path, bytes_max: int) -> str:
    """The last `bytes_max` bytes of a regular file; opening a pipe must not block."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    with open(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is not a regular file")
        skipped = file.seek(max(0, found.st_size - bytes_max))
        raw = file.read(bytes_max)
    # Half a line may be a secret without its name, so it is dropped.
    _, _, whole_lines = raw.partition(b"\n")
    return (whole_lines if skipped and whole_lines else raw).decode(errors="replace")


def _create(path: Path) -> io.BufferedWriter:
    """Create the file, private, before anything is collected."""
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        return open(os.dup(1) if path == STDOUT else os.open(path, flags, 0o600), "wb")
    except OSError as error:
        raise UsageError(
            "bundle.not_written",
            f"cannot write {path}: {error.strerror}; choose another file with --output, or - for "
            "standard output",
        ) from error


def _write(file: io.BufferedWriter, folder: str, entries: dict[str, bytes]) -> None:
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, raw in sorted(entries.items()):
            about = tarfile.TarInfo(f"{folder}/{name}")
            about.size, about.mode, about.mtime = len(raw), 0o600, int(time.time())
            archive.addfile(about, io.BytesIO(raw))


# --- the machine and the pod's processes: versions, limits, /proc; secrets are redacted

PROCESSES_MAX = 256  # a pod of eight ranks and two engines has some fifty
MACHINE_FILES = (
    *("/proc/version", "/proc/meminfo", "/proc/loadavg", "/proc/uptime", "/proc/self/mountinfo"),
    *("/proc/pressure/memory", "/proc/pressure/cpu", "/proc/sys/fs/file-nr", "/etc/os-release"),
    *("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/cpu.stat"),
)
PROCESS_FILES = ("status", "limits", "cgroup", "oom_score", "oom_score_adj", "wchan", "sched")


def machine_facts() -> dict[str, Any]:
    """Versions, kernel, memory, limits, and this command's environment."""
    return {
        "build": build_info(),
        "machine": machine(),
        "uname": platform.uname()._asdict(),
        "python": sys.version,
        "executable": sys.executable,
        "uid": os.geteuid(),
        "packages": {each.name: each.version for each in metadata.distributions()},
        "environment": redact.environment(os.environ),
        "files": {path: found for path in MACHINE_FILES if (found := read(path))},
    }


def process_facts(pids: Collection[int]) -> list[dict[str, Any]]:
    """What /proc has of each process; one that exits meanwhile is left out."""
    found = []
    for pid in sorted(pids)[:PROCESSES_MAX]:
        words = read(f"/proc/{pid}/cmdline").rstrip("\0").split("\0")
        if not procfs.is_alive(pid):
            continue
        variables = (pair.partition("=") for pair in read(f"/proc/{pid}/environ").split("\0"))
        found.append(
            {
                "pid": pid,
                "name": procfs.name(pid),
                "parent": procfs.parent(pid),
                "command": redact.text(shlex.join(words)),
                "environment": redact.environment({name: value for name, _, value in variables}),
                "rss_bytes": procfs.rss_bytes(pid),
                "descriptors": sum(1 for _ in descriptors(pid)),
                "files": {name: read(f"/proc/{pid}/{name}") for name in PROCESS_FILES},
            }
        )
    return found
