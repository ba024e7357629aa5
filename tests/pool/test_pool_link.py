"""Goal: a gateway's link to the pool says its demand first, joins changes, and reconnects; a lease
names no file but its own.

Method: a real server on the real path, which collects what it is sent.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest

from plumbing.errors import ProtocolError
from plumbing.pod.paths import pool_socket
from plumbing.wire.connection import Handler
from plumbing.wire.server import Server
from pool.client.link import AHEAD, DEMAND_S, PoolLink
from pool.core.events import ModelDemand, OpenDoor
from pool.core.states import ModelState
from pool.messages import CATALOGUE, DoorsMsg, LeaseMsg, PooledModel
from tests.helpers import auntil
from tests.pool.neighbours import linked


class CollectingPool(Handler):
    """Keeps every message, and the connection that it came on."""

    def __init__(self, directory):
        self.conns, self.said = [], []
        self.server = Server(pool_socket(directory), CATALOGUE, self, service="pool")

    def opened(self, conn):
        self.conns.append(conn)

    def received(self, conn, message, request_id, fds):
        self.said.append(message)

    def closed(self, conn, reason):
        self.conns.remove(conn)


@pytest.fixture
def directory(tmp_path):
    tmp_path.chmod(0o700)
    return str(tmp_path)


@asynccontextmanager
async def running(link, directory):
    """The link, with a pool that it connects to."""
    pool = CollectingPool(directory)
    await pool.server.start()
    task = asyncio.create_task(link.run())
    try:
        await auntil(lambda: pool.said, "the first demand")
        yield pool
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await pool.server.close()


async def test_demand_is_first_on_every_connection(directory):
    """Goal: a restarted pool hears the demand of now. Method: doors are sent, the server ends,
    another one starts."""
    demand, doors, lost = {"chat": ModelDemand(in_flight=1)}, [], []
    link = linked(directory, lambda: demand, doors.append, lost.append)
    async with running(link, directory) as first:
        assert first.said[0].models == demand
        said = DoorsMsg({"chat": PooledModel(1, OpenDoor("engine-0", 2), ModelState.AWAKE)})
        first.conns[0].send(said)
        await auntil(lambda: doors, "the doors")
        assert (doors, link.problem) == ([said], None)
        await first.server.close()
        await auntil(lambda: lost, "the loss")
        assert link.problem is not None
        demand["chat"] = ModelDemand(in_flight=2)
        second = CollectingPool(directory)
        await second.server.start()
        await auntil(lambda: second.said, "the demand of the new connection")
        assert second.said[0].models == demand
        await second.server.close()


async def test_demand_is_sent_once_for_what_changes_together_and_not_again_as_it_was(directory):
    """Goal: a burst of requests costs the pool a message, and it judges only what is new. Method: a
    thousand changes in one turn of the loop; a change that changes nothing; a new connection."""
    demand, looks = {"chat": ModelDemand()}, []

    def look():
        looks.append(dict(demand))
        return demand

    link = PoolLink(directory, look)
    async with running(link, directory) as pool:
        for number in range(1, 1001):
            demand["chat"] = ModelDemand(in_flight=number)
            link.changed()
        await auntil(lambda: len(pool.said) > 1, "the change")
        seen = len(looks)
        link.changed()
        await auntil(lambda: len(looks) > seen, "the look at what has changed")
        pool.conns[0].close("a test")
        await auntil(lambda: len(pool.said) > 2, "the new connection's demand")
        assert [each.models["chat"].in_flight for each in pool.said] == [0, 1000, 1000]


async def test_demand_that_changes_all_the_time_is_evenly_spaced_but_for_the_first(directory):
    """Goal: a switch waits for nothing, and a busy gateway does not flood the pool."""
    demand = {"chat": ModelDemand()}
    link = PoolLink(directory, lambda: demand)
    async with running(link, directory) as pool:
        end_s = asyncio.get_running_loop().time() + 20 * DEMAND_S
        while asyncio.get_running_loop().time() < end_s:
            demand["chat"] = ModelDemand(in_flight=demand["chat"].in_flight + 1)
            link.changed()
            await asyncio.sleep(0)
        assert AHEAD < len(pool.said) <= AHEAD + 22


def test_lease_names_no_file_but_its_own():
    """Goal: its file is `lease_` and its id, which is no path."""
    said = CATALOGUE.encode(LeaseMsg("../../etc/passwd", "HOST-0", 1, 0.0), 7)
    with pytest.raises(ProtocolError, match="lease"):
        CATALOGUE.decode(said, 0)
