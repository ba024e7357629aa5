"""What a front knows of each pod, and which pod gets a request.

A pod is known by its address; the gateway in it says which pod it is, and in which incarnation of
itself. Its state follows from its last report and from what has happened to the connection that
reports come on:

    unknown     no report yet
    ready       an engine serves, or a model can be woken
    no_engine   neither
    leaving     it was told to end: its streams move
    silent      no report for `silent_ms`, nor tokens: its streams move where a pod has room
    gone        its connection broke, and no new one is there after `GONE_MS`; its streams broke

A pod's readiness in Kubernetes says nothing here: the restart of any one container makes a pod
unready that serves.

Requests that share a prefix share a key, and a key has one order of pods, by rendezvous hashing
(Thaler and Ravishankar, 1998), the same at every front, with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2018): the first pod of the order whose load is within the bound.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from hashlib import blake2b

from plumbing.gateway_protocol import Continuation, Hello, PodModel, PodReport

GONE_MS = 100.0  # a gateway that lives accepts a new connection in a millisecond
FORGET_MS = 60_000.0  # a silent pod that no name leads to any more is gone then
YOUNGER_MS = 5_000.0  # one that was started so much later was not started together with another
SUSPENDED_MS = 600_000.0  # a pod whose replay was another one gets no resumes for so long
LOAD_FACTOR = 1.25  # of the mean load, and one more
# The nearest first; what is not known here is farther away than all.
TIERS = ("awake", "waking", "warm", "offloaded", "cold")
_DISTANCE = {tier: distance for distance, tier in enumerate(TIERS)}


class PodState(StrEnum):
    UNKNOWN = "unknown"
    READY = "ready"
    NO_ENGINE = "no_engine"
    LEAVING = "leaving"
    SILENT = "silent"
    GONE = "gone"


class Pod:
    """One address at which a pod is, or was. `is_named`: a name leads to it now."""

    def __init__(self, address: str, now_ms: float) -> None:
        self.address = address
        self.report: PodReport | None = None
        self.has_any = False  # model that answers
        self.heard_ms = now_ms  # when it reported last, or was named first
        self.broke_ms: float | None = None  # its connection is broken since then
        self.is_named = True
        self.is_gone = False
        self.suspended_ms = 0.0  # until then it gets no resumes
        self.sent: Counter[str] = Counter()  # since its last report, by model
        self.tokens = -1  # of its streams, once its report is late
        self.leaving_since_ms: float | None = None
        self.born_ms = now_ms  # when this incarnation was heard first
        self.shown, self.shown_since_ms = PodState.UNKNOWN, now_ms  # its state, as last recorded

    @property
    def incarnation(self) -> int:
        return 0 if self.report is None else self.report.incarnation

    @property
    def name(self) -> str:
        return self.address if self.report is None else self.report.pod

    def state(self, now_ms: float, silent_ms: float) -> PodState:
        if self.is_gone:
            return PodState.GONE
        if self.report is None:
            return PodState.UNKNOWN
        if now_ms - self.heard_ms >= silent_ms:
            return PodState.SILENT
        if self.report.leaving_ms is not None:
            return PodState.LEAVING
        return PodState.READY if self.has_any else PodState.NO_ENGINE

    def hear(self, report: PodReport, now_ms: float) -> None:
        if report.incarnation != self.incarnation:
            self.born_ms = now_ms
        if report.pod != self.name:  # another one has the address now
            self.suspended_ms = 0.0
        if report.leaving_ms is None:
            self.leaving_since_ms = None
        elif self.leaving_since_ms is None:
            self.leaving_since_ms = now_ms
        self.report, self.heard_ms, self.broke_ms, self.is_gone = report, now_ms, None, False
        self.has_any = any(map(serves, report.models.values()))
        self.sent.clear()
        self.tokens = -1

    def model(self, name: str) -> PodModel | None:
        """None: its report does not name it."""
        return None if self.report is None else self.report.models.get(name)

    @property
    def any_model(self) -> PodModel | None:
        """For a request that names none, or one that only an engine may know."""
        models = {} if self.report is None else self.report.models
        return next((each for each in models.values() if serves(each)), None)

    @property
    def body_bytes_max(self) -> int:
        return 0 if self.report is None else self.report.body_bytes_max

    def hello(self, model: PodModel) -> Hello:
        """The pod in the place of an engine."""
        where, what = (self.address, self.incarnation), (model.continuation_id, model.continuation)
        return Hello(*where, *what, self.body_bytes_max)


def serves(model: PodModel) -> bool:
    """Whether it answers a request, now or once it is awake."""
    return bool(model.engine) or (bool(model.tier) and model.tier != TIERS[0])


def can_continue(model: PodModel, continuation_id: str) -> bool:
    is_kept = model.continuation in (Continuation.EXACT, Continuation.STATE)
    return is_kept and model.continuation_id == continuation_id


def may_continue(model: PodModel) -> bool:
    """Whether its id will be known only once it is awake, as it has not been yet; the pod refuses a
    stream of another one."""
    return not (model.engine or model.continuation_id)


class Choice(StrEnum):
    """Why a request goes to its pod."""

    AGAIN = "again"  # it was there before
    PREFIX = "prefix"  # the first in the order of its key
    BOUND = "bound"  # a later one, because those before have too much load
    LOAD = "load"  # the less loaded of two


class Place:
    """Where a request could go. `sent`: for its model since the last report, by this front.
    `runs`: its engine runs one more at once; beyond that they wait in it."""

    __slots__ = ("by", "has_room", "load", "model", "pod", "runs")

    def __init__(self, pod: Pod, model: PodModel, sent: int) -> None:
        self.pod, self.model, self.by = pod, model, Choice.AGAIN
        self.load = model.in_flight + model.waiting + sent
        self.has_room = model.room > sent
        self.runs = not model.slots or self.load < model.slots


def choose(places: Sequence[Place], key: bytes) -> Place | None:
    """The one of `places` that gets a request."""
    tiers: dict[int, list[Place]] = {}
    for each in places:
        if each.has_room:
            tiers.setdefault(_DISTANCE.get(each.model.tier, len(TIERS)), []).append(each)
    if not tiers:
        return None  # it waits here, where it can be sent anywhere
    same = tiers[min(tiers)]
    free = [each for each in same if each.runs] or same
    return _by_key(free, key) if key else _by_load(free)


def _by_key(places: Sequence[Place], key: bytes) -> Place:
    order = sorted(places, key=lambda each: _weight(key, each.pod.name), reverse=True)
    bound = LOAD_FACTOR * (sum([each.load for each in order]) + 1) / len(order) + 1
    found = next(each for each in order if each.load <= bound)  # the least loaded is below it
    found.by = Choice.PREFIX if found is order[0] else Choice.BOUND
    return found


def _by_load(places: Sequence[Place]) -> Place:
    two = random.sample(places, min(2, len(places)))
    found = min(two, key=lambda each: each.load)
    found.by = Choice.LOAD
    return found


def _weight(key: bytes, pod: str) -> bytes:
    return blake2b(pod.encode(), key=key[:64], digest_size=8).digest()
