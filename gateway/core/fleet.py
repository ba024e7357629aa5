"""The requests of a front: many pods in the place of one engine.

All of a request's life is a gateway's (`machine.py`): to a front a pod is an engine, its address
the engine's id, and the incarnation of its gateway the token of its grant. What differs is here: to
whom a request goes, and what becomes of it after a break.

    the answer broke off          the same pod again, once it reports a newer token or after
                                  200 ms, twice at most: its engine has died, not the pod
    the pod has no engine         another pod after 1 s, if one has room
    the pod is gone               another pod at once
    the pod is silent, or leaves  another pod, one stream after the other, as there is room; what
                                  no pod can take stays connected, and goes on there
    the replay is another one     one other pod; the pod gets no resumes for 10 minutes

A stream is resumed only where the continuation id is the one that it was begun under. A request has
one attempt: it is dropped before another pod gets the request, so no two pods speak in one answer.
While a pod that leaves still has a long stream, its heir computes it ahead (`Prefill`), so what is
left of the pause is the tokens that were made meanwhile, and the way.
An engine that dies is charged to the requests that it had, over all pods together: a request may
kill three of them, not three in each pod. What dies in a silent pod is charged when it is known.

A request that no pod can take now waits aside, and is looked at again when something has changed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gateway.core import events as ev
from gateway.core.answers import failure
from gateway.core.client_request import Attempt, ClientRequest, RequestState
from gateway.core.events import BreakCause, GatewayEvent, GatewayRules
from gateway.core.lanes import Lane
from gateway.core.machine import BUSY, NEVER_MS, NEWER_GRANT_MS, REPLAYS, Gateway
from gateway.core.pods import (
    FORGET_MS,
    GONE_MS,
    SUSPENDED_MS,
    YOUNGER_MS,
    Choice,
    Place,
    Pod,
    PodState,
    can_continue,
    choose,
    may_continue,
    serves,
)
from plumbing.gateway_protocol import Journal, PodModel
from pool.core.events import ModelDemand

ASIDE_MS = 100.0  # between two looks at a request that no pod can take
NO_ENGINE_MS = 1_000.0  # a failover inside of a pod takes less
AGAIN_MAX = 2  # at the same pod, after a break
# Breaks without progress, at whatever pods: then it is the request.
BREAKS_MAX = 8
MOVES_MAX = 4  # streams that come from pods that leave, at one pod at once
AHEAD_TOKENS = 24  # a pod computes ahead if it lacks so many tokens of a stream at least
AHEAD_TIMES = 3  # for one stream, which grows meanwhile
AHEAD_MS = 10_000.0  # each time; a longer prefill is not waited for
STALL_MS = 200.0  # this process did not run for so long: no pod was silent meanwhile
BAD_STATES = (PodState.NO_ENGINE, PodState.SILENT, PodState.GONE)
LOSSES = ("gone", "restarted", "silent")
MOVES = ("gone", "no_engine", "silent", "leaving", "differed", "refused")
# They say nothing against the request; those with a wrong token were in no engine of the right one.
NO_BREAKS = (
    *(BreakCause.MOVED, BreakCause.HANDED_OVER, BreakCause.SUPERSEDED),
    BreakCause.WRONG_TOKEN,
)
ENDS = (BreakCause.CLOSED, BreakCause.POD_LOST)  # a pod that leaves was told to end


# One life of an engine: its pod, the pod's incarnation, token and era.
Life: TypeAlias = "tuple[Pod, int, int, str]"


@dataclass(slots=True)
class Ahead:
    """A pod computes a stream that another pod still has, at most until `until_ms`. `tokens`: of
    the stream as it was then; `times`: how often it has done so."""

    pod: Pod
    until_ms: float
    tokens: int
    times: int


@dataclass(slots=True, eq=False)
class Sent:
    """Where a request was sent last."""

    pod: Pod
    incarnation: int
    token: int  # of the engine that had it there
    era: str
    broke_ms: float = 0.0
    breaks: int = 0  # there, in a row
    leaves: str = ""  # the cause for which it is to go elsewhere
    refused_by: set[int] = field(default_factory=set)  # incarnations, since the last answer
    differed: bool = False  # a replay was another one
    # Engines of silent pods, that may have died of it unseen.
    unsure: list[Life] = field(default_factory=list)
    ahead: Ahead | None = None

    @property
    def engine(self) -> Life:
        return self.pod, self.incarnation, self.token, self.era

    def is_of_another(self, model: PodModel | None) -> bool:
        """Whether another engine is known to be there now, or another life of the same one."""
        return model is not None and (model.token, model.era) != (self.token, self.era)


class Fleet(Gateway):
    """All requests of one front. It has no lanes (`lanes.py`)."""

    explains_deaths = False  # it was in one pod, and the others' may have died of another request
    alone = None
    lanes: Mapping[str, Lane] = {}
    by_model: Mapping[str, Gateway] = {}

    def __init__(self, rules: GatewayRules) -> None:
        super().__init__(rules)
        self.pods: dict[str, Pod] = {}  # by address
        self.losses: Counter[str] = Counter()  # of pods, by cause (`LOSSES`)
        self.moves: Counter[str] = Counter()  # of streams to another pod, by cause (`MOVES`)
        self.choices: Counter[Choice] = Counter()  # of a pod for a request
        self._sent: dict[int, Sent] = {}  # by request

    def _happened(self, event: GatewayEvent, now_ms: float) -> None:
        match event:
            case ev.RequestCame():
                self.add(event, now_ms)
            case ev.PodNamed():
                self._named(event, now_ms)
            case ev.PodHeard():
                self._heard(event, now_ms)
            case ev.PodBroke():
                self._broken(event, now_ms)
            case ev.Prefilled():
                self._prefilled(event, now_ms)
            case _:
                super()._happened(event, now_ms)

    @property
    def needs_ticks(self) -> bool:
        """Whether anything waits for time to pass: a pod may fall silent at any time."""
        return bool(self.pods or self.requests)

    def demand(self, now_ms: float) -> dict[str, ModelDemand]:
        return {}

    def state(self, pod: Pod) -> PodState:
        return pod.state(self._now_ms, self.rules.silent_ms)

    def _note(self, pod: Pod, cause: str = "") -> None:
        """Record a state that is another one, and every loss."""
        state, old = self.state(pod), pod.shown
        if state is not old:
            pod.shown, pod.shown_since_ms = state, self._now_ms
        elif not cause:
            return
        where = f"{pod.name} at {pod.address}"
        message = f"{where}: {old} → {state}"
        if cause:
            message = f"{where} is lost ({cause}): its streams continue in other pods"
        severity = "warning" if cause or state in BAD_STATES else "info"
        data = {"pod": pod.name, "address": pod.address, "cause": cause or None}
        self.outbox.append(ev.Told("pod", message, severity, {**data, "state": state, "old": old}))

    # ------------------------------------------------------------------ whose turn it is, and where

    def _send_due(self) -> None:
        # Each pod has a limit of its own, of the same size.
        turns = self.queue.due(
            *(lambda: self.resuming // (len(self._ready) or 1), lambda: self._company),
            self._now_ms,
        )
        for request in turns:
            place = self._place_for(request)
            if place is None:
                request.not_before_ms = self._now_ms + ASIDE_MS
                request.refusals = 0  # it is not full pods that it waits for: let others pass
                self.queue.add(request)
            elif request.body_bytes > (limit := place.pod.body_bytes_max):
                sizes = {"size": request.body_bytes, "limit": limit}
                self.fail(request, failure("gateway.body_too_large", **sizes))
            else:
                self._send_to(request, place)

    @property
    def _ready(self) -> list[Pod]:
        now_ms, silent_ms = self._now_ms, self.rules.silent_ms
        pods = self.pods.values()
        return [pod for pod in pods if pod.state(now_ms, silent_ms) is PodState.READY]

    def _send_to(self, request: ClientRequest, place: Place) -> None:
        pod, model = place.pod, place.model
        old = self._sent.get(request.number)
        new = Sent(pod, pod.incarnation, model.token, model.era)
        if old is not None:
            new.refused_by, new.differed = old.refused_by, old.differed
            new.unsure = old.unsure
            if old.pod is pod and not old.is_of_another(model):
                new.breaks = old.breaks
        if request.is_inside and old is not None and old.pod is not pod:
            self._is_dead_of(request, self._now_ms)  # its pod has no engine any more
            if request.number not in self.requests or request.is_suspect:
                return  # another turn
        self._sent[request.number] = new
        self.choices[place.by] += 1
        if old is not None and old.pod is not pod and request.state is RequestState.PARKED:
            self.moves[self._why_moved(old)] += 1
        pod.sent[request.model] += 1
        self.send(request, pod.incarnation, pod.hello(model), self._now_ms)

    def _why_moved(self, old: Sent) -> str:
        if old.leaves or old.refused_by:
            return old.leaves or "refused"
        is_gone = old.pod.is_gone or old.pod.incarnation != old.incarnation
        return "gone" if is_gone else "no_engine"

    def _place_for(self, request: ClientRequest) -> Place | None:
        """Where it goes now; None: it waits."""
        key = request.key
        sent = self._sent.get(request.number)
        places = self._places(request)
        if sent is None:
            return choose(places, key)
        is_same = sent.pod.incarnation == sent.incarnation
        here = [each for each in places if each.pod is sent.pod and is_same]
        others = [
            each
            for each in places
            if each not in here and each.pod.incarnation not in sent.refused_by
        ]
        found = choose(others, key)
        stays = not sent.leaves and is_same
        if stays and not sent.pod.is_gone and sent.breaks <= AGAIN_MAX and not sent.refused_by:
            since_ms = self._now_ms - sent.broke_ms
            if not here:  # it has no engine, or is about to be gone
                return found if since_ms >= NO_ENGINE_MS else None
            is_newer = sent.is_of_another(here[0].model)
            return here[0] if is_newer or since_ms >= NEWER_GRANT_MS else None
        if found is not None:
            return found
        sent.refused_by.clear()
        return choose(here, b"") if not sent.leaves else None

    def _places(self, request: ClientRequest) -> list[Place]:
        """All pods that could take it, full ones too."""
        name, ready = request.model, self._ready
        named = [(pod, model) for pod in ready if (model := pod.model(name)) is not None]
        if not named:
            named = [(pod, model) for pod in ready if (model := pod.any_model) is not None]
        found = [Place(pod, model, pod.sent.get(name, 0)) for pod, model in named if serves(model)]
        if request.state is not RequestState.PARKED:
            return found
        found = [each for each in found if each.pod.suspended_ms <= self._now_ms]
        known = [each for each in found if can_continue(each.model, request.continuation_id)]
        return known or [each for each in found if may_continue(each.model)]

    # ------------------------------------------------------------------ breaks and refusals

    def head(self, attempt: Attempt, came: ev.HeadCame, now_ms: float) -> None:
        """Without a pod's name the pod's gateway speaks, and no engine has seen the request."""
        request = attempt.owner
        is_refusal = request.has_broken or came.status >= 500 or came.status in BUSY
        if not came.token and is_refusal:
            self.refused(attempt, now_ms)
        elif not came.token:
            self._begin(attempt, came)  # no pod would take it
        else:
            sent = self._sent[attempt.request]
            sent.refused_by.clear()
            is_another, sent.token = sent.token != came.inner_token, came.inner_token
            attempt.continuation_id = came.continuation_id
            if attempt.was_inside and is_another:  # where it broke off last, the engine has died
                self._is_dead_of(request, now_ms)
                if request.number in self.requests and request.is_suspect:
                    self.broke(attempt, BreakCause.SUPERSEDED, now_ms)  # it waits for its trial
                if request.attempt is not attempt:
                    return
            super().head(attempt, came, now_ms)
            if came.token != attempt.token and not sent.pod.is_gone:  # another one has its address
                self._lose(sent.pod, "gone", now_ms)

    def refused(self, attempt: Attempt, now_ms: float) -> None:
        """Another pod may take it at once."""
        request, sent = attempt.owner, self._sent[attempt.request]
        sent.refused_by.add(attempt.token)
        super().refused(attempt, now_ms)
        places = self._places(request)
        if any(each.pod.incarnation not in sent.refused_by for each in places):
            request.not_before_ms = now_ms

    def broke(self, attempt: Attempt, cause: BreakCause, now_ms: float, leaves: str = "") -> None:
        """`leaves`: with `MOVED`, why it is to go elsewhere."""
        request, sent = attempt.owner, self._sent[attempt.request]
        if cause in ENDS and sent.pod.leaving_since_ms is not None:
            cause, leaves = BreakCause.HANDED_OVER, PodState.LEAVING
        sent.broke_ms, sent.leaves, sent.ahead = now_ms, leaves, None
        sent.breaks += cause not in NO_BREAKS
        super().broke(attempt, cause, now_ms)
        if cause is not BreakCause.MOVED:
            self._settle(request, sent, now_ms)
            if request.is_inside and sent.is_of_another(sent.pod.model(request.model)):
                self._is_dead_of(request, now_ms)  # as its pod has reported already
        elif self.state(sent.pod) is PodState.SILENT:
            sent.unsure.append(sent.engine)

    def _settle(self, request: ClientRequest, sent: Sent, now_ms: float) -> None:
        """Charge the engines of pods that fell silent under this request, unless they live."""
        unsure, sent.unsure = sent.unsure, []
        for engine in unsure:
            if engine == sent.engine:  # charged as the one that has just broken off
                continue
            pod = engine[0]
            model = pod.model(request.model)
            now = model and (pod, pod.incarnation, model.token, model.era)
            lives = engine == now and self.state(pod) not in (PodState.SILENT, PodState.GONE)
            if not lives and request.number in self.queue.waiting:
                was_inside = request.is_inside
                self._is_dead_of(request, now_ms)
                request.is_inside = was_inside

    def _wait_for_grant(self, request: ClientRequest, cause: BreakCause, now_ms: float) -> None:
        request.not_before_ms = now_ms  # `_place_for` says when
        if cause in NO_BREAKS:
            request.is_inside = False
            return
        request.is_inside = True  # until the pod says that its engine lives
        request.breaks_here += 1
        if request.breaks_here >= BREAKS_MAX:
            request.not_before_ms, request.gives_up_ms = NEVER_MS, now_ms

    def mismatched(self, request: ClientRequest, why: str) -> None:
        """The replay is another one: another pod may have the right one, as nothing was sent."""
        sent, attempt = self._sent[request.number], request.attempt
        assert attempt is not None
        sent.pod.suspended_ms = self._now_ms + SUSPENDED_MS
        message = (
            f"{sent.pod.name} replayed another answer ({why}), with equal weights and settings by"
            " its continuation id; it resumes no stream for ten minutes"
        )
        data = {"request": request.number, "pod": sent.pod.name}
        self.outbox.append(ev.Told("replay_differed", message, "error", data))
        others = (pod for pod in self.pods.values() if pod is not sent.pod and not pod.is_gone)
        if sent.differed or not any(others):
            super().mismatched(request, why)
            return
        sent.differed = True
        self.broke(attempt, BreakCause.MOVED, self._now_ms, "differed")

    def _forget(self, request: ClientRequest, *how: Any, **more: Any) -> None:
        self._sent.pop(request.number, None)
        super()._forget(request, *how, **more)

    # ------------------------------------------------------------------ what pods say

    def _named(self, event: ev.PodNamed, now_ms: float) -> None:
        if event.is_named:
            self.pods.setdefault(event.address, Pod(event.address, now_ms))
        if event.address in self.pods:
            self.pods[event.address].is_named = event.is_named
        self._forget_gone()

    def _heard(self, event: ev.PodHeard, now_ms: float) -> None:
        pod = self.pods.get(event.address)
        if pod is None:
            pod = self.pods[event.address] = Pod(event.address, now_ms)
            pod.is_named = False
        old, report = pod.report, event.report
        if old is not None and old.incarnation != report.incarnation and not pod.is_gone:
            self._lose(pod, "restarted", now_ms)
        pod.hear(report, now_ms)
        if old is not None and old.incarnation == report.incarnation:
            self._charge(pod, now_ms)
        self._note(pod)
        self._look_at_aside(now_ms)

    def _broken(self, event: ev.PodBroke, now_ms: float) -> None:
        """A gateway that lives listens, so one whose port refuses is gone at once."""
        pod = self.pods.get(event.address)
        if pod is None or pod.is_gone or pod.report is None:
            return
        if pod.broke_ms is None:
            pod.broke_ms = now_ms
        if event.is_refused:
            self._lose(pod, "gone", now_ms)

    def _charge(self, pod: Pod, now_ms: float, *, is_lost: bool = False) -> None:
        """Every request that broke off in this pod was in an engine: in one that has died, if
        another one is there now, or if the whole pod is lost."""
        for request in list(self.queue.waiting.values()):
            sent = self._sent.get(request.number)
            if sent is None or sent.pod is not pod or not request.is_inside:
                continue
            if is_lost or sent.is_of_another(pod.model(request.model)):
                self._is_dead_of(request, now_ms)

    def _is_dead_of(self, request: ClientRequest, now_ms: float) -> None:
        self._died(request, now_ms)
        request.is_inside = False
        self.queue.queue_again()  # others may be cleared by it

    def _lose(self, pod: Pod, cause: str, now_ms: float) -> None:
        """Nothing that this incarnation says reaches anybody any more."""
        pod.is_gone, pod.broke_ms = cause != "restarted", None
        self.losses[cause] += 1
        self._note(pod, cause)
        for attempt in list(self.attempts.values()):
            if attempt.engine == pod.address and attempt.token == pod.incarnation:
                self.broke(attempt, BreakCause.POD_LOST, now_ms)
        self._charge(pod, now_ms, is_lost=True)
        self._look_at_aside(now_ms)

    def _forget_gone(self) -> None:
        for address, pod in list(self.pods.items()):
            if pod.is_gone and not pod.is_named:
                del self.pods[address]

    def _look_at_aside(self, now_ms: float) -> None:
        """Something has changed: those that wait aside may have a place."""
        for request in self.queue.waiting.values():
            if request.not_before_ms <= now_ms + ASIDE_MS:
                request.not_before_ms = min(request.not_before_ms, now_ms)

    # ------------------------------------------------------------------ time

    def _pass_time(self, now_ms: float) -> None:
        passed_ms = now_ms - self._ticked_ms
        if passed_ms >= STALL_MS:
            for pod in self.pods.values():
                pod.heard_ms = min(pod.heard_ms + passed_ms, now_ms)
        for pod in list(self.pods.values()):
            self._look_at_pod(pod, now_ms)
        self._forget_gone()
        super()._pass_time(now_ms)

    def _look_at_pod(self, pod: Pod, now_ms: float) -> None:
        if pod.is_gone:
            return
        if pod.broke_ms is not None and now_ms - pod.broke_ms >= GONE_MS:
            self._lose(pod, "gone", now_ms)
            return
        if not pod.is_named and now_ms - pod.heard_ms >= FORGET_MS:
            self._lose(pod, "silent", now_ms)
            return
        if now_ms - pod.heard_ms >= self.rules.silent_ms / 2 and self._speaks(pod):
            pod.heard_ms = now_ms - self.rules.silent_ms / 2
        self._note(pod)
        state = self.state(pod)
        if state in (PodState.SILENT, PodState.LEAVING):
            self._empty(pod, state, now_ms)

    def _speaks(self, pod: Pod) -> bool:
        """Whether its streams have more tokens than when this was asked last: its reports are late,
        and it lives."""
        mine = (each.owner for each in self.attempts.values() if each.engine == pod.address)
        before, pod.tokens = pod.tokens, sum(each.delivered_tokens for each in mine)
        return 0 <= before < pod.tokens

    def _empty(self, pod: Pod, state: PodState, now_ms: float) -> None:
        """Move what another pod can take, and nothing else."""
        replays = (each for each in self.attempts.values() if each.owner.state in REPLAYS)
        moving = Counter(each.engine for each in replays)
        ahead = (each.ahead for each in self._sent.values() if each.ahead is not None)
        moving.update(each.pod.address for each in ahead)
        most = MOVES_MAX if state is PodState.LEAVING else self.rules.resumes_max
        homeless = set()  # what no pod can take more of now
        for attempt in list(self.attempts.values()):
            request = attempt.owner
            if attempt.engine != pod.address or not self._may_move(request, state):
                continue
            begun = self._sent[request.number].ahead
            if begun is not None and begun.until_ms > now_ms and state is PodState.LEAVING:
                continue
            kind = request.model, request.continuation_id
            is_homeless = kind in homeless and begun is None
            place = None if is_homeless else self._heir(request, pod, state, moving, most)
            if place is None:
                homeless.add(kind)
                continue
            if state is not PodState.LEAVING or not self._computes_ahead(request, place.pod):
                self.broke(attempt, BreakCause.MOVED, now_ms, state)
                self._send_to(request, place)
            moving[place.pod.address] += 1

    def _heir(
        self, request: ClientRequest, pod: Pod, state: PodState, moving: Counter[str], most: int
    ) -> Place | None:
        """Where this one goes. During a rollout to pods that were replaced already, as far as they
        have room: elsewhere it would have to move again."""
        is_begun = request.state in (*REPLAYS, RequestState.STREAMING)
        found = [
            place
            for place in self._places(request)
            if place.pod is not pod
            and (not is_begun or can_continue(place.model, request.continuation_id))
        ]
        if state is PodState.LEAVING:
            born_ms = pod.born_ms + YOUNGER_MS
            younger = [each for each in found if each.pod.born_ms > born_ms]
            found = [each for each in younger if each.has_room] or found
        free = [each for each in found if moving[each.pod.address] < most]
        ahead = self._sent[request.number].ahead  # it has its place there
        known = [each for each in found if ahead is not None and each.pod is ahead.pod]
        return choose(known, b"") or choose(free, request.key)

    def _computes_ahead(self, request: ClientRequest, pod: Pod) -> bool:
        """Whether this pod, which is its heir, first computes what it lacks of the stream."""
        sent, tokens = self._sent[request.number], len(request.tokens)
        old = sent.ahead
        if old is None or old.pod is not pod:
            old = Ahead(pod, 0.0, 0, 0)
        if tokens - old.tokens < AHEAD_TOKENS or old.times >= AHEAD_TIMES:
            return False
        sent.ahead = Ahead(pod, self._now_ms + AHEAD_MS, tokens, old.times + 1)
        journal = Journal(request.tokens, request.chunks)
        where = pod.address, request.continuation_id
        self.outbox.append(ev.Prefill(request.number, *where, journal))
        return True

    def _prefilled(self, event: ev.Prefilled, now_ms: float) -> None:
        """It moves now. What broke off may have been an engine that died of it."""
        request = self.requests.get(event.request)
        sent = self._sent.get(event.request)
        if request is None or sent is None or sent.ahead is None:
            return
        sent.ahead.until_ms = now_ms
        if event.is_broken:
            request.died(now_ms)
        pod = self.pods.get(request.attempt.engine) if request.attempt is not None else None
        if pod is not None and self.state(pod) is PodState.LEAVING:
            self._empty(pod, PodState.LEAVING, now_ms)

    def _may_move(self, request: ClientRequest, state: PodState) -> bool:
        """What may be sent once only stays where it is."""
        if request.is_lean or not request.is_inference or request.state is RequestState.RELAYING:
            return False
        # A pod that leaves finishes replays and what has not begun; one that is silent may not.
        return state is PodState.SILENT or request.state is RequestState.STREAMING

    def _waits_in_vain(self, request: ClientRequest) -> bool:
        return True

    def _is_overdue(self, request: ClientRequest, now_ms: float) -> bool:
        return request.gives_up_ms is not None or request.held_ms >= self.rules.hold_ms

    @property
    def waits_for(self) -> str:
        """Why no pod takes a request, "" if one does."""
        states = Counter(self.state(pod) for pod in self.pods.values())
        if not states:
            return "no name leads to a pod"
        if states[PodState.READY]:
            return ""
        found = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        return f"no pod can take requests: {found}"
