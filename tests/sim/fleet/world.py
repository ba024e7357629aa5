"""A front in virtual time, before pods that die, fall silent, leave, restart at the same address
and play another answer.

The front's core is the real one, and this is its shell and its network: it performs every effect,
delivers reports and groups in the order of each connection, and checks with each event what must
never happen (F1 to F8 of the fleet). A pod is its gateway and its engine in one. A partition
keeps what is sent and delivers it when it heals, as TCP does, or ends the connection after 10 s.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import replace

from gateway.core import events as ev
from gateway.core.client_request import Attempt, RequestState
from gateway.core.fleet import Fleet
from plumbing.gateway_protocol import Continuation, PodModel, PodReport
from tests.gateway.core.model import PATHS, Play, text_of
from tests.gateway.core.pod import Client, Shell

MODEL = "m"
REPORT_MS = 250.0
RETRY_MS = 20.0
AGAIN_MS = 1_000.0
LOST_FLOW_MS = 10_000.0
CONNECT_MS = 2_000.0
PASSED_MS = 1_000.0
FITS_MS = 1_500.0  # a second, and what reports and ticks take
OPEN, BUSY_503, OTHER_409 = 200, 503, 409


@dataclass(eq=False)
class Connection:
    """One attempt's connection. What the pod has written waits in `pipe` during a partition."""

    number: int
    core: Attempt
    client: Client
    pod: SimPod
    asked: int  # the incarnation that the front meant
    journal: list[int] | None
    is_open: bool = True  # at the front
    is_served: bool = True  # at the pod
    is_lost: bool = False  # the node is gone that would have sent again what a cut has dropped
    made: int = 0
    pipe: list[Callable[[], None]] = field(default_factory=list)


@dataclass(eq=False)
class SimPod:
    """`token` of its engine; `incarnation` of its gateway."""

    address: str
    name: str
    incarnation: int
    cid: str = "c" * 16
    token: int = 1
    is_alive: bool = True  # its gateway
    has_engine: bool = True
    is_cut: bool = False  # no packet of it arrives,
    is_deaf: bool = False  # and none to it
    cut_ms: float = 0.0
    leaving_ms: float | None = None
    is_told_to_leave: bool = False  # and the front has heard it
    told_cid: str = ""  # that the front has heard
    lost_ms: float | None = None  # without a word to anybody
    misspells: bool = False
    room: int = 64
    latency_ms: float = 1.0
    connections: list[Connection] = field(default_factory=list)
    watch: int = 0  # the number of the connection that it reports on; 0: none
    fits_since_ms: float = 0.0


