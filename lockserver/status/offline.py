"""The status from files: while no server answers, and what supervisors wrote of their engines.

Read-only. A server may run and not answer: then a second one could not start in its directory, and
`silent_server` says which process it is. Without a server: the state file's contents, and what can
be seen. It must not guess:
only the witness proves whether a holder is alive, and the waiters are unknown until a server is
back. In either case: which holders sleep and which engines are cold, as their supervisors wrote it
last. The lock server knows who holds a lock and not what for; what an engine writes into the shared
directory is enough for a sentence, and nothing is decided by it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec import to_builtins

from lockserver import schema, state_file, witness
from lockserver.core.events import Holder, LockRecord
from lockserver.core.lock import KINDS, kinds_of, with_filed
from lockserver.core.names import WitnessState
from lockserver.status.online import SCHEMA, processes_of, shown_wait
from lockserver.status.reasons import NOBODY, RESUME, LockWait, Process, named, wait
from plumbing.errors import UnderstudyError, UnreachableError, WaitTimeoutError
from plumbing.pod.messages import Tier
from plumbing.pod.paths import engine_state, lockserver_guard
from plumbing.service import procfs
from plumbing.service.clock import Clock, SystemClock, moment
from plumbing.service.files import read_json
from plumbing.text import duration

MEANWHILE = "active engines keep serving, and no other engine is granted the lock"
HANGS = "if it stays so, kill it: kill -9 {pid}; then start another, or let its container restart"


@dataclass(frozen=True, slots=True)
class SilentServer:
    """One sentence on the server, and one on what to do."""

    message: str
    fix: str

    def error(self) -> UnderstudyError:
        return UnreachableError("lock.not_answering", f"{self.message}; {self.fix}")


def silent_server(directory: str, error: UnderstudyError) -> SilentServer | None:
    """The server that did not answer a request, which failed with `error`; None if there is none.

    One in another PID namespace is not visible. Then it is known by accepting the connection.
    """
    path = lockserver_guard(directory)
    pid = _guard_holder(path)
    if pid is None and not isinstance(error, WaitTimeoutError):
        return None
    if pid is None:
        return SilentServer(
            f"the lock server in {directory} accepts connections and does not answer; its process"
            " is not visible from here",
            f"see whether its container is paused, stopped or out of CPU time; {MEANWHILE}",
        )
    halted = procfs.halted(pid)
    state = f", {halted}" if halted else ""
    fix = RESUME.get(halted or "", HANGS).format(pid=pid)
    return SilentServer(
        f"the lock server, pid {pid} ({procfs.name(pid)}{state}), holds {path} and does not answer",
        f"{fix}; {MEANWHILE}",
    )


def _guard_holder(path: str) -> int | None:
    """The process that has the guard at `path` open, if it is visible; the one named in it first.

    Only a server opens it. Trying its flock instead could make a server that starts now fail.
    """
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            said = file.read(64).removeprefix(b"pid ").strip()
    except OSError:
        return None
    pids = [each for each in procfs.holders_of(found.st_dev, found.st_ino) if each != os.getpid()]
    named = int(said) if said.isdigit() else None
    return named if named in pids else next(iter(pids), None)


UNANSWERED = "no lock server answers; this is its state file"


def offline(
    directory: str, clock: Clock | None = None, silent: SilentServer | None = None
) -> dict[str, Any] | None:
    """The view from the state file while no server answers; None if there is none either. `silent`:
    there is a server, which does not answer.

    Raises:
        OSError: it cannot be read.
    """
    clock = clock or SystemClock()
    found = state_file.read(directory, KINDS)
    if found is None:
        return None
    written_s = os.stat(os.path.join(directory, state_file.NAME)).st_mtime
    seen = _Seen(
        directory, found.record, clock.now_ms() - (time.time() - written_s) * 1000, clock, silent
    )
    kinds = with_filed(kinds_of(found.models), found.record)
    status = schema.LockserverStatus(
        schema=SCHEMA,
        as_of_event_id=0,
        last_event=None,
        server=schema.LockServerFields(pid=None, since=None, dir=directory, online=False),
        models=list(found.models),
        mode=None,
        era=found.record.era,
        token=found.record.token,
        problem=found.problem,
        locks={name: _lock(name, seen, is_fenced=fenced) for name, fenced in kinds.items()},
        tcp=None,
        supervisors=[],
        supervisors_total=0,
        service={},
        gateways=[],
        last_grants=[],
    )
    document: dict[str, Any] = to_builtins(status)
    return document


@dataclass(frozen=True, slots=True)
class _Seen:
    directory: str
    record: LockRecord
    written_ms: float
    clock: Clock
    silent: SilentServer | None


def _lock(name: str, seen: _Seen, *, is_fenced: bool) -> schema.LockLock:
    holder, clock = seen.record.holders.get(name), seen.clock
    since_ms = seen.written_ms if holder is None else holder.since_mono_ms
    processes = [] if holder is None else processes_of(holder.witness)
    what = UNANSWERED if seen.silent is None else seen.silent.message
    return schema.LockLock(
        kind="fenced" if is_fenced else "plain",
        state="unknown",
        **moment(since_ms, clock),
        holder=None if holder is None else _holder(holder, seen),
        waiters=[],
        waiters_total=0,
        waiting_for=[schema.LockWaitingFor(**each) for each in processes],
        waits=[shown_wait(_wait(name, holder, processes, since_ms, seen, what), clock)],
        problem=what,
    )


def _holder(holder: Holder, seen: _Seen) -> schema.LockHolder:
    return schema.LockHolder(
        engine=holder.engine,
        incarnation=holder.incarnation,
        token=holder.token,
        **moment(holder.since_mono_ms, seen.clock),
        since_mono_ms=holder.since_mono_ms,
        witness=_witness_state(seen.directory, holder),
    )


def _wait(
    name: str,
    holder: Holder | None,
    processes: Sequence[Process],
    since_ms: float,
    seen: _Seen,
    what: str,
) -> LockWait:
    meanwhile = "until then an active engine keeps serving, and no other engine is granted the lock"
    if holder is None:
        is_unknown = name in seen.record.unknown
        evidence = "the holder is not on file" if is_unknown else "no holder is on file"
    elif holder.lease_ms is not None:
        evidence = f"it cannot renew its lease of {duration(holder.lease_ms)}"
        meanwhile = "the active engine stops before its lease expires"
    elif (state := _witness_state(seen.directory, holder)) == WitnessState.UNPROVEN:
        evidence = f"witness {holder.witness.name} is missing or was replaced: it proves nothing"
    else:
        who = f" by {named(processes)}" if state == WitnessState.HELD else ""
        evidence = f"witness {holder.witness.name} is {state}{who}"
    fix = f"start it: lockserver serve --dir {seen.directory}; {meanwhile}"
    end = fix if seen.silent is None else seen.silent.fix
    whose = (holder.engine, holder.incarnation, holder.token, None) if holder else NOBODY
    return wait("no_server", since_ms, (evidence,), whose, what=what, end=end)


def _witness_state(directory: str, holder: Holder) -> str:
    file, probe = witness.identify(os.path.join(directory, holder.witness.name))
    is_same = file == holder.witness or probe is WitnessState.UNSEEN
    return str(probe if is_same else WitnessState.UNPROVEN)


Document = dict[str, Any]


def idle(directory: str, document: Document) -> dict[str, str]:
    """Since when and why an engine of the server's `document` does nothing, by its id, as its
    supervisor wrote it last: of holders that rest, and of those that are to run no backend."""
    holders = [lock["holder"] for lock in document["locks"].values() if lock["holder"]]
    tokens = {holder["engine"]: holder["token"] for holder in holders}
    without = {each["engine"] for each in document["supervisors"] if each["incarnation"] is None}
    found = {}
    for engine in (*tokens, *without):
        on_file = _on_file(directory, engine)
        state = on_file.get("engine") or {}
        token = (on_file.get("lock") or {}).get("token")
        rests = state.get("state") == "resting" and token == tokens.get(engine, -1)
        is_cold = state.get("state") == "dead" and engine in without
        if rests or (is_cold and (on_file.get("goal") or {}).get("goal") == Tier.COLD):
            found[engine] = f"since {state.get('since')}: {state.get('reason')}"
    return found


def _on_file(directory: str, engine: str) -> Document:
    try:
        return read_json(engine_state(directory, engine)) or {}
    except (UnderstudyError, OSError):  # `engine status` says what is wrong with it
        return {}
