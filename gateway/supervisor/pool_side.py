"""Speaks with the pool for a gateway: its models' doors come in, what its children have goes out.

While the pool is away the last doors hold, and failovers go on, since grants come from the lock
server. Owns no decision: doors are obeyed by children (`gateway.core.lanes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import msgspec

from gateway import messages as msg
from gateway.core.demand import ChildDemands
from gateway.supervisor.child_processes import ChildLink, ChildProcesses
from plumbing.errors import UnderstudyError
from plumbing.service.clock import Clock
from plumbing.service.events import EventLog
from pool.client.link import PoolCallbacks, PoolLink
from pool.core.events import Door, ModelDemand, RefusedDoor, binds_alike
from pool.core.states import ModelState
from pool.messages import DoorsMsg, PooledModel


class GatewayPoolSide:
    """One gateway's connection to the pool of its directory; `models`: those of the pool file."""

    def __init__(
        self,
        directory: str,
        models: Mapping[str, object],
        children: ChildProcesses,
        clock: Clock,
        log: EventLog,
    ) -> None:
        self.models = tuple(models)
        self.said: dict[str, PooledModel] = {}  # of each, with our number of its door
        self.changed_ms = clock.now_ms()  # connected, or lost
        self.refusal: str | None = None
        self.lost: Counter[str] = Counter()  # by model: requests in children that died
        self._demands = ChildDemands(self.models)
        self._children, self._clock, self._log = children, clock, log
        self._heard: dict[str, tuple[int, Door]] = {}  # each door with the pool's number
        self._strangers: frozenset[str] = frozenset()
        self._link = PoolLink(
            directory,
            self._demands.whole,
            PoolCallbacks(
                on_doors=self._doors_came,
                on_connected=self._connected,
                on_lost=self._lost,
                on_refused=self._refused,
            ),
        )

    @property
    def is_connected(self) -> bool:
        return self._link.is_connected

    @property
    def problem(self) -> str | None:
        """Why the pool is of no use now."""
        if not self.models or (self.is_connected and self.refusal is None and self.said):
            return None
        why = self.refusal or self._link.problem or "it has sent nothing yet"
        return f"no pool: {why}; awake models are still served, but no model switches"

    def demand(self) -> dict[str, ModelDemand]:
        return self._demands.whole()

    async def run(self) -> None:
        """Stay connected until cancelled."""
        await self._link.run()

    # ------------------------------------------------------------------ for the children

    def demanded(self, link: ChildLink, demand: msg.ModelDemandMsg) -> None:
        self._demands.said(link.number, demand.models)
        self._link.changed()

    def ended(self, link: ChildLink) -> None:
        """A child is gone; what a dead one had is lost."""
        if link.process is not None and link.process.returncode:
            for model, demand in self._demands.of_child(link.number).items():
                self.lost[model] += demand.in_flight + len(demand.tickets)
        self._demands.gone(link.number)
        self._link.changed()

    # ------------------------------------------------------------------ what the pool says

    def _doors_came(self, doors: DoorsMsg) -> None:
        self.refusal = None
        for model in self.models:
            said = doors.models.get(model) or _unknown(model)
            self._set(model, said)
        self._children.set_model_doors(msg.ModelDoorsMsg(self.said))
        strangers = frozenset(doors.models) - frozenset(self.models)
        if strangers - self._strangers:
            names = ", ".join(sorted(strangers))
            message = f"the pool has models unknown to this gateway: {names}; restart the gateway"
            self._log.record("gateway.pool_differs", message, "warning")
        self._strangers = strangers
        if not self._demands.is_heard:  # else children answer, once they obey
            self._link.changed()

    def _set(self, model: str, said: PooledModel) -> None:
        old = self.said.get(model)
        if said.door is None:  # what it said before counts
            door, number = (None, 0) if old is None else (old.door, old.number)
        else:
            before, before_door = self._heard.get(model, (0, None))
            is_same = before == said.number and binds_alike(before_door, said.door)
            self._heard[model] = (said.number, said.door)
            if old is not None and is_same:
                door, number = said.door, old.number  # there is nothing to obey anew
            else:
                door, number = said.door, self._demands.tell(model, said.number)
        self.said[model] = msgspec.structs.replace(said, door=door, number=number)

    def _connected(self) -> None:
        self.changed_ms = self._clock.now_ms()
        self._log.record("gateway.pool", "connected to the pool")

    def _lost(self, reason: str) -> None:
        self.changed_ms = self._clock.now_ms()
        message = f"lost the pool ({reason}); awake models are still served, but no model switches"
        self._log.record("gateway.pool_lost", message, "warning")

    def _refused(self, error: UnderstudyError) -> None:
        if self.refusal != error.message:  # it is repeated at every attempt
            self.refusal = error.message
            message = f"the pool refuses this gateway: {error.message}"
            self._log.record("gateway.pool_refused", message, "error", {"error_code": error.code})


def _unknown(model: str) -> PooledModel:
    sentence = f"the pool does not know {model}: its file has changed; restart the gateway"
    return PooledModel(0, RefusedDoor("model_not_found", sentence, None), ModelState.COLD)
