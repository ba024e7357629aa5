"""How a thread of an engine gets back to a service that has died: it retries until it succeeds, for
the engine computes without a service, too.
"""

from __future__ import annotations

import select
import time
from collections.abc import Callable

from plumbing.errors import UnderstudyError

# The first attempts fall into the restart of a server, which takes half a second; after that the
# whole container is being restarted. A failed attempt costs microseconds, and a pause as long as
# the wait so far would double the time without a service.
BACKOFF_S, BACKOFF_S_MAX = 0.02, 0.1

# What may succeed the next time.
TEMPORARY = (UnderstudyError, OSError, MemoryError)


def rejoin(
    attempt: Callable[[], None],
    on_away: Callable[[str], None],
    why: BaseException,
    wake: int,
    may_go_on: Callable[[], bool],
) -> float | None:
    """Call `attempt` until it raises nothing of TEMPORARY; how many milliseconds that took, or None
    if it may not go on.

    Args:
        on_away: called with the reason, beginning with `why`, whenever it changes.
        wake: a descriptor that is readable once `may_go_on` is to be asked again.
    """
    began, delay_s, said = time.monotonic(), 0.0, ""
    while may_go_on():
        sentence = why.message if isinstance(why, UnderstudyError) else str(why)
        if sentence != said:
            said = sentence
            on_away(sentence)
        _pause(wake, delay_s)
        delay_s = min(max(BACKOFF_S, delay_s * 2), BACKOFF_S_MAX)
        try:
            attempt()
        except TEMPORARY as error:
            why = error
        else:
            return (time.monotonic() - began) * 1000
    return None


def _pause(wake: int, delay_s: float) -> None:
    """No `select`: an engine has descriptors above 1,023."""
    poll = select.poll()
    poll.register(wake, select.POLLIN)
    poll.poll(delay_s * 1000)
