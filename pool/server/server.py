"""The pool as a process: the shell around its core, its socket, and the program that runs them with
the HTTP endpoints; and its status.

Owns the order of things. Must not decide who is awake: every question goes to `core`. Everything
runs as callbacks on one loop, and an event that comes while another one is handled waits its turn.

The surprising thing: a state that cannot be written stops everything behind it. What is not on file
is not told; the write is repeated, and events wait meanwhile.
"""

from __future__ import annotations

import asyncio
import functools
import gc
import math
import os
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from plumbing.errors import InvariantError, ProtocolError, UnderstudyError, UsageError
from plumbing.pod.messages import Tier
from plumbing.pod.observers import PartServer
from plumbing.pod.paths import pool_socket, pool_state
from plumbing.service.clock import SystemClock, Timer, moment
from plumbing.service.events import EventLog
from plumbing.service.files import SlotFile, SlotFormat, put_aside, state_faults
from plumbing.service.http import HttpServer, Probe
from plumbing.service.notify import restarts
from plumbing.service.signals import until_ended
from plumbing.text import duration, join_address, size
from plumbing.wire.connection import Connection, Handler
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from pool import messages as msg
from pool import schema, status_text
from pool.core import events as ev
from pool.core.admission import expected_ms, wait_of
from pool.core.facts import Facts
from pool.core.model import Model, ModelEngine
from pool.core.reconcile import ModelPool
from pool.core.saved import PoolSnapshot
from pool.core.states import HOST, EntryKind
from pool.core.who_yields import bound_ms
from pool.pool_file import PoolFile, digests, engines_of, with_changes
from pool.server.engines import EngineLink, EngineSide
from pool.server.gateways import PoolGateways, for_gateways
from pool.server.leases import LeaseDesk
from pool.server.memory import SAMPLE_S, MemorySide
from pool.server.metrics import PoolMetrics
from pool.server.settings import PoolSettings

INBOX_MAX = 10_000  # events that wait for a disk; a pool whose disk is gone for longer ends
SAVE_RETRY_S = 1.0
LOG_ONLY = (ev.ModelChanged, ev.Switched, ev.Alarm)
SPENT = ("wait_ms", "drain_ms", "release_ms", "raise_ms")
DUE_S_MIN = 0.001  # the core may ask to be called at once, and others must get their turn
DUE_S_MAX = 3600.0


