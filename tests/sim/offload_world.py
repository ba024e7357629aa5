"""A device's server and that of its host copies, engines that offload and restage, and a keeper.

Both servers are the real machine, each with a driver, a disk and a kernel of its own. A process is
one actor: its connections, and the epochs whose files it holds. What the bytes are is a number, and
each load from disk has another: so bytes that come back are told from bytes that are loaded.
Everything is drawn from one seed.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

from gms import messages as msg
from gms.core import events as ev
from gms.core.region import WRITER_STATES, RegionPhase
from tests.sim.gms_device import MIB, commit_of, manifest_of
from tests.sim.offload_node import Actor, Memory, Node

IDENTITY = {"model": "tiny"}
SIZES = [MIB]


def digest_of(content: int) -> str:
    return f"{content:064x}"


class OffloadWorld:
    """Two servers and their clients, one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.trace: list[str] = []
        self.now_ms = 0.0
        self._ids, self._numbers, self._contents = (itertools.count(1) for _ in range(3))
        self.new_id = lambda: f"{next(self._ids):032x}"
        self.actors: list[Actor] = []
        self.condemning: set[int] = set()
        self.condemned: set[int] = set()  # contents that are out of service for good
        self.standing: str | None = None  # the copy that stands for the weights: on disk
        self.loads = self.restages = self.offloads = 0
        self.device, self.host = Node("device", self), Node("host", self)
        for name in ("engine-0", "engine-1", "keeper"):
            self._launch(name)

    # ------------------------------------------------------------------ connections

    def _launch(self, name: str) -> None:
        self.actors.append(Actor(name))

    def _send(self, node: Node, actor: Actor, message: Any, **facts: Any) -> None:
        session = actor.session[node.name]
        if session is None:
            session = actor.session[node.name] = next(self._numbers)
            node.sessions[session] = actor
        actor.is_busy = True
        node.tell(ev.Received(session, 1, message, **facts))

    def lose_session(self, actor: Actor, name: str) -> None:
        actor.session[name], actor.is_busy = None, False
        if actor.at[name] != "reading":  # a writer's load is lost, and so is its memory
            self._drop(actor, name)

    def _drop(self, actor: Actor, name: str) -> None:
        actor.at[name], actor.holds[name] = "", None

    def _end(self, node: Node, actor: Actor) -> None:
        session, actor.session[node.name] = actor.session[node.name], None
        if session is not None and node.sessions.pop(session, None) is not None:
            node.tell("closed", session, "closed")

    def hear(self, node: Node, actor: Actor, effect: ev.Respond) -> None:
        name = node.name
        answer = effect.message if isinstance(effect, ev.SendMessage) else effect
        if isinstance(answer, msg.WaitingMsg):
            return
        actor.is_busy = False
        match answer:
            case msg.WritingMsg():
                actor.at[name], actor.copy = "writing", answer.copy
                actor.holds[name] = node.vault[answer.epoch]
            case ev.SendRegion():
                actor.at[name], actor.holds[name] = "reading", node.vault[answer.region]
                self._check_readable(node, answer.region)
            case msg.CommittedMsg():
                actor.at[name] = "reading"
                self._check_readable(node, answer.epoch)
                if name == "device":
                    assert node.journal is not None
                    self.standing = None
                    self.restages += actor.restages_from is not None
            case msg.OffloadedMsg():
                self.offloads += 1
                self._check_free()
            case ev.RefuseRequest():
                session = actor.session[name]
                if session is not None:
                    node.sessions.pop(session, None)
                    actor.session[name] = None
                    self.lose_session(actor, name)
                    node.tell("closed", session, "refused")

    # ------------------------------------------------------------------ what engines do

    def _attach(self, node: Node, actor: Actor, mode: str) -> None:
        actor.at[node.name], actor.restages_from = "asking", None
        request = msg.AttachMsg(actor.name, f"i-{id(actor)}", mode, IDENTITY, wait_ms=1 << 40)
        self._send(node, actor, request)

    def _write(self, node: Node, actor: Actor) -> None:
        """One step of a load, a restage or a copy."""
        memory = actor.holds[node.name]
        if not memory.content:
            if node is self.host:
                source = actor.holds["device"]
                memory.content = source.content
            else:
                self._fill(actor, memory)
            self._send(node, actor, msg.AllocateMsg(MIB))
            return
        commit = commit_of(0, IDENTITY, SIZES).message
        assert isinstance(commit, msg.CommitMsg)
        again = actor.restages_from if node is self.device else None
        message = msg.CommitMsg(commit.identity, commit.manifest, again)
        self._send(node, actor, message)

    def _fill(self, actor: Actor, memory: Memory) -> None:
        """From the copy, if there is one to be had; else from disk."""
        copy = actor.holds["host"]
        if copy is None or copy.epoch != actor.copy:  # a new process, in its place
            copy = self._copy_to_read(actor.copy)
        if actor.copy is not None and copy is not None:
            memory.content, actor.restages_from = copy.content, copy.epoch
            return
        held = self.standing is not None and self.host.holders(self.standing)
        assert not held, "weights are loaded although a copy stands for them"
        self.loads += 1
        memory.content = next(self._contents)

    def _waits_for_copy(self, actor: Actor) -> bool:
        """Its server has died, and somebody is about to hand the copy back."""
        memory, copy = actor.holds["device"], actor.copy
        is_there = copy is None or self._copy_to_read(copy) is not None
        if is_there or memory is None or memory.content:
            return False
        return bool(self.host.holders(str(copy)))

    def _copy_to_read(self, epoch: str | None) -> Memory | None:
        committed = self.host.machine.committed
        if committed is None or committed.id != epoch:
            return None
        return self.host.vault.get(committed.id)

    def _release(self, actor: Actor) -> None:
        """It holds the copy already: unmap, and ask on its own session."""
        actor.holds["device"], actor.at["device"], actor.is_away = None, "", True
        if actor.session["device"] is not None:
            self._send(self.device, actor, msg.OffloadMsg(), **self.facts())

    def facts(self) -> dict[str, Any]:
        """What the shell looks up for `offload`."""
        committed = self.device.machine.committed
        is_mapped = committed is not None and bool(self.device.holders(committed.id))
        return {"is_mapped": is_mapped, "copy": self.host_copy()}

    def host_copy(self) -> ev.JournalRecord | None:
        """What is committed in host memory, if a process holds it."""
        copy, host = self.host.journal, self.host
        if copy is not None and (not host.holders(copy.epoch) or copy.epoch in host.marked):
            return None
        return copy

    def _rejoin(self, node: Node, actor: Actor) -> None:
        memory = actor.holds[node.name]
        manifest, held = manifest_of(SIZES), msg.HeldEpoch(True, IDENTITY)
        who = actor.name, f"i-{id(actor)}"
        message = msg.HandBackMsg(*who, memory.epoch, tuple(SIZES), epoch=held, manifest=manifest)
        self._send(node, actor, message)

    def _digest(self, node: Node, actor: Actor) -> None:
        memory, session = actor.holds[node.name], actor.session[node.name]
        node.tell(ev.Received(session, 0, msg.DigestMsg(digest_of(memory.content))))

    def _condemn(self, actor: Actor) -> None:
        memory, session = actor.holds["device"], actor.session["device"]
        committed = self.device.machine.committed
        assert session is not None
        if committed is not None and committed.id == memory.epoch:
            self.condemning.add(memory.content)
            committed.failed_canaries.add("one before it")
        self.device.tell(ev.Received(session, 0, msg.CondemnMsg("a bad page")))
        self.kill(actor)  # it exits

    def kill(self, actor: Actor) -> None:
        """Its connections end; what it maps goes when it is reaped."""
        actor.is_dying = True
        for node in (self.device, self.host):
            self._end(node, actor)

    def _reap(self, actor: Actor) -> None:
        self.actors.remove(actor)
        self._launch(actor.name)

    # ------------------------------------------------------------------ what could happen now

    def moves(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for node in (self.device, self.host):
            if node.driver:
                found.append((f"{node.name} {type(node.driver[0]).__name__}", node.complete_one))
            found += [(f"{node.name} {e[-3:]} free", lambda n=node, e=e: n.look(e))
                      for e in node.free_files]  # fmt: skip
        for actor in self.actors:
            move = self._move_of(actor)
            if move is not None:
                found.append((f"{actor.name} {move[0]}", move[1]))
        return found

    def _move_of(self, actor: Actor) -> tuple[str, Any] | None:
        if actor.is_dying:
            return "is reaped", lambda: self._reap(actor)
        for node in (self.device, self.host):
            if actor.at[node.name] == "reading" and actor.session[node.name] is None:
                return f"rejoins {node.name}", lambda n=node: self._rejoin(n, actor)
        if actor.is_busy:
            return None
        for node in (self.device, self.host):
            if actor.at[node.name] == "writing":
                if node is self.device and self._waits_for_copy(actor):
                    return None
                return f"writes {node.name}", lambda n=node: self._write(n, actor)
            epoch = self._undigested(node, actor)
            if epoch:
                return f"digests {node.name}", lambda n=node: self._digest(n, actor)
        if actor.name == "keeper":
            return self._keeper_move(actor)
        if actor.at["device"] == "":
            if actor.is_away and actor.at["host"] == "reading" and self.rng.random() < 0.2:
                return "lets the copy go", lambda: self._let_go(self.host, actor)
            if actor.is_away and self.rng.random() < 0.5:
                return "asks again", lambda: self._ask_again(actor)
            return "attaches", lambda: self._come_back(actor)
        if actor.at["host"] == "reading" and self._copy_is_good(actor):
            return "releases", lambda: self._release(actor)
        if self.host.machine.committed is not None and actor.at["host"] == "":
            return "takes the copy", lambda: self._attach(self.host, actor, "ro")
        if actor.at["host"] == "reading":
            return "lets the copy go", lambda: self._let_go(self.host, actor)
        return None

    def _ask_again(self, actor: Actor) -> None:
        self._send(self.device, actor, msg.OffloadMsg(), **self.facts())

    def _come_back(self, actor: Actor) -> None:
        self._end(self.device, actor)
        actor.is_away = False
        self._attach(self.device, actor, "rw_or_ro")

    def _let_go(self, node: Node, actor: Actor) -> None:
        self._end(node, actor)
        self._drop(actor, node.name)

    def _undigested(self, node: Node, actor: Actor) -> bool:
        committed, memory = node.machine.committed, actor.holds[node.name]
        return (
            committed is not None
            and actor.at[node.name] == "reading"
            and memory is not None
            and committed.id == memory.epoch
            and committed.digest is None
        )

    def _copy_is_good(self, actor: Actor) -> bool:
        copy = self.host.machine.committed
        held = actor.holds["host"]
        return copy is not None and held is not None and held.epoch == copy.id

    def _keeper_move(self, actor: Actor) -> tuple[str, Any] | None:
        weights, copy = self.device.machine.committed, self.host.machine.committed
        if actor.at["device"] == "reading" and actor.at["host"] == "":
            return "makes a copy", lambda: self._attach(self.host, actor, "rw_or_ro")
        if actor.at["device"] == "reading" and actor.at["host"] == "reading":
            return "has made it", lambda: self._let_go(self.device, actor)
        is_other = weights is not None and (
            copy is None or (None not in (copy.digest, weights.digest)
            and copy.digest != weights.digest)
        )  # fmt: skip
        is_idle = actor.at["device"] == "" and not self.host.machine.orphans
        if is_other and is_idle:
            if actor.at["host"] == "reading":
                return "lets go", lambda: self._let_go(self.host, actor)
            if copy is not None:
                drop = msg.DropMsg(copy.id, even_if_mapped=True)
                said = ev.Received(next(self._numbers), 1, drop)
                return "drops the copy", lambda: self.host.tell(said)
            if actor.at["host"] == "":
                return "reads the weights", lambda: self._attach(self.device, actor, "ro")
        if copy is not None and actor.at["host"] == "":
            return "keeps the copy", lambda: self._attach(self.host, actor, "ro")
        return None

    def step(self, fault_rate: float) -> None:
        self.now_ms += 1
        if self.rng.random() < fault_rate:
            name, move = self.rng.choice(self._faults())
        else:
            moves = self.moves()
            if not moves:
                return
            name, move = self.rng.choice(moves)
        self.trace.append(name)
        move()
        self.check()

    def _faults(self) -> list[tuple[str, Any]]:
        nodes = (self.device, self.host)
        found: list[tuple[str, Any]] = [(f"{node.name} crashes", node.crash) for node in nodes]
        for actor in self.actors:
            if not actor.is_dying:
                found.append((f"{actor.name} dies", lambda a=actor: self.kill(a)))
            is_reader = actor.at["device"] == "reading" and actor.session["device"] is not None
            if is_reader and not actor.is_dying and actor.name != "keeper":
                found.append((f"{actor.name} condemns", lambda a=actor: self._condemn(a)))
        return found

    # ------------------------------------------------------------------ what must always hold

    def journalled(self, node: Node) -> None:
        """The disk has changed: what is out of service, or offloaded, is so for good."""
        if node is not self.device:
            return
        committed = node.journal.epoch if node.journal is not None else None
        memories = [m for a in self.actors if (m := a.holds["device"]) is not None]
        memories += node.vault.values()
        is_in_force = committed not in node.marked
        in_force = {m.content for m in memories if m.epoch == committed and is_in_force}
        self.condemned |= self.condemning - in_force
        if node.offloaded is not None and node.journal is None:
            if self.standing is None:
                assert self.host.holders(node.offloaded.epoch), "only its server has the copy"
            self.standing = node.offloaded.epoch
        if node.offloaded is None and node.journal is not None:
            self.standing = None

    def _check_readable(self, node: Node, epoch: str) -> None:
        memory = node.vault[epoch]
        assert memory.content, "a reader sees what was written"
        digest = node.machine.regions[epoch].digest
        assert digest in (None, digest_of(memory.content)), "its bytes are not those of its digest"
        if node is self.device:
            assert memory.content not in self.condemned, "condemned bytes are back"

    def _check_free(self) -> None:
        device = self.device
        machine = device.machine
        serving = [e.id for e in machine.regions.values() if machine.is_superseded(e)]
        held = [m.epoch for a in self.actors if (m := a.holds["device"]) is not None]
        left = [epoch for epoch in (*held, *device.vault) if epoch not in serving]
        assert not left, f"offloaded, and the memory of {left} is not free"

    def check(self) -> None:
        for node in (self.device, self.host):
            machine = node.machine
            phases = [epoch.phase for epoch in machine.regions.values()]
            assert phases.count(RegionPhase.SERVED) <= 1
            writers = [s for s in machine.sessions.values() if s.state in WRITER_STATES]
            assert len(writers) == phases.count(RegionPhase.MAKING)
            both = machine.committed is not None and machine.offloaded is not None
            assert not both, "weights are on the device and offloaded"

    def settle(self) -> None:
        """Without faults every engine has weights in the end, or has offloaded them."""
        for _ in range(3000):
            engines = [a for a in self.actors if a.name != "keeper"]
            if all(a.at["device"] == "reading" and a.session["device"] for a in engines):
                return
            self.step(0.0)
        raise AssertionError(f"engines without weights: {self.actors}")
