"""Whether a grant could be written: each lock has its share of one slot of the state file.

With a share each, no engine's grant ever depends on how much another's takes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from lockserver.core.events import Holder, RefuseConnection, Wanted
from lockserver.core.lock import Lock


def bytes_on_file(name: str, holder: Holder) -> int:
    """What this lock's holder takes in the file, with the comma behind it."""
    return len(json.dumps({name: holder.to_dict()}, separators=(",", ":")).encode())


def check_size(
    want: Wanted, holder: Holder, locks: Mapping[str, Lock], share_bytes: int
) -> RefuseConnection | None:
    """Why what is wanted anew could not be granted; None if it could. `holder`: what `want` would
    be on file, with the longest numbers."""
    for name in want.msg.locks:
        needed = bytes_on_file(name, holder)
        if needed > share_bytes and not locks[name].is_held_by(want.msg.incarnation):
            return RefuseConnection(
                want.conn,
                "lock.does_not_fit",
                f"{want.msg.engine} cannot be granted the {name} lock: its record takes {needed}"
                f" bytes, and each of the {len(locks)} locks has {share_bytes} bytes of the state"
                " file; use a shorter engine id, or fewer models",
                {"lock": name, "needed_bytes": needed, "share_bytes": share_bytes},
            )
    return None