class PoolServer(Handler):
    """One directory's pool, and its socket for gateways, leases and users."""

    def __init__(self, settings: PoolSettings) -> None:
        self.settings, self.clock = settings, SystemClock()
        self.problem: str | None = None  # why nothing is decided now
        self.log = EventLog("pool", self.clock)
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        where = pool_socket(settings.directory), msg.CATALOGUE, self
        self.server = PartServer(*where, self.log, lambda: document(self), service="pool")
        # What the servers cannot do now.
        self.troubles: list[Callable[[], str | None]] = [lambda: self.server.problem]
        self._inbox: deque[ev.PoolEvent] = deque()
        self._effects: deque[ev.PoolEffect] = deque()
        self._timer, self._ticker = Timer(self._due), Timer(self._tick)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Take the directory, read the state, connect to everybody.

        Raises:
            UnderstudyError: another pool is here, or the state cannot be kept.
        """
        await self.server.start()  # first: it guards everything below against a second pool
        try:
            self._open()
        except BaseException:
            await self.server.close()
            raise
        self._tasks = [*self.engines.start(), *self.memory.start()]
        for task in self._tasks:
            task.add_done_callback(self._ended)
        self.feed(ev.PoolTick())
        if self.state.record is None:
            for name, model in self.file.models.items():
                if model.preload:
                    self.feed(ev.Ordered(name, ev.Order.LOAD))
        self._tick()

    def _open(self) -> None:
        """
        Raises:
            UnderstudyError: the state cannot be kept, or does not fit these settings.
        """
        settings, clock, feed = self.settings, self.clock, self.feed
        directory = settings.directory
        self.state = state = PoolStateFile(directory)
        record = state.record or {}
        # At runtime, by model ("": the pool) and setting.
        self.changed: dict[str, dict[str, str]] = record.get("changed", {})
        self.file = file = _as_changed(settings, self.changed, self.log)
        models, setup = file.models, settings.setup_of(file)
        snapshot = msgspec.convert(record["pool"], PoolSnapshot) if record else None
        self.leases = LeaseDesk(directory, file.devices, feed)
        granted, era = self.leases.recover(), secrets.token_hex(8)
        self.pool = ModelPool(setup, clock.now_ms(), era, snapshot, granted=granted)
        self.facts = self.pool.facts
        self.doors = {name: ev.SetModelDoor(name, 0, None) for name in models}
        self.metrics = PoolMetrics(models, setup.devices)
        self.metrics.metrics.refresh = self._refresh
        self.gateways = PoolGateways(lambda: for_gateways(self.facts, self.doors, self.file), feed)
        engines_by_model = {name: engines_of(name, each) for name, each in models.items()}
        self.engines = EngineSide(directory, engines_by_model, feed)
        devices = {name: each.devices for name, each in models.items()}
        beside = functools.partial(beside_bytes, self.facts)
        self.memory = MemorySide(directory, devices, file.host_memory, feed, beside)
        self.started_ms = clock.now_ms()
        if state.problem is not None:
            message = f"{state.path}: {state.problem}; moved to {state.aside}"
            self.log.record("pool.state_lost", message, "error", {"aside": state.aside})

    async def close(self) -> None:
        """Stop. Nothing is told: engines and gateways go on with what they were told."""
        self._timer.cancel()
        self._ticker.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for part in (self.leases, self.engines, self.gateways, self.state):
            part.close()
        await self.server.close()

    # ------------------------------------------------------------------ events

    def feed(self, event: ev.PoolEvent) -> None:
        """Hand one event to the core, and perform what follows.

        Raises:
            UnderstudyError: the core refuses it, and nothing has changed. Only of an event that is
                handled at once; of one that had to wait it is recorded.
        """
        if self._effects:
            if len(self._inbox) >= INBOX_MAX:
                raise InvariantError(f"{INBOX_MAX} events wait: {self.problem}")
            self._inbox.append(event)
            return
        try:
            self._handle(event)
        finally:
            self._drain()

    def _change(self, model: str, setting: str, value: str | None) -> None:
        """Set something at runtime (`model` "": of the whole pool), None: as in the pool file.

        Raises:
            UsageError: there is no such setting, or it cannot have this value.
            UnderstudyError: it cannot be written to the state file.
        """
        changed = {name: dict(found) for name, found in self.changed.items()}
        changed.setdefault(model, {}).pop(setting, None)
        if value is not None:
            changed[model][setting] = value
        file, before = with_changes(self.settings.file, changed), self.changed
        why = no_room(self, file.margin_bytes)
        if setting == "margin" and value is not None and why is not None:
            raise UsageError("pool.bad_setting", why)
        self.changed = {name: found for name, found in changed.items() if found}
        try:
            self._save(True)
        except OSError as error:
            self.changed = before
            why = f"it cannot be written to the state file: {error.strerror}"
            raise UnderstudyError("pool.state_unwritable", why) from error
        self.file = file
        self.feed(ev.RulesChanged(model, file.models[model] if model else file))
        self.gateways.tell(is_urgent=True)

    def _handle(self, event: ev.PoolEvent) -> None:
        effects = self.pool.handle(event, self.clock.now_ms())
        # Neighbours are told first, and then it is written down.
        self._effects.extend(sorted(effects, key=lambda each: isinstance(each, LOG_ONLY)))
        self._perform()

    def _refresh(self) -> None:
        self.metrics.update(
            self.facts,
            self.clock.now_ms(),
            bounds_ms(self.facts),
            is_unwritten=self.problem is not None,
            gateways=len(self.gateways.conns),
        )

    def _perform(self) -> None:
        while self._effects:
            try:
                self._perform_one(self._effects[0])
            except OSError as error:
                self._hold(error)
                return
            self._effects.popleft()

    def _drain(self) -> None:
        """What has come meanwhile, then the time."""
        while self._inbox and not self._effects:
            event = self._inbox.popleft()
            try:
                self._handle(event)
            except UnderstudyError as error:
                data = {"error_code": error.code}
                self.log.record("pool.wrong_message", error.message, "warning", data)
        self._arm()

    # ------------------------------------------------------------------ the state

    def _save(self, is_order: bool) -> None:
        """`is_order`: what a person has asked for is in it (`SaveState`).

        Raises:
            OSError: it may not be on file.
        """
        record = {"pool": self.pool.snapshot(), "changed": self.changed}
        self.state.write(record, survives_power_cut=is_order)

    def _hold(self, error: OSError) -> None:
        if self.problem is None:
            self.problem = (
                f"nothing is decided: {self.state.path} cannot be written ({error.strerror});"
                " models stay as they are until it can be written"
            )
            self.log.record("pool.state_unwritable", self.problem, "error")
        self._rearm(SAVE_RETRY_S)

    # ------------------------------------------------------------------ neighbours and time

    def _ended(self, task: asyncio.Task[None]) -> None:
        """A task that ends by itself is a bug, and ends the pool."""
        if not task.cancelled() and not self.failed.done():
            self.failed.set_exception(task.exception() or RuntimeError("a task has ended"))

    def _arm(self) -> None:
        if self._effects:
            return  # the retry of the state is due
        delay_s = (self.pool.due_ms - self.clock.now_ms()) / 1000
        self._rearm(min(max(delay_s, DUE_S_MIN), DUE_S_MAX))

    def _rearm(self, delay_s: float) -> None:
        self._timer.cancel()
        self._timer.soon(delay_s)

    def _due(self) -> None:
        if self._effects:
            self._perform()
            if self._effects:
                return
            self.problem = None
            self.log.record("pool.state_written", f"{self.state.path} can be written again")
            self._drain()
            return
        self.feed(ev.PoolTick())

    def _tick(self) -> None:
        self._ticker.soon(SAMPLE_S)
        self.memory.sample()
        self.metrics.look(self.facts.models, self.facts.demand)

    # ------------------------------------------------------------------ effects

    def _perform_one(self, effect: ev.PoolEffect) -> None:
        """
        Raises:
            OSError: the state could not be written; nothing behind this may be performed.
        """
        match effect:
            case ev.SaveState():
                self._save(effect.is_order)
            case ev.SetModelDoor():
                is_new = effect.number != self.doors[effect.model].number
                self.doors[effect.model] = effect
                self.gateways.tell(is_urgent=is_new)
            case ev.TellEngine():
                if effect.goal is not Tier.COLD:
                    model = self.engines.links[effect.engine].model
                    self.memory.keep(model, and_kv=effect.goal is Tier.AWAKE)
                self.engines.tell(effect)
                if effect.kill:
                    self._record("pool.kill", effect.kill, "warning", engine_id=effect.engine)
            case ev.AskMemory():
                self.memory.ask(effect)
            case ev.AskWitness():
                self.engines.witnesses.ask(effect.engine, effect.number)
            case ev.GrantLease():
                self.leases.granted(effect.lease)
                self._record("pool.lease", f"lease {effect.lease} is granted", lease=effect.lease)
            case ev.RefuseLease():
                self.leases.refused(effect.lease, effect.why)
                self._record("pool.lease", effect.why, "warning", lease=effect.lease)
            case ev.Alarm(model=model, sentence=sentence):
                self._record("pool.alarm", sentence, "error", model=model)
            case ev.ModelChanged(model=model, old=old, new=new, reason=reason):
                self.gateways.tell(is_urgent=False)
                self.metrics.count(effect, self.facts.models[model].leaving)
                text = f"{model}: {old} → {new}: {reason}"
                data = {"model": model, "from": old, "to": new, "cause": reason}
                self._record("pool.model", text, **data)
            case ev.Switched(model=model, victims=victims):
                self.metrics.count(effect)
                spent = {name: round(getattr(effect, name), 1) for name in SPENT}
                text = f"{model} is awake, {duration(effect.wait_ms)} after it was requested"
                text += f", in place of {', '.join(victims)}" if victims else ""
                self._record("pool.switch", text, model=model, victims=list(victims), **spent)

    def _record(self, kind: str, message: str, severity: str = "info", **data: object) -> None:
        """Behind what is sent in this turn of the loop: gateways wait for their doors."""
        record = functools.partial(self.log.record, kind, message, severity, data)
        asyncio.get_running_loop().call_soon(record)

    # ------------------------------------------------------------------ its socket

    def closed(self, conn: Connection, reason: str) -> None:
        self.gateways.left(conn)
        self.leases.left(conn)

    def received(
        self, conn: Connection, message: Message, request_id: int, fds: list[OwnedFd]
    ) -> None:
        close_all(fds)
        match message:
            case msg.DemandMsg():
                self.gateways.said(conn, message)
            case msg.LeaseMsg():
                self.leases.asked(conn, message, request_id)
            case msg.OrderMsg() | msg.SetMsg():
                try:
                    conn.send(self._obey(message), request_id)
                except UnderstudyError as error:  # a refusal, no fault of the connection's
                    conn.fault(error, request_id, close=False)
            case _:
                raise ProtocolError(
                    "pool.not_a_request", f"{message.TYPE} is not a request to a pool"
                )

    def _obey(self, message: msg.OrderMsg | msg.SetMsg) -> Message:
        """
        Raises:
            UnderstudyError: it is not obeyed, and nothing has changed.
        """
        if message.model is not None and message.model not in self.doors:
            why = f"this pool has no model {message.model}; it has {', '.join(self.doors)}"
            raise UsageError("model_not_found", why)
        if isinstance(message, msg.SetMsg):
            self._change(message.model or "", message.setting, message.value)
            whose = f"of {message.model}" if message.model else "of the pool"
            value = "as in the pool file" if message.value is None else f"now {message.value}"
            sentence = f"{message.setting} {whose} is {value}"
            self.log.record("pool.set", sentence, data={"setting": message.setting})
            return msg.OrderedMsg(None, sentence)
        self.feed(message)
        text = f"an operator requested: {message.order} {message.model}"
        data = {"model": message.model, "order": message.order}
        self.log.record("pool.order", text, data=data)
        sentence = sentence_on(self, message.model)
        return msg.OrderedMsg(self.facts.models[message.model].state, sentence)


def _as_changed(
    settings: PoolSettings, changed: dict[str, dict[str, str]], log: EventLog
) -> PoolFile:
    """The pool file with what was set before the restart; what does not fit it any more is
    dropped from `changed`."""
    file = settings.file
    for model, settings_of in [*changed.items()]:
        for setting, value in [*settings_of.items()]:
            try:
                file = with_changes(file, {model: {setting: value}})
            except UnderstudyError as error:
                del settings_of[setting]
                what = f"dropped {setting}={value}{f' of {model}' if model else ''}"
                log.record("pool.set", f"{what}: {error.message}", "warning", {"setting": setting})
        if not settings_of:
            del changed[model]
    return file


# -------------------------------------------------------------------------------- the state file

SCHEMA = 8
# A hundred models, each with two engines on 64 devices, and every setting changed. A write costs
# what is written, not the size of its slot.
SLOT_BYTES = 1024 * 1024
FORMAT = SlotFormat("understudy-pool 1", SLOT_BYTES)
FAULTS = {"in_use": "pool.state_in_use", "unwritable": "pool.state_unwritable"}


class PoolStateFile:
    """What the pool must know after a restart, on disk; its meaning is `pool.core.saved`'s.
    `record`: what was on it, None if nothing can be believed, and then its `problem` and where it
    was put `aside`.

    Both slots are valid from the moment the file exists, so one bad slot means that the newest
    record may be lost, and the other one must not be believed: goals that were told later would
    come back with older generations. Then a new *era* begins: engines replace what they remember,
    and the pool learns everything from those who hold it.

    The surprising thing: decisions do not wait for the disk. What they are about (processes,
    memory, doors) is gone after a power cut, and an engine whose file is newer than ours is caught
    up with (`pool.core.reconcile`). Only what people have asked for must outlive the machine.
    """

    def __init__(self, directory: str) -> None:
        """Open it, or put an unreadable one aside and create a new one.

        Raises:
            UnderstudyError: `pool.state_unwritable`, `pool.state_in_use`.
        """
        self.path = path = pool_state(directory)
        self.record: dict[str, Any] | None = None
        self.problem = self.aside = None
        with state_faults(path, FORMAT, **FAULTS):
            if os.path.lexists(path):
                self.record, self.problem = _load(path)
                self.aside = None if self.problem is None else put_aside(path)
            if not os.path.lexists(path) or self.problem is not None:
                FORMAT.create(path, _text(None))
            self._file = SlotFile(path, FORMAT)

    def write(self, record: dict[str, Any], *, survives_power_cut: bool = True) -> None:
        """Write the next slot; as `SlotFile.write`. Values may be structs."""
        self._file.write(_text(record), survives_power_cut=survives_power_cut)

    def close(self) -> None:
        self._file.close()


def _text(record: dict[str, Any] | None) -> bytes:
    return msgspec.json.encode({"schema": SCHEMA, "record": record})


def _load(path: str) -> tuple[dict[str, Any] | None, str | None]:
    """The record, and why there is none that can be believed."""
    raw = FORMAT.read(path)
    slots = [slot for slot in FORMAT.decode(raw) if slot is not None]
    if len(slots) < 2:
        return None, f"{2 - len(slots)} of its 2 slots cannot be read ({len(raw)} bytes)"
    body = msgspec.json.decode(max(slots)[1])
    if body.get("schema") != SCHEMA:
        return None, f"it has schema {body.get('schema')}, and this pool reads {SCHEMA}"
    return body["record"], None  # None: a pool that has told nothing yet


# ------------------------------------------------------------------------------------ the status
# It has the reservations, who holds what; of each model why it is where it is, what it waits for,
# and how long that can last. `pool.status_text` prints it.

PROBLEMS_MAX = 20  # a pod with a hundred engines that are all gone has one problem


def document(server: PoolServer) -> dict[str, Any]:
    """The status document, the same for the CLI, `/status` and observers."""
    found = schema.PoolStatus(
        schema=1,
        online=True,
        **server.log.newest(),
        pid=os.getpid(),
        restarts=restarts(),
        dir=server.settings.directory,
        **moment(server.started_ms, server.clock),
        era=server.facts.era,
        recovering=is_recovering(server),
        models=[_model(server, model) for model in server.facts.models.values()],
        devices=[_device(server.facts, name) for name in server.facts.ledger.devices],
        leases=[_lease(server, lease) for lease in server.facts.leases.values()],
        gateways=[schema.PoolGateway(name) for name in server.gateways.conns],
        file=schema.PoolFileFields(server.settings.path or None, digests(server.settings.file)),
        changed={name or "pool": found for name, found in server.changed.items()},
        problems=problems(server)[:PROBLEMS_MAX],
    )
    return dict(msgspec.to_builtins(found))


def sentence_on(server: PoolServer, name: str) -> str:
    """The model's state, why, and what it waits for."""
    model = _model(server, server.facts.models[name])
    return status_text.sentence(msgspec.to_builtins(model))


