"""One rank's weights: mapped and kept, or released and kept as a copy in host memory.

Shared by every backend. Owns the reader's keeper. Knows no model. The surprising thing: what is in
the way of a release is no error: the weights stay, or their memory is not free yet, and the
supervisor asks again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gms.client import Keeper, Offloaded, Reader, release
from plumbing.errors import UnderstudyError

logger = logging.getLogger(__name__)


class KeptWeights:
    """The weights of `reader`, kept from now on. `may_digest`: as for a keeper."""

    def __init__(self, reader: Reader, may_digest: Callable[[], bool]) -> None:
        self.reader = reader
        self._may_digest = may_digest
        self._gone: Offloaded | None = None
        self.keeper = self._kept()

    @property
    def is_away(self) -> bool:
        """Nothing is mapped: nobody may compute."""
        return self._gone is not None

    def let_go(self) -> tuple[int, str]:
        """Release the weights and have their memory freed: how much is free, or what is in the
        way of either."""
        try:
            if self._gone is None:
                self._gone = release(self.reader, self.keeper)
            return self._gone.free(), ""
        except UnderstudyError as error:
            return 0, error.message

    def bring_back(self, budget_s: float) -> None:
        """Map them where they were, if they are not.

        Raises:
            UnderstudyError: as `Offloaded.restage`; the process must end.
        """
        gone = self._gone
        if gone is None:
            return
        gone.restage(budget_s, on_wait=logger.warning)
        self._gone, self.keeper = None, self._kept()

    def close(self) -> None:
        """Keep nothing any more; a reader that maps its weights stays as it is."""
        self.keeper.close()
        if self._gone is not None:
            self._gone.close()

    def _kept(self) -> Keeper:
        # It keeps the session through the deaths of the memory service, while others compute.
        keeper = Keeper(self.reader, may_digest=self._may_digest, on_change=logger.warning)
        keeper.start()
        return keeper
