"""The protocol that `bench_gms` compares with: two requests for each allocation.

Other memory services attach like this: ask what an allocation is, then for its descriptor. Here the
server that answers `attach` answers these requests too. The service itself knows nothing of them,
and they have every advantage: no session, no flock on the epoch's file, no thread between request
and descriptor, one address range for all.
"""

from __future__ import annotations

from gms import messages as msg
from gms import names
from gms.server.server import DeviceServer
from gms.vmm.host import HostMemory
from gms.vmm.interface import Allocation, DeviceMemory, Reservation
from plumbing.errors import ProtocolError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.connection import Connection
from plumbing.wire.fds import OwnedFd
from plumbing.wire.limits import MANIFEST_FRAME_BYTES_MAX
from plumbing.wire.messages import Catalogue, FaultMsg, HelloMsg, Message, WelcomeMsg
from plumbing.wire.server import Server


class Describe(Message, frozen=True, tag="describe"):
    """Asks what allocation `slab` of the epoch is."""

    epoch: str
    slab: int


class Described(Message, frozen=True, tag="described"):
    size_bytes: int


class Export(Message, frozen=True, tag="export"):
    """Asks for its descriptor."""

    epoch: str
    slab: int


class Exported(Message, frozen=True, tag="exported"):
    FDS = (1, 1)


ADDED = (Describe, Described, Export, Exported)
CLIENT_CATALOGUE = Catalogue(msg.StatusMsg, msg.StatusReplyMsg, *ADDED)


class TwoRequestServer(DeviceServer):
    """A device's server that also answers `describe` and `export`."""

    def __init__(
        self, directory: str, device: str, memory: DeviceMemory, capacity_bytes: int
    ) -> None:
        super().__init__(directory, device, memory, capacity_bytes)
        every = msg.CATALOGUE.classes.values()
        common = (HelloMsg, WelcomeMsg, FaultMsg)  # of all catalogues
        known = [cls for cls in every if cls not in common]
        catalogue = Catalogue(*known, *ADDED, frame_bytes_max=MANIFEST_FRAME_BYTES_MAX)
        path = names.socket_path(directory, device)
        self._server = Server(path, catalogue, self, service="gms")

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        if isinstance(message, Describe):
            conn.send(Described(self._slab(message).size_bytes), request_id)
        elif isinstance(message, Export):
            conn.send(Exported(), request_id, [self._slab(message).export(writable=False)])
        else:
            super().received(conn, message, request_id, fds)

    def _slab(self, asked: Describe | Export) -> Allocation:
        slabs = self._vault._slabs.get(asked.epoch, [])
        if not 0 <= asked.slab < len(slabs):
            raise ProtocolError("bench.no_such_slab", f"{asked.epoch} has no slab {asked.slab}")
        return slabs[asked.slab]


def attach(directory: str, device: str) -> tuple[Reservation, list[Allocation]]:
    """Map the committed epoch, one allocation after the other."""
    memory = HostMemory()
    allocations: list[Allocation] = []
    with BlockingClient(names.socket_path(directory, device), CLIENT_CATALOGUE) as client:
        status = client.request(msg.StatusMsg()).message
        assert isinstance(status, msg.StatusReplyMsg)
        epoch = status.document["epoch"]
        whole = memory.reserve(status.document["committed_bytes"])
        end_bytes = 0
        for slab in range(status.document["slabs"]):
            described = client.request(Describe(epoch, slab)).message
            assert isinstance(described, Described)
            reply = client.request(Export(epoch, slab))
            allocations.append(memory.adopt(reply.fds[0], described.size_bytes))
            whole.map(end_bytes, allocations[-1:], writable=False)
            end_bytes += described.size_bytes
    return whole, allocations
