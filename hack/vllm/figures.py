"""What a pod of two vLLM engines takes of the machine: memory, and an idle standby's CPU.

Owns the reading of /proc for it. The engines only name their processes: their own figures of memory
are what is checked here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from plumbing.errors import UnderstudyError
from plumbing.pod.paths import KV_SLAB_PREFIX, SLAB_PREFIX
from plumbing.service.procfs import descendants, parent
from understudy.status.gather import engine_parts, gather, memory_parts, pids_of

# A parked engine is checked once in this time for each rank, and vLLM's workers spin for a second
# after that: the CPU is measured over exactly one period.
IDLE_S_PER_RANK = 300.0
IDLE_CPU_PERCENT_MAX = 2.0
COUNTED_TWICE = 1.05  # of the committed bytes; more cannot be the rounding of pages
KV_ROOM_BYTES = 8 << 20  # what the kernel may merge with the mapping of a KV cache
KV_LEAST = 0.9  # of the requested size: vLLM takes whole blocks for all layers
MIB = 1 << 20
MEMFD = f"/memfd:{SLAB_PREFIX}"  # how /proc names the slabs of weights,
MEMFD_KV = f"/memfd:{KV_SLAB_PREFIX}"  # and those of a KV pool
Figures = dict[str, Any]


def problems_of(found: Figures) -> list[str]:
    """Promises that these figures break."""
    committed = found["weights_committed_bytes"]
    problems, used = [], found["weights_pss_bytes"]
    if not 0 < used <= COUNTED_TWICE * committed:
        problems.append(
            f"the weights take {used} bytes with two engines up, and {committed} are committed"
        )
    stock, ours = found["stock_worker_private_bytes"], found["standby_worker_private_bytes"]
    # Stock workers have private weights, and ours must not. With a model as small as a test's, that
    # difference is lost in the rest.
    if stock is not None and committed >= 64 * MIB and stock - ours < committed // 2:
        problems.append(
            f"the standby's workers have {ours} private bytes, and stock ones {stock}: the weights"
            " are not shared"
        )
    if found["standby_kv_resident_bytes"]:
        problems.append(f"the standby has {found['standby_kv_resident_bytes']} bytes of KV cache")
    is_whole_period = found["idle_s"] >= IDLE_S_PER_RANK  # in less, one check weighs too much
    if is_whole_period and found["standby_cpu_percent"] > IDLE_CPU_PERCENT_MAX:
        problems.append(
            f"the idle standby takes {found['standby_cpu_percent']:.1f} % of a core, more than"
            f" {IDLE_CPU_PERCENT_MAX:g} %: {found['standby_cpu_percent_by_process']}"
        )
    return problems


async def look_at(
    directory: Path,
    kv_bytes: int,
    stock_worker_private_bytes: int | None,
    idle_s: float | None = None,
) -> Figures:
    """The figures of the pod in `directory`, which must be whole and idle for `idle_s` (by default
    one period of a parked engine's check). `*_worker_private_bytes`: of all workers of one engine,
    without the KV cache; stock's is None if no stock server was measured.

    Raises:
        UnderstudyError: `drill.no_figures`, a KV cache cannot be found.
    """
    view = await gather(directory)
    engines = {part["engine"]["id"]: part for part in view["engines"]}
    active = engines.pop(view["active"])
    (standby,) = engines.values()
    committed = sum(int(each.get("committed_bytes") or 0) for each in view["gms"])
    servers = (await pids_of(memory_parts(directory))).values()
    supervisors = (await pids_of(engine_parts(directory))).values()
    roots = {*supervisors, *filter(None, map(parent, servers))}
    everybody = {pid for root in roots for pid in (root, *descendants(root))}
    slabs = sum(
        each.pss for pid in everybody for each in mappings(pid) if each.path.startswith(MEMFD)
    )
    idle_s = idle_s or IDLE_S_PER_RANK * len(workers_of(standby))
    cpu = await cpu_percent(tree_of(standby), idle_s)
    return {
        "weights_committed_bytes": committed,
        "weights_pss_bytes": slabs,
        "kv_bytes": kv_bytes,
        "standby_kv_resident_bytes": kv_resident(workers_of(standby), kv_bytes),
        "active_kv_resident_bytes": kv_resident(workers_of(active), kv_bytes),
        "active_pss_bytes": pss(active),
        "standby_pss_bytes": pss(standby),
        "standby_worker_private_bytes": private_bytes(workers_of(standby), kv_bytes),
        "stock_worker_private_bytes": stock_worker_private_bytes,
        "idle_s": idle_s,
        "standby_cpu_percent": round(sum(cpu.values()), 2),
        "standby_cpu_percent_by_process": cpu,
    }


def workers_of(engine: Mapping[str, Any]) -> list[int]:
    """The workers' pids, from an engine's status document."""
    pids: Mapping[str, int] = engine["backend"]["pids"]
    return [pid for name, pid in pids.items() if name.startswith("worker")]


def workers_below(pids: Iterable[int]) -> list[int]:
    """Those of `pids` that are vLLM's workers by their title: a stock server does not list them."""
    wanted, found = set(pids), psutil.process_iter(["cmdline"])
    words = {each.pid: " ".join(each.info["cmdline"] or ()) for each in found}
    return [pid for pid in wanted & words.keys() if words[pid].startswith("VLLM::Worker")]


def tree_of(engine: Mapping[str, Any]) -> list[int]:
    pid = int(engine["engine"]["pid"])
    return [pid, *descendants(pid)]


def pss(engine: Mapping[str, Any]) -> int:
    """Proportional memory of the engine's whole tree, supervisor and helpers included."""
    return sum(each.pss for pid in tree_of(engine) for each in mappings(pid))


def private_bytes(pids: Iterable[int], kv_bytes: int) -> int:
    """Private memory of `pids`, without their KV cache."""
    return sum(
        each.private_clean + each.private_dirty
        for pid in pids
        for each in mappings(pid)
        if not is_kv(each, kv_bytes)
    )


def kv_resident(pids: Iterable[int], kv_bytes: int) -> int:
    """Resident memory of the KV caches of `pids`; each has one of `kv_bytes`.

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
        resident += sum(each.rss for each in ranges)
    return resident


def is_kv(mapping: Any, kv_bytes: int) -> bool:
    """Memory of a pool, or private memory and parked addresses."""
    is_size = KV_LEAST * kv_bytes <= mapping.size <= kv_bytes + KV_ROOM_BYTES
    return bool(mapping.path.startswith(MEMFD_KV)) or (is_size and mapping.path == "[anon]")


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


def mappings(pid: int) -> Sequence[Any]:
    """Every mapping of `pid` by psutil, with `path` ("[anon]" where it has none) and sizes in
    bytes; none if the process has ended."""
    try:
        found: Sequence[Any] = psutil.Process(pid).memory_maps(grouped=False)
    except psutil.NoSuchProcess:
        return ()
    return found
