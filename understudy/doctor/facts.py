"""The facts that the checks judge, as data, all of one moment.

Probes fill them in, checks read them; neither knows the other. What could not be found out is None,
or a sentence that says why. Pids are those of this PID namespace, as the kernel reports them for
whoever listens on a socket; a part in another namespace has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from plumbing.part.models import device_of
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
    """A socket in the directory. `pid`: the process that listens on it, None if not visible."""

    name: str
    is_answered: bool
    pid: int | None = None
    mode: int | None = None  # of the file


class SocketListener(Struct, frozen=True):
    """A listening socket of this network namespace whose path is in our directory.

    Containers of one pod share their network, so sockets of other containers are among them,
    whatever their directories are. `directory`: what the path leads to for that process.
    """

    name: str
    process: Process | None = None
    directory: FileId | None = None


class Kernel(Struct, frozen=True):
    release: str
    has_peer_pidfd: bool = True
    has_pidfd_open: bool = True
    clock_source: str | None = None
    has_huge_slabs: bool = True  # it gives huge pages to memory like the memory service's
    shared_huge_pages: str | None = None  # how `shmem_enabled` is set; None: it has no such setting


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
    """`memory_bytes`: what the memory service may use, or this process if there is no memory
    service; `memory_limit`: what sets that limit."""

    memory_bytes: int = 0
    memory_limit: str = ""
    shm_bytes: int | None = None
    termination_log: str = ""
    termination_log_problem: str | None = None
    has_termination_log: bool = False


class PoolFileFacts(Struct, frozen=True):
    """The pool file at `path`, as it is now. `digests`: of its settings, as the pool's status has
    them. `problem`: why there is none."""

    path: str
    file: PoolFile | None = None
    digests: Mapping[str, str] = {}
    problem: str | None = None


class TlsFile(Struct, frozen=True):
    """A file of the gateway's TLS that `variable` of the environment names."""

    variable: str
    path: str
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

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs under which it can be served."""
        return self.instances if self.is_mig else (self.uuid,)


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
    """

    directory: Directory
    view: Mapping[str, Any]
    sockets: Sequence[SocketFile] = ()
    listeners: Sequence[SocketListener] = ()
    kernel: Kernel = field(default_factory=lambda: Kernel("unknown"))
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
    tls_files: Sequence[TlsFile] = ()
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
