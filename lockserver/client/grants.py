"""Which grants are believed, of those that are heard on one connection after the other."""

from __future__ import annotations

from lockserver.messages import CATALOGUE, NO_ERA, GrantedMsg
from plumbing.errors import UnderstudyError
from plumbing.wire.connection import KeptConnection


class GrantsConnection(KeptConnection):
    """A kept connection to the lock server, with the newest grant of each lock. Tokens compare
    within an era only: a grant of another era, by a server that has lost all of its state, replaces
    what was known."""

    def __init__(self, address: str) -> None:
        super().__init__(address, CATALOGUE)
        self.newest: dict[str, GrantedMsg] = {}

    def believes(self, grant: GrantedMsg) -> bool:
        """Remember `grant`. One that is older than what was heard is a refusal of the server."""
        known = self.newest.get(grant.lock)
        is_comparable = known is not None and known.era == grant.era != NO_ERA
        if known is None or not is_comparable or grant.token >= known.token:
            self.newest[grant.lock] = grant
            return True
        refusal = UnderstudyError(
            "lock.old_token",
            f"the lock server says that {grant.engine} holds {grant.lock} under token"
            f" {grant.token}, but {known.engine} has held it under token {known.token} of the same"
            " era: its state file is an old copy. Stop the lock server, move lockserver.json away"
            " and start it again: engines that serve show it their tokens",
            engine=grant.engine,
            token=grant.token,
            known_token=known.token,
        )
        self.problem = refusal.message
        self.refused(refusal, 0)
        return False
