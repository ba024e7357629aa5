"""The model process of a rank above 0: it runs the steps that rank 0 runs, at the same time.

Owns its loop. Knows neither tokens' meaning nor requests: rank 0 says which tokens go through
which slot of which cache. Memory it takes when the HTTP process says so, as every rank does.
"""

from __future__ import annotations

import select
from typing import TYPE_CHECKING, NoReturn

from engine.backends.reference.link import TakeMemory, Taken
from engine.backends.reference.model.rank import Rank
from plumbing.errors import InvariantError, UnderstudyError
from plumbing.wire.blocking import BlockingClient

if TYPE_CHECKING:  # numpy comes only after the number of its threads is set
    from engine.backends.reference.model.exchange import Follower


def follow(link: BlockingClient, rank: Rank) -> NoReturn:
    """Follow until a peer is gone. Ends by an UnderstudyError that says why."""
    from engine.backends.reference.model.exchange import Follower

    leader = rank.peers
    if not isinstance(leader, Follower):
        raise InvariantError("rank 0 follows nobody")
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    poll.register(leader.fileno(), select.POLLIN)
    link.notify(rank.ready)
    while True:
        for fd, _ in poll.poll():
            if fd == link.fileno():
                _answer(link, rank)
            else:
                _step(leader, rank)


def _step(leader: Follower, rank: Rank) -> None:
    step = leader.next_step()
    if step is None:
        rank.distrust()
        leader.distrusted()
    else:
        rank.decoder.forward(rank.cache(step.cache), step.slot, step.tokens, step.start)


def _answer(link: BlockingClient, rank: Rank) -> None:
    message = link.receive().message
    if not isinstance(message, TakeMemory):
        raise UnderstudyError("engine.link", f"{message.TYPE} is not for a rank above 0")
    rank.take_memory()
    link.notify(Taken(rank.kv_bytes))
