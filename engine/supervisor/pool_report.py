"""What a supervisor reports of its engine to a pool, beside what it reports to everybody.

Owns the sizes: weights and KV memory in equal shards on the ranks' devices, and what the processes
take beside them, measured once when the backend is prepared. On a GPU the kernel shows nothing of
that, so it stays unknown here.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from engine.supervisor.engine import Engine
from engine.supervisor.incarnation import Incarnation
from plumbing.pod.messages import PoolWord, WitnessRef
from plumbing.pod.models import device_of
from plumbing.service import procfs


class PoolWords:
    """Of one engine, whose pod has models."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._measured: tuple[str, dict[str, int]] = ("", {})  # of which incarnation

    def word(self) -> PoolWord | None:
        """None in a pod without models."""
        settings, now, running = (
            self._engine.settings,
            self._engine.lifecycle.now,
            self._engine.incarnation,
        )
        if not settings.model:
            return None
        prepared = running.prepared if running is not None else None
        places = running.loading.places if running is not None else ()
        return PoolWord(
            model=settings.model,
            generation=now.generation,
            witness=_witness_of(running) if running is not None else None,
            base_bytes=self._base_bytes(running, places) if running and prepared else {},
            weights_bytes=shards(prepared.weights_bytes, places) if prepared else {},
            kv_bytes=shards(prepared.kv_bytes, places) if prepared else {},
            can_resume=prepared is not None and prepared.continuation != "",
            is_permanent=now.exit_code is not None,
            is_leaving=now.is_leaving,
            is_machine=bool(self._engine.machine_fault),
        )

    def _base_bytes(self, running: Incarnation, places: Sequence[str]) -> dict[str, int]:
        if self._measured[0] != running.id:
            private = sum(_private_bytes(running.tree.everyone()))
            hosts = places and all(place.startswith("HOST-") for place in places)
            self._measured = running.id, shards(private, places) if hosts else {}
        return self._measured[1]


def shards(total_bytes: int, places: Sequence[str]) -> dict[str, int]:
    """In equal parts, by device; rounded up, so that nothing is booked too small."""
    part = -(-total_bytes // len(places)) if places else 0
    found: dict[str, int] = {}
    for device in map(device_of, places):
        found[device] = found.get(device, 0) + part
    return found


def _private_bytes(pids: Iterable[int]) -> Iterable[int]:
    return (procfs.private_bytes(pid) or 0 for pid in pids)


def _witness_of(running: Incarnation) -> WitnessRef | None:
    if running.witness_path is None:
        return None
    return WitnessRef(os.path.basename(running.witness_path), *running.witness_id)
