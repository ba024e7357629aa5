"""What a gateway may do with requests for a model: a function of what is known of it."""

from __future__ import annotations

from pool.core.events import Door, OpenDoor, RefusedDoor, Running, ShutDoor
from pool.core.expected import awake_ms, is_news
from pool.core.known import KnownModel
from pool.core.states import ModelState

FAILED_RETRY_S = 60  # somebody has to look at it first
NO_ROOM_RETRY_S = 60


def door_of(known: KnownModel, now_ms: float) -> Door:
    """The door of a model whose state is known."""
    model = known.model
    match model.state:
        case ModelState.AWAKE | ModelState.WAKING | ModelState.LOADING if _is_open(known):
            return _open(known) or _shut(known, now_ms)
        case ModelState.FAILED:
            retry_s = None if model.is_permanent else FAILED_RETRY_S
            why = (
                f"model {known.name} has failed: {model.fault.rstrip('.')};"
                f" `understudy pool reset {known.name}` lets it try again"
            )
            return RefusedDoor("pool.failed", why, retry_s)
        case ModelState.UNLOADING | ModelState.RELEASING | ModelState.DRAINING if (
            known.is_unload_ordered
        ):
            if model.state is ModelState.UNLOADING:
                return RefusedDoor("pool.not_loaded", reason_of(known), None)
        case ModelState.COLD | ModelState.PENDING if (
            not known.rules.is_on_demand and known.load_ordered_ms is None and _is_cold(known)
        ):
            why = (
                f"model {known.name} is not loaded, and is not loaded on demand; an operator can:"
                f" `understudy pool load {known.name}`"
            )
            return RefusedDoor("pool.not_loaded", why, None)
    if known.never is not None and model.state is ModelState.PENDING:
        why = f"model {known.name} does not fit: {known.never}"
        return RefusedDoor("pool.no_room", why, NO_ROOM_RETRY_S)
    return _shut(known, now_ms)


def _is_cold(known: KnownModel) -> bool:
    return known.model.floor.value == "cold"


def _is_open(known: KnownModel) -> bool:
    """An open door stays open over a failover: the gateway replaces its engine by itself, and
    nobody waits for the pool."""
    if known.model.state is ModelState.AWAKE:
        return True
    return known.model.is_again and isinstance(known.door, OpenDoor)


def _open(known: KnownModel) -> OpenDoor | None:
    holder = known.holder
    if holder is not None:
        return OpenDoor(holder.engine, holder.token)
    return known.door if isinstance(known.door, OpenDoor) else None


def _shut(known: KnownModel, now_ms: float) -> ShutDoor:
    model = known.model
    running = model.running if model.state in WITH_REQUESTS else Running.FINISH
    return ShutDoor(running, expected_ms(known, now_ms), reason_of(known))


def expected_ms(known: KnownModel, now_ms: float) -> float | None:
    """Until it is awake, as far as is known; None also where nobody waits for it."""
    at_ms = awake_ms(known, now_ms) or known.expected_ms
    if at_ms is None or known.is_unload_ordered or known.model.state is ModelState.AWAKE:
        return None
    return max(0.0, at_ms - now_ms)


WITH_REQUESTS = frozenset({ModelState.DRAINING, ModelState.RELEASING, ModelState.UNLOADING})


def reason_of(known: KnownModel) -> str:
    """Why requests wait, in one sentence."""
    name, model = known.name, known.model
    if known.is_unload_ordered:
        return f"an operator is unloading model {name}"
    match model.state:
        case ModelState.PENDING:
            return f"model {name} waits for room: {known.wait or 'it has just been asked for'}"
        case ModelState.LOADING:
            return f"model {name} is being loaded: {model.reason}"
        case ModelState.WAKING:
            return f"model {name} is waking up"
        case ModelState.DRAINING:
            return f"model {name} is finishing its requests: {model.reason}"
        case ModelState.RELEASING | ModelState.UNLOADING:
            return f"model {name} is freeing its memory: {model.reason}"
        case _:
            return f"model {name} is {model.state}"


def is_other_door(known: KnownModel, door: Door, now_ms: float) -> bool:
    """Whether it must be told: another key, or another time at which a pending model is expected.
    A number that nobody waits for to be obeyed may grow."""
    if door_key(known, door) != known.door_key:
        return True
    is_pending = known.model.state is ModelState.PENDING
    return is_pending and isinstance(door, ShutDoor) and is_news(door, known, now_ms)


def door_key(known: KnownModel, door: Door) -> tuple[object, ...]:
    """What makes it another door. A reason that changes is no news for those who wait."""
    match door:
        case ShutDoor():
            return known.model.state, door.running
        case _:
            return known.model.state, door
