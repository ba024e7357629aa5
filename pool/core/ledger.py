"""What is booked on every device and in host memory, when, and what proves that it has left.

The ledger has one line for each thing that takes room:

    free = total − margin − outside − Σ entries

What is leaving still counts: an entry is dropped when its memory is proven to be free, never when
its engine was asked for it. The surprising thing: `free_bytes` may be negative. Books can be
wrong (a measured size above the estimate, a stranger on the device), and then they say so instead
of raising.

An entry enters before anybody is told to take memory. It leaves on three proofs, in this order:

1. every engine of the model obeys the lower goal, by its own word, and has come to rest or gives
   its KV memory back. A death is no proof of that: a supervisor that has not seen the goal launches
   again with the old one;
2. a question is asked after that. What was said before may be older than what was taken since;
3. the answer says that nothing is held: the kernel's for the base of an engine (`AskWitness`), the
   memory service's for the rest (`AskMemory`).

Must not know of phases, tickets or admission.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from plumbing.pod.messages import Tier
from pool.core.events import AskMemory, AskWitness, MemoryIs, PoolEffect
from pool.core.model import RANK, WITHOUT_KV, Model, ModelEngine
from pool.core.states import HOST, NEVER_MS, EngineSizes, EntryKey, EntryKind, by_device

Entries = dict[EntryKey, int]


class DeviceView(Struct, frozen=True):
    """`usable_bytes`: all but the margin and what is outside. `free_bytes`: what of that is not
    booked; it may be negative. `leaving_bytes`: booked, and on its way out already, of any model.
    """

    name: str
    total_bytes: int
    usable_bytes: int
    free_bytes: int
    leaving_bytes: int = 0
    outside_bytes: int = 0


class PoolLedger:
    """All entries of the pool, and what the memory service has said. Sums are kept, so that every
    question is answered at once."""

    def __init__(self, margin_bytes: int, devices: tuple[str, ...] = ()) -> None:
        """`devices`: all of the pool, with `HOST` if there is host memory for copies."""
        self.margin_bytes = margin_bytes
        self.devices = devices
        self.entries: Entries = {}
        self.leaving: set[EntryKey] = set()
        self.memory: dict[str, MemoryIs] = {}
        self.number = 0  # of the last question
        self._booked: dict[str, int] = {}

    # ------------------------------------------------------------------ looking

    def free_bytes(self, device: str) -> int:
        """Room for a new entry; negative if more is booked or used than there is. Of a device that
        is not measured yet, nothing is free."""
        return self.usable_bytes(device) - self._booked.get(device, 0)

    def usable_bytes(self, device: str) -> int:
        """All that may ever be booked there, as things stand outside. Host memory has no margin:
        its total is a limit that was set, not a device."""
        if device not in self.memory:
            return 0
        found, margin_bytes = self.memory[device], 0 if device == HOST else self.margin_bytes
        return found.total_bytes - margin_bytes - found.outside_bytes

    def fits(self, entries: Mapping[EntryKey, int]) -> bool:
        """Whether all of them could be booked at once."""
        added: dict[str, int] = {}
        for key, size_bytes in entries.items():
            more = size_bytes - self.entries.get(key, 0)
            added[key.device] = added.get(key.device, 0) + more
        return all(more <= 0 or more <= self.free_bytes(name) for name, more in added.items())

    def views(self) -> dict[str, DeviceView]:
        """Every measured device, for the policy."""
        leaving = dict.fromkeys(self.memory, 0)
        for key in self.leaving:
            if key.device in leaving:
                leaving[key.device] += self.entries[key]
        return {
            name: DeviceView(
                name,
                found.total_bytes,
                self.usable_bytes(name),
                self.free_bytes(name),
                leaving[name],
                found.outside_bytes,
            )
            for name, found in self.memory.items()
        }

    # ------------------------------------------------------------------ what happens

    def book(self, entries: Entries) -> bool:
        """Book what is missing of these, all or nothing; whether there was room. What leaves stays
        then."""
        missing = {
            key: size
            for key, size in entries.items()
            if size > self.entries.get(key, -1) or key in self.leaving
        }
        if not self.fits(missing):
            return False
        for key, size_bytes in missing.items():
            self.settle(key, size_bytes)
            self.leaving.discard(key)
        return True

    def settle(self, key: EntryKey, size_bytes: int) -> None:
        """It is of this size, whether there is room for it or not: it was measured."""
        before = self.entries.get(key, 0)
        self.entries[key] = size_bytes
        self._booked[key.device] = self._booked.get(key.device, 0) + size_bytes - before

    def drop(self, key: EntryKey) -> None:
        """Its memory is proven to be free. Nothing happens if it is not there."""
        size_bytes = self.entries.pop(key, 0)
        self.leaving.discard(key)
        if size_bytes:
            self._booked[key.device] -= size_bytes

    # ------------------------------------------------------------------ what a model needs

    def is_known(self, device: str) -> bool:
        """Whether what is there has been heard since the pool has started."""
        return device not in self.devices or device in self.memory

    def copies(self, model: Model) -> bool:
        """Whether a copy of its weights in host memory is booked with it: it is to be offloaded, or
        the copy that is made after the first load, where there is room for one, has been made."""
        sizes, rules, host = model.sizes, model.rules, self.memory.get(HOST)
        is_needed = rules.rest == "offloaded" or rules.offload_after_ms < NEVER_MS
        if not is_needed and EntryKey(HOST, EntryKind.COPY, model.name) not in self.entries:
            return False
        if sizes is None or host is None:
            return False
        return 0 < sum(sizes.weights.values()) <= host.total_bytes

    def entries_at(self, model: Model, tier: Tier) -> Entries:
        """All that `model` has booked at a tier."""
        if tier is Tier.COLD:
            return {}
        sizes = model.sizes or self._whole(model)
        held = {EntryKind.BASE: sizes.base}
        if RANK[tier] >= RANK[Tier.WARM]:
            held[EntryKind.WEIGHTS] = sizes.weights
        if tier is Tier.AWAKE:
            held[EntryKind.KV] = sizes.kv
        if self.copies(model):
            held[EntryKind.COPY] = {HOST: sum(sizes.weights.values())}
        return {key: held[key.kind].get(key.device, 0) for key in model.keys if key.kind in held}

    def needs(self, model: Model) -> dict[Tier, Mapping[str, int]]:
        """The same of every tier, by device. A tier of unknown size is left out, and takes the
        whole of its devices."""
        needs: dict[Tier, Mapping[str, int]] = {Tier.COLD: {}}
        sizes = model.sizes or EngineSizes({}, {}, {})
        tiers = (Tier.OFFLOADED, Tier.WARM, Tier.AWAKE)
        for tier, size in zip(tiers, (sizes.base, sizes.weights, sizes.kv), strict=True):
            if not size:
                break
            needs[tier] = by_device(self.entries_at(model, tier))
        return needs

    def _whole(self, model: Model) -> EngineSizes:
        """Of a model of unknown size: all of its devices, in equal parts for its engines."""
        known = [device for device in model.rules.devices if device in self.memory]
        parts = {name: max(0, self.usable_bytes(name)) // len(model.engines) for name in known}
        return EngineSizes(base=parts, weights={}, kv={}, is_estimated=True)

    def booked(self, model: Model) -> Entries:
        """All lines of this model and of its engines."""
        entries = self.entries
        return {key: entries[key] for key in model.keys if key in entries}

    # ------------------------------------------------------------------ what is said

    def hear_memory(self, event: MemoryIs, models: Mapping[str, Model]) -> Iterable[str]:
        """What is held is booked, whatever there is room for. Of which models something has
        changed."""
        before, self.memory[event.device] = self.memory.get(event.device), event
        is_other = before is None or (
            (before.total_bytes, before.outside_bytes) != (event.total_bytes, event.outside_bytes)
        )
        for (kind, name), size_bytes in event.held.items():
            key = EntryKey(event.device, kind, name)
            if name in models and size_bytes > self.entries.get(key, 0):
                self.settle(key, size_bytes)
                is_other = True  # others may have less room than they count on
            if name in models and kind is EntryKind.WEIGHTS:
                self.learn_sizes(models[name])
        if is_other or before is None:
            return models
        news = {name for (_, name), _ in before.held.items() ^ event.held.items()}
        news |= {name for name, _ in before.asked.items() ^ event.asked.items()}
        return news & models.keys()

    def learn_sizes(self, model: Model) -> None:
        """Take what its engines have measured; what is booked for their goals follows. Where no
        engine can measure a base, as on a GPU, that one stays estimated."""
        words = [engine.said for engine in model.engines if engine.said is not None]
        before = model.sizes or EngineSizes({}, {}, {})
        base = _largest([said.base_bytes for said in words])
        weights = _largest([said.weights_bytes for said in words]) or before.weights
        sizes = EngineSizes(
            base=base or before.base,
            # The memory service counts whole pages where an engine counts its tensors. With the
            # smaller figure, all who rest could give way and a page of each would still be booked.
            weights={
                name: max(size, self._bytes_held(EntryKey(name, EntryKind.WEIGHTS, model.name)))
                for name, size in weights.items()
            },
            kv=_largest([said.kv_bytes for said in words]) or before.kv,
            is_estimated=before.is_estimated and not base,
        )
        if sizes == model.sizes or not sizes.base:
            return
        model.sizes = sizes
        for key, size_bytes in self.entries_at(model, Tier.AWAKE).items():
            if key in self.entries:
                held = self._bytes_held(key)
                self.settle(key, max(size_bytes, held))

    def book_living(self, model: Model) -> None:
        """An engine that lives has its base, by whatever goal, and one that wakes or serves
        has KV memory: a goal of its own, from before ours, may have led there."""
        sizes = model.sizes or self._whole(model)
        for engine in model.living():
            held = {EntryKind.BASE: (engine.name, sizes.base)}
            has_kv = engine.said is not None and engine.said.state not in WITHOUT_KV
            if has_kv and not engine.gives_kv_back:  # what it still has is known from its service
                held[EntryKind.KV] = (model.name, sizes.kv)
            for device in model.rules.devices:
                for kind, (owner, size) in held.items():
                    key = EntryKey(device, kind, owner)
                    if key not in self.entries:
                        self.settle(key, size.get(device, 0))

    # ------------------------------------------------------------------ what leaves

    def let_go(self, model: Model, wanted: Entries, stays: Entries) -> Iterator[PoolEffect]:
        """Drop what is booked, not wanted, and proven to be free; ask for the proofs. `stays`: what
        it has at the end of a drain. The policy counts on the rest."""
        yield from self._ask_witnesses(model)
        booked = self.booked(model)
        leaving = [key for key in booked if key not in wanted]
        going = [] if model.alarm else [key for key in booked if key not in stays]
        self.leaving = (self.leaving - booked.keys()) | set(going)
        if not leaving:
            model.asked, model.asked_for = None, frozenset()
            return
        ready = frozenset(key for key in leaving if self._may_be_free(model, key))
        if any(key.kind is not EntryKind.BASE for key in ready - model.asked_for):
            self.number += 1
            model.asked = self.number
            kinds = frozenset(key.kind for key in ready)
            is_gone = all(engine.is_gone for engine in model.engines)
            yield AskMemory(model.name, self.number, kinds, EntryKind.COPY in kinds or is_gone)
        model.asked_for = ready
        for key in ready:
            if self._is_free(model, key):
                self.drop(key)

    def why_not_free(self, model: Model) -> str | None:
        """Which of the three proofs is missing, in their order; None: nothing is to be freed."""
        deaf = [each for each in model.engines if not (each.has_obeyed or each.is_gone)]
        if deaf:
            return f"{_names(deaf)} has not answered its newest goal, {deaf[0].goal}"
        busy = [each for each in model.engines if not each.is_without_kv]
        if busy:
            return f"{_names(busy)} has not let go of its KV memory"
        wanted = self.entries_at(model, model.goal)
        left = [key for key in self.booked(model) if key not in wanted]
        owners = {key.owner for key in left if key.kind is EntryKind.BASE}
        alive = [each for each in model.engines if each.name in owners and each.goal is Tier.COLD]
        if alive:
            return f"processes of {_names(alive)} are still alive"
        parts = sorted({f"{key.kind} on {key.device}" for key in left})
        return f"the memory service has not freed {', '.join(parts)}" if parts else None

    def _ask_witnesses(self, model: Model) -> Iterator[PoolEffect]:
        for engine in model.engines:
            is_stopped = engine.goal is Tier.COLD and engine.has_obeyed
            if is_stopped and not engine.is_gone and engine.asked is None:
                self.number += 1
                engine.asked = self.number
                yield AskWitness(engine.name, self.number)

    def _may_be_free(self, model: Model, key: EntryKey) -> bool:
        """Whether none of its engines has it or is going to take it."""
        match key.kind:
            case EntryKind.KV:
                return all(each.is_without_kv or each.gives_kv_back for each in model.engines)
            case EntryKind.WEIGHTS:
                return all(engine.is_without_weights for engine in model.engines)
            case EntryKind.COPY:
                return all(engine.is_gone for engine in model.engines)
            case _:
                return any(each.is_gone for each in model.engines if each.name == key.owner)

    def _is_free(self, model: Model, key: EntryKey) -> bool:
        if key.kind is EntryKind.BASE:
            return True  # its witnesses were the proof
        memory = self.memory.get(key.device)
        if memory is None or model.asked is None:
            return False
        return memory.asked.get(model.name, 0) >= model.asked and not self._bytes_held(key)

    def _bytes_held(self, key: EntryKey) -> int:
        memory = self.memory.get(key.device)
        return 0 if memory is None else memory.held.get((key.kind, key.owner), 0)


def _names(engines: Iterable[ModelEngine]) -> str:
    return ", ".join(each.name for each in engines)


def _largest(found: list[Mapping[str, int]]) -> dict[str, int]:
    return {name: max(each.get(name, 0) for each in found) for each in found for name in each}
