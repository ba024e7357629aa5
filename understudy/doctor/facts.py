"""What a check-up knows: facts of one moment, as data.

Probes fill them in, checks read them; neither knows the other. What could not be learnt is None,
or a sentence that says why. A pid is one of this process's PID namespace: the kernel says it of
whoever listens on a socket, so a part that runs in another namespace has none here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

FileId = tuple[int, int]  # device and inode: two paths with the same are one directory


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str = ""

    def __str__(self) -> str:
        return f"pid {self.pid} ({self.name})" if self.name else f"pid {self.pid}"


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory that the parts of a pod share, as this process sees it."""

    path: str
    kind: str = "directory"  # or "missing", or what it is instead
    can_be_made: bool = True
    owner_uid: int = 0
    our_uid: int = 0
    mode: int = 0o700
    identity: FileId | None = None
    filesystem: str = ""  # as mount(8) calls it
    is_mounted: bool = True  # on a file system other than the one that / is on
    flock_problem: str | None = None


@dataclass(frozen=True, slots=True)
class SocketFile:
    """A socket in the directory. `pid` is who listens on it, None if that is not visible."""

    name: str
    is_answered: bool
    pid: int | None = None


@dataclass(frozen=True, slots=True)
class Listener:
    """A socket with a path in our directory on which somebody of this network namespace listens.

    Containers of one pod have one network, so those of other containers are among them, whatever
    their directories are. `directory` is what the path leads to for that process, where visible.
    """

    name: str
    process: Process | None = None
    directory: FileId | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    release: str
    has_peer_pidfd: bool = True
    has_pidfd_open: bool = True
    clock_source: str | None = None


@dataclass(frozen=True, slots=True)
class FdUse:
    """The limit on open descriptors of a process, and how many it has open."""

    process: Process
    limit: int
    hard_limit: int
    count: int = 0


@dataclass(frozen=True, slots=True)
class Port:
    """A port that a pod's part listens on, and who listens on it now."""

    number: int
    what: str
    flag: str
    part: str
    is_taken: bool = False
    owner: Process | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """`memory_bytes` is what this process's control group allows, `memory_limit` who says so."""

    memory_bytes: int = 0
    memory_limit: str = ""
    shm_bytes: int | None = None
    termination_log: str = ""
    termination_log_problem: str | None = None
    has_termination_log: bool = False


@dataclass(frozen=True, slots=True)
class Hold:
    """Device memory that a process has: bytes, or None where the driver does not say."""

    process: Process
    size_bytes: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as NVML knows it; what it does not know of this model is None."""

    uuid: str
    instances: tuple[str, ...] = ()
    is_mig: bool = False
    is_persistent: bool | None = None
    compute_mode: str | None = None  # "default", "exclusive_process", "prohibited", …
    holds: tuple[Hold, ...] = ()

    @property
    def devices(self) -> tuple[str, ...]:
        """The UUIDs under which it can be served."""
        return self.instances if self.is_mig else (self.uuid,)


@dataclass(frozen=True, slots=True)
class Gpus:
    """`problem` says why there is nothing to see; None: NVML answered. `is_broken`: a driver is
    there and does not work, where otherwise there is none."""

    listed: tuple[Gpu, ...] = ()
    driver_version: str = ""
    problem: str | None = None
    is_broken: bool = False


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the checks may ask about.

    `pids` are the pod's processes, as far as they are visible. `view` is the document of
    `understudy status`. `served` are the devices of the pod by its sockets; `named` those that the
    environment names, by the variable. `slabs` are host memory of this pod's weights that
    processes outside of it hold. `packages` are installed versions by name.
    """

    directory: Directory
    view: Mapping[str, Any]
    sockets: Sequence[SocketFile] = ()
    listeners: Sequence[Listener] = ()
    kernel: Kernel = field(default_factory=lambda: Kernel("unknown"))
    limits: Sequence[FdUse] = ()
    ports: Sequence[Port] = ()
    machine: Machine = field(default_factory=Machine)
    gpus: Gpus = field(default_factory=lambda: Gpus(problem="nobody has looked"))
    pids: frozenset[int] = frozenset()
    served: Sequence[str] = ()
    named: Mapping[str, Sequence[str]] = field(default_factory=dict)
    slabs: Sequence[Hold] = ()
    mps: str | None = None  # what speaks for the Multi-Process Service
    packages: Mapping[str, str] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)

    def answered(self) -> list[SocketFile]:
        """The sockets of the directory that somebody listens on."""
        return [each for each in self.sockets if each.is_answered]

    def is_hidden(self) -> bool:
        """Whether some part of the pod runs in a PID namespace that cannot be seen from here."""
        return any(each.pid is None for each in self.answered())

    def gpus_served(self) -> list[str]:
        """The pod's devices that are GPUs: HOST-0 is none."""
        return [each for each in self.served if each.startswith(("GPU-", "MIG-"))]
