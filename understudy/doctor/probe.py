"""Gathers the facts of a check-up: every probe once, and who belongs to the pod.

Owns one rule: a process is of the pod if it listens on a socket of its directory, is a child of
one that does, or supervises one. Pids in the parts' documents are not used: each part says its own,
which means something else where containers have PID namespaces of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from plumbing.service import procfs
from plumbing.service.build import installed
from understudy.doctor import probe_devices, probe_directory, probe_machine
from understudy.doctor.facts import Facts, SocketFile
from understudy.status.gather import gather, gms_sockets
from understudy.up.ports import Ports

ANSWER_S = 2.0  # what answers does so in milliseconds; one that hangs must not keep the others
INIT = 1
PACKAGES = ("vllm", "torch", "cuda-python", "nvidia-ml-py")


async def look(directory: Path, ports: Ports, environ: Mapping[str, str]) -> Facts:
    """Everything that can be learnt from here; changes nothing."""
    path = str(directory)
    sockets = probe_directory.look_at_sockets(path)
    view, gpus = await asyncio.gather(gather(directory, ANSWER_S), probe_devices.look_at_gpus())
    parts = [each.pid for each in sockets if each.pid is not None]
    pids = _pod(sockets)
    return Facts(
        directory=probe_directory.look_at_directory(path),
        view=view,
        sockets=sockets,
        listeners=probe_directory.listeners(path),
        kernel=probe_machine.look_at_kernel(),
        limits=probe_machine.look_at_limits(parts),
        ports=probe_machine.look_at_ports(ports),
        machine=probe_machine.look_at_machine(environ),
        gpus=gpus,
        pids=pids,
        served=list(gms_sockets(directory)),
        named=probe_devices.named_devices(environ),
        slabs=probe_devices.slabs_outside(path, view["gms"], pids),
        mps=probe_devices.look_for_mps(environ),
        packages=installed(PACKAGES),
        environ=environ,
    )


def _pod(sockets: Sequence[SocketFile]) -> frozenset[int]:
    """The pod's processes, as far as they are visible."""
    found: set[int] = set()
    for each in sockets:
        if each.pid is None:
            continue
        found |= {each.pid, *procfs.descendants(each.pid)}
        above = procfs.parent(each.pid)
        if each.name.startswith("gms_") and above is not None and above > INIT:
            found.add(above)  # the supervisor of the devices' servers has no socket of its own
    return frozenset(found)
