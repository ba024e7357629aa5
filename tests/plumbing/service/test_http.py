"""Goal: probes, status and metrics over real sockets; one sentence where a port is taken."""

import asyncio
import json
import os
import socket
import subprocess
import sys
import textwrap
from contextlib import asynccontextmanager
from urllib.parse import quote

import pytest

from plumbing.errors import UnderstudyError
from plumbing.service.events import EventLog
from plumbing.service.http import HttpServer, Probe
from plumbing.service.metrics import Metrics
from tests.fake_clock import FakeClock
from tests.helpers import auntil, open_fds


@asynccontextmanager
async def serving(**changes):
    probes = {
        "live": lambda: Probe(True, "alive"),
        "ready": lambda: Probe(False, "waiting_for_lock", {"holder": "engine-0"}),
    }
    settings = {
        "probes": probes,
        "status": lambda: {"schema": 1, "as_of_event_id": 0},
        "metrics": Metrics(),
        "events": EventLog("x", FakeClock()),
    }
    http = HttpServer("127.0.0.1", 0, **{**settings, **changes})
    await http.start()
    try:
        yield http
    finally:
        await http.stop()


async def fetch(port, path, method="GET"):
    """One request on a connection of its own: (status, headers, body)."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    request = f"{method} {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    writer.write(request.encode())
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def test_probes_answer_200_or_503_and_say_why():
    """Goal: the body of a probe; method: one that holds and one that does not."""

    async def main():
        async with serving() as http:
            status, headers, body = await fetch(http.port, "/live")
            assert (status, json.loads(body)) == (200, {"ok": True, "reason": "alive"})
            assert headers["content-type"].startswith("application/json")
            status, _, body = await fetch(http.port, "/ready")
            assert status == 503
            expected = {"ok": False, "reason": "waiting_for_lock", "holder": "engine-0"}
            assert json.loads(body) == expected

    asyncio.run(main())


def test_probe_that_raises_is_500_and_the_server_lives_on():
    """Goal: a bug in one probe costs that answer; method: raise, then ask another."""

    async def main():
        def broken():
            raise RuntimeError("bug")

        probes = {"live": lambda: Probe(True, "alive"), "ready": broken}
        async with serving(probes=probes) as http:
            assert (await fetch(http.port, "/ready"))[0] == 500
            assert (await fetch(http.port, "/live"))[0] == 200

    asyncio.run(main())


def test_status_metrics_and_index():
    """Goal: the reading surface; method: fetch each page."""

    async def main():
        async with serving() as http:
            _, _, body = await fetch(http.port, "/status")
            assert json.loads(body) == {"schema": 1, "as_of_event_id": 0}
            _, headers, body = await fetch(http.port, "/metrics")
            assert headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
            assert 'understudy_limit_hits_total{limit="http_connections"} 0.0' in body
            _, _, body = await fetch(http.port, "/")
            paths = ["/live", "/ready", "/status", "/metrics", "/events"]
            assert json.loads(body) == {"paths": paths}

    asyncio.run(main())


def test_events_are_the_last_ones_or_those_after_an_id():
    """Goal: what has happened, without a stream. Method: three events; all, the rest, a bad id."""

    async def main():
        log = EventLog("x", FakeClock())
        for number in range(3):
            log.record("x.y", f"number {number}")
        async with serving(events=log) as http:
            for query, ids in (
                ("", [1, 2, 3]),
                ("?since=2", [3]),
                ("?since=3", []),
                ("?since=9", []),
            ):
                status, _, body = await fetch(http.port, f"/events{query}")
                found = json.loads(body)
                assert (status, found["as_of_event_id"]) == (200, 3)
                assert [each["id"] for each in found["events"]] == ids
            for bad in ("x", "-1", "²", "9" * 20):
                status, _, body = await fetch(http.port, f"/events?since={quote(bad)}")
                assert status == 400
                assert json.loads(body)["error"]["code"] == "service.bad_since"

    asyncio.run(main())


def test_nothing_changes_state_and_unknown_paths_are_404():
    """Goal: TCP only reads; method: other methods, another path, a server without events."""

    async def main():
        async with serving(events=None) as http:
            for method in ("POST", "PUT", "DELETE"):
                assert (await fetch(http.port, "/status", method))[0] == 405
            assert (await fetch(http.port, "/nothing"))[0] == 404
            assert (await fetch(http.port, "/events"))[0] == 404

    asyncio.run(main())


def test_stop_frees_the_port_and_every_descriptor():
    """Goal: no leak over start and stop; method: count descriptors around both."""

    async def main():
        async with serving() as http:
            await fetch(http.port, "/live")  # what is opened lazily is open from here on
        before = open_fds()
        async with serving() as http:
            await fetch(http.port, "/live")
            port = http.port
            await http.stop()
            await http.stop()
        assert open_fds().keys() == before.keys()
        with socket.create_server(("127.0.0.1", port)):
            pass

    asyncio.run(main())


def test_port_in_use_names_port_and_process():
    """Goal: one sentence with the cause and the fix; method: take the port first."""

    async def main():
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
            http = HttpServer("127.0.0.1", port, probes={}, status=dict, metrics=Metrics())
            before = open_fds()
            with pytest.raises(UnderstudyError) as caught:
                await http.start()
            assert open_fds().keys() == before.keys()
        error = caught.value
        assert (error.code, error.exit_code) == ("service.port_in_use", 1)
        assert error.details == {"host": "127.0.0.1", "port": port, "pid": os.getpid()}
        assert f"port {port} on 127.0.0.1 is in use by pid {os.getpid()}" in error.message
        assert "--http-port" in error.message

    asyncio.run(main())


def test_random_bytes_cost_their_sender_and_nobody_else(caplog):
    """Goal: bad input disturbs nothing, leaks nothing, fills no log; method: garbage, huge head."""

    async def main():
        async with serving() as http:
            await fetch(http.port, "/live")
            before = open_fds()
            for garbage in (b"\x00\xff" * 500, b"GET / HTTP/1.1\r\nX: " + b"a" * 20_000 + b"\r\n"):
                reader, writer = await asyncio.open_connection("127.0.0.1", http.port)
                writer.write(garbage)
                assert b" 400 " in (await reader.read()).split(b"\r\n")[0]
                writer.close()
                await writer.wait_closed()
            assert (await fetch(http.port, "/live"))[0] == 200
            await auntil(lambda: open_fds().keys() == before.keys(), "closed connections", 10)

    asyncio.run(main())
    # On a busy machine asyncio's debug mode warns of a step that took long: no fault of the server.
    assert [each for each in caplog.records if not each.msg.startswith("Executing ")] == []


def test_minimal_server_loads_no_heavy_library():
    """Goal: a small lock server; method: the modules of one scraped process."""
    program = textwrap.dedent(
        """
        import sys
        from plumbing.service import clock, events, http, log, metrics
        from plumbing.pod.cli import run_async
        async def main():
            server = http.HttpServer("127.0.0.1", 0, probes={}, status=dict,
                metrics=metrics.Metrics(), events=events.EventLog("x", clock.SystemClock()))
            await server.start()
            server._metrics.render()
            print(*sys.modules)
        run_async(main)
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"numpy", "rich", "psutil", "torch", "aiohttp"} & set(done.stdout.split())
