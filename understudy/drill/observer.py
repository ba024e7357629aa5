"""Observes the effects of a kill: grants, states of engines and models, deaths of processes.

Owns the pidfds of the engine that is about to be killed, opened *before* the kill, because pids are
recycled. When the lock server announces the next grant, each of these processes must have exited,
or have neither memory nor descriptors left; otherwise it could still touch memory that now belongs
to the new engine. The evidence is the kernel's, not the pod's.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from engine import messages as engine_messages
from lockserver.client import messages as lock_messages
from lockserver.client import witness
from plumbing.pod.messages import EventMsg, StatusReplyMsg, WatchMsg
from plumbing.pod.models import lock_of
from plumbing.pod.observers import PeerWatch
from plumbing.pod.paths import LOCKSERVER_SOCKET, pool_socket
from plumbing.service.clock import SystemClock
from plumbing.service.procfs import is_spent
from plumbing.service.procfs import name as process_name
from plumbing.wire.messages import Message
from plumbing.wire.peer import is_gone
from pool.messages import CATALOGUE as POOL_CATALOGUE
from understudy.drill.records import EngineDeath, Kill, Moment, Records, Switch
from understudy.drill.targets import POOL

clock = SystemClock()

LOCKSERVER = "the lock server"
SWITCH_TIMES = ("drain_ms", "release_ms", "raise_ms")  # without the wait until it could begin


@dataclass(slots=True)
class OldTree:
    """The processes of one engine, by pidfds, or all together by the witness file they lock."""

    pids: dict[int, tuple[int, str]] = field(default_factory=dict)  # pidfd → 17, "engine"
    witness: int | None = None

    @classmethod
    def of(cls, pids: Iterable[int]) -> OldTree:
        tree = cls()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):  # it has just exited by itself
                name = process_name(pid)
                tree.pids[os.pidfd_open(pid)] = pid, name
        return tree

    @classmethod
    def by_witness(cls, directory: Path, incarnation: str | None) -> OldTree:
        """For processes not visible here; the kernel releases the lock of a dead one last. Without
        an incarnation, or its file, it is no evidence."""
        with contextlib.suppress(OSError):
            if incarnation is not None:
                path = directory / witness.name_of(incarnation)
                return cls(witness=os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        return cls()

    @property
    def is_evidence(self) -> bool:
        """Whether it can prove that processes are gone."""
        return bool(self.pids) or self.witness is not None

    def alive(self) -> list[str]:
        """Those that have not exited and can still touch something."""
        if self.witness is not None:
            return ["a process that holds its witness"] if _is_held(self.witness) else []
        # The pid cannot be recycled: the process had not exited, let alone been reaped.
        return [
            f"pid {pid} ({name})"
            for pidfd, (pid, name) in self.pids.items()
            if not is_gone(pidfd) and not is_spent(pid)
        ]

    def close(self) -> None:
        """Release them; a stopped process that was not detected continues."""
        for pidfd in self.pids:
            with contextlib.suppress(OSError):  # it exited, as it should
                signal.pidfd_send_signal(pidfd, signal.SIGCONT)
            os.close(pidfd)
        self.pids.clear()
        if self.witness is not None:
            os.close(self.witness)
            self.witness = None


class Observer:
    """Watches the lock server and every engine, and writes into `records`."""

    def __init__(self, directory: Path, engines: Mapping[str, str], records: Records) -> None:
        self._records = records
        self._kill: Kill | None = None
        self._tree = OldTree()
        self._connected: set[str] = set()
        self._states: dict[str, str] = {}  # the last of each model
        self._running: dict[str, str] = {}  # the living incarnation of each engine
        self._faults: dict[str, str] = {}  # the code of what its backend reported last
        watched = [(LOCKSERVER, LOCKSERVER_SOCKET, lock_messages.CATALOGUE, self._on_lockserver)]
        for engine, path in engines.items():
            heard = partial(self._on_engine, engine)
            watched.append((engine, path, engine_messages.CONTROL, heard))
        if records.models:
            watched.append((POOL, pool_socket(""), POOL_CATALOGUE, self._on_pool))
        self._watches = [
            PeerWatch(
                *(str(directory / path), catalogue, WatchMsg(), on),
                partial(self._connected.discard, part),
            )
            for part, path, catalogue, on in watched
        ]

    def unwatched(self) -> list[str]:
        """The lock server or the pool, if it is not connected, so that its events are not seen."""
        parts = (LOCKSERVER, *((POOL,) if self._records.models else ()))
        return [each for each in parts if each not in self._connected]

    def incarnation_of(self, engine: str) -> str | None:
        """The one that lives, as far as is known."""
        return self._running.get(engine)

    def expect(self, kill: Kill, tree: OldTree) -> None:
        """Attribute events from now on to `kill`; takes ownership of `tree`."""
        self._tree.close()
        self._kill, self._tree = kill, tree

    async def close(self) -> None:
        for watch in self._watches:
            await watch.close()
        self._tree.close()

    # ------------------------------------------------------------------ messages

    def _on_lockserver(self, message: Message) -> None:
        self._connected.add(LOCKSERVER)
        wanted = lock_of(self._kill.model if self._kill is not None else "")
        if isinstance(message, lock_messages.GrantedMsg) and message.lock == wanted:
            self._granted(message.engine, message.token, message.incarnation)
        elif isinstance(message, EventMsg):
            record, data = message.record, message.record.get("data") or {}
            if record.get("type") == "lock.granted" and data.get("lock") == wanted:
                engine, token = str(data.get("engine")), int(data.get("token", 0))
                self._granted(engine, token, data.get("incarnation"))
                self._note_grant(data)

    def _granted(self, engine: str, token: int, incarnation: str | None) -> None:
        """A newer grant: the old tree must be gone. Reported twice, as message and as event."""
        kill = self._kill
        if kill is None or token <= kill.old_token or kill.new_token is not None:
            return
        if incarnation is not None and incarnation == kill.incarnation:
            kill.old_token, kill.holder = token, None  # its own grant, from before its death
            return
        kill.new_token, kill.new_engine = token, engine
        alive = self._tree.alive() if kill.holder in (None, kill.incarnation) else []
        if self._tree.is_evidence:
            self._records.grants_checked += 1
        if alive:
            self._records.overlaps.append(
                f"token {token} was granted to {engine} while {', '.join(alive)} "
                f"of {kill.engine} was alive"
            )

    def _note_grant(self, data: Mapping[str, Any]) -> None:
        kill = self._kill
        if kill is None or data.get("token") != kill.new_token:
            return
        kill.fenced_ms = _after(kill, data.get("fenced_mono_ms"))
        _earliest_detection(kill, data.get("lost_mono_ms"))

    def _on_engine(self, engine: str, message: Message) -> None:
        kill = self._kill
        self._note_engine(engine, message)
        if kill is None or not isinstance(message, EventMsg):
            return
        record, data = message.record, message.record.get("data") or {}
        if engine == kill.engine:
            if record.get("type") == "engine.rehearsal":
                kill.incarnation = self._running.get(engine)  # which may be a moment old
            elif record.get("type") == "engine.child_exit" or data.get("to") == "dead":
                _earliest_detection(kill, data.get("seen_mono_ms", record.get("mono_ms")))
        elif record.get("type") == "engine.state" and (not kill.peers or engine in kill.peers):
            if data.get("to") == "waking" and kill.granted_ms is None:
                kill.granted_ms = _after(kill, record.get("mono_ms"))
            elif data.get("to") == "active" and kill.active_ms is None:
                kill.active_ms = _after(kill, record.get("mono_ms"))

    def _note_engine(self, engine: str, message: Message) -> None:
        if isinstance(message, StatusReplyMsg):
            about = message.document.get("engine") or {}
            # Before its first launch a new supervisor has none, and the last one's has ended.
            self._note_incarnation(engine, about, is_dead=about.get("state") == "dead")
        elif isinstance(message, EventMsg):
            record = message.record
            data = record.get("data") or {}
            if record.get("type") == "engine.fault":
                self._faults[engine] = str(record.get("error_code") or data.get("error_code"))
            elif record.get("type") == "engine.state":
                why = str(record.get("message", ""))
                is_dead = data.get("to") == "dead"
                self._note_incarnation(engine, data, is_dead=is_dead, message=why)

    def _note_incarnation(
        self, engine: str, about: Mapping[str, Any], *, is_dead: bool, message: str = ""
    ) -> None:
        """Record a death: seen, or shown by the launch that follows it."""
        named, last = about.get("incarnation"), self._running.get(engine)
        if last is not None and (is_dead or named != last):
            del self._running[engine]
            is_seen = is_dead and named == last
            cause = str(about.get("cause", "")) if is_seen else ""
            fault = self._faults.pop(engine, "")
            cause = fault if cause == "backend_fault" and fault else cause
            why = message or str(about.get("reason", "")) if is_seen else ""
            self._records.deaths.append(
                EngineDeath(engine, last, cause, why or "its supervisor ended")
            )
        if isinstance(named, str) and not is_dead:
            self._running[engine] = named

    def _on_pool(self, message: Message) -> None:
        """A pool that was killed is dialled again; what happened meanwhile shows in the states that
        its successor names first."""
        self._connected.add(POOL)
        if isinstance(message, StatusReplyMsg):
            for each in message.document.get("models") or ():
                at_ms = clock.now_ms() - float(each.get("for_ms") or 0.0)
                self._note_model(each["model"], each["state"], at_ms)
        elif isinstance(message, EventMsg):
            kind, data = message.record.get("type"), message.record.get("data") or {}
            at_ms = float(message.record.get("mono_ms") or clock.now_ms())
            if kind == "pool.model":
                self._note_model(str(data["model"]), str(data["to"]), at_ms)
            elif kind == "pool.switch":
                length_ms = sum(float(data[name]) for name in SWITCH_TIMES)
                self._records.switches.append(Switch(at_ms, str(data["model"]), length_ms))

    def _note_model(self, model: str, state: str, at_ms: float) -> None:
        if self._states.get(model) != state:
            self._states[model] = state
            self._records.moments.append(Moment(at_ms, model, state))


def _is_held(file: int) -> bool:
    """Whether processes hold `file`, by shared locks. The lock server has tested it by now; while
    it holds the file alone, to seal it, no process does."""
    # It may be done between two tries.
    is_held = not _locks(file, fcntl.LOCK_EX) and _locks(file, fcntl.LOCK_SH)
    is_held = is_held and not _locks(file, fcntl.LOCK_EX)
    fcntl.flock(file, fcntl.LOCK_UN)
    return is_held


def _locks(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _after(kill: Kill, mono_ms: Any) -> float | None:
    """`mono_ms` if it is after the kill; events of an earlier failover are not."""
    if isinstance(mono_ms, (int, float)) and mono_ms >= kill.killed_ms:
        return float(mono_ms)
    return None


def _earliest_detection(kill: Kill, mono_ms: Any) -> None:
    seen_ms = _after(kill, mono_ms)
    if seen_ms is not None and (kill.detected_ms is None or seen_ms < kill.detected_ms):
        kill.detected_ms = seen_ms
