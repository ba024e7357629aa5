"""Carries out what the core has decided: to gateways, engines, memory, leases, and the log."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable

from plumbing.pod.messages import Tier
from plumbing.text import duration
from pool.core import events as ev
from pool.server.parts import PoolParts


class PoolPerformer:
    """`save` writes the state, to survive a power cut if it is told True, and raises OSError where
    that fails."""

    def __init__(self, parts: PoolParts, save: Callable[[bool], None]) -> None:
        self._parts, self._save = parts, save

    def perform(self, effect: ev.PoolEffect) -> None:
        """
        Raises:
            OSError: the state could not be written; nothing behind this may be performed.
        """
        parts = self._parts
        match effect:
            case ev.SaveState():
                self._save(effect.is_order)
            case ev.SetModelDoor():
                parts.gateways.tell(is_urgent=parts.told.set_door(effect))
            case ev.TellEngine():
                self._tell(effect)
            case ev.KillEngine():
                parts.engines.tell(effect.engine, Tier.COLD, effect.generation, is_kill=True)
                self._record("pool.kill", effect.reason, "warning", engine_id=effect.engine)
            case ev.FreeKv():
                parts.memory.free_kv(effect.model)
            case ev.FreeWeights():
                parts.memory.free_weights(effect.model, and_copy=effect.and_copy)
            case ev.AskMemory():
                parts.memory.ask(effect.model, effect.number)
            case ev.AskWitness():
                parts.engines.witnesses.ask(effect.engine, effect.number)
            case ev.GrantLease():
                parts.leases.granted(effect.lease)
                self._record("pool.lease", f"lease {effect.lease} is granted", lease=effect.lease)
            case ev.RefuseLease():
                parts.leases.refused(effect.lease, effect.code, effect.sentence)
                self._record("pool.lease", effect.sentence, "warning", lease=effect.lease)
            case ev.PoolRecord():
                self._note(effect)

    def _tell(self, effect: ev.TellEngine) -> None:
        parts = self._parts
        model = parts.engines.links[effect.engine].model
        if effect.goal is not Tier.COLD:
            parts.memory.keep(model, and_kv=effect.goal is Tier.AWAKE)
        parts.engines.tell(effect.engine, effect.goal, effect.generation)

    def _note(self, record: ev.PoolRecord) -> None:
        parts = self._parts
        match record:
            case ev.ModelChanged():
                parts.told.changed(record)
                parts.gateways.tell(is_urgent=False)
                known = parts.pool.situation.models[record.model]
                parts.metrics.count(record, known.leaving)
                text = f"{record.model}: {record.old} → {record.new}: {record.reason}"
                data = {"model": record.model, "from": record.old, "to": record.new}
                self._record("pool.model", text, **data, cause=record.reason)
            case ev.Switched():
                parts.metrics.count(record)
                fields = ("wait_ms", "drain_ms", "release_ms", "raise_ms")
                data = {name: round(getattr(record, name), 1) for name in fields}
                text = f"{record.model} is awake, {duration(record.wait_ms)} after it was asked for"
                if record.victims:
                    text += f", in place of {', '.join(record.victims)}"
                self._record(
                    "pool.switch", text, model=record.model, victims=list(record.victims), **data
                )
            case ev.LeaseWaits():
                parts.leases.waits(record.lease, record.why)
            case ev.Alarm():
                parts.told.alarmed(record)
                self._record(
                    "pool.alarm",
                    record.sentence,
                    "error",
                    model=record.model,
                    error_code=record.code,
                )

    def _record(self, kind: str, message: str, severity: str = "info", **data: object) -> None:
        """Behind what is sent in this turn of the loop: gateways wait for their doors."""
        record = functools.partial(self._parts.log.record, kind, message, severity, data)
        asyncio.get_running_loop().call_soon(record)