def problems(server: PoolServer) -> list[str]:
    """One sentence for each thing that does not work now."""
    found = [server.problem, no_room(server, server.facts.ledger.margin_bytes)]
    found += [each.alarm for each in server.facts.models.values()]
    if not server.gateways.conns:
        found.append("no gateway is connected, so no request can wake a model")
    found += [*server.engines.problems, *server.memory.problems]
    found += [look() for look in server.troubles]
    return [each for each in found if each]


def no_room(server: PoolServer, margin_bytes: int) -> str | None:
    """Which device would have no room for any model with this margin."""
    for name, found in server.facts.ledger.memory.items():
        if name != HOST and found.total_bytes <= margin_bytes:
            kept = f"`margin` keeps {size(margin_bytes)} of each device free"
            return f"no model fits: {name} has {size(found.total_bytes)}, and {kept}; lower it"
    return None


def is_recovering(server: PoolServer) -> bool:
    return any(each.is_recovering for each in server.facts.models.values())


def probes(server: PoolServer) -> Mapping[str, Callable[[], Probe]]:
    return {
        "live": lambda: Probe(True, "running"),
        "startup": lambda: Probe(True, "started"),
        "ready": lambda: ready(server),
    }


def ready(server: PoolServer) -> Probe:
    """It decides: its state can be written, and a gateway is connected. A model that recovers waits
    for its own engines, and does not make the pool unready."""
    if server.problem is not None:
        return Probe(False, "state_unwritable", {"why": server.problem})
    if not server.gateways.conns:
        return Probe(False, "no_gateway", {"why": "no gateway is connected"})
    return Probe(True, "recovering" if is_recovering(server) else "deciding")


