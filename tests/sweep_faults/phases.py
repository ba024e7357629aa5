"""What happens to a pod while a call fails: the phases, and when each is over.

A phase kills something, asks for something, or does nothing but ask. A pod that has not noticed yet
does not count as whole.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import NamedTuple

from tests.sweep_faults.pod import Standing, SweptPod, supervisor_of


class Phase(NamedTuple):
    """Something that happens to a pod, and the parts that are new when it is over."""

    happens: Callable[[SweptPod, Standing], Awaitable[None]]
    renews: tuple[str, ...] = ()

    def is_over(self, old: Standing, new: Standing) -> bool:
        return all(old.lives[part] != new.lives[part] for part in self._parts(old))

    def unexpected(self, old: Standing, new: Standing) -> list[str]:
        """The parts that were started again though this phase does not do that."""
        expected = {*self._parts(old), "token"}
        return [
            f"{part} was started again"
            for part, life in old.lives.items()
            if part not in expected and new.lives.get(part) != life
        ]

    def _parts(self, old: Standing) -> list[str]:
        supervisor = supervisor_of(old.active)
        named = {"active": old.active, "standby": old.standby, "supervisor": supervisor}
        return [named.get(role, role) for role in self.renews]


async def _commit(pod: SweptPod, standing: Standing) -> None:
    """The weights are loaded again."""
    server = pod.gms_server()
    pod.kill_container("gms")
    pod.kill(server)
    for engine in (standing.standby, standing.active):
        await pod.kill_model(engine)


async def _kill_active(pod: SweptPod, standing: Standing) -> None:
    pod.kill_container(standing.active)


def _kills(what: str, *renewed: str) -> Phase:
    """The death of a container, or of the server of gms."""

    async def happens(pod: SweptPod, _: Standing) -> None:
        pod.kill(pod.gms_server()) if what == "gms-server" else pod.kill_container(what)

    return Phase(happens, (what, *renewed))


PHASES: Mapping[str, Phase] = {
    "rest": Phase(lambda pod, _: pod.visit()),
    "relaunch": Phase(lambda pod, standing: pod.kill_model(standing.standby), ("standby",)),
    "grant": Phase(lambda pod, standing: pod.kill_model(standing.active), ("active", "token")),
    "switchover": Phase(lambda pod, _: pod.switch_over(), ("token",)),
    "commit": Phase(_commit, ("gms", "gms-server", "active", "standby")),
    "reconnect": _kills("lockserver"),
    "gms-reconnect": _kills("gms-server"),
    "gms-restart": _kills("gms", "gms-server"),
    "restart": Phase(_kill_active, ("active", "supervisor", "token")),
}
