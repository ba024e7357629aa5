"""What the gateway and leases import of the pool.

Nobody waits for the pool: whoever has heard it goes on with its last word while it is away.
"""

from __future__ import annotations

from pool import messages
from pool.client.link import PoolCallbacks, PoolLink
from pool.core.events import (
    Door,
    ModelDemand,
    OpenDoor,
    RefusedDoor,
    Running,
    ShutDoor,
    Ticket,
    TicketKind,
    binds_alike,
)
from pool.core.states import TICKETS_MAX, ModelState
from pool.messages import DemandMsg, DoorsMsg, PooledModel
from pool.pool_file import read_pool_file
from pool.settings import ModelSettings, PoolFile, QueueLimits, engines_of

__all__ = [
    "TICKETS_MAX",
    "DemandMsg",
    "Door",
    "DoorsMsg",
    "ModelDemand",
    "ModelSettings",
    "ModelState",
    "OpenDoor",
    "PoolCallbacks",
    "PoolFile",
    "PoolLink",
    "PooledModel",
    "QueueLimits",
    "RefusedDoor",
    "Running",
    "ShutDoor",
    "Ticket",
    "TicketKind",
    "binds_alike",
    "engines_of",
    "messages",
    "read_pool_file",
]