# -------------------------------------------------------------------------------------- models


def _model(server: PoolServer, model: Model) -> schema.PoolModel:
    facts, now_ms, sizes, holder = server.facts, server.clock.now_ms(), model.sizes, model.holder
    told = server.doors[model.name]
    bound, measured = None, None
    if not model.is_unknown:
        of = (model.name, model.rules.priority, seen_models(facts), facts.rules)
        bound, measured = bound_ms(*of), bound_ms(*of, is_measured=True)
    tickets = facts.demand.tickets(model.name)
    booked: dict[str, dict[str, int]] = {}
    for key, size_bytes in facts.ledger.booked(model).items():
        kinds = booked.setdefault(key.device, {})
        kinds[key.kind.value] = kinds.get(key.kind.value, 0) + size_bytes
    return schema.PoolModel(
        model=model.name,
        state=model.state.value,
        **moment(model.since_ms, server.clock),
        reason=model.reason or None,
        waits_for=wait_of(facts, model),
        fault=model.fault or None,
        tier=model.goal.value,
        pinned=model.is_pinned,
        priority=model.rules.priority,
        recovering=model.is_recovering,
        tickets=len(tickets),
        oldest_ticket_ms=max((round(now_ms - each.since_ms) for each in tickets), default=None),
        parked=sum(each.kind == "parked" for each in tickets),
        in_flight=facts.demand.in_flight(model.name),
        door={"number": told.number, **(msgspec.to_builtins(told.door) if told.door else {})},
        holder=None if holder is None else schema.PoolHolder(holder.name, model.token),
        engines=[_engine(server.engines.links[each.name], each, model) for each in model.engines],
        bytes=booked,
        estimated=sizes is None or sizes.is_estimated,
        sizes=None
        if sizes is None
        else {kind: dict(getattr(sizes, kind)) for kind in ("base", "weights", "kv")},
        refused=model.never,
        expected_ms=_rounded(expected_ms(facts, model)),
        bound_ms=_rounded(bound),
        measured_bound_ms=_rounded(measured),
        alarm=model.alarm or None,
    )


