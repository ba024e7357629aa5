"""`understudy status --watch`: what it adds to the status, as pure code, and in a terminal."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from fcntl import ioctl
from pathlib import Path
from typing import Any

from tests.lockserver.processes import ServerProcess
from understudy.status.view import pod_view
from understudy.status.watch import EVENTS_SHOWN, memory_bars, watch_lines

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOURS_AGO = "2030-01-01T09:00:00.000Z"
MINUTE_AGO = "2030-01-01T11:59:00.000Z"
ROWS, COLUMNS = 40, 120
WAIT_S = 30.0


def engine(name: str, state: str, since: str, **more: Any) -> dict[str, Any]:
    about = {"id": name, "role": "auto", "state": state, "since": since, "reason": "so"}
    return {"engine": about, "lock": {"connected": True}, "inflight": 3, **more}


GRANTS = [
    {"lock": "loader", "engine": "engine-1", "token": 1, "contended": False, "ts": HOURS_AGO},
    {"lock": "active", "engine": "engine-0", "token": 2, "contended": False, "ts": HOURS_AGO},
    {
        "lock": "active",
        "engine": "engine-1",
        "token": 3,
        "contended": True,
        "ts": HOURS_AGO,
        "lost_mono_ms": 10.0,
        "fenced_mono_ms": 15.0,
    },
    {
        "lock": "active",
        "engine": "engine-0",
        "token": 4,
        "contended": True,
        "ts": MINUTE_AGO,
        "lost_mono_ms": 1000.0,
        "fenced_mono_ms": 1005.5,
    },
]
LAST = {"token": 4, "granted_mono_ms": 1007.5, "canary_mono_ms": 1020.0, "active_mono_ms": 1024.0}
HOLDER = {"engine": "engine-0", "token": 4, "since": MINUTE_AGO}
LOCK = {
    "locks": {"active": {"state": "held", "holder": HOLDER, "problem": None}},
    "last_grants": GRANTS,
}
DEVICE = {
    "device_uuid": "HOST-0",
    "state": "committed",
    "sessions": [{}, {}],
    "waiting": [],
    "committed_bytes": 2 << 30,
    "staging_bytes": 1,
    "superseded_bytes": 0,
    "capacity_bytes": 4 << 30,
}
ENGINES = [
    engine("engine-0", "active", MINUTE_AGO, last_failover=LAST),
    engine("engine-1", "standby", HOURS_AGO),
]
EVENTS = [
    {"ts": MINUTE_AGO, "source": "lockserver", "message": f"message {number}"}
    for number in range(100)
]


def watched(**parts: Any) -> list[str]:
    given = {"lockserver": LOCK, "gms": [DEVICE], "engines": ENGINES, **parts}
    return watch_lines(pod_view("/run/understudy", **given), EVENTS, NOW)


def test_watch_shows_memory_failovers_and_the_latest_events():
    """Goal: one screen. Method: a pod that has failed over twice, to the letter where it counts."""
    lines = watched()
    bar = lines[lines.index("memory") + 1]
    # Half of it is committed, and a single byte that is being loaded is seen.
    assert bar == f"HOST-0  [{15 * '#'}+{14 * '.'}]  2.0 GiB of 4.0 GiB"
    kv = {"pool_bytes": 1 << 30, "capacity_bytes": 4 << 30}
    (bar,) = memory_bars([{**DEVICE, "kv": kv}])
    assert bar == f"HOST-0  [{15 * '#'}+{8 * 'k'}{6 * '.'}]  3.0 GiB of 4.0 GiB"
    takeovers = [line.split() for line in lines[lines.index("failovers") + 2 :][:2]]
    assert takeovers[0] == ["1m00s", "ago", "engine-0", "token", "4", "5.5", "2.0", "12.5", "4.0"]
    # What the engine knew of the one before is gone: it only remembers its last.
    assert takeovers[1] == ["3h00m", "ago", "engine-1", "token", "3", "5.0", "-", "-", "-"]
    latest = lines[lines.index("events") + 1 :]
    assert [line.split()[-1] for line in latest] == [str(n) for n in range(100)][-EVENTS_SHOWN:]


def test_watch_shows_requests_behind_a_gateway():
    """Goal: a failover as clients live it. Method: a gateway's document; one that is silent."""
    load = {"connections": 9, "in_flight": 4, "parked": 2, "memory_bytes": 3 << 20}
    ended = [("whole", "exact", 5), ("whole", "state", 2), ("broken", "none", 1)]
    found = [{"ending": e, "continuation": c, "count": count} for e, c, count in ended]
    totals = {"requests": found, "pauses": 4, "pause_ms": 100.0, "replayed_tokens": 70}
    gateway = {"accepting": True, "memory_bytes_max": 1 << 30, "load": load, "totals": totals}
    lines = watched(lockserver={**LOCK, "mode": "gateway"}, gateway=gateway)
    at = lines.index("requests") + 1
    assert lines[at].startswith("9 connections   4 in flight   0 waiting for an engine   2 parked")
    assert lines[at].endswith("holds 3.0 MiB of 1.0 GiB")
    assert lines[at + 1].startswith("4 pauses of 25 ms on average   0 resumed   70 tokens replayed")
    assert lines[at + 2] == "ended: 7 whole, 1 broken"
    assert "requests" not in watched(gateway={"name": "gateway", "error": "gone"})
    assert "requests" not in watched()


