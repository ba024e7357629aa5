"""Which grants are believed, of those that are heard on one connection after the other."""

from __future__ import annotations

from lockserver.messages import NO_ERA, GrantedMsg
from plumbing.errors import UnderstudyError


class NewestGrants:
    """The newest grant of each lock. Tokens compare within an era only: a grant of another era, by
    a server that has lost all of its state, replaces what was known."""

    def __init__(self) -> None:
        self._newest: dict[str, GrantedMsg] = {}

    def newest(self, lock: str) -> GrantedMsg | None:
        """The newest grant of `lock` that was believed."""
        return self._newest.get(lock)

    def check(self, grant: GrantedMsg) -> UnderstudyError | None:
        """Remember `grant`, or why it must not be believed."""
        known = self._newest.get(grant.lock)
        is_comparable = known is not None and known.era == grant.era != NO_ERA
        if known is None or not is_comparable or grant.token >= known.token:
            self._newest[grant.lock] = grant
            return None
        return UnderstudyError(
            "lock.old_token",
            f"the lock server says that {grant.engine} holds {grant.lock} under token"
            f" {grant.token}, but {known.engine} has held it under token {known.token} of the same"
            " era: its state file is an old copy. Stop the lock server, move lockserver.json away"
            " and start it again: engines that serve show it their tokens",
            engine=grant.engine,
            token=grant.token,
            known_token=known.token,
        )
