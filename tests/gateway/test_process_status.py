"""Goal: status, probes and metrics say what is true, and the page on their JSON is complete.

Method: a real gateway beside a lock server and stand-ins for engines.
"""

from __future__ import annotations

import json
import os
import signal
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gateway.schema import GatewayStatus, LeaveDocument, OfflineGateway, ReplaceDocument
from tests.documents import mismatches
from tests.engine.pod import Pod
from tests.gateway.gateways import GatewayProcess, command
from tests.helpers import until
from tests.lockserver.engines import EngineProcess

UNREACHABLE = 3
LINES_MAX = 15


def text_of(gateway: GatewayProcess) -> str:
    done = command(gateway.directory, "status")
    assert len(done.stdout.splitlines()) <= LINES_MAX
    return done.stdout


def reason(gateway: GatewayProcess) -> tuple[int, str]:
    code, body = gateway.get("ready")
    return code, body["reason"]


def test_ready_and_status_follow_the_engine(gateway: GatewayProcess):
    """Goal: ready means that a request would be answered. Method: no engine, one, its death with
    another that takes over, and a successor, which must be told who serves."""
    assert reason(gateway) == (503, "no_engine")
    assert "engine   none for" in text_of(gateway)
    assert gateway.get("startup")[0] == 200
    first = EngineProcess(gateway.directory, "engine-0")
    try:
        token = first.granted()
        until(lambda: reason(gateway) == (200, "engine_active"), "the engine")
        expected = {"engine": "engine-0", "token": token}
        assert expected.items() <= gateway.get("ready")[1].items()
        assert f"engine   engine-0  token {token}" in text_of(gateway)
        command(gateway.directory, "replace")
        until(lambda: gateway.status()["upstream"] is not None, "the successor to hear of it")
        assert expected.items() <= gateway.status()["upstream"].items()
    finally:
        first.close()
    until(lambda: reason(gateway) == (200, "takeover"), "the death")
    assert gateway.metric("understudy_gateway_ready") == 1
    second = EngineProcess(gateway.directory, "engine-1")
    try:
        assert second.granted() > token
        until(lambda: gateway.get("ready")[1].get("engine") == "engine-1", "the takeover")
    finally:
        second.close()


def test_documents_have_the_keys_and_types_of_the_page(gateway: GatewayProcess):
    """Goal: scripts can rely on the page. Method: status with an engine, behind a replacement,
    without an engine, from the command, the port and a directory without a gateway."""
    documents: list[dict[str, Any]] = []
    with closing(Pod(Path(gateway.directory))) as pod:
        pod.engine("engine-0", "--rest")
        until(lambda: gateway.status()["rest"]["engine"], "the engine to be heard")
        until(gateway.is_alone, "one gateway")
        done = command(gateway.directory, "replace", "--json")
        restarted = json.loads(done.stdout)
        documents.append(gateway.status())
        until(lambda: gateway.status()["rest"]["engine"], "the engine to be heard again")
        done = command(gateway.directory, "status", "--json")
        documents += [json.loads(done.stdout), gateway.get("status")[1]]
    until(lambda: gateway.status()["idle"] is not None, "the engine to be missed")
    documents.append(gateway.status())
    assert gateway.ends(signal.SIGTERM) == 0
    offline = command(gateway.directory, "status", "--json", code=UNREACHABLE)
    assert [mismatches(each, GatewayStatus) for each in documents] == [[]] * len(documents)
    assert mismatches(json.loads(offline.stdout), OfflineGateway) == []
    assert mismatches(restarted, ReplaceDocument) == []


def test_commands_without_a_gateway_say_what_follows(gateway: GatewayProcess, tmp_path: Path):
    """Goal: exit code 3, and what to do. Method: one that has ended, and a directory that never had
    one."""
    assert gateway.ends(signal.SIGTERM) == 0
    done = command(gateway.directory, "status", code=UNREACHABLE)
    assert "gateway.offline" in done.stderr
    assert f"start it: gateway serve --dir {gateway.directory}" in done.stderr
    for words in (["status"], ["events"], ["replace"]):
        command(str(tmp_path), *words, code=UNREACHABLE)


@pytest.mark.slow
def test_a_stopped_gateway_is_named(make_gateway, lasting: GatewayProcess):
    """Goal: status finds the process to resume. Method: SIGSTOP of one that no init replaces."""
    lasting.close()
    gateway = make_gateway()
    gateway.has_init = False
    pid = gateway.start().pid
    os.kill(pid, signal.SIGSTOP)
    try:
        done = command(gateway.directory, "status", code=UNREACHABLE)
        assert f"resume it: kill -CONT {pid}" in done.stdout
    finally:
        os.kill(pid, signal.SIGCONT)
    assert gateway.pid == pid


def test_leave_returns_once_no_request_is_left(make_gateway, lasting: GatewayProcess):
    """Goal: a preStop hook ends as soon as it may. Method: a pod of a fleet without requests, and
    one that no front knows."""
    refused = command(lasting.start().directory, "leave", "--json", code=1)
    assert json.loads(refused.stdout)["error"]["code"] == "gateway.no_fleet"
    lasting.close()
    gateway = make_gateway("--hop", "127.0.0.1:0", "--pod-name", "pod-7").start()
    done = command(gateway.directory, "leave", "--within", "30s", "--json")
    assert mismatches(json.loads(done.stdout), LeaveDocument) == []
    hop = gateway.status()["hop"]
    assert hop["pod"] == "pod-7"
    assert 0 < hop["leaving_ms"] < 30_000
