"""What a `want` must be before anything else looks at it: its shape, nothing of who holds what."""

from __future__ import annotations

from collections.abc import Container

from lockserver.core.events import Refuse, Wanted
from lockserver.witness import ENGINE_ID, INCARNATION, name_of


def check_want(want: Wanted, locks: Container[str]) -> Refuse | None:
    """Why this `want` can be nobody's truth, or None."""
    incarnation = INCARNATION.fullmatch(want.incarnation) if want.incarnation else None
    if not ENGINE_ID.fullmatch(want.engine):
        code, why = "lock.bad_engine_id", f"{want.engine!r} is no engine id"
    elif want.incarnation is not None and (
        incarnation is None or incarnation["engine"] != want.engine
    ):
        code = "lock.bad_incarnation"
        why = f"{want.incarnation!r} is no incarnation of {want.engine}: its id, '-', 16 hex digits"
    elif want.incarnation is None and (want.locks or want.tokens or want.witness):
        code = "lock.bad_want"
        why = "a supervisor without an incarnation wants no lock, has no token and no witness"
    elif want.incarnation and want.witness and want.witness != name_of(want.incarnation):
        code = "lock.bad_witness_name"
        why = (
            f"the witness of {want.incarnation} is {name_of(want.incarnation)}, not {want.witness}"
        )
    elif want.locks and not want.witness:
        code, why = "lock.bad_witness_name", "whoever wants a lock names its witness"
    elif unknown := [lock for lock in (*want.locks, *want.tokens) if lock not in locks]:
        code, why = "lock.unknown_lock", f"there is no lock {unknown[0]!r} here"
    elif len(set(want.locks)) != len(want.locks) or not set(want.tokens) <= set(want.locks):
        code = "lock.bad_want"
        why = "each wanted lock is named once, and a token is of a lock that is wanted"
    else:
        return None
    return Refuse(want.conn, code, why)
