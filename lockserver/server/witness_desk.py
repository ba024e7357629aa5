"""This server's looks at the witnesses and serving files of its directory, also when it is short of
descriptors.

A look that is not possible now is repeated with a descriptor from the reserve, and then with every
tick: the `want` that needed it waits here. So does the removal of a witness that is not needed any
more. Owns what waits for a look. Must not decide what a look means.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TypeVar

from msgspec.structs import replace

from lockserver import serving, witness
from lockserver.core.events import Wanted
from lockserver.core.ledger import ENDED_MAX
from lockserver.core.names import (
    INCARNATION,
    PREFIX,
    SERVING_PREFIX,
    ServingFile,
    WitnessFile,
    WitnessState,
)
from lockserver.messages import WantMsg
from plumbing.wire.connection import Connection
from plumbing.wire.fds import Reserve

T = TypeVar("T")


class WitnessDesk:
    """The witnesses in `directory`."""

    def __init__(self, directory: str, reserve: Reserve) -> None:
        self._directory = directory
        self._reserve = reserve
        self._unseen: dict[int, Wanted] = {}  # by connection; bounded by their number
        self._unremoved: dict[str, WitnessFile] = {}

    # ------------------------------------------------------------------ looking

    def identify(self, name: str) -> tuple[WitnessFile | None, WitnessState]:
        return self._look(lambda: witness.identify(self._path(name)), lambda found: found[1])

    def probe(self, file: WitnessFile) -> WitnessState:
        path = self._path(file.name)
        return self._look(lambda: witness.probe(path, file.dev, file.ino), lambda state: state)

    def probe_serving(self, file: ServingFile, token: int) -> WitnessState:
        path = self._path(file.name)
        return self._look(lambda: serving.probe(path, file, token), lambda state: state)

    def scan_serving(
        self, *, seal_at: int = 0, keep: frozenset[str] = frozenset()
    ) -> tuple[set[str], int] | None:
        """The serving files that may be held, and the largest length; None: they cannot be read."""
        with self._reserve:
            try:
                return serving.scan(self._directory, seal_at=seal_at, keep=keep)
            except OSError:
                return None

    def scan(self, *, seal: bool = False, keep: frozenset[str] = frozenset()) -> set[str] | None:
        """The names of all witnesses that may be held; None if the directory cannot be read."""
        with self._reserve:
            try:
                return witness.scan(self._directory, seal=seal, keep=keep)
            except OSError:
                return None

    def wanted(self, conn: Connection, want: WantMsg) -> Wanted:
        """A `want` as an event, with what its witness shows and the process of the peer."""
        self.forget(conn.id)
        file, state, serves = None, WitnessState.UNPROVEN, None
        if want.incarnation is not None and INCARNATION.fullmatch(want.incarnation):
            serves = serving.find(self._directory, want.incarnation)
        if want.witness is not None and want.incarnation is not None and "/" not in want.witness:
            file, state = self.identify(want.witness)
        return Wanted(
            conn.id,
            want,
            witness_file=file,
            witness_state=state,
            pid=conn.peer.pid,
            process=conn.peer.pidfd_source,
            serving=serves,
        )

    def _look(self, look: Callable[[], T], state_of: Callable[[T], WitnessState]) -> T:
        found = look()
        if state_of(found) is WitnessState.UNSEEN:
            with self._reserve:
                found = look()
        return found

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    # ------------------------------------------------------------------ what waits for a look

    @property
    def unseen(self) -> list[Wanted]:
        """The wants that wait until their witness can be looked at."""
        return list(self._unseen.values())

    @property
    def is_behind(self) -> bool:
        """Whether anything waits for a look."""
        return bool(self._unseen or self._unremoved)

    def look_again(self, want: Wanted) -> None:
        """Keep `want` until its witness can be looked at."""
        self._unseen[want.conn] = want

    def forget(self, conn: int) -> None:
        """This connection has sent another want, or ends."""
        self._unseen.pop(conn, None)

    def discard(self, files: Iterable[WitnessFile]) -> None:
        """Remove these witnesses, and the serving files beside them, if they are free. One that
        cannot be tried is tried again."""
        for file in files:
            state = self.probe(file)
            if state is WitnessState.FREE:
                with suppress(OSError):
                    os.unlink(self._path(SERVING_PREFIX + file.name.removeprefix(PREFIX)))
                with suppress(OSError):  # a directory that cannot be written to: it stays
                    os.unlink(self._path(file.name))
            elif state is WitnessState.UNSEEN and len(self._unremoved) < ENDED_MAX:
                self._unremoved[file.name] = file

    def tick(self) -> list[Wanted]:
        """Try again; the wants to hand in, now that their witnesses have been looked at."""
        unremoved, self._unremoved = self._unremoved, {}
        self.discard(unremoved.values())
        seen = []
        for want in self.unseen:
            assert want.msg.witness is not None
            file, state = self.identify(want.msg.witness)
            if state is not WitnessState.UNSEEN:
                self.forget(want.conn)
                again = replace(want, witness_file=file, witness_state=state, is_repeat=True)
                seen.append(again)
        return seen
