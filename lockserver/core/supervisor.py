"""What the server knows of one supervisor. A record, and how a `want` replaces it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lockserver.core.events import Wanted
from lockserver.core.terms import LeaseTerms
from lockserver.witness import WitnessFile


@dataclass(slots=True)
class Supervisor:
    """One supervisor process, from its first `want` until its process (or connection) is gone."""

    id: str
    engine: str
    since_ms: float
    heard_ms: float
    conn: int | None = None
    newest: int = -1  # of its connections, the last that was opened and heard
    pid: int = 0
    process: str = (
        "none"  # where its pidfd came from; "lease", or "none": its connection stands for it
    )
    incarnation: str | None = None
    witness: WitnessFile | None = None
    witness_name: str | None = None
    lease: LeaseTerms | None = None
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
        self.newest = want.conn
        self.incarnation, self.witness_name = want.incarnation, want.witness
        self.lease = want.lease
        self.witness, self.locks, self.tokens = want.witness_file, want.locks, dict(want.tokens)
