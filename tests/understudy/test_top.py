"""`understudy top`: what each page shows, as pure code, and the command in a terminal."""

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

import pytest

from understudy.status.view import pod_view
from understudy.top.view import HELP, KEYS, Shown, TopPage, log_line, memory_bars, page

NOW = datetime(2030, 1, 1, 12, tzinfo=UTC)
HOURS_AGO = "2030-01-01T09:00:00.000Z"
MINUTE_AGO = "2030-01-01T11:59:00.000Z"
ROWS, COLUMNS = 40, 120
WAIT_S = 30.0


def engine(name: str, state: str, since: str, **more: Any) -> dict[str, Any]:
    about = {"id": name, "role": "auto", "state": state, "since": since, "reason": "so"}
    return {"engine": about, "lock": {"connected": True}, "inflight": 3, **more}


def changed(name: str, source: str, target: str, lasted_ms: float) -> dict[str, Any]:
    data = {"from": source, "to": target, "lasted_ms": lasted_ms}
    text = f"{source} → {target}"
    kind = {"type": "engine.state", "severity": "info", "ts": MINUTE_AGO}
    return {**kind, "source": name, "message": text, "data": data}


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
    changed("engine-0", "init", "standby", 30_000),
    changed("engine-0", "standby", "waking", 3_600_000),
    changed("engine-1", "init", "standby", 45_000),
    {"type": "lock.granted", "source": "lockserver", "message": "m", "severity": "warning"},
]


def shown(height: int = ROWS, **changes: Any) -> Shown:
    view = pod_view("/run/understudy", LOCK, [DEVICE], ENGINES)
    found = {"view": view, "events": EVENTS, "logs": ["gms | a", "gms | b"], **changes}
    return Shown(now=NOW, height=height, **found)


def texts(which: TopPage, what: Shown) -> list[str]:
    return [text for text, _ in page(which, what)]


def test_page_of_the_pod_has_what_people_look_for():
    """Goal: one screen. Method: a pod that has failed over twice, to the letter where it counts."""
    lines = texts(TopPage.POD, shown())
    assert "healthy   failover ready (1 standby)" in lines[0]
    assert any(line.startswith("engine-0  auto  active   1m00s  3") for line in lines), lines
    spent = lines[lines.index("time in states") + 2 :][:2]
    assert spent[0].split() == ["engine-0", "30s", "1h00m", "-", "1m00s", *"----"]
    assert spent[1].split() == ["engine-1", "45s", "3h00m", *"------"]
    bar = lines[lines.index("memory") + 1]
    # Half of it is committed, and a single byte that is being loaded is seen.
    assert bar == f"HOST-0  [{15 * '#'}+{14 * '.'}]  2.0 GiB of 4.0 GiB"
    kv = {"pool_bytes": 1 << 30, "capacity_bytes": 4 << 30}
    (bar,) = memory_bars([{**DEVICE, "kv": kv}])
    assert bar == f"HOST-0  [{15 * '#'}+{8 * 'k'}{6 * '.'}]  3.0 GiB of 4.0 GiB"
    header, *takeovers = lines[lines.index("failovers") + 1 :][:3]
    assert header.split("  ")[0] == "when"
    assert takeovers[0].split() == [
        *("1m00s", "ago", "engine-0", "token", "4", "5.5", "2.0", "12.5", "4.0")
    ]
    # What the engine knew of the one before is gone: it only remembers its last.
    assert takeovers[1].split() == [
        *("3h00m", "ago", "engine-1", "token", "3", "5.0", "-", "-", "-")
    ]
    assert lines[-1] == KEYS


def test_page_leaves_out_empty_lines_where_not_all_would_fit():
    """Goal: failovers are seen in a terminal of 24 lines. Method: one line less than is needed."""
    whole = texts(TopPage.POD, shown(height=1000))
    tight = texts(TopPage.POD, shown(height=len(whole) - 1))
    assert tight == [*(line for line in whole[:-2] if line), "", KEYS]


def test_page_of_the_pod_shows_requests_behind_a_gateway():
    """Goal: a failover as clients live it. Method: a gateway's document; one that is silent."""
    load = {"connections": 9, "in_flight": 4, "parked": 2, "memory_bytes": 3 << 20}
    ended = [("whole", "exact", 5), ("whole", "state", 2), ("broken", "none", 1)]
    found = [{"ending": e, "continuation": c, "count": count} for e, c, count in ended]
    totals = {"requests": found, "pauses": 4, "pause_ms": 100.0, "replayed_tokens": 70}
    gateway = {"accepting": True, "memory_bytes_max": 1 << 30, "load": load, "totals": totals}
    view = pod_view("/d", {**LOCK, "mode": "gateway"}, [DEVICE], ENGINES, gateway)
    lines = texts(TopPage.POD, shown(view=view))
    at = lines.index("requests") + 1
    assert lines[at].startswith("9 connections   4 in flight   0 waiting for an engine   2 parked")
    assert lines[at].endswith("holds 3.0 MiB of 1.0 GiB")
    assert lines[at + 1].startswith("4 pauses of 25 ms on average   0 resumed   70 tokens replayed")
    assert lines[at + 2] == "ended: 7 whole, 1 broken"
    silent = {"name": "gateway", "error": "gone"}
    view = pod_view("/d", {**LOCK, "mode": "gateway"}, [DEVICE], ENGINES, silent)
    assert "requests" not in texts(TopPage.POD, shown(view=view))
    assert "requests" not in texts(TopPage.POD, shown())


