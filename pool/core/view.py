"""What the policy sees, and what it answers: plain values. The machine makes the one and obeys the
other; both are new at every decision."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum

from msgspec import Struct

from plumbing.pod.messages import Tier
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
    """Of one model's tickets (or the one of a lease or an order), the one that decides: what
    `tickets.first_ticket` has chosen. Between models its wait counts from its model's last drain,
    if it is older than that."""

    priority: int
    since_ms: float
    is_parked: bool = False


class Leaving(StrEnum):
    """Why a model is on its way down."""

    HEAD = "head"  # another one's ticket needs its room
    IDLE = "idle"  # nobody has asked for it
    ORDER = "order"  # an operator's


class ModelView(Struct, frozen=True):
    """A model, or a lease, as the policy judges it. `needs`: bytes by device, and on `HOST`, that
    the model without its shadow has booked at a tier; a tier that is not named is unknown, and
    takes the whole of its devices. A granted lease is a pinned model that is awake."""

    name: str
    rules: ModelRules
    state: ModelState
    tier: Tier  # what it holds now, or is falling to
    needs: Mapping[Tier, Mapping[str, int]]
    booked: Mapping[str, int] = {}  # for it without its shadow, and until it is proven to be free
    ticket: TicketView | None = None  # None: nobody waits for it
    awake_since_ms: float | None = None
    turn_since_ms: float | None = None  # since its streams have resumed; None: since it is awake
    asleep_since_ms: float | None = None  # since when it is below awake, at whatever tier
    last_request_ms: float = 0.0
    in_flight: int = 0
    cannot_park: int = 0
    is_raised_for_ticket: bool = False  # it is on its way up because somebody waits
    is_loading_again: bool = False  # after a death
    has_plan: bool = False  # a head that got `Yield`, and is neither raised nor gone since
    has_copy: bool = False  # so that it can be offloaded
    leaving: Leaving | None = None  # while it drains, releases or unloads
    back_off_until_ms: float | None = None  # it has failed, and is not tried before then
    keep_alive_ms: float | None = None  # as recent requests ask; None: its rules'; inf: for ever
    shadow: Tier | None = None  # what its shadow holds, or is falling to; None: it has none
    shadow_bytes: Mapping[str, int] = {}  # that the shadow has booked besides, or would have
    switch_ms: float = 0.0  # the mean cost of waking it, resumed prefill included
    load_ms: float = 60_000.0  # the budget of a raise
    raise_ms: float | None = None  # what it and the resumed streams took; None: never measured
    release_ms: float = 0.0
    is_lease: bool = False
    is_blind: bool = False  # something about it is not known yet: it goes neither up nor down


class DeviceView(Struct, frozen=True):
    """`free_bytes` now, in the books, the margin and what is outside taken off; it may be negative.
    `leaving_bytes`: booked, and on its way out already, whoever's it is."""

    name: str
    total_bytes: int
    free_bytes: int
    leaving_bytes: int = 0
    outside_bytes: int = 0


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
    """Look again at `until_ms`; None: at the next event. `why`: a sentence for operators, which
    does not change while the reason is the same (so it names no remaining time). `victims`: models
    that are going to be asked then; `behind`: the model, or lease, that goes first. `is_outranked`:
    one of them has work of a better priority, and most likely ends it before `until_ms`."""

    until_ms: float | None
    why: str
    victims: tuple[str, ...] = ()
    behind: str = ""
    is_outranked: bool = False


class Never(Struct, frozen=True):
    """It fits only if something goes that never does by itself. `why` says who holds what."""

    why: str


Decision = Raise | Yield | Wait | Never


class Plan(Struct, frozen=True):
    """`decisions`: for each model with a ticket that is not awake or on its way up, in the order of
    the policy. `rests`: models that go down because nobody has asked for them. `unyields`: models
    whose room no head needs any more, and that still drain. `shadows`: shadows that may be launched
    now. `due_ms`: when time alone changes the plan."""

    decisions: Mapping[str, Decision]
    rests: tuple[Victim, ...] = ()
    unyields: tuple[str, ...] = ()
    shadows: tuple[str, ...] = ()
    due_ms: float | None = None
