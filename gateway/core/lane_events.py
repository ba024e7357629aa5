"""What a lane of a pool is told beside the gateway's own events, and its settings: plain values."""

from __future__ import annotations

from msgspec import Struct

from gateway.core.events import GatewayEvent
from pool.core.events import Door
from pool.core.states import PooledRules

# An engine's batch, as vLLM's on small GPUs. What is sent beyond it waits inside of the engine,
# where it can be neither ordered nor sent again.
MAX_IN_FLIGHT = 256
QUEUE_MAX = 512  # requests that wait for any model, of which nothing was sent


class LaneRules(Struct, frozen=True):
    """The settings of one model. Times are in ms."""

    max_in_flight: int = MAX_IN_FLIGHT
    queue_max: int = 128  # requests that wait for this model, of which nothing was sent
    wait_ms: float = 300_000.0  # each for so long
    starve_after_ms: float = 60_000.0  # a request that is so much older is sooner by one priority
    keep_alive_ms: float = 300_000.0  # of requests that name no other
    priority: int = 0  # the same
    client_priority: int | None = None  # the most urgent that a request may name; None: `priority`

    def priority_for(self, wanted: int | None) -> int:
        """The priority of a request that names `wanted`. A client may only make its requests less
        urgent, unless the pool file lets it do more: else one client starves all others."""
        if wanted is None:
            return self.priority
        best = self.priority if self.client_priority is None else self.client_priority
        return max(wanted, min(best, self.priority))


class LaneDoorSet(GatewayEvent, frozen=True):
    """The pool says what may be done with requests for `model`; repeats change nothing. `rules`:
    its settings now, where an operator may have changed them; None: as they are."""

    model: str
    number: int
    door: Door
    rules: PooledRules | None = None
