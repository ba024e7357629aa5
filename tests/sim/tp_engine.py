"""Engines of the tensor-parallel simulation: a supervisor each, and the incarnation that it runs.

The way to the weights is the real `Loading`; around it is what `engine/supervisor/incarnation.py`
does, one step at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.core.loading import Loading, Role
from tests.sim.tp_rank import At, Move, Rank

if TYPE_CHECKING:
    from tests.sim.tp_world import World


class Engine:
    """A supervisor and the incarnation that it runs, if any."""

    def __init__(self, world: World, name: str, role: Role, ranks: int) -> None:
        self.world, self.name, self.role, self.ranks_count = world, name, role, ranks
        self.supervisor: str | None = None  # None: the container is down
        self.is_stopped = False  # SIGSTOP: it does nothing, and can be killed
        self.is_dying = False  # everything of this incarnation was killed and is being reaped
        self.loading: Loading | None = None
        self.ranks: list[Rank] = []
        self.failures: list[str] = []
        self._mourned: str | None = None  # the supervisor that died

    @property
    def is_whole(self) -> bool:
        """Every rank is attached, and nothing is wrong with that."""
        return (
            bool(self.ranks)
            and not self.is_dying
            and all(rank.at is At.ATTACHED for rank in self.ranks)
        )

    @property
    def is_outdated(self) -> bool:
        """It has, or wants, weights of a checkpoint that is not on disk any more."""
        versions = {rank.version for rank in self.ranks if rank.version}
        return not self.is_dying and bool(versions - {self.world.version})

    @property
    def progress(self) -> int:
        """How far its ranks have come, taken together: which of two engines is the further."""
        return sum(list(At).index(rank.at) for rank in self.ranks) if not self.is_dying else -1

    # ------------------------------------------------------------------ what it could do now

    def moves(self) -> list[Move]:
        if self.supervisor is None:
            may_start = not self._mourned or self.world.may_restart(self)
            return [(f"{self.name} container starts", self._start)] if may_start else []
        if self.is_stopped:
            return []
        found: list[Move] = []
        wants = self.loading is not None and self.loading.wants_loader
        if wants and self.world.loader.is_free:
            found.append((f"{self.name} takes the loader lock", self._take_loader))
        lives = any(rank in self.world.processes for rank in self.ranks)
        if self.ranks and not self.is_dying and any(r.at is At.DYING for r in self.ranks):
            found.append((f"{self.name} notices a death", lambda: self.fail("a rank died")))
        elif self.is_dying and not lives:
            found.append((f"{self.name} is reaped", self._reaped))
        elif not self.ranks:
            found.append((f"{self.name} launches", self._launch))
        elif not self.is_dying:
            held = self.world.held_back
            free = [rank for rank in self.ranks if (self.name, rank.number) not in held]
            found += [move for rank in free if (move := rank.move())]
            if self.is_whole and any(rank.copy and rank.copy.is_bad for rank in self.ranks):
                found.append((f"{self.name} meets a bad page", self._meet_bad_page))
        return found

    def _start(self) -> None:
        self.supervisor = self._mourned = self.world.new_supervisor()

    def _launch(self) -> None:
        incarnation = self.world.new_incarnation(self.name)
        self.loading = self.world.loading_type(self.role)
        self.ranks = [Rank(self, number, incarnation) for number in range(self.ranks_count)]
        self.world.processes += self.ranks

    def _reaped(self) -> None:
        self.ranks, self.loading, self.is_dying = [], None, False
        self.world.loader.leave(self.supervisor)

    def _take_loader(self) -> None:
        assert self.supervisor is not None
        assert self.loading is not None
        self.world.loader.take(self.supervisor)
        self._let_go()

    # ------------------------------------------------------------------ the way to the weights

    def rank_asks(self, rank: Rank) -> None:
        self.loading.asked(self.ranks_count)
        self._let_go()

    def rank_attached(self, rank: Rank) -> None:
        assert rank.copy is not None
        objection = self.loading.attached(rank.number, {"version": rank.version})
        if objection is not None:
            self.fail(objection)
        elif not self.loading.wants_loader:
            self.world.loader.leave(self.supervisor)

    def may_go_on(self, rank: Rank) -> bool:
        """Whether a writer may load: where ranks meet at a barrier, once all have their grants."""
        granted = (At.WRITING, At.COMMITTING, At.READING, At.ATTACHED)
        return not self.world.has_barrier or all(other.at in granted for other in self.ranks)

    def _let_go(self) -> None:
        has_loader = self.world.loader.holder == self.supervisor
        if self.loading.is_permitted(has_loader=has_loader):
            for rank in self.ranks:
                if rank.at is At.ASKING:
                    rank.at, rank.mode = At.LEFT, self.loading.mode

    # ------------------------------------------------------------------ its end

    def _meet_bad_page(self) -> None:
        for rank in self.ranks:
            if rank.copy is not None and rank.copy.is_bad:
                rank.condemn()
        self.fail("a bad page")

    def fail(self, why: str) -> None:
        """Any failure on the way is fatal to the incarnation: all of it is killed."""
        self.failures.append(why)
        self.world.trace.append(f"({self.name} fails: {why})")
        self.is_dying = True
        for rank in self.ranks:
            rank.kill()

    def kill_container(self) -> None:
        """The supervisor dies, and everything with it."""
        assert self.supervisor is not None
        for rank in self.ranks:
            rank.kill()
        self.world.loader.leave(self.supervisor)
        self.supervisor, self.loading = None, None
        self.ranks, self.is_dying, self.is_stopped = [], False, False