def test_watch_draws_nothing_of_a_part_that_does_not_answer():
    """Goal: a hole is a hole. Method: no part answers, and documents that are half there."""
    gone = {"name": "lockserver", "error": "gone"}
    lines = watched(lockserver=gone, gms=[], engines=[{"name": "engine-0", "error": "gone"}])
    assert not {"memory", "failovers", "requests"} & set(lines)
    assert "memory" not in watched(gms=[{"device_uuid": "HOST-0"}], engines=[{"engine": {}}])


class Terminal:
    """The command in a terminal of its own; what it writes is read as it comes."""

    def __init__(self, *words: str) -> None:
        self.master, slave = pty.openpty()
        ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
        self.before = termios.tcgetattr(slave)
        self.slave = slave
        self.process = subprocess.Popen(
            [sys.executable, "-m", "understudy.cli.main", *words],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env={**os.environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        self._seen = ""

    def sees(self, words: str) -> None:
        """Read until `words` have been written, with what moves the cursor left out."""
        end = time.monotonic() + WAIT_S
        while words not in self._seen:
            ready, _, _ = select.select([self.master], [], [], max(0, end - time.monotonic()))
            assert ready, f"waited in vain for {words!r} after {self._seen[-2000:]!r}"
            raw = os.read(self.master, 65536).decode(errors="replace")
            self._seen += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", raw)
        self._seen = self._seen.partition(words)[2]


@contextlib.contextmanager
def terminal(*words: str) -> Iterator[Terminal]:
    opened = Terminal(*words)
    try:
        yield opened
    finally:
        opened.process.kill()
        opened.process.wait()
        os.close(opened.master)
        os.close(opened.slave)


def test_watch_in_a_terminal_waits_for_a_pod_and_ends_with_ctrl_c(tmp_path: Path):
    """Goal: an operator leaves it open. Method: a pty; a lock server that comes; Ctrl-C."""
    with terminal("status", "--watch", f"--dir={tmp_path}") as watch:
        watch.sees("no part of a pod answers")
        server = ServerProcess(str(tmp_path))
        server.start()
        try:
            watch.sees("NO failover")
            watch.sees("events")
            watch.sees("lockserver")
        finally:
            server.close()
        watch.process.send_signal(signal.SIGINT)
        assert watch.process.wait(WAIT_S) == 130
        assert termios.tcgetattr(watch.slave) == watch.before
