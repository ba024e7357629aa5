"""Who holds each model's lock, by the lock server, and which engines' processes are dead, by their
witnesses.

`PoolLockSide` watches `active:<model>`. While the lock server is away, the last report counts.
Grants are pushed to every observer. That nobody holds a lock any more is in the status document
only, which is asked for when something has happened there.

`WitnessWatch` tries witnesses while there is a reason to. The lock server removes the witness of a
dead incarnation, perhaps before this pool has looked, or while there is none. So each witness gets
a second name as soon as it is heard of, `pool_witness_…`, which is this pool's alone: evidence that
outlives both. A witness that is found free is sealed, as by the lock server, so that nobody can
join it any more.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Collection
from typing import Any

from lockserver.client import messages as lock
from lockserver.client import witness
from lockserver.client.reconnect import NewestGrants
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import WitnessRef
from plumbing.pod.models import ACTIVE, kind_of, lock_of, model_of
from plumbing.pod.paths import lockserver_socket
from plumbing.wire.connection import Connection
from plumbing.wire.messages import Message
from pool.client.link import KeptLink
from pool.core.events import EngineDead, HolderNamed, PoolEvent

Feed = Callable[[PoolEvent], None]

LOOK_S = 0.05  # between two looks at the status: it costs the lock server a walk through /proc


class PoolLockSide(KeptLink):
    def __init__(self, directory: str, models: Collection[str], feed: Feed) -> None:
        super().__init__(lockserver_socket(directory), lock.CATALOGUE)
        self._models, self._feed = models, feed
        self._told: dict[str, HolderNamed] = {}
        self._grants = NewestGrants()

    def begin(self, conn: Connection) -> None:
        conn.send(lock.WatchMsg(), 1)

    def hear(self, message: Message, request_id: int) -> None:
        match message:
            case lock.StatusReplyMsg():
                self.problem = None
                self._look_at(message.document)
            case lock.GrantedMsg() if kind_of(message.lock) == ACTIVE:
                self._granted(message)
            case lock.EventMsg():
                self.look_soon(LOOK_S)

    def look(self) -> None:
        if self.conn is not None:
            self.conn.send(lock.StatusMsg(), 1)

    def _granted(self, grant: lock.GrantedMsg) -> None:
        refusal = self._grants.check(grant)
        if refusal is not None:
            self.problem = refusal.message
            return
        self._say(HolderNamed(model_of(grant.lock), grant.engine, grant.token, grant.era))

    def _look_at(self, document: dict[str, Any]) -> None:
        locks, era = document["locks"], str(document["era"])
        missing = [name for name in self._models if lock_of(ACTIVE, name) not in locks]
        if missing:
            self.problem = (
                f"the lock server has no lock for {', '.join(missing)}: start it with the same pool"
                " file"
            )
        for model in self._models:
            found = locks.get(lock_of(ACTIVE, model), {}).get("holder")
            found = found or {"engine": "", "token": 0}  # nobody
            known = self._grants.newest(lock_of(ACTIVE, model))
            is_old = known is not None and known.era == era and found["token"] < known.token
            if not (found["token"] and is_old):  # of before a grant that has come meanwhile
                self._say(HolderNamed(model, found["engine"], found["token"], era))

    def _say(self, said: HolderNamed) -> None:
        if said.model in self._models and self._told.get(said.model) != said:
            self._told[said.model] = said
            self._feed(said)


LINK_PREFIX = "pool_"  # before the name of a witness, `witness_<engine>_<16 hex>`
# Small processes die within milliseconds, and some need half a minute; who is hung may be so for
# days. A try takes 50 us of a CPU, so it is dense only where somebody waits for the answer: during
# a failover nobody does, and the engines need the CPU.
DENSE_S, DENSE_FOR_S = 0.001, 1.0
SLOW_S, SLOW_FOR_S = 0.010, 60.0
RARE_S = 0.1
RANDOM_CHARS = 16  # of an incarnation


class WitnessWatch:
    """The witnesses in `directory`; `feed` gets `EngineDead` once for each that is free, and once
    for each question."""

    def __init__(self, directory: str, feed: Feed) -> None:
        self._directory, self._feed = directory, feed
        self._asked: dict[str, int] = {}  # by engine, the newest question
        self._kept: dict[str, tuple[str, int, int]] = {}  # by incarnation: engine, dev, ino
        self._since_s: dict[str, float] = {}  # of those that are tried now
        self._newest_s = 0.0  # when the last reason to try has come
        self._timer: asyncio.TimerHandle | None = None
        self.problem: str | None = None

    def recover(self, engines: Callable[[str], str | None]) -> None:
        """What an earlier pool kept; `engines` tells whose an incarnation is, if it is known."""
        for name in os.listdir(self._directory):
            if not name.startswith(LINK_PREFIX + witness.PREFIX):
                continue
            path = os.path.join(self._directory, name)
            stem, _, random = name.removeprefix(LINK_PREFIX + witness.PREFIX).rpartition("_")
            incarnation = f"{stem}-{random}"
            engine = engines(incarnation)
            with contextlib.suppress(OSError):
                found = os.lstat(path)
                if engine is None:  # of a model that is not in the pool any more
                    os.unlink(path)
                else:
                    self._kept[incarnation] = (engine, found.st_dev, found.st_ino)

    def keep(self, engine: str, incarnation: str, ref: WitnessRef) -> None:
        """This incarnation lives, with this witness: keep the evidence.

        Raises:
            UnderstudyError: `pool.bad_witness`, it is not the file that the engine says.
        """
        if incarnation in self._kept:
            return
        if ref.name != witness.name_of(incarnation):
            raise UnderstudyError(
                "pool.bad_witness", f"{ref.name!r} is not the witness of {incarnation}"
            )
        link = self._link(incarnation)
        try:
            with contextlib.suppress(FileExistsError):
                os.link(os.path.join(self._directory, ref.name), link, follow_symlinks=False)
            found = os.lstat(link)
            self.problem = None
        except FileNotFoundError:
            return  # sealed and removed already: it says nothing more
        except OSError as error:  # no space, no memory: at the next word of the engine
            self.problem = f"cannot keep the witness of {engine}: {error.strerror}"
            return
        if (found.st_dev, found.st_ino) != (ref.dev, ref.ino):
            os.unlink(link)
            raise UnderstudyError(
                "pool.bad_witness", f"the witness of {incarnation} was replaced by another file"
            )
        self._kept[incarnation] = (engine, ref.dev, ref.ino)

    def suspect(self, engine: str, *, but: str = "") -> None:
        """There is a reason to think that the incarnations of `engine` are dead, but for one."""
        now_s = asyncio.get_running_loop().time()
        for incarnation, (name, _, _) in self._kept.items():
            if name == engine and incarnation not in (but, *self._since_s):
                self._since_s[incarnation] = self._newest_s = now_s
        self._arm()

    def ask(self, engine: str, number: int) -> None:
        """Its supervisor has stopped it: answer once all of its processes are dead."""
        self._asked[engine] = number
        self._newest_s = asyncio.get_running_loop().time()
        self.close()  # the next try may be far
        self.suspect(engine)

    def withdraw(self, engine: str) -> None:
        """It may start again."""
        self._asked.pop(engine, None)

    def trust(self, incarnation: str) -> None:
        """It has been heard: stop trying."""
        self._since_s.pop(incarnation, None)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        if self._timer is None and (self._since_s or self._asked):
            loop = asyncio.get_running_loop()
            waited_s = loop.time() - self._newest_s
            delay_s = SLOW_S if waited_s < SLOW_FOR_S else RARE_S
            if self._asked and waited_s < DENSE_FOR_S:
                delay_s = DENSE_S
            self._timer = loop.call_later(delay_s, self._try)

    def _try(self) -> None:
        self._timer = None
        for incarnation in tuple(self._since_s):
            engine, *file = self._kept[incarnation]
            if witness.probe(self._link(incarnation), *file) is not witness.WitnessState.FREE:
                continue
            del self._kept[incarnation], self._since_s[incarnation]
            with contextlib.suppress(OSError):
                os.unlink(self._link(incarnation))
            self._feed(EngineDead(engine, incarnation))
        for engine, number in [each for each in self._asked.items() if self._has_none(each[0])]:
            del self._asked[engine]
            self._feed(EngineDead(engine, "", number))
        self._arm()

    def _has_none(self, engine: str) -> bool:
        """Whether no witness of this engine is left that anybody may hold, heard of or not."""
        if any(name == engine for name, _, _ in self._kept.values()):
            return False
        stem = f"{witness.PREFIX}{engine}_"
        names = [name for name in os.listdir(self._directory) if name.startswith(stem)]
        return all(self._is_free(name) for name in names if len(name) == len(stem) + RANDOM_CHARS)

    def _is_free(self, name: str) -> bool:
        path = os.path.join(self._directory, name)
        file, state = witness.identify(path)
        if file is not None and state is not witness.WitnessState.HELD:
            state = witness.probe(path, file.dev, file.ino)
        return state is witness.WitnessState.FREE or not os.path.lexists(path)

    def _link(self, incarnation: str) -> str:
        return os.path.join(self._directory, LINK_PREFIX + witness.name_of(incarnation))
