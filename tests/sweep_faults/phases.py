"""What happens to a pod while a call fails: the phases, and when each is over.

A phase kills something, asks for something, or does nothing but ask. `is_over` compares the pod
before and after, so that a pod which has not noticed yet does not count as whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from tests.sweep_faults.pod import Standing, SweptPod, supervisor_of


@dataclass(frozen=True, slots=True)
class Phase:
    """Something that happens to a pod. `renews`: the parts that it starts again."""

    about: str
    happens: Callable[[SweptPod, Standing], Awaitable[None]]
    is_over: Callable[[Standing, Standing], bool]
    renews: tuple[str, ...] = ()


async def _commit(pod: SweptPod, standing: Standing) -> None:
    server = pod.gms_server()
    await pod.kill_container("gms")
    await pod.kill(server)
    for engine in (standing.standby, standing.active):
        await pod.kill_model(engine)


def _is_newer(old: Standing, new: Standing) -> bool:
    return new.token > old.token


def _has_new(*roles: str) -> Callable[[Standing, Standing], bool]:
    def is_over(old: Standing, new: Standing) -> bool:
        return all(old.lives[_part(old, role)] != new.lives[_part(old, role)] for role in roles)

    return is_over


def _kills(what: str, *renewed: str) -> Phase:
    """The death of a container or of a server of gms, which is over when those parts are new."""
    if what == "gms-server":
        return Phase(
            f"{what} is killed",
            lambda pod, _: pod.kill(pod.gms_server()),
            _has_new(*renewed),
            renewed,
        )
    return Phase(
        f"the container {what} is killed",
        lambda pod, _: pod.kill_container(what),
        _has_new(*renewed),
        (what, *renewed),
    )


PHASES: Mapping[str, Phase] = {
    "rest": Phase(
        "nothing but questions and requests", lambda pod, _: pod.visit(), lambda old, new: True
    ),
    "relaunch": Phase(
        "the standby's model process is killed",
        lambda pod, standing: pod.kill_model(standing.standby),
        _has_new("standby"),
        ("standby",),
    ),
    "grant": Phase(
        "the active engine's model process is killed",
        lambda pod, standing: pod.kill_model(standing.active),
        _is_newer,
        ("active",),
    ),
    "switchover": Phase(
        "the active engine hands over", lambda pod, _: pod.switch_over(), _is_newer, ("active",)
    ),
    "commit": Phase(
        "memory service and both backends are killed: the weights are loaded again",
        _commit,
        _has_new("gms-server", "active", "standby"),
        ("gms", "gms-server", "active", "standby"),
    ),
    "reconnect": _kills("lockserver", "lockserver"),
    "gms-reconnect": _kills("gms-server", "gms-server"),
    "gms-restart": _kills("gms", "gms-server"),
    "restart": Phase(
        "the active engine's supervisor is killed",
        lambda pod, standing: pod.kill_container(standing.active),
        _is_newer,
        ("active", "supervisor"),
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