def seen_models(facts: Facts) -> list[Model]:
    """As the plan sees them."""
    return [model for model in facts.models.values() if not model.is_unknown]


def bounds_ms(facts: Facts) -> dict[str, float]:
    """How long the tickets that each known model has now, or a usual one, can wait."""
    seen, found = seen_models(facts), {}
    for model in seen:
        priorities = [each.priority for each in facts.demand.tickets(model.name)]
        last = max([model.rules.priority, *priorities])
        found[model.name] = bound_ms(model.name, last, seen, facts.rules) or 0.0
    return found


def _rounded(spent_ms: float | None) -> int | None:
    return None if spent_ms is None or math.isinf(spent_ms) else round(spent_ms)


def _engine(link: EngineLink, engine: ModelEngine, model: Model) -> schema.PoolEngine:
    state = engine.said.state if engine.said is not None and engine.is_connected else None
    is_shadow = link.engine != model.main().name
    return schema.PoolEngine(link.engine, is_shadow, link.goal, state, link.problem)


# -------------------------------------------------------------------------------------- memory


def beside_bytes(facts: Facts, device: str) -> int | None:
    """What engines and leases have there beside weights and KV memory; None: not known of all."""
    total = sum(lease.booked.get(device, 0) for lease in facts.leases.values())
    for engine in facts.engines.values():
        if engine.said is None or not (engine.is_connected and engine.incarnation):
            continue
        if not engine.said.base_bytes:
            return None
        total += engine.said.base_bytes.get(device, 0)
    return total


