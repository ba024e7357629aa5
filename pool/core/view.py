"""What the policy sees, and what it answers: plain values. The machine makes the one and obeys the
other; both are new at every decision."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from plumbing.part.tier import Tier
from pool.core.states import ModelState


class PoolRules(Struct, frozen=True):
    """The settings of the whole pool. Times are in ms."""

    margin_bytes: int = 512 << 20  # of each device, kept free
    starve_after_ms: float = 60_000.0  # a ticket so old counts as of the next better priority
    quantum_factor: float = 1.0  # a turn lasts at least so many switches


class ModelRules(Struct, frozen=True):
    """The settings of one model. Times are in ms."""

    devices: tuple[str, ...]
    priority: int = 0
    is_pinned: bool = False
    shadow_keeps: bool = False
    rest: Tier = Tier.WARM  # where it goes when nobody asks for it
    is_on_demand: bool = True  # a request may load it from cold
    min_runtime_ms: float = 10_000.0
    max_wait_ms: float = 5_000.0
    keep_alive_ms: float = 300_000.0
    offload_after_ms: float | None = None  # asleep
    unload_after_ms: float | None = None
    park_ms: float = 2_000.0  # of a drain: then streams are parked
    cut_ms: float | None = 30_000.0  # then the rest is cut; None: never


class TicketView(Struct, frozen=True):
    """Of one model's tickets (or the one of a lease or an order), those that decide: its oldest in
    the order of the policy."""

    priority: int
    since_ms: float
    is_parked: bool = False


class ModelView(Struct, frozen=True):
    """A model, or an engine's floor, as the policy judges it. `needs`: bytes by device, and on
    `HOST`, in all that the model and its shadow would have booked at a tier."""

    name: str
    rules: ModelRules
    state: ModelState
    tier: Tier  # what it holds now, or is falling to
    needs: Mapping[Tier, Mapping[str, int]]
    ticket: TicketView | None  # None: nobody waits for it
    awake_since_ms: float | None
    last_request_ms: float
    in_flight: int
    cannot_park: int
    is_raised_for_ticket: bool  # it is on its way up because somebody waits
    is_loading_again: bool  # after a death
    has_copy: bool  # so that it can be offloaded
    shadow: Tier | None  # what its shadow holds
    switch_ms: float  # the mean cost of waking it, resumed prefill included
    load_ms: float  # the budget of a raise
    release_ms: float


class DeviceView(Struct, frozen=True):
    """`free_bytes` now, in the books; `leaving_bytes`: booked, and on its way out already."""

    name: str
    total_bytes: int
    free_bytes: int
    leaving_bytes: int


class Raise(Struct, frozen=True):
    """Book it to `AWAKE` and raise it now. `is_backfill`: it takes room that no plan needs."""

    is_backfill: bool = False


class Victim(Struct, frozen=True):
    """`model` goes down to `tier`; `is_shadow`: its shadow alone."""

    model: str
    tier: Tier
    is_shadow: bool = False


class Yield(Struct, frozen=True):
    """Ask these, then look again when memory is free. Empty: those that were asked suffice."""

    victims: tuple[Victim, ...]


class Wait(Struct, frozen=True):
    """Look again at `until_ms`; None: at the next event. `why`: a sentence for operators."""

    until_ms: float | None
    why: str


class Never(Struct, frozen=True):
    """It fits only if something goes that never does by itself. `why` says who holds what."""

    why: str


Decision = Raise | Yield | Wait | Never


class Plan(Struct, frozen=True):
    """`heads` and backfills by model, in the order of the policy; `rests`: models that go down
    because nobody has asked for them; `due_ms`: when time alone changes the plan."""

    decisions: Mapping[str, Decision]
    rests: tuple[Victim, ...] = ()
    due_ms: float | None = None
