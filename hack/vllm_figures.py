"""What a pod of two vLLM engines takes of the machine: memory, an idle standby's CPU, leavings.

Owns the reading of /proc for it. Nothing is asked of the engines but which processes they have:
what an engine says of its own memory is what is to be checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from plumbing.errors import UnderstudyError
from plumbing.service.procfs import descendants
from understudy.drill.part_killer import committed_devices, roots_of
from understudy.host import MEMFD, physical_bytes
from understudy.status.gather import gather, pids_of

# A parked engine is asked once in so long, for each rank, whether it could be woken, and vLLM's
# workers spin for a second after that: so long is watched, no more and no less.
IDLE_S_PER_RANK = 300.0
IDLE_CPU_PERCENT_MAX = 2.0
COUNTED_TWICE = 1.05  # of what is committed; more is more than the rounding of pages
KV_ROOM_BYTES = 8 << 20  # what the kernel may show as one mapping with the addresses of a KV cache
KV_LEAST = 0.9  # of what was asked for: vLLM takes whole blocks for all layers
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Range:
    """One line of /proc/PID/smaps: what is mapped, with how much memory (man 5 proc)."""

    path: str  # "" where it is anonymous
    size_bytes: int
    rss_bytes: int
    pss_bytes: int
    private_bytes: int


@dataclass(frozen=True, slots=True)
class Figures:
    """A pod that is whole and idle. `*_worker_private_bytes`: of all workers of one engine, without
    the KV cache; stock's is None where no stock server was looked at."""

    weights_committed_bytes: int
    weights_physical_bytes: int
    weights_pss_bytes: int
    kv_bytes: int
    standby_kv_resident_bytes: int
    active_kv_resident_bytes: int
    active_pss_bytes: int
    standby_pss_bytes: int
    standby_worker_private_bytes: int
    stock_worker_private_bytes: int | None
    idle_s: float
    standby_cpu_percent: float
    standby_cpu_percent_by_process: Mapping[str, float]

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def problems(self) -> list[str]:
        """What is otherwise than promised."""
        found = []
        limit = COUNTED_TWICE * self.weights_committed_bytes
        for what, size in (
            ("physical memory", self.weights_physical_bytes),
            ("Pss", self.weights_pss_bytes),
        ):
            if not 0 < size <= limit:
                found.append(
                    f"the {what} of the weights is {size} bytes with two engines up, and"
                    f" {self.weights_committed_bytes} are committed"
                )
        stock = self.stock_worker_private_bytes
        spared = stock - self.standby_worker_private_bytes if stock is not None else 0
        # Stock workers have the weights in memory of their own, and ours must not: that difference
        # drowns in everything else where a model is as small as a test's.
        is_visible = self.weights_committed_bytes >= 64 * MIB
        if stock is not None and is_visible and spared < self.weights_committed_bytes // 2:
            found.append(
                f"the standby's workers have {self.standby_worker_private_bytes} bytes of their"
                f" own, and stock ones {stock}: the weights are not shared"
            )
        if self.standby_kv_resident_bytes:
            found.append(f"the standby has {self.standby_kv_resident_bytes} bytes of KV cache")
        if self.standby_cpu_percent > IDLE_CPU_PERCENT_MAX:
            found.append(
                f"the idle standby takes {self.standby_cpu_percent:.1f} % of a core, and"
                f" {IDLE_CPU_PERCENT_MAX:g} % are its share: {self.standby_cpu_percent_by_process}"
            )
        return found


async def look_at(
    directory: Path,
    kv_bytes: int,
    stock_worker_private_bytes: int | None,
    idle_s: float | None = None,
) -> Figures:
    """The figures of the pod in `directory`, which is whole, and idle for the time that it takes:
    `idle_s`, unless given one period of what a parked engine does.

    Raises:
        UnderstudyError: `drill.no_figures`, what is to be measured cannot be found.
    """
    view = await gather(directory)
    engines = {part["engine"]["id"]: part for part in view["engines"]}
    active = engines.pop(view["active"])
    (standby,) = engines.values()
    committed = sum(int(each["committed_bytes"]) for each in committed_devices(view).values())
    roots = roots_of(await pids_of(directory))
    everybody = {pid for root in roots for pid in (root, *descendants(root))}
    slabs = sum(
        each.pss_bytes for pid in everybody for each in mappings(pid) if each.path.startswith(MEMFD)
    )
    idle_s = idle_s or IDLE_S_PER_RANK * len(workers_of(standby))
    cpu = await cpu_percent(tree_of(standby), idle_s)
    return Figures(
        weights_committed_bytes=committed,
        weights_physical_bytes=physical_bytes(everybody),
        weights_pss_bytes=slabs,
        kv_bytes=kv_bytes,
        standby_kv_resident_bytes=kv_resident(workers_of(standby), kv_bytes),
        active_kv_resident_bytes=kv_resident(workers_of(active), kv_bytes),
        active_pss_bytes=pss(active),
        standby_pss_bytes=pss(standby),
        standby_worker_private_bytes=private_bytes(workers_of(standby), kv_bytes),
        stock_worker_private_bytes=stock_worker_private_bytes,
        idle_s=idle_s,
        standby_cpu_percent=round(sum(cpu.values()), 2),
        standby_cpu_percent_by_process=cpu,
    )


