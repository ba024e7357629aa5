"""Strangers at the ports of every part of a pod, in a directory whose name is not UTF-8."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from plumbing.service.http import CONNECTIONS_MAX
from tests.e2e.pods import Pod, PodHome, in_pod
from tests.e2e.test_inspection import understudy
from tests.helpers import http_get, until

SHOWN = "odd-\\udcff"


@pytest.fixture
def home(model: Path) -> Iterator[PodHome]:
    # Not pytest's directory, below which the path of an engine's socket would be too long.
    with tempfile.TemporaryDirectory(prefix="us-") as directory:
        os.mkdir(os.fsencode(directory) + b"/odd-\xff", 0o700)
        with closing(PodHome(Path(directory, os.fsdecode(b"odd-\xff")), model)) as found:
            yield found


def problems_with_strangers(port: int) -> str:
    """What /status says of problems while idle connections hold the port; /live must answer."""
    with contextlib.ExitStack() as stack:
        for _ in range(CONNECTIONS_MAX + 1):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))

        def named() -> str:
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            assert json.loads(http_get(port, "/live")[1])["ok"]
            document = json.loads(http_get(port, "/status")[1])
            return str(document.get("problem") or document.get("problems") or "")

        return until(named, "the problem in the status")


@pytest.mark.slow
@in_pod
async def test_every_part_answers_probes_and_names_the_problem(pod: Pod):
    """Goal: strangers at a port are seen by operators and cost no probe. Method: idle connections
    above the limit, at each part's port; its status, its liveness, and the pod afterwards. The name
    of its directory is shown everywhere."""
    before = await pod.whole()
    ports = pod.local.ports
    for port in (ports.lockserver, ports.gms, ports.gateway, *ports.engines):
        found = await asyncio.to_thread(problems_with_strangers, port)
        assert "HTTP connections are open" in found
    for words in (("status",), ("status", "--json"), ("events",), ("doctor",)):
        _, out = await understudy(pod, *words)
        assert SHOWN in out.replace("\\\\", "\\") or words == ("events",)
    assert (await pod.whole()).token == before.token
