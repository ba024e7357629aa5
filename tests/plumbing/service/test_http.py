"""Goal: probes, status, metrics and events over real sockets, for whoever may ask; what strangers
send and hold costs them their connections, and a probe is answered meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest
import uvloop

from plumbing.errors import UnderstudyError
from plumbing.service import http as http_server
from plumbing.service.events import EventLog
from plumbing.service.hosts import KnownHosts
from plumbing.service.http import HttpServer, Probe
from plumbing.service.metrics import Metrics
from tests.fake_clock import FakeClock
from tests.helpers import auntil, open_fds, room_for

ANSWER_S = 30.0
PROBES = {
    "live": lambda: Probe(True, "alive"),
    "ready": lambda: Probe(False, "waiting_for_lock", {"holder": "engine-0"}),
}


class Reply(NamedTuple):
    status: int
    head: str
    body: bytes

    @property
    def document(self) -> Any:
        return json.loads(self.body)


class Service:
    """A server, on the loop that our programs have, and a client of it."""

    def __init__(self, **changes: Any) -> None:
        self.runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        settings = {
            "probes": PROBES,
            "status": lambda: {"schema": 1, "as_of_event_id": 0},
            "metrics": Metrics(),
            "events": EventLog("x", FakeClock()),
        }
        self.http = HttpServer("127.0.0.1", 0, **{**settings, **changes})
        self.run(self.http.start())

    def run(self, what: Any) -> Any:
        return self.runner.run(what)

    def send(self, data: bytes) -> Reply:
        return self.run(self.asend(data))

    async def asend(self, data: bytes) -> Reply:
        """Everything that follows `data`, until the server closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.http.port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            async with asyncio.timeout(ANSWER_S):
                said = await reader.read()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        head, _, body = said.partition(b"\r\n\r\n")
        return Reply(int(head.split()[1]), head.decode().lower(), body)

    def get(self, path: str, method: str = "GET", host: str = "x", more: str = "") -> Reply:
        return self.send(f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n{more}\r\n".encode())

    def until(self, what: Callable[[], object], why: str) -> None:
        self.run(auntil(what, why))

    @property
    def open(self) -> int:
        return len(self.http._open)


@pytest.fixture
def serve() -> Iterator[Callable[..., Service]]:
    """Starts servers, which end with the test."""
    made: list[Service] = []

    def start(**changes: Any) -> Service:
        made.append(Service(**changes))
        return made[-1]

    yield start
    for each in made:
        each.run(each.http.stop())
        each.runner.close()


@pytest.fixture
def service(serve) -> Service:
    return serve()


# ---------------------------------------------------------------------- what is answered


def test_probes_answer_200_or_503_and_say_why(service):
    found = service.get("/live")
    assert (found.status, found.document) == (200, {"ok": True, "reason": "alive"})
    assert "content-type: application/json" in found.head
    found = service.get("/ready")
    expected = {"ok": False, "reason": "waiting_for_lock", "holder": "engine-0"}
    assert (found.status, found.document) == (503, expected)
    of_head = service.get("/ready", "HEAD")
    assert (of_head.status, of_head.head, of_head.body) == (503, found.head, b"")


def test_probe_that_raises_is_500_and_the_server_lives_on(serve):
    service = serve(probes={**PROBES, "ready": lambda: 1 / 0})
    assert [service.get(path).status for path in ("/ready", "/live")] == [500, 200]


def test_status_metrics_and_index(service):
    assert service.get("/status").document == {"schema": 1, "as_of_event_id": 0}
    page = service.get("/metrics")
    assert "content-type: text/plain; version=0.0.4; charset=utf-8" in page.head
    assert b'understudy_limit_hits_total{limit="http_connections"} 0.0' in page.body
    assert service.get("/").document["paths"] == [
        *("/live", "/ready", "/status", "/metrics", "/events")
    ]


def test_events_are_the_last_ones_or_those_after_an_id(serve):
    log = EventLog("x", FakeClock())
    for number in range(3):
        log.record("x.y", f"number {number}")
    service = serve(events=log)
    for query, ids in (("", [1, 2, 3]), ("?since=2", [3]), ("?since=3", []), ("?since=9", [])):
        found = service.get(f"/events{query}").document
        assert found["as_of_event_id"] == 3
        assert [each["id"] for each in found["events"]] == ids
    for bad in ("x", "²", "9" * 5000):
        found = service.get(f"/events?since={quote(bad)}")
        assert (found.status, found.document["error"]["code"]) == (400, "service.bad_since")


def test_nothing_changes_state_and_unknown_paths_are_404(service):
    assert {service.get("/status", each).status for each in ("POST", "PUT", "DELETE")} == {405}
    assert {service.get(path).status for path in ("/nothing", "/events/")} == {404}


# ---------------------------------------------------------------------- which names are ours

FOREIGN = ("attacker.example", "attacker.example.:9400", "svc.attacker.example")


@pytest.mark.parametrize("host", [*FOREIGN, "cluster.local.org"])
def test_name_that_an_attacker_may_own_reads_nothing_but_probes(host, service):
    """Goal: DNS rebinding shows nothing of a pod. Method: every path as a rebound page asks for it,
    with the page's own origin, which equals Host, and without."""
    for path in ("/status", "/metrics", "/events", "/", "/nothing"):
        for origin in ("", f"Origin: http://{host}\r\n"):
            found = service.get(path, host=host, more=origin)
            assert (found.status, found.document["error"]["code"]) == (421, "service.unknown_host")
    assert service.get("/live", host=host).status == 200


def test_names_given_by_an_option_and_the_machines_own_are_answered(monkeypatch):
    """Goal: an Ingress, and a host's full name. Method: both, in other letters and with a dot."""
    monkeypatch.setattr(socket, "gethostname", lambda: "Node-7.cluster.example.org")
    known = KnownHosts(["Status.Example.com"])
    for host in (
        "status.example.COM",
        "status.example.com.:80",
        "node-7.cluster.example.org",
        None,
    ):
        assert known.refusal(host) is None  # None: a request without Host is no browser's
    for host in ("other.example.com", "", "a b", "a:b", "a.example/", "1.2.3.4.attacker.example"):
        assert known.refusal(host)


# ---------------------------------------------------------------------- what is odd

HALF = b"GET /live HTTP/1.1\r\nHost: x\r\n"
WHOLE = HALF + b"\r\n"
ODD = {
    "body": (b"POST /live HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", 405),
    "connect": (b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "upgrade": (HALF + b"Upgrade: h2c\r\nConnection: Upgrade\r\n\r\n", 200),
    "slashes": (b"GET //live HTTP/1.1\r\nHost: x\r\n\r\n", 404),
    "nonsense-behind": (WHOLE + b"\r\nnonsense", 200),
    "head-too-large": (b"GET / HTTP/1.1\r\nX: " + b"a" * 30_000, 400),
    "garbage": (b"\x00\xff" * 500, 400),
}


@pytest.mark.parametrize(("data", "status"), ODD.values(), ids=ODD)
def test_each_request_has_one_answer(data, status, service, caplog):
    """Goal: whatever is asked, one answer; the connection ends, and nothing is logged."""
    found = service.send(data)
    assert found.status == status
    assert "connection: close" in found.head
    assert b"HTTP/1.1 " not in found.body
    # On a busy machine asyncio's debug mode warns of a step that took long: no fault of the server.
    assert [each for each in caplog.records if not each.msg.startswith("Executing ")] == []


def test_stop_sends_what_was_answered_and_frees_every_descriptor(serve):
    """Goal: an answer is not cut by the stop, and nothing leaks. Method: one larger than the
    buffers, whose reader starts when the server stops; descriptors around a second server."""
    service = serve(status=lambda: {"x": "x" * 8_000_000})

    async def read_at_the_stop() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", service.http.port)
        writer.write(b"GET /status HTTP/1.1\r\nHost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\n")
        _, body = await asyncio.gather(service.http.stop(), reader.read())
        writer.close()
        return body

    assert len(service.run(read_at_the_stop())) > 8_000_000
    before = open_fds()
    service.run(service.http.start())
    assert service.get("/live").status == 200
    for _ in range(2):
        service.run(service.http.stop())
    assert open_fds().keys() == before.keys()
    with socket.create_server(("127.0.0.1", service.http.port)):
        pass


def test_port_in_use_names_port_and_process():
    """Goal: one sentence with the cause and the fix; method: take the port first."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        events = EventLog("x", FakeClock())
        made = {"probes": {}, "status": dict, "metrics": Metrics(), "events": events}
        http = HttpServer("127.0.0.1", port, **made)
        before = open_fds()
        with pytest.raises(UnderstudyError, match="--http-port") as caught:
            asyncio.run(http.start())
        assert open_fds().keys() == before.keys()
    assert (caught.value.code, caught.value.exit_code) == ("service.port_in_use", 1)
    assert caught.value.details == {"host": "127.0.0.1", "port": port, "pid": os.getpid()}


# ---------------------------------------------------------------------- strangers


@contextlib.contextmanager
def strangers(service: Service, count: int, data: bytes = HALF) -> Iterator[list[socket.socket]]:
    """`count` connections that have sent `data` and stay open on their side; the server has turns
    in between, because they may be more than its backlog takes."""
    with contextlib.ExitStack() as stack:
        made = []
        for _ in range(count):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", service.http.port)))
            with contextlib.suppress(ConnectionError):  # closed already
                sock.sendall(data)
            sock.setblocking(False)
            made.append(sock)
            service.run(asyncio.sleep(0))
        yield made


async def end_of(sock: socket.socket) -> bytes:
    """What arrives on `sock` until its other end closes it."""
    data = b""
    with contextlib.suppress(ConnectionError):
        async with asyncio.timeout(ANSWER_S):
            while more := await asyncio.get_running_loop().sock_recv(sock, 65536):
                data += more
    return data


def test_probe_is_answered_while_strangers_hold_every_connection(serve, monkeypatch):
    """Goal: the port cannot be taken. Method: half requests, several times the limit; then a probe,
    the metric, and the problem, which is named while it lasts."""
    service = serve()
    limit = service.http.connections_max
    assert service.http.problem is None
    with strangers(service, 3 * limit):
        assert service.get("/live").status == 200
        service.until(lambda: service.open <= limit, "the oldest to be closed")
        page = service.get("/metrics").body.decode()
        (line,) = [each for each in page.splitlines() if "http_connections" in each]
        assert float(line.split()[-1]) >= 2 * limit
        assert f"{limit} HTTP connections are open" in service.http.problem
        assert str(service.http.port) in service.http.problem
    monkeypatch.setattr(http_server, "PROBLEM_S", 0.0)
    service.until(lambda: service.http.problem is None, "the problem to be over")


@pytest.mark.parametrize("sent", [b"", HALF, b"GET /live HTTP/1.1\r\nX: "])
def test_connection_without_a_whole_request_is_closed_at_the_deadline(sent, service, monkeypatch):
    """Goal: silence and half a head cost seconds. Method: a short deadline, and one who sends a
    byte now and then."""
    monkeypatch.setattr(http_server, "DEADLINE_S", 0.2)

    async def drip_until_closed(sock: socket.socket) -> None:
        closing = asyncio.ensure_future(end_of(sock))
        while not closing.done():
            with contextlib.suppress(ConnectionError):
                sock.send(b"X")
            await asyncio.sleep(0.01)

    with strangers(service, 1, sent) as (quiet,), strangers(service, 1) as (drip,):
        service.run(drip_until_closed(drip))
        assert b"200" not in service.run(end_of(quiet))


def test_out_of_descriptors_the_oldest_makes_room(service):
    """Goal: a probe is answered although the process has no descriptor left. Method: a limit of
    what is open, while strangers hold some of it."""

    async def ask_without_descriptors(pending: socket.socket) -> bytes:
        with room_for(0):
            pending.connect_ex(("127.0.0.1", service.http.port))
            await auntil(lambda: "cannot accept" in (service.http.problem or ""), "the shortage")
            await asyncio.get_running_loop().sock_sendall(pending, WHOLE)
            return await end_of(pending)

    with strangers(service, 3), socket.socket() as pending:
        service.until(lambda: service.open == 3, "the connections")
        pending.setblocking(False)
        # In one piece: uvloop takes descriptors whenever a loop is run.
        assert b"200 OK" in service.run(ask_without_descriptors(pending))
