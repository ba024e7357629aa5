"""A supervisor's `want` on this host, with what the server itself sees of it."""

from __future__ import annotations

import os

from lockserver import witness
from lockserver.core.events import Wanted
from lockserver.messages import Want
from lockserver.witness import Probe
from plumbing.wire.connection import Connection


def wanted(directory: str, conn: Connection, want: Want) -> Wanted:
    """The event for the machine: its witness is looked at, its process is the peer's."""
    file, state = None, Probe.UNPROVEN
    if want.witness is not None and want.incarnation is not None and "/" not in want.witness:
        file, state = witness.identify(os.path.join(directory, want.witness))
    return Wanted(
        conn=conn.id,
        supervisor=want.supervisor,
        engine=want.engine,
        incarnation=want.incarnation,
        witness=want.witness,
        locks=want.locks,
        tokens=want.tokens,
        witness_file=file,
        witness_state=state,
        pid=conn.peer.pid,
        process=conn.peer.pidfd_source,
    )
