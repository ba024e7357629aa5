"""`lockserver status`: what it prints of waits at a terminal, and its exit codes."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from lockserver.status.reasons import TEXTS
from lockserver.status.text import text_of
from tests.helpers import auntil, free_port
from tests.lockserver.gateways import Gateway
from tests.lockserver.test_waits import SCENES

ROOT = Path(__file__).resolve().parent.parent.parent
COLUMNS = 80
UNREACHABLE = 3


@pytest.mark.slow
def test_status_in_an_80_column_terminal_and_its_exit_codes(pod_dir, start_server, start_engine):
    """Goal: the text is wrapped, names what is waited for, and scripts can rely on the exit code.
    Method: run the command as a process with COLUMNS set, with a server, with only its file, and
    with neither."""
    server = start_server()
    holder = start_engine("engine-0")
    holder.granted()

    def run(columns: int) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "lockserver.cli", "status", "--dir", pod_dir],
            capture_output=True,
            text=True,
            env={**os.environ, "COLUMNS": str(columns)},
            check=False,
        )
        return done.returncode, done.stdout

    code, text = run(COLUMNS)
    assert code == 0
    assert "active   held        engine-0  token 1  pid " in text
    wide = run(500)[1]
    assert len(wide.splitlines()) < len(text.splitlines())
    server.kill()
    code, text = run(COLUMNS)
    assert (code, "offline view" in text) == (UNREACHABLE, True)
    lines = text.splitlines()
    assert [line for line in lines if len(line) > COLUMNS and len(line.split()) > 2] == []
    plain = " ".join(text.split())
    assert f"engine engine-0 {holder.incarnation} token 1 since 2" in plain
    assert f"is held by pid {min(holder.pids[1:])} (" in plain
    assert f"to do start it: lockserver serve --dir {pod_dir}" in plain
    os.unlink(os.path.join(pod_dir, "lockserver.json"))
    assert run(COLUMNS) == (UNREACHABLE, "")


def test_status_of_a_healthy_pod_takes_at_most_15_lines(pod_dir, start_server, start_engine):
    """Goal: the status of a healthy pod is short. Method: a holder, a standby, a gateway; count
    lines."""
    server = start_server("--service", f"active=127.0.0.1:{free_port()}")
    start_engine("engine-0").granted()
    start_engine("engine-1")

    async def scenario() -> None:
        async with Gateway(pod_dir) as gateway:
            await gateway.accepts()
            await auntil(lambda: server.status()["gateways"][0]["accepting"], "it to accept")
            await auntil(lambda: server.lock()["waiters"], "the standby to be in line")
            document = server.status()
        assert len(text_of(document, COLUMNS).splitlines()) <= 15
        assert document["locks"]["active"]["problem"] is None

    asyncio.run(scenario())


def test_every_wait_reason_has_a_scene_and_a_line_in_the_reference():
    """Goal: no reason is added without a scene and an entry in the reference. Method: compare the
    table, the scenes, and the table of reference.md."""
    made = {reason for *_, expected in SCENES.values() for reason, *_ in expected} | {"no_server"}
    page = (ROOT / "docs" / "reference.md").read_text()
    section = page.partition("## Why a lock is waiting")[2].partition("\n## ")[0]
    assert set(TEXTS) == made == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
