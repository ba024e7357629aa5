"""One engine's supervisor, on its own host: a clock, a connection, a tree and its lease.

It does what the client and the engine's side of the lock do; its lease's keeper is the real one.
`kill_at_ms` is the kernel's timer, which runs on while the supervisor is stopped
(`LeaseWorld.pass_time`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lockserver.core import events as ev
from lockserver.core.supervisors import LEASE
from lockserver.messages import GrantedMsg, RenewedMsg, WantMsg
from lockserver.witness import name_of
from tests.sim.lease.network import DRIFT, LEASE_MS, NEVER, Line, Tree

if TYPE_CHECKING:
    from tests.sim.lease.world import LeaseWorld

BEAT_MS = 500.0
DEAF = 0.4  # of a lease: a connection is suspect
READY = 0.3  # the probability that a tree is initialised in a step
OVER = ("lock.stale_claim", "lock.incarnation_ended")  # refusals that end an incarnation


class Node:
    """Times are by its own clock, unless stated otherwise."""

    def __init__(self, world: LeaseWorld, engine: str) -> None:
        self.world, self.engine = world, engine
        self.rate = 1 + world.random.uniform(-DRIFT, DRIFT)
        self.supervisor = f"{world.next_id():016x}"
        self.is_alive = True
        self.stopped_until_ms = 0.0  # true time
        self.cut_off_until_ms = 0.0  # true time
        self.is_lost_for_good = False
        self.line: Line | None = None
        self.heard_ms = 0.0
        self.beat_at_ms = 0.0
        self.progress = 0
        self.tree: Tree | None = None
        self.is_ready = False  # initialised: it wants `active`
        self.is_killing = False
        self.keeper = world.keeper_type()
        self.kill_at_ms = NEVER

    def now(self) -> float:
        return self.world.true_ms * self.rate

    @property
    def killed_ms(self) -> float:
        """When its kernel kills it, in true time."""
        return self.kill_at_ms / self.rate

    @property
    def is_cut_off(self) -> bool:
        return self.world.true_ms < self.cut_off_until_ms

    @property
    def holds(self) -> bool:
        return self.tree is not None and self.tree.token > 0

    def step(self) -> None:
        """Everything that is due by now."""
        if not self.is_alive or self.world.true_ms < self.stopped_until_ms:
            return
        self.listen()
        if self.keeper.must_stop(self.now()) and not self.is_killing:
            self.kill_tree()
        self.keep_connected()
        self.keep_tree()

    # ------------------------------------------------------------------ its connection

    def keep_connected(self) -> None:
        now_ms, line = self.now(), self.line
        if line is None:
            self.connect()
        elif now_ms >= self.beat_at_ms:
            self.beat_at_ms = now_ms + BEAT_MS
            if now_ms - self.heard_ms > DEAF * LEASE_MS:
                self.hang_up()
            else:
                self.progress += 1
                self.say(line, ev.Beaten(line.id, self.progress))

    def connect(self) -> None:
        if self.world.server.machine is not None and not self.is_cut_off:
            self.line = self.world.network.connect(self)
            self.heard_ms = self.now()
            self.want()

    def hang_up(self) -> None:
        line, self.line = self.line, None
        assert line is not None
        self.world.network.close_by_client(line)
        self.keeper.cut()

    def say(self, line: Line, message: Any) -> None:
        if self.tree is not None:
            self.keeper.sent(self.progress, self.now())
        self.world.network.send_up(line, message)

    def want(self) -> None:
        line, tree = self.line, self.tree
        if line is None:
            return
        self.progress += 1
        is_ready = tree is not None and self.is_ready
        want = WantMsg(
            supervisor=self.supervisor,
            engine=self.engine,
            incarnation=tree.incarnation if tree else None,
            witness=name_of(tree.incarnation) if tree else None,
            locks=("active",) if is_ready else (),
            tokens={"active": tree.token} if tree and is_ready and tree.token else {},
            progress=self.progress,
        )
        self.say(line, ev.Wanted(line.id, want, process=LEASE))

    # ------------------------------------------------------------------ receiving

    def listen(self) -> None:
        line = self.line
        if line is None or self.is_cut_off:
            return
        while line.down:
            if line.down[0][0] > self.world.true_ms:
                return
            self.heard_ms = self.now()
            self.told(line.down.popleft()[1])
        if line.eof_down_ms <= self.world.true_ms:
            self.hang_up()

    def told(self, message: Any) -> None:
        tree = self.tree
        if isinstance(message, RenewedMsg):
            if self.keeper.renewed(message.progress, message.lease_ms, self.now()) and self.holds:
                self.arm()
        elif tree is None or self.is_killing:
            return
        elif isinstance(message, GrantedMsg) and message.lock == "active":
            if message.incarnation == tree.incarnation:
                self.woken(tree, message.token)
            elif tree.token and message.token > tree.token:
                self.kill_tree()
        elif isinstance(message, ev.RefuseConnection) and message.code in OVER:
            self.kill_tree()

    def woken(self, tree: Tree, token: int) -> None:
        if not self.keeper.may_act(self.now()) or tree.is_dead or tree.dies_ms < NEVER:
            self.want()
        elif tree.token != token:
            self.keeper.hold()
            self.world.wake(tree, token)
            self.arm()
            self.want()

    def arm(self) -> None:
        lease = self.keeper.lease
        assert lease is not None
        self.kill_at_ms = lease.sent_ms + self.world.kill_fraction * lease.lease_ms

    # ------------------------------------------------------------------ its tree, and its own end

    def keep_tree(self) -> None:
        tree = self.tree
        if tree is None:
            self.is_ready = self.is_killing = False
            self.change_tree(self.world.new_tree(self.engine))
        elif tree.is_dead and self.is_killing:
            self.is_killing, self.kill_at_ms = False, NEVER
            self.change_tree(None)
        elif tree.is_dead:
            self.is_killing = True
        elif not self.is_ready and not self.is_killing and self.world.random.random() < READY:
            self.is_ready = True
            self.want()

    def change_tree(self, tree: Tree | None) -> None:
        self.tree = tree
        self.keeper.begin()
        self.want()

    def kill_tree(self) -> None:
        assert self.tree is not None
        self.is_killing = True
        self.world.doom(self.tree)

    def be_killed(self) -> None:
        """By its kernel, on time."""
        self.world.note(f"the kernel kills {self.engine}")
        self.die()

    def die(self) -> None:
        self.is_alive, self.kill_at_ms = False, NEVER
        if self.tree is not None:
            self.world.doom(self.tree)
        if self.line is not None:
            self.hang_up()
