"""What happens to a pod while a call fails: the phases, and when each is over.

A phase kills something, asks for something, or does nothing but ask. `is_over` compares the pod
before and after, so that a pod which has not noticed yet does not count as whole.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from hack.sweep_faults.pod import Standing, SweptPod, supervisor_of


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that happens to a pod. `renews`: the parts that it starts again."""

    about: str
    happens: Callable[[SweptPod, Standing], Awaitable[None]]
    is_over: Callable[[Standing, Standing], bool]
    renews: tuple[str, ...] = ()


async def _rest(pod: SweptPod, standing: Standing) -> None:
    await pod.visit()


async def _relaunch(pod: SweptPod, standing: Standing) -> None:
    await pod.kill_backend(standing.standby, "backend-model")


async def _grant(pod: SweptPod, standing: Standing) -> None:
    await pod.kill_backend(standing.active, "backend-model")


async def _switchover(pod: SweptPod, standing: Standing) -> None:
    await pod.switch_over()


async def _commit(pod: SweptPod, standing: Standing) -> None:
    server = pod.gms_server()
    pod.kill_container("gms")
    os.kill(server, signal.SIGKILL)
    for engine in (standing.standby, standing.active):
        await pod.kill_backend(engine, "backend-model")


async def _reconnect(pod: SweptPod, standing: Standing) -> None:
    pod.kill_container("lockserver")


async def _gms_reconnect(pod: SweptPod, standing: Standing) -> None:
    os.kill(pod.gms_server(), signal.SIGKILL)


async def _kv_reconnect(pod: SweptPod, standing: Standing) -> None:
    os.kill(pod.gms_server("kv-server"), signal.SIGKILL)


async def _gms_restart(pod: SweptPod, standing: Standing) -> None:
    pod.kill_container("gms")


async def _restart(pod: SweptPod, standing: Standing) -> None:
    pod.kill_container(standing.active)


def _is_newer(old: Standing, new: Standing) -> bool:
    return new.token > old.token


def _has_new(*roles: str) -> Callable[[Standing, Standing], bool]:
    def is_over(old: Standing, new: Standing) -> bool:
        return all(old.lives[_part(old, role)] != new.lives[_part(old, role)] for role in roles)

    return is_over


PHASES: Mapping[str, Phase] = {
    "rest": Phase("nothing but questions and requests", _rest, lambda old, new: True),
    "relaunch": Phase(
        "the standby's model process is killed", _relaunch, _has_new("standby"), ("standby",)
    ),
    "grant": Phase("the active engine's model process is killed", _grant, _is_newer, ("active",)),
    "switchover": Phase("the active engine hands over", _switchover, _is_newer, ("active",)),
    "commit": Phase(
        "memory service and both backends are killed: the weights are loaded again",
        _commit,
        _has_new("gms-server", "active", "standby"),
        ("gms", "gms-server", "kv-server", "active", "standby"),
    ),
    "reconnect": Phase(
        "the lock server is killed", _reconnect, _has_new("lockserver"), ("lockserver",)
    ),
    "gms-reconnect": Phase(
        "a device's memory server is killed",
        _gms_reconnect,
        _has_new("gms-server"),
        ("gms-server",),
    ),
    "kv-reconnect": Phase(
        "the server of a device's KV memory is killed",
        _kv_reconnect,
        _has_new("kv-server"),
        ("kv-server",),
    ),
    "gms-restart": Phase(
        "the memory service's supervisor is killed",
        _gms_restart,
        _has_new("gms-server", "kv-server"),
        ("gms", "gms-server", "kv-server"),
    ),
    "restart": Phase(
        "the active engine's supervisor is killed", _restart, _is_newer, ("active", "supervisor")
    ),
}


def _part(standing: Standing, role: str) -> str:
    supervisor = supervisor_of(standing.active)
    named = {"active": standing.active, "standby": standing.standby, "supervisor": supervisor}
    return named.get(role, role)


def unexpected(old: Standing, new: Standing, phase: Phase) -> list[str]:
    """The parts that were started again though `phase` does not do that."""
    renewed = {_part(old, role) for role in phase.renews}
    return [
        f"{part} was started again"
        for part, life in old.lives.items()
        if part not in renewed and new.lives.get(part) != life
    ]