def _device(facts: Facts, device: str) -> schema.PoolDevice:
    """Who holds what of it is by owner: a model, or `lease ID`; the largest first."""
    ledger, booked = facts.ledger, []
    for key, size_bytes in ledger.entries.items():
        if key.device == device and size_bytes:
            owner = facts.engines[key.owner].model if key.kind is EntryKind.BASE else key.owner
            owner = f"lease {owner}" if key.kind is EntryKind.LEASE else owner
            booked.append(
                schema.PoolBooked(owner, key.kind.value, size_bytes, key in ledger.leaving)
            )
    known = ledger.memory.get(device)
    return schema.PoolDevice(
        device=device,
        total_bytes=known.total_bytes if known else None,
        free_bytes=max(0, ledger.free_bytes(device)) if known else None,
        booked_bytes=sum(row.bytes for row in booked),
        outside_bytes=known.outside_bytes if known else 0,
        margin_bytes=0 if device == HOST else ledger.margin_bytes,
        booked=sorted(booked, key=lambda row: (row.owner, -row.bytes)),
    )


def _lease(server: PoolServer, lease: Model) -> schema.PoolLeaseFields:
    asked = lease.lease
    assert asked is not None
    held = server.leases.leases.get(asked.lease)
    return schema.PoolLeaseFields(
        lease=asked.lease,
        device=asked.device,
        bytes=asked.bytes,
        granted=lease.goal is Tier.AWAKE,
        waits_for=wait_of(server.facts, lease),
        priority=asked.priority,
        command=(held.asked.program if held is not None else "") or None,
        pid=(held.pid if held is not None else 0) or None,
        **moment(asked.since_ms, server.clock),
    )


async def run(settings: PoolSettings) -> None:
    """Serve until SIGTERM or SIGINT.

    Raises:
        UnderstudyError: it could not start.
    """
    server = PoolServer(settings)
    await server.start()
    http = HttpServer(
        settings.http_host,
        settings.http_port,
        probes=probes(server),
        status=lambda: document(server),
        metrics=server.metrics.metrics,
        events=server.log,
        allowed_hosts=settings.allowed_hosts,
    )
    server.troubles.append(lambda: http.problem)
    try:
        await http.start()
        models = len(settings.file.models)
        message = f"started on {settings.directory} with {models} models, probes on"
        message += f" {join_address(http.host, http.port)}"
        server.log.record("pool.started", message, data={"http_port": http.port})
        gc.freeze()  # these objects stay: no later collection scans them while a ticket waits
        await until_ended(server.failed)
    finally:
        await http.stop()
        await server.close()
