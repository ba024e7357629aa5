"""Who is known here: one record per supervisor process, and who may be added.

Pure questions about records. A record lasts until its process is gone (by pidfd; where there is
none, until its connection closes), which is what makes a second supervisor of an engine visible.
"""

from __future__ import annotations

from collections.abc import Mapping

from lockserver.core import sentences
from lockserver.core.events import Refuse, Wanted
from lockserver.core.lock import Lock
from lockserver.core.supervisor import Supervisor

# A pod has a handful; a thousand may wait all the same, at a few KiB each, and a heartbeat of one
# looks at nobody else. Each may be remembered until its process ends.
SUPERVISORS_MAX = 1024


def twins_of(want: Wanted, supervisors: Mapping[str, Supervisor]) -> list[Supervisor]:
    """Other supervisors of the same engine."""
    others = supervisors.values()
    return [s for s in others if s.engine == want.engine and s.id != want.supervisor]


def holds_any(supervisor_id: str, locks: Mapping[str, Lock]) -> bool:
    """Whether a holder, in whatever state, belongs to this supervisor."""
    return standing(supervisor_id, locks) > 0


def check_identity(
    want: Wanted,
    speaker: Supervisor | None,
    locks: Mapping[str, Lock],
    supervisors: Mapping[str, Supervisor],
) -> Refuse | None:
    """Why this sender cannot be who it says it is, or None; `speaker` has its connection so far."""
    known = speaker or supervisors.get(want.supervisor)
    if known is not None and (known.id, known.engine) != (want.supervisor, want.engine):
        why = f"this is supervisor {known.id} of {known.engine}; it cannot become another"
        return Refuse(want.conn, "lock.identity_changed", why)
    if known is not None and known.has_process and want.pid and known.pid not in (0, want.pid):
        why = (
            f"supervisor {known.id} of {known.engine} is pid {known.pid}, which lives; pid"
            f" {want.pid} cannot speak for it"
        )
        return Refuse(want.conn, "lock.identity_changed", why)
    is_full = known is None and len(supervisors) >= SUPERVISORS_MAX
    if is_full and not holds_any(want.supervisor, locks):  # a holder on file is in the right
        why = f"{SUPERVISORS_MAX} supervisors are known here, which is the limit; end some of them"
        return Refuse(want.conn, "lock.too_many_waiters", why)
    twins = twins_of(want, supervisors)
    mine = standing(want.supervisor, locks)
    if twins and mine <= max(standing(twin.id, locks) for twin in twins):
        return sentences.engine_id_taken(want.conn, want.engine, twins[0].pid)
    return None


def standing(supervisor_id: str, locks: Mapping[str, Lock]) -> int:
    """Which of two supervisors of one engine is in the right: who holds more; else who is here.

    Were it enough to hold anything, two that hold different locks would evict each other for ever.
    """
    held = [k for k in locks.values() if k.holder and k.holder.supervisor == supervisor_id]
    return max((1 + lock.is_fenced for lock in held), default=0)
