"""The status from files: while no server answers, and what supervisors wrote of their engines.

Read-only. Without a server: the state file's contents, and what can be seen. It must not guess:
only the witness proves whether a holder is alive, and the waiters are unknown until a server is
back. In either case: which holders sleep and which engines are cold, as their supervisors wrote it
last. The lock server knows who holds a lock and not what for; what an engine writes into the shared
directory is enough for a sentence, and nothing is decided by it.
"""

from __future__ import annotations

import os
import time
from typing import Any

from lockserver import state_file, witness
from lockserver.core.events import Holder, LockRecord
from lockserver.core.lock import KINDS, kinds_of, with_filed
from lockserver.core.names import WitnessState
from lockserver.status.document import SCHEMA, processes_of, wait_document
from lockserver.status.reasons import LockWait, named
from lockserver.status.silent import SilentServer
from plumbing.errors import UnderstudyError
from plumbing.pod.messages import Tier
from plumbing.pod.paths import engine_state
from plumbing.service.clock import Clock, SystemClock, moment
from plumbing.service.files import read_json
from plumbing.text import duration

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
    wait = LockWait(
        "no_server",
        UNANSWERED if silent is None else silent.message,
        since_ms,
        (evidence,),
        fix if silent is None else silent.fix,
        engine=holder.engine if holder else None,
        incarnation=holder.incarnation if holder else None,
        token=holder.token if holder else None,
    )
    document["waits"] = [wait_document(wait, clock)]
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