def test_pages_of_events_and_logs_end_with_the_newest_in_any_height():
    """Goal: what happened last is always on the screen. Method: more than fits."""
    many = [{**EVENTS[-1], "message": f"message {number}"} for number in range(100)]
    lines = texts(TopPage.EVENTS, shown(height=10, events=many))
    assert len(lines) == 10
    assert [line.split()[-1] for line in lines[1:-2]] == [str(n) for n in range(93, 100)]
    lines = texts(TopPage.LOGS, shown(height=10, logs=[f"gms | {n}" for n in range(100)]))
    assert lines[1:-2] == [f"gms | {n}" for n in range(93, 100)]
    assert texts(TopPage.HELP, shown())[1:-2] == list(HELP)
    assert max(map(len, HELP)) <= 80  # the usual terminal; what is longer is cut off


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            '{"ts": "2030-01-01T12:00:00.123Z", "level": "info", "logger": "x", "msg": "so"}',
            "12:00:00.123 INFO    so",
        ),
        ("12:00:00.123 INFO    so", "12:00:00.123 INFO    so"),
        *((each, each) for each in ("", "[1]", '{"ts": 1}', '{"ts": "cut o', "3", "[" * 100_000)),
    ],
)
def test_log_lines_of_json_are_read_to_people(line: str, told: str):
    """Goal: what was said fits a terminal. Method: a line of each format, and of neither."""
    assert log_line("gms", line) == f"gms | {told}"


@pytest.mark.parametrize("height", [0, 1, 3, 5, 200])
@pytest.mark.parametrize("which", list(TopPage))
def test_pages_of_any_height_fit_it(which: TopPage, height: int):
    """Goal: no terminal is too small to start in. Method: every page, from nothing to plenty."""
    assert len(page(which, shown(height))) <= max(3, height)


def test_nothing_is_drawn_of_what_does_not_answer():
    """Goal: a hole is a hole. Method: no part answers, and documents that are half there."""
    gone = [{"name": "engine-0", "error": "gone"}]
    view = pod_view("/d", {"name": "lockserver", "error": "gone"}, [], gone)
    lines = texts(TopPage.POD, shown(view=view, events=[]))
    assert "down" in lines[0]
    assert not {"memory", "failovers", "time in states"} & set(lines)
    view = pod_view("/d", LOCK, [{"device_uuid": "HOST-0"}], [{"engine": {"id": "e"}}])
    assert texts(TopPage.POD, shown(view=view, events=[{"type": "engine.state", "source": "e"}]))


def test_trouble_is_red_and_severities_have_their_colours():
    """Goal: one sees it from afar, and reads it without colours. Method: styles by name."""
    assert page(TopPage.POD, shown())[0][1] == "bold green"
    view = pod_view("/d", LOCK, [DEVICE], ENGINES[:1])
    lines = page(TopPage.POD, shown(view=view))
    assert lines[0][1] == "bold yellow"
    assert [style for text, style in lines if text.startswith("! ")] == ["red"]
    assert [style for _, style in page(TopPage.EVENTS, shown())[1:-2]] == ["", "", "", "yellow"]


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

    def press(self, key: str) -> None:
        os.write(self.master, key.encode())


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


def test_top_in_a_terminal_obeys_its_keys_and_leaves_it_as_it_was(tmp_path: Path):
    """Goal: the real thing. Method: a pty; each page by its key, quit, and the terminal's settings
    before and after."""
    log_dir = tmp_path / "elsewhere"
    log_dir.mkdir()
    (log_dir / "gms.log").write_text("the last words of gms\n")
    with terminal("top", f"--dir={tmp_path}", f"--log-dir={log_dir}") as top:
        top.sees("NO failover")
        top.sees(KEYS)
        assert termios.tcgetattr(top.slave)[3] & termios.ICANON == 0
        top.press("?")
        top.sees(HELP[0])
        top.press("l")
        top.sees("gms | the last words of gms")
        top.press("x")  # no key of ours
        top.press("q")
        assert top.process.wait(WAIT_S) == 0
        assert termios.tcgetattr(top.slave) == top.before


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 0)])
def test_top_that_is_ended_by_a_signal_leaves_the_terminal_as_it_was(
    tmp_path: Path, number: signal.Signals, code: int
):
    """Goal: Ctrl-C and a kill are no worse than `q`. Method: each while it shows the pod."""
    with terminal("top", f"--dir={tmp_path}") as top:
        top.sees(KEYS)
        top.process.send_signal(number)
        assert top.process.wait(WAIT_S) == code
        assert termios.tcgetattr(top.slave) == top.before


def test_top_without_a_terminal_prints_lines_again_and_again(tmp_path: Path):
    """Goal: it can be piped. Method: two pictures, no escape sequence, no list of keys."""
    words = [sys.executable, "-m", "understudy.cli.main", "top", f"--dir={tmp_path}"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            seen = [process.stdout.readline() for _ in range(6)]
        finally:
            process.kill()
    assert sum("NO failover" in line for line in seen) >= 2
    assert not any("\x1b" in line or KEYS in line for line in seen)
