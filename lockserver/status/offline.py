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
from dataclasses import dataclass
from typing import Any

from lockserver import state_file, witness
from lockserver.core.events import Holder, LockRecord
from lockserver.core.lock import KINDS, kinds_of, with_filed
from lockserver.core.names import WitnessState
from lockserver.status.document import SCHEMA, processes_of, wait_document
from lockserver.status.reasons import NOBODY, RESUME, named, wait
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
    pid = _holder(path)
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


def _holder(path: str) -> int | None:
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
    written_ms = clock.now_ms() - (time.time() - written_s) * 1000
    return {
        "schema": SCHEMA,
        "as_of_event_id": 0,
        "last_event": None,
        "server": {"pid": None, "since": None, "dir": directory, "online": False},
        "models": list(found.models),
        "mode": None,
        "era": found.record.era,
        "token": found.record.token,
        "locks": {
            name: {
                "kind": "fenced" if is_fenced else "plain",
                **_lock_document(directory, name, found.record, written_ms, clock, silent),
            }
            for name, is_fenced in with_filed(kinds_of(found.models), found.record).items()
        },
        "tcp": None,
        "members": {},
        "supervisors": [],
        "supervisors_total": 0,
        "service": {},
        "gateways": [],
        "last_grants": [],
        "problem": found.problem,
    }


def _lock_document(
    directory: str,
    name: str,
    record: LockRecord,
    written_ms: float,
    clock: Clock,
    silent: SilentServer | None,
) -> dict[str, Any]:
    holder = record.holders.get(name)
    since_ms = written_ms if holder is None else holder.since_mono_ms
    document: dict[str, Any] = {
        "state": "unknown",
        **moment(since_ms, clock),
        "holder": None,
        "waiters": [],
        "waiters_total": 0,
        "waiting_for": [],
        "waits": [],
        "problem": UNANSWERED if silent is None else silent.message,
    }
    evidence = "no holder is on file" if name not in record.unknown else "the holder is not on file"
    if holder is not None:
        processes = processes_of(holder.witness)
        state = _witness_state(directory, holder)
        document["holder"] = {
            "engine": holder.engine,
            "incarnation": holder.incarnation,
            "token": holder.token,
            **moment(holder.since_mono_ms, clock),
            "since_mono_ms": holder.since_mono_ms,
            "witness": state,
        }
        document["waiting_for"] = processes
        who = f" by {named(processes)}" if state == str(WitnessState.HELD) else ""
        evidence = f"witness {holder.witness.name} is {state}{who}"
        if state == str(WitnessState.UNPROVEN):
            evidence = (
                f"witness {holder.witness.name} is missing or was replaced: it proves nothing"
            )
        if holder.lease is not None:
            count, length = len(holder.lease.members), duration(holder.lease.lease_ms)
            evidence = f"{count} members over TCP cannot renew their leases of {length}"
    meanwhile = "until then an active engine keeps serving, and no other engine is granted the lock"
    if holder is not None and holder.lease is not None:
        meanwhile = "the active engine stops before its lease expires"
    fix = f"start it: lockserver serve --dir {directory}; {meanwhile}"
    whose = (holder.engine, holder.incarnation, holder.token, None) if holder else NOBODY
    told = wait(
        *("no_server", since_ms, (evidence,), whose),
        what=UNANSWERED if silent is None else silent.message,
        end=fix if silent is None else silent.fix,
    )
    document["waits"] = [wait_document(told, clock)]
    return document


def _witness_state(directory: str, holder: Holder) -> str:
    file, probe = witness.identify(os.path.join(directory, holder.witness.name))
    is_same = file == holder.witness or probe is WitnessState.UNSEEN
    return str(probe if is_same else WitnessState.UNPROVEN)


Document = dict[str, Any]


def resting(directory: str, document: Document) -> dict[str, str]:
    """Since when and why each holder in the server's `document` rests, by engine."""
    holders = [lock["holder"] for lock in document["locks"].values() if lock["holder"]]
    found = {each["engine"]: _sentence(directory, each) for each in holders}
    return {engine: sentence for engine, sentence in found.items() if sentence}


def cold(directory: str, document: Document) -> dict[str, str]:
    """Since when and why each supervisor in the server's `document` runs no backend, by engine;
    of those that are not to run one."""
    idle = [each["engine"] for each in document["supervisors"] if each["incarnation"] is None]
    found = {engine: _cold_sentence(directory, engine) for engine in idle}
    return {engine: sentence for engine, sentence in found.items() if sentence}


def _cold_sentence(directory: str, name: str) -> str | None:
    on_file = _on_file(directory, name)
    engine, goal = on_file.get("engine") or {}, (on_file.get("goal") or {}).get("goal")
    if engine.get("state") != "dead" or goal != Tier.COLD:
        return None
    return f"since {engine.get('since')}: {engine.get('reason')}"


def _on_file(directory: str, engine: str) -> Document:
    try:
        return read_json(engine_state(directory, engine)) or {}
    except (UnderstudyError, OSError):  # `engine status` says what is wrong with it
        return {}


def _sentence(directory: str, holder: Document) -> str | None:
    on_file = _on_file(directory, holder["engine"])
    engine, token = on_file.get("engine") or {}, (on_file.get("lock") or {}).get("token")
    if engine.get("state") != "resting" or token != holder["token"]:
        return None
    return f"since {engine.get('since')}: {engine.get('reason')}"
