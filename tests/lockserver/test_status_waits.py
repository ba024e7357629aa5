"""No silent waits: for every state that can last, `status` reports who, since when, the evidence
that remains, and the fix, in the document and in the text at 80 columns.

Each state that only the real world shows is produced with a real server and real processes by a
scene of `wait_scenes`, and inspected with the command; `test_waits.py` has the others.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest

from lockserver.messages import StatusMsg
from lockserver.status.reasons import ELSEWHERE, TEXTS
from lockserver.status.text import text_of
from plumbing.text import duration
from tests.helpers import auntil, free_port
from tests.lockserver.engines import EngineProcess
from tests.lockserver.gateways import Gateway
from tests.lockserver.processes import ServerProcess
from tests.lockserver.test_waits import SCENES as PURE
from tests.lockserver.wait_scenes import holder, over_tcp, restart, surroundings
from tests.lockserver.wait_scenes.scene import Scene, Told
from understudy.http_get import get

ROOT = Path(__file__).resolve().parent.parent.parent
SCENES = Path(__file__).resolve().parent / "wait_scenes"
COLUMNS = 80
TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
UNREACHABLE = 3

STATES = (
    holder.silent_holder,
    holder.orphans,
    restart.unknown_holder,
    surroundings.witness_removed,
    surroundings.witness_replaced,
    surroundings.failing_disk,
    surroundings.witness_that_cannot_be_sealed,
    surroundings.no_descriptors,
    surroundings.address_of_a_stranger,
    surroundings.socket_of_a_stranger,
    surroundings.gateway_that_does_not_accept,
    surroundings.gateway_that_is_gone,
    over_tcp.leases_of_strangers,
    over_tcp.no_server_over_tcp,
    restart.no_server,
    restart.no_server_and_no_holder,
    restart.server_that_is_stopped,
)


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.__name__)
def test_status_of_a_lasting_state_shows_engine_time_evidence_and_fix(
    state: Callable[[Scene], AbstractAsyncContextManager[Told]],
    pod_dir: str,
    start_server: Callable[..., ServerProcess],
    start_engine: Callable[..., EngineProcess],
):
    """Goal: no silent waits. Method: produce the state, run the command with and without `--json`,
    and look for the four facts."""

    async def scenario() -> None:
        async with state(Scene(pod_dir, start_server, start_engine)) as told:
            code = UNREACHABLE if told.reason == "no_server" else 0
            if told.by_client is not None:
                document = told.by_client.request(StatusMsg()).message.document
            else:
                look = ask(pod_dir, code=code) if told.by_http is None else fetch(told.by_http)
                document = await look
            check_document(document, told)
            check_text(text_of(document, COLUMNS), document, told)

    asyncio.run(scenario())


async def ask(directory: str, *flags: str, code: int = 0) -> Any:
    """The command's output, as JSON."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lockserver.cli", "status", "--dir", directory, "--json", *flags),
        stdout=subprocess.PIPE,
    )
    output, _ = await process.communicate()
    assert process.returncode == code, output
    return json.loads(output)


async def fetch(server: ServerProcess) -> Any:
    return (await get(f"http://127.0.0.1:{server.http_port}/status")).json()


def wait_of(document: Any, told: Told) -> Any:
    waits = document["locks"][told.lock]["waits"]
    found = [each for each in waits if each["reason"] == told.reason]
    assert len(found) == 1, waits
    return found[0]


def check_document(document: Any, told: Told) -> None:
    lock, wait = document["locks"][told.lock], wait_of(document, told)
    assert (wait["engine"], wait["token"], wait["pid"]) == (told.engine, told.token, told.pid)
    assert (wait["incarnation"] or "").startswith(told.engine or "")
    assert TIME.fullmatch(wait["since"])
    assert wait["for_ms"] >= 0
    evidence = "; ".join(wait["evidence"])
    assert [words for words in told.evidence if words not in evidence] == [], evidence
    assert [words for words in told.fix if words not in wait["fix"]] == [], wait["fix"]
    assert wait["is_fault"] == told.is_fault
    faults = [each for each in lock["waits"] if each["is_fault"]]
    if told.reason not in ELSEWHERE:
        assert bool(lock["problem"]) == bool(faults)
    assert TIME.fullmatch(lock["since"])


def check_text(text: str, document: Any, told: Told) -> None:
    wait = wait_of(document, told)
    lines = text.splitlines()
    too_long = [line for line in lines if len(line) > COLUMNS and len(line.split()) > 2]
    assert too_long == []  # a single word is meant to be copied
    block = [line for line in lines if line.startswith(" ")]
    plain = " ".join(" ".join(block).split())
    who = wait["engine"] or "none"
    parts = [who, wait["incarnation"], wait["token"] and f"token {wait['token']}"]
    parts += [wait["pid"] and f"supervisor pid {wait['pid']}"]
    assert f"engine {' '.join(each for each in parts if each)}" in plain
    assert f"since {wait['since']} ({duration(wait['for_ms'])})" in plain
    for evidence in wait["evidence"]:
        assert f"evidence {evidence}" in plain
    assert f"to do {wait['fix']}" in plain


@pytest.mark.slow
def test_status_in_an_80_column_terminal_and_its_exit_codes(pod_dir, start_server, start_engine):
    """Goal: the text is wrapped, and scripts can rely on the exit code. Method: run the command as
    a process with COLUMNS set, with a server, with only its file, and with neither."""
    server = start_server()
    start_engine("engine-0").granted()

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
            document = await ask(pod_dir)
        assert len(text_of(document, COLUMNS).splitlines()) <= 15
        assert document["locks"]["active"]["problem"] is None

    asyncio.run(scenario())


def test_every_wait_reason_has_a_scene_and_a_line_in_the_reference():
    """Goal: no reason is added without a scene and an entry in the reference. Method: compare the
    table, the scenes, and the table of reference.md."""
    scenes = "".join(path.read_text() for path in SCENES.glob("*.py"))
    made = set(re.findall(r"Told\(\s*\"(\w+)\"", scenes))
    page = (ROOT / "docs" / "reference.md").read_text()
    section = page.partition("## Why a lock is waiting")[2].partition("\n## ")[0]
    made |= {reason for *_, expected in PURE.values() for reason, *_ in expected}
    assert set(TEXTS) == made == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))
