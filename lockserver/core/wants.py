"""What a `want` must be before anything else looks at it, and what a supervisor is once it is.

Pure checks: shape only, nothing of who holds what.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from lockserver.core.events import Refuse, Wanted
from lockserver.witness import ENGINE_ID, INCARNATION, WitnessFile, name_of


@dataclass(slots=True)
class Supervisor:
    """One supervisor process, from its first `want` until its process (or connection) is gone."""

    id: str
    engine: str
    since_ms: float
    heard_ms: float
    conn: int | None = None
    pid: int = 0
    process: str = "none"  # where its pidfd came from; "none": its connection stands for it
    incarnation: str | None = None
    witness: WitnessFile | None = None
    witness_name: str | None = None
    locks: tuple[str, ...] = ()
    tokens: Mapping[str, int] = field(default_factory=dict)
    progress: int = -1
    is_silent: bool = False

    @property
    def has_process(self) -> bool:
        return self.process != "none"

    def adopt(self, want: Wanted) -> None:
        """Be what `want` says, all of it."""
        self.conn, self.pid, self.process = want.conn, want.pid, want.process
        self.incarnation, self.witness_name = want.incarnation, want.witness
        self.witness, self.locks, self.tokens = want.witness_file, want.locks, dict(want.tokens)


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
