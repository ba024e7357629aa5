"""The loader lock as the tensor-parallel simulation sees it: a file that one supervisor has locked.

Which of those that wait is next, the schedule says: each looks again now and then. The kernel
unlocks the file when its holder's process ends, and the holder when its incarnation wants it no
more.
"""

from __future__ import annotations


class LoaderLock:
    def __init__(self) -> None:
        self.holder: str | None = None

    @property
    def is_free(self) -> bool:
        return self.holder is None

    def take(self, supervisor: str) -> None:
        assert self.is_free
        self.holder = supervisor

    def leave(self, supervisor: str | None) -> None:
        """It wants it no more, or is dead."""
        if self.holder == supervisor:
            self.holder = None