def workers_of(engine: Mapping[str, Any]) -> list[int]:
    """The workers' pids, from an engine's status document."""
    pids: Mapping[str, int] = engine["backend"]["pids"]
    return [pid for name, pid in pids.items() if name.startswith("worker")]


def workers_below(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that call themselves vLLM's workers: in a stock server nobody lists them."""
    found = []
    for pid in pids:
        try:
            with open(f"/proc/{pid}/cmdline", encoding="utf-8", errors="replace") as file:
                words = file.read()
        except OSError:
            continue  # it has ended
        if words.startswith("VLLM::Worker"):
            found.append(pid)
    return found


def tree_of(engine: Mapping[str, Any]) -> list[int]:
    pid = int(engine["engine"]["pid"])
    return [pid, *descendants(pid)]


def pss(engine: Mapping[str, Any]) -> int:
    """Proportional memory of the engine's whole tree, supervisor and helpers included."""
    return sum(each.pss_bytes for pid in tree_of(engine) for each in mappings(pid))


def private_bytes(pids: Iterable[int], kv_bytes: int) -> int:
    """What nobody shares with `pids`, without their KV cache."""
    return sum(
        each.private_bytes for pid in pids for each in mappings(pid) if not is_kv(each, kv_bytes)
    )


def kv_resident(pids: Iterable[int], kv_bytes: int) -> int:
    """How much of the KV caches of `pids` is really there; each has one of `kv_bytes`.

    Raises:
        UnderstudyError: `drill.no_figures`, a process has no mapping of that size.
    """
    resident = 0
    for pid in pids:
        ranges = [each for each in mappings(pid) if is_kv(each, kv_bytes)]
        if not ranges:
            raise UnderstudyError(
                "drill.no_figures", f"pid {pid} has no mapping of the size of the KV cache"
            )
        resident += sum(each.rss_bytes for each in ranges)
    return resident


def is_kv(mapping: Range, kv_bytes: int) -> bool:
    is_size = KV_LEAST * kv_bytes <= mapping.size_bytes <= kv_bytes + KV_ROOM_BYTES
    return is_size and not mapping.path


async def cpu_percent(pids: Iterable[int], seconds: float) -> dict[str, float]:
    """Percent of one core that each of `pids` took in the next `seconds`, by pid and name."""
    loop = asyncio.get_running_loop()
    processes = [psutil.Process(pid) for pid in pids]

    def spent_s() -> list[float]:
        return [times.user + times.system for times in (each.cpu_times() for each in processes)]

    began, before = loop.time(), spent_s()
    await asyncio.sleep(seconds)
    took_s = loop.time() - began
    return {
        f"{process.pid} {process.name()}": round(100 * (after - earlier) / took_s, 2)
        for process, earlier, after in zip(processes, before, spent_s(), strict=True)
    }


def mappings(pid: int) -> Iterator[Range]:
    """Every mapping of `pid`; none where it has ended."""
    path, amounts = "", dict[str, int]()
    try:
        with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, rest = line.partition(":")
                if rest.rstrip().endswith(" kB") and " " not in name:
                    amounts[name] = int(rest.split()[0]) * 1024
                elif name == "VmFlags":  # the last line of each
                    yield _mapping(path, amounts)
                    amounts = {}
                elif "-" in name.partition(" ")[0]:  # address, access, offset, device, inode, path
                    fields = line.rstrip("\n").split(None, 5)
                    path = fields[5] if len(fields) == 6 else ""
    except (FileNotFoundError, ProcessLookupError):
        return


def _mapping(path: str, amounts: Mapping[str, int]) -> Range:
    private = amounts.get("Private_Clean", 0) + amounts.get("Private_Dirty", 0)
    return Range(path, amounts["Size"], amounts["Rss"], amounts["Pss"], private)
