"""The TCP ports of a pod: which they are, whether they can be bound, and ports that are free.

Ports are checked before the start: a second pod's probes would otherwise be answered by the first
one's servers, and the start would look fine. Free ports do not come from the kernel: a port of its
ephemeral range may go to the next client that connects while the server for it still starts.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable
from dataclasses import dataclass

from plumbing.errors import UnderstudyError
from plumbing.service.hosts import bind

SERVICE_PORT = 8000
HOP_PORT = 8443  # where a pod of a fleet serves fronts
LOCKSERVER_PORT = 9400
GMS_PORT = 9401
GATEWAY_PORT = 9403  # 9402 is the lock's own, over TCP
POOL_PORT = 9404
UI_PORT = 9405
ENGINE_PORT = 9410  # engine n: this plus n
ENGINES = 16  # whose ports are looked at beside other pods; a pool may have more

OURS = range(15_000, 32_000)  # below the kernel's ephemeral range
TRIES = 100
FLEET_APART = 100  # from the ports of one pod of a fleet to the next one's
PROBE_FLAGS = "--http-host or --port-offset"  # of `understudy up`: what chooses another address
SERVICE_FLAGS = "--host, --service-port or --port-offset"
ANYWHERE = "0.0.0.0"  # a port in use at any address counts as taken


@dataclass(frozen=True, slots=True)
class Ports:
    """The TCP ports of a pod. `engines[n]`: engine n's probe port. `pool`: the pool's, 0 in a
    pod without one. `ui`: the page's, 0 without one."""

    service: int = SERVICE_PORT
    lockserver: int = LOCKSERVER_PORT
    gms: int = GMS_PORT
    gateway: int = GATEWAY_PORT
    engines: tuple[int, ...] = (ENGINE_PORT, ENGINE_PORT + 1)
    pool: int = 0
    ui: int = 0

    def all(self) -> tuple[int, ...]:
        """Those of the service, the lock server, gms, the gateway, the engines; then of others."""
        others = [each for each in (self.pool, self.ui) if each]
        return (self.service, self.lockserver, self.gms, self.gateway, *self.engines, *others)

    def moved(self, offset: int) -> Ports:
        """Each of them, moved."""
        engines = tuple(each + offset for each in self.engines)
        single = (self.service, self.lockserver, self.gms, self.gateway)
        service, lockserver, gms, gateway = (each + offset for each in single)
        pool, ui = (each + offset if each else 0 for each in (self.pool, self.ui))
        return Ports(service, lockserver, gms, gateway, engines, pool, ui)


def check_port(port: int, address: str, flag: str = PROBE_FLAGS) -> None:
    """Raise as `plumbing.service.hosts.bind` if nothing can listen on `port` of `address`, which
    `flag` chooses."""
    bind(address, port, flag).close()


def free_base(bases: range, apart: Iterable[int]) -> int:
    """One of `bases` to which each of `apart` can be added for a free port.

    Raises:
        UnderstudyError: `pod.no_free_ports`.
    """
    wanted = tuple(apart)
    for base in random.choices(bases, k=TRIES):
        with contextlib.suppress(UnderstudyError):
            for each in wanted:
                check_port(base + each, ANYWHERE)
            return base
    raise UnderstudyError(
        "pod.no_free_ports",
        f"found no {len(wanted)} free ports from {OURS.start} to {OURS.stop}; stop the processes"
        " that use them",
    )


def free_offset(pods: int = 1) -> int:
    """What moves the ports of this many pods, `FLEET_APART` from each other, to free ones."""
    engines = tuple(range(ENGINE_PORT, ENGINE_PORT + ENGINES))
    one = (*Ports(engines=engines, pool=POOL_PORT, ui=UI_PORT).all(), HOP_PORT)
    offsets = range(OURS.start - SERVICE_PORT, OURS.stop - max(one) - FLEET_APART * pods)
    return free_base(
        offsets, (port + FLEET_APART * number for port in one for number in range(pods))
    )


def free_pod_ports(*, has_pool: bool = False) -> Ports:
    """Free ports for a whole pod, beside others."""
    return Ports(pool=POOL_PORT if has_pool else 0).moved(free_offset())


def check_ports(ports: Ports, host: str = "127.0.0.1", http_host: str = "127.0.0.1") -> None:
    """Raise as `check_port` for one of `ports`; the service listens at `host`, the probes at
    `http_host`."""
    for port in ports.all():
        if port == ports.service:
            check_port(port, host, SERVICE_FLAGS)
        else:
            check_port(port, http_host)