class World(Shell):
    """`fleet`: the front's core."""

    tick_ms = 50.0

    def __init__(self, seed: int, pods: int = 3, rules: ev.GatewayRules | None = None) -> None:
        super().__init__(seed, Fleet(rules or ev.GatewayRules()))
        self.fleet: Fleet = self.gateway
        self.stalled_ms = 0.0
        self.trace: list[str] = []
        self.cids: dict[int, str] = {}  # of the engine that began each stream
        self.open: dict[int, Connection] = {}  # by attempt
        self.entered: dict[int, int] = {}  # requests that an engine has seen, how often
        self.killed: dict[int, int] = {}  # engines, by the request that killed them
        self.hits: Counter[int] = Counter()  # ends of an engine, or of a pod, that had the request
        self.freed: Counter[int] = Counter()  # when a request was at no pod any more, in ms
        self.unseen: set[int] = set()  # whose replay is misspelled behind what the client has
        self._incarnations = itertools.count(1)
        self._watches = itertools.count(1)
        self.pods: dict[str, SimPod] = {}
        for index in range(pods):
            self.start(f"10.0.0.{index}:8443", f"pod-{index}")
            self.handle(ev.PodNamed(f"10.0.0.{index}:8443", True))

    # ------------------------------------------------------------------ time

    def told(self, what: str) -> None:
        self.trace.append(f"{self.now_ms:.0f} {what}")

    def stall(self, ms: float) -> None:
        """The front does not run for so long."""
        self.told(f"front stalls {ms:.0f}")
        self.now_ms += ms
        self.stalled_ms = self.now_ms
        for _ in range(3):  # a timer may be due before the reports that have come
            self.at(self.rng.uniform(0.0, 6.0), lambda: self.handle(ev.Tick()))

    # ------------------------------------------------------------------ pods

    def start(self, address: str, name: str, cid: str = "c" * 16) -> SimPod:
        """A gateway and an engine at this address, in place of what was there."""
        pod = SimPod(address, name, next(self._incarnations), cid)
        pod.latency_ms = self.rng.choice((0.2, 1.0, 5.0))
        pod.fits_since_ms = self.now_ms
        old = self.pods.get(address)
        assert old is None or not old.is_alive
        self.pods[address] = pod
        self.told(f"start {name} {pod.incarnation} at {address}")
        if old is not None and old.lost_ms is not None:
            # The front's connection is not told; it makes another one after a second of silence.
            late_ms = old.lost_ms + AGAIN_MS + self.rng.uniform(0.0, 500.0) - self.now_ms
            self.at(max(0.0, late_ms), lambda: self._connect_watch(pod))
        else:
            self._connect_watch(pod)
        return pod

    def _connect_watch(self, pod: SimPod) -> None:
        if pod.is_alive and not pod.watch and self.pods.get(pod.address) is pod:
            if pod.is_cut or pod.is_deaf:
                self.at(RETRY_MS, lambda: self._connect_watch(pod))
                return
            pod.watch = next(self._watches)
            self._report(pod, pod.watch)

    def _report(self, pod: SimPod, watch: int) -> None:
        """Now, and every 250 ms."""
        if pod.is_alive and pod.watch == watch:
            self._say(pod)
            self.at(REPORT_MS, lambda: self._report(pod, watch))

    def _say(self, pod: SimPod) -> None:
        """Its report; the front reads it as long as it has this connection."""
        watch = pod.watch
        if not watch or pod.is_cut or pod.is_deaf:
            return  # what is sent again later is as good
        running = sum(each.is_served for each in pod.connections)
        engine = "e" if pod.has_engine else ""
        model = PodModel(
            *(engine, pod.token, "era", pod.cid, Continuation.EXACT, "awake"),
            in_flight=running,
            room=max(0, pod.room - running),
        )
        report = PodReport(pod.name, pod.incarnation, {MODEL: model}, 1 << 20, pod.leaving_ms)

        def arrives() -> None:
            if pod.watch == watch:
                pod.is_told_to_leave = report.leaving_ms is not None
                pod.told_cid = pod.cid
                self.handle(ev.PodHeard(pod.address, report))

        self.at(pod.latency_ms, arrives)

    def kill(self, pod: SimPod, is_node: bool = False) -> None:
        """All of the pod; `is_node`: without a word to anybody."""
        if not pod.is_alive:
            return
        self.told(f"kill {pod.name} {pod.incarnation}{' node' if is_node else ''}")
        pod.is_alive = pod.has_engine = False
        pod.lost_ms = self.now_ms if is_node or pod.is_cut else None
        self._unfit(pod)
        watch, pod.watch = pod.watch, 0
        self.hits.update(each.client.number for each in self.open.values() if each.pod is pod)
        for each in pod.connections:
            each.is_served = False
            if not is_node:
                self._deliver(each, lambda each=each: self._broke(each))
            else:
                each.pipe.clear()
                each.is_lost = pod.is_cut
                self.at(LOST_FLOW_MS, lambda each=each: self._broke(each))
        pod.connections = []
        if watch and not is_node and not pod.is_cut:
            self.at(pod.latency_ms, lambda: self._watch_broke(pod))
        elif watch:
            self.at(LOST_FLOW_MS, lambda: self._watch_broke(pod))

    def _watch_broke(self, pod: SimPod) -> None:
        if self.pods.get(pod.address) is not pod:
            return  # another one is there, and has reported
        self.handle(ev.PodBroke(pod.address))
        if not pod.is_cut:
            self.at(pod.latency_ms, lambda: self._refused(pod))

    def _refused(self, pod: SimPod) -> None:
        if self.pods.get(pod.address) is pod and not pod.is_alive and not pod.is_cut:
            self.handle(ev.PodBroke(pod.address, is_refused=True))

    def break_watch(self, pod: SimPod) -> None:
        """Only this connection breaks; the gateway lives, and takes another one."""
        if pod.is_alive and pod.watch:
            pod.watch = 0
            self.told(f"break watch {pod.name}")
            self.handle(ev.PodBroke(pod.address))
            self.at(self.rng.choice((1.0, 50.0)), lambda: self._connect_watch(pod))

    def kill_engine(self, pod: SimPod, back_ms: float) -> None:
        """Its streams' connections close, and the next engine has a newer token."""
        if not pod.has_engine:
            return
        self.told(f"kill engine of {pod.name} for {back_ms:.0f}")
        pod.has_engine = False
        self._unfit(pod)
        for each in pod.connections:
            self.hits[each.client.number] += 1
            each.is_served = False
            self._deliver(each, lambda each=each: self._broke(each))
        pod.connections = []
        self._say(pod)
        self.at(back_ms, lambda: self._engine_back(pod))

    def _engine_back(self, pod: SimPod) -> None:
        if pod.is_alive and not pod.has_engine:
            pod.has_engine, pod.token = True, pod.token + 1
            self._perhaps_fit(pod)
            self._say(pod)

    def cut(self, pod: SimPod, ms: float, is_one_way: bool = False) -> None:
        """Nothing of it arrives for so long; unless `is_one_way`, nothing reaches it either."""
        if pod.is_cut:
            return
        self.told(f"cut {pod.name} for {ms:.0f}{' one way' if is_one_way else ''}")
        pod.is_cut, pod.is_deaf, pod.cut_ms = True, not is_one_way, self.now_ms
        self._unfit(pod)
        self.at(ms, lambda: self._heal(pod))

    def _heal(self, pod: SimPod) -> None:
        is_lost = self.now_ms - pod.cut_ms >= LOST_FLOW_MS
        pod.is_cut = pod.is_deaf = False
        self._perhaps_fit(pod)
        self.told(f"heal {pod.name}")
        connections = [each for each in self.open.values() if each.pod is pod]
        for each in connections:
            pipe, each.pipe = each.pipe, []
            if is_lost:
                each.is_served = False
                self._broke(each)
            for what in () if is_lost else pipe:
                what()
        if is_lost and pod.watch:
            pod.watch = 0
            self._watch_broke(pod)
            self.at(RETRY_MS, lambda: self._connect_watch(pod))
        elif pod.is_alive and not pod.watch:
            self._connect_watch(pod)
        elif not pod.is_alive:
            self._watch_broke(pod)
        self._say(pod)

    def leave_fleet(self, pod: SimPod, within_ms: float) -> None:
        self.told(f"{pod.name} leaves within {within_ms:.0f}")
        pod.leaving_ms = within_ms
        self._unfit(pod)
        self._say(pod)
        self.at(within_ms, lambda: self.kill(pod))

    def _perhaps_fit(self, pod: SimPod) -> None:
        is_well = pod.is_alive and pod.has_engine and not pod.is_cut and pod.leaving_ms is None
        pod.fits_since_ms = self.now_ms if is_well else float("inf")

    def _unfit(self, pod: SimPod) -> None:
        pod.fits_since_ms = float("inf")

    # ------------------------------------------------------------------ clients

    def _came(self, client: Client) -> ev.RequestCame:
        number, poison = client.number, " poison" if client.is_poison else ""
        self.told(f"ask {number} {client.kind} {client.max_tokens}{poison}")
        return replace(super()._came(client), model=MODEL, key=bytes([1 + number % 3]))

    def leave(self, client: Client) -> None:
        if not client.outcome:
            self.told(f"client {client.number} leaves")
            super().leave(client)

    # ------------------------------------------------------------------ the front's shell

    def handle(self, event: ev.GatewayEvent) -> None:
        effects = list(self.fleet.handle(event, self.now_ms))
        self.perform(effects)
        self._check_moved(effects)

    def _check_moved(self, effects: list[ev.GatewayEffect]) -> None:
        """F5: what was taken from a silent pod has another one in the same turn."""
        for effect in effects:
            if isinstance(effect, ev.StreamPaused) and effect.cause is ev.BreakCause.MOVED:
                pod = self.pods.get(effect.engine)
                if pod is not None and pod.leaving_ms is None:
                    request = self.fleet.requests.get(effect.request)
                    is_taken = request is None or request.attempt is not None
                    differs = any(
                        isinstance(each, ev.Told)
                        and each.kind == "replay_differed"
                        and each.data["request"] == effect.request
                        for each in effects
                    )
                    assert is_taken or differs, "F5: dropped for silence without a taker"
                    was_well = self.now_ms - pod.fits_since_ms > FITS_MS and bool(pod.watch)
                    assert differs or not was_well, f"{pod.name} was not silent"

    def act(self, effect: ev.GatewayEffect) -> None:
        match effect:
            case ev.SendRequest():
                self._send(effect)
            case ev.DropAttempt():
                self._drop(effect.attempt)
            case ev.Prefill():
                self._prefill(effect)

    def end(self, effect: ev.RequestEnded) -> None:
        super().end(effect)
        self.told(f"end {effect.request} {effect.ending} {effect.code}")

    def _drop(self, attempt: int) -> None:
        connection = self.open.pop(attempt, None)
        if connection is not None:
            self.hits[connection.client.number] += connection.pod.is_cut
            connection.is_open = False
            self._notices(connection)

    def _notices(self, connection: Connection) -> None:
        """The pod learns that the front is gone, unless it is cut off."""
        pod = connection.pod

        def notice() -> None:
            if pod.is_deaf:
                self.at(REPORT_MS, notice)
                return
            connection.is_served = False
            if connection in pod.connections:
                pod.connections.remove(connection)

        self.at(pod.latency_ms, notice)

    def _send(self, effect: ev.SendRequest) -> None:
        client = self.clients[effect.request]
        others = [each for each in self.open.values() if each.client is client]
        assert not others, "F1: a request at two pods"
        journal = None if effect.journal is None else list(effect.journal.tokens)
        client.asked.append((self.now_ms, effect.engine, effect.token, journal and len(journal)))
        pod = self.pods.get(effect.engine)
        assert pod is None or not pod.is_told_to_leave, "a request for a pod that leaves"
        if pod is not None and journal is not None and pod.told_cid:
            assert pod.told_cid == self.cids[client.number], "F3: asked of another model"
        core = self.fleet.attempts[effect.attempt]
        self.told(f"send {effect.request} to {effect.engine} {effect.token}")
        if pod is None:
            pod = SimPod(effect.engine, "", 0, is_alive=False)
        connection = Connection(effect.attempt, core, client, pod, effect.token, journal)
        self.open[effect.attempt] = connection
        self.hits[effect.request] += not pod.is_alive  # a front cannot know that it did not arrive
        if pod.is_deaf or pod.is_cut:
            self.at(CONNECT_MS, lambda: self._unreached(connection))
        else:
            self.at(2 * pod.latency_ms, lambda: self._arrives(connection))

    def _prefill(self, effect: ev.Prefill) -> None:
        """Its end reaches the front, unless the pod is cut off."""
        pod = self.pods[effect.pod]
        assert not pod.is_told_to_leave, "a request for a pod that leaves"
        assert effect.continuation_id == self.cids[effect.request], "F3: asked of another model"
        self.told(f"prefill {effect.request} at {effect.pod}")

        def ends() -> None:
            if not pod.is_cut:
                self.hits[effect.request] += not pod.has_engine
                self.handle(ev.Prefilled(effect.request, is_broken=not pod.has_engine))

        self.at(5.0 * (effect.request % 40), ends)

    def _unreached(self, connection: Connection) -> None:
        pod = connection.pod
        if pod.is_alive and not pod.is_deaf and not pod.is_cut:
            self._arrives(connection)
        else:
            self._broke(connection, ev.BreakCause.UNREACHED)

    def _broke(self, connection: Connection, cause: ev.BreakCause = ev.BreakCause.CLOSED) -> None:
        if connection.is_open and connection.number in self.open:
            connection.is_open = False
            del self.open[connection.number]
            self.freed[connection.client.number] = int(self.now_ms)
            self.handle(ev.AnswerEnded(connection.number, cause))

    # ------------------------------------------------------------------ what a pod does

    def _arrives(self, connection: Connection, waited_ms: float = 0.0) -> None:
        """A request is at the pod, which waits a second for an engine."""
        pod, client = connection.pod, connection.client
        if not connection.is_open:
            return
        if not pod.is_alive:
            self._deliver(connection, lambda: self._broke(connection, ev.BreakCause.UNREACHED))
            return
        if not pod.has_engine or len(pod.connections) >= pod.room:
            if waited_ms >= PASSED_MS:
                self._refuse(connection, BUSY_503)
            else:
                self.at(50.0, lambda: self._arrives(connection, waited_ms + 50.0))
            return
        first = self.cids.get(client.number)
        if connection.journal is not None and pod.cid != first:
            self._refuse(connection, OTHER_409)
            return
        pod.connections.append(connection)
        self.entered[client.number] = self.entered.get(client.number, 0) + 1
        is_once = PATHS.get(client.kind) is None
        assert not (is_once and self.entered[client.number] > 1), "F4: asked twice"
        incarnation, token = pod.incarnation, pod.token
        self._deliver(connection, lambda: self._head(connection, incarnation, token))
        if not client.is_stream:
            self.at(5.0 * client.max_tokens, lambda: self._whole(connection))
            return
        play = Play(client.kind, client.prompt, client.max_tokens, self.rng, connection.journal)
        play.misspells = pod.misspells and connection.journal is not None
        if play.misspells and b"w" not in b"".join(map(text_of, connection.journal or ())):
            self.unseen.add(client.number)
        self._play(connection, list(play.groups()), play.tail())

    def _refuse(self, connection: Connection, status: int) -> None:
        connection.is_served = False
        head = ev.HeadCame(connection.number, status, "", 0, Continuation.NONE, False)
        self._deliver(connection, lambda: self._unsigned(connection, head))

    def _unsigned(self, connection: Connection, head: ev.HeadCame) -> None:
        if connection.number in self.open:
            self.handle(head)

    def _head(self, connection: Connection, incarnation: int, token: int) -> None:
        """What the front's shell makes of the pod's signature."""
        client, pod = connection.client, connection.pod
        if connection.number not in self.open:
            return
        kind = Continuation.EXACT if client.is_stream else Continuation.RETRY
        was = connection.core.owner.state
        self.handle(
            ev.HeadCame(
                *(connection.number, OPEN, pod.address, incarnation, kind, client.is_stream),
                inner_token=token,
                continuation_id=pod.cid,
            )
        )
        if connection.number in self.open and client.is_stream:
            assert incarnation == connection.asked, "F1: another incarnation was heard"
            first = self.cids.setdefault(client.number, pod.cid)
            if was is RequestState.RESUMING:
                assert first == pod.cid, "F3: two continuation ids in one stream"

    def _play(self, connection: Connection, groups: list, tail: bytes) -> None:
        """One group now, the next one later."""
        pod, client = connection.pod, connection.client
        if not connection.is_served:
            return
        if not groups:
            connection.is_served = False
            if connection in pod.connections:
                pod.connections.remove(connection)
            self._deliver(connection, lambda: self._says(connection, "end", tail))
            return
        events, tokens, chunks = groups.pop(0)
        connection.made += len(tokens)
        self._deliver(connection, lambda: self._says(connection, "group", events, tokens, chunks))
        if client.is_poison and connection.made >= 6 and pod.has_engine:
            if pod.leaving_ms is None and not pod.is_cut:  # else a front does not count it
                self.killed[client.number] = self.killed.get(client.number, 0) + 1
            self.kill_engine(pod, self.rng.choice((60.0, 400.0)))
            return
        self.at(5.0, lambda: self._play(connection, groups, tail))

    def _whole(self, connection: Connection) -> None:
        pod = connection.pod
        if connection.is_served:
            connection.is_served = False
            pod.connections.remove(connection)
            self._deliver(connection, lambda: self._ended(connection))

    def _ended(self, connection: Connection) -> None:
        if self.open.pop(connection.number, None) is not None:
            connection.is_open = False
            self.handle(ev.AnswerEnded(connection.number))

    def _says(self, connection: Connection, method: str, *what: object) -> None:
        """Bytes reach the front: of a connection that it has left, they reach nobody."""
        if connection.number not in self.open:
            late = getattr(connection.core, method)(*what, self.now_ms)
            assert late == b"", "F1: a dropped attempt speaks"
            assert not self.fleet.outbox
            return
        if method == "end":
            self.open.pop(connection.number)
            connection.is_open = False
        connection.client.sent += getattr(connection.core, method)(*what, self.now_ms)
        self.perform(self.fleet.handle(ev.Tick(), self.now_ms))

    def _deliver(self, connection: Connection, what: Callable[[], None]) -> None:
        """To the front, in order."""
        pod = connection.pod

        def arrives() -> None:
            if connection.is_lost:
                return
            if pod.is_cut or connection.pipe:
                connection.pipe.append(what)
            else:
                what()

        self.at(pod.latency_ms, arrives)

    # ------------------------------------------------------------------ F8

    def check_nobody_waits(self) -> None:
        """A stream goes on where a fitting pod has had room for a second."""
        if self.now_ms - self.stalled_ms < FITS_MS:
            return
        has_suspects = any(each.is_suspect for each in self.fleet.requests.values())
        fitting = {
            pod.cid
            for pod in self.pods.values()
            if self.now_ms - pod.fits_since_ms >= FITS_MS
            and pod.watch
            and self.fleet.pods[pod.address].suspended_ms <= self.now_ms
            and 2 * sum(each.is_served for each in pod.connections) < pod.room
        }
        for request in self.fleet.queue.waiting.values():
            if has_suspects or request.gives_up_ms is not None:
                continue
            is_parked = request.state is RequestState.PARKED
            since_ms = request.paused_since_ms if is_parked else request.waits_since_ms
            can = request.continuation_id in fitting if is_parked else bool(fitting)
            since_ms = max(since_ms or 0.0, self.freed[request.number])
            is_late = self.now_ms - since_ms >= FITS_MS
            is_refused = request.refusals > 3  # it waits for longer each time
            assert not (can and is_late and not is_refused), f"F8: {request.number} waits"
        for each in self.open.values():
            lost_ms, sent_ms = each.pod.lost_ms, each.client.asked[-1][0]
            is_late = lost_ms is not None and self.now_ms - max(lost_ms, sent_ms) >= 2 * FITS_MS
            can = self.cids.get(each.client.number) in fitting and each.client.is_stream
            assert not (is_late and can), f"{each.client.number} stays at a pod that is gone"
