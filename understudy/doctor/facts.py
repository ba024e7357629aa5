"""What the checks of `understudy doctor` judge, data about one moment, and what they find.

`probe.py` fills it in. None, or a sentence that says why, stands for what could not be found out.
Pids are those of this PID namespace, as the kernel reports them for the process that listens on a
socket; a part in another namespace has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from plumbing.pod.models import device_of
from pool.settings import PoolFile

FileId = tuple[int, int]  # device and inode: two paths with the same are one directory
GMS, ENGINE = "gms_", "engine_"  # how the names of their sockets start


class Process(Struct, frozen=True):
    pid: int
    name: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})" if self.name else f"pid {self.pid}"


class Directory(Struct, frozen=True):
    """The directory that the parts of a pod share, as this process sees it."""

    path: str
    kind: str = "directory"  # or "missing", or what it is instead
    can_be_made: bool = True
    owner_uid: int = 0
    our_uid: int = 0
    mode: int = 0o700
    identity: FileId | None = None
    filesystem: str = ""  # as mount(8) calls it
    is_mounted: bool = True  # on another file system than /
    flock_problem: str | None = None


class SocketFile(Struct, frozen=True):
    """A socket in the directory. `pid`: its listener, None if not visible; `mode`: of the file."""

    name: str
    is_answered: bool
    pid: int | None = None
    mode: int | None = None


class SocketListener(Struct, frozen=True):
    """A listening socket of this network namespace whose path is in our directory.

    Containers of one pod share their network, so the sockets of all of them are listed, whatever
    their directories are. `directory`: what the path leads to for that process.
    """

    name: str
    process: Process | None = None
    directory: FileId | None = None

    def __str__(self) -> str:
        return str(self.process or "a process that is not visible here")


class FdUse(Struct, frozen=True):
    """The limit on open descriptors of a process, and how many it has open."""

    process: Process
    limit: int
    hard_limit: int
    count: int = 0


class Port(Struct, frozen=True):
    """A port that a part of the pod listens on, and the process that has it now."""

    number: int
    what: str
    flag: str
    part: str
    is_taken: bool = False
    owner: Process | None = None


class MachineFacts(Struct, frozen=True):
    """The kernel and the memory. `memory_bytes`: what the memory service may use, or this process
    if there is none; `memory_limit`: what sets that limit."""

    release: str = "unknown"
    has_peer_pidfd: bool = True
    has_pidfd_open: bool = True
    clock_source: str | None = None
    has_huge_slabs: bool = True  # it gives huge pages to memory like the memory service's
    shared_huge_pages: str | None = None  # how `shmem_enabled` is set; None: no such setting
    memory_bytes: int = 0
    memory_limit: str = ""
    shm_bytes: int | None = None
    termination_log: str | None = None  # None: there is none
    termination_log_problem: str | None = None


class PoolFileFacts(Struct, frozen=True):
    """The pool file at `path`, as it is now. `digests`: of its settings, as the pool's status has
    them. `problem`: why there is none."""

    path: str
    file: PoolFile | None = None
    digests: Mapping[str, str] = {}
    problem: str | None = None


class HeldMemory(Struct, frozen=True):
    """Memory that a process holds: bytes, or None where the driver does not report it."""

    process: Process
    size_bytes: int | None


class GpuFacts(Struct, frozen=True):
    """One GPU as NVML describes it; None is what it does not support for this model."""

    uuid: str
    instances: tuple[str, ...] = ()
    is_mig: bool = False
    is_persistent: bool | None = None
    compute_mode: str | None = None  # "default", "exclusive_process", "prohibited", …
    holds: tuple[HeldMemory, ...] = ()


class Gpus(Struct, frozen=True):
    """`problem`: why no GPU can be seen; None: NVML answered. `is_broken`: a driver is installed
    and does not work."""

    listed: tuple[GpuFacts, ...] = ()
    driver_version: str = ""
    problem: str | None = None
    is_broken: bool = False


class PodFacts(Struct, frozen=True):
    """Everything that the checks may look at.

    `pids`: the pod's visible processes. `view`: the document of `understudy status`. `served`: the
    pod's devices, by its sockets; `named`: those in the environment, by variable. `slabs`: host
    memory of this pod's weights that processes outside of it hold. `packages`: installed versions.
    `tls_files`: why each file that the environment names (`VARIABLE is PATH`) cannot be read.
    """

    directory: Directory
    view: Mapping[str, Any]
    sockets: Sequence[SocketFile] = ()
    listeners: Sequence[SocketListener] = ()
    limits: Sequence[FdUse] = ()
    ports: Sequence[Port] = ()
    machine: MachineFacts = field(default_factory=MachineFacts)
    gpus: Gpus = field(default_factory=lambda: Gpus(problem="not probed"))
    pids: frozenset[int] = frozenset()
    served: Sequence[str] = ()
    named: Mapping[str, Sequence[str]] = {}
    slabs: Sequence[HeldMemory] = ()
    mps: str | None = None  # evidence of the Multi-Process Service
    packages: Mapping[str, str] = {}
    environ: Mapping[str, str] = {}
    tls_files: Mapping[str, str | None] = {}
    pool_file: PoolFileFacts | None = None  # None: it is not known where one is

    def answered(self) -> list[SocketFile]:
        """The sockets of the directory that have a listener."""
        return [each for each in self.sockets if each.is_answered]

    def is_hidden(self, prefix: str = "") -> bool:
        """Whether a part of the pod, one whose socket's name starts with `prefix`, runs in a PID
        namespace that is not visible here: in another container, with limits of its own."""
        return any(each.pid is None for each in self.answered() if each.name.startswith(prefix))

    def gpus_served(self) -> list[str]:
        """The pod's devices that are GPUs; HOST-0 is not one."""
        devices = dict.fromkeys(map(device_of, self.served))  # a pool serves each model's apart
        return [each for each in devices if each.startswith(("GPU-", "MIG-"))]


class FindingStatus(StrEnum):
    """The outcome of a check, most serious first."""

    FAIL = "fail"  # the pod, or its next failover, does not work
    WARN = "warn"  # it works, with a risk
    PASS = "pass"
    SKIP = "skip"  # cannot be checked here


class Finding(Struct, frozen=True):
    """What a check found, in a sentence, and how to fix it (what to type, or what to change)."""

    status: FindingStatus
    found: str
    fix: str = ""


def passed(found: str) -> Finding:
    return Finding(FindingStatus.PASS, found)


def warned(found: str, fix: str) -> Finding:
    return Finding(FindingStatus.WARN, found, fix)


def failed(found: str, fix: str) -> Finding:
    return Finding(FindingStatus.FAIL, found, fix)


def skipped(why: str) -> Finding:
    return Finding(FindingStatus.SKIP, why)
