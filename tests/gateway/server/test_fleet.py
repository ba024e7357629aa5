"""Goal: a client of a front reads one whole answer, whatever becomes of the pods behind it.

Method: a front and pods in this process (`fleet_bench`), with stub engines.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import ssl
import struct
import time
from typing import Any
from unittest.mock import AsyncMock, Mock

import msgspec
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from gateway.cli import main, render
from gateway.core import fleet as fleet_module
from gateway.core.events import (
    GatewayRules,
    HeadCame,
    PodBroke,
    PodHeard,
    PodNamed,
    Prefilled,
    RequestCame,
    SendRequest,
    Tick,
)
from gateway.core.fleet import Ahead, Fleet, Sent
from gateway.core.pods import Place, Pod, choose
from gateway.messages import CONTROL, StatusMsg
from gateway.schema import FrontStatus
from gateway.server import client as client_module
from gateway.server import exchange as exchange_module
from gateway.server import hop as hop_module
from gateway.server import pods as pods_module
from gateway.server import upstream as upstream_module
from gateway.server.channels import FRAME_BYTES_MAX, OPENED, WINDOW_BYTES
from gateway.server.hop import fleet_security
from gateway.server.pods import PODS_MAX, PodNames
from plumbing.gateway_protocol import WATCH_PATH, Continuation, PodModel, PodReport
from plumbing.pod.observers import ask
from plumbing.pod.paths import gateway_socket
from tests.documents import mismatches
from tests.gateway.core.model import by_state
from tests.gateway.server.fleet_bench import BODY, BenchPod, FleetBench, check_whole, in_fleet
from tests.gateway.server.harness import CHAT, Answer, configured
from tests.gateway.stub_engine import StubReply, StubRequest
from tests.helpers import auntil
from understudy.http_get import get
from understudy.status.view import front_lines, front_view


@pytest.mark.parametrize("cut_bytes", [0, 40])
@pytest.mark.parametrize("groups", range(13))
@in_fleet
async def test_stream_whose_pod_dies_behind_any_group_goes_on_at_another_pod(
    bench, groups, cut_bytes
):
    await bench.start(2)
    for pod in bench.pods:
        pod.engine.cut_after_groups, pod.engine.cut_bytes = groups, cut_bytes
    client = await bench.ask(BODY)
    await auntil(lambda: any(pod.engine.died.is_set() for pod in bench.pods), "a death")
    dead = next(pod for pod in bench.pods if pod.engine.died.is_set())
    for pod in bench.pods:
        pod.engine.cut_after_groups = None
    dead.kill()
    check_whole(await client.answer(), BODY)
    assert bench.fleet.losses["gone"] == 1


@in_fleet
async def test_answer_without_stream_is_asked_again_at_another_pod(bench):
    document = {"model": "stub", "max_tokens": 4, "messages": []}
    await bench.start(2, routes={CHAT: _wait_for_ever})
    client = await bench.ask(document)
    await auntil(lambda: any(pod.engine.requests for pod in bench.pods), "the request")
    dead = bench.of()
    for pod in bench.pods:
        pod.engine.routes.clear()
    dead.kill()
    answer = await client.answer()
    assert answer.status == 200
    assert len(json.loads(answer.body)["choices"]) == 1


async def _wait_for_ever(*_: Any) -> None:
    await asyncio.Event().wait()


async def _begin_and_wait(_: StubRequest, reply: StubReply) -> None:
    reply.head(continuation="none")
    reply.write(b"part")
    await asyncio.Event().wait()


@in_fleet
async def test_engine_that_dies_is_followed_in_its_pod_under_a_newer_token(bench):
    [pod] = await bench.start(hold_after_groups=5)
    client = await bench.ask(BODY)
    await client.head()
    await auntil(lambda: by_state(bench.fleet)["streaming"] == 1, "the stream")
    pod.engine.die()
    pod.engine.token, pod.engine.hold_after_groups = 2, None
    await pod.engine.start()
    await pod.grant()
    body, is_whole = await client.chunks()
    check_whole(Answer(200, {}, body, is_whole), BODY)
    assert [each.journal is None for each in pod.engine.requests] == [True, False]
    assert not bench.fleet.losses


@in_fleet
async def test_stream_waits_where_no_pod_has_its_continuation_id(bench):
    [first] = await bench.start(hold_after_groups=3)
    client = await bench.stream()
    other = await bench.pod(continuation_id="two")
    same = await bench.pod()
    bench.name(first, other, same)
    await auntil(lambda: bench.ready() == 3, "the new pods")
    first.kill()
    check_whole(await client.answer(), BODY)
    assert not other.engine.requests
    assert len(same.engine.requests) == 1


@in_fleet
async def test_pod_without_engine_refuses_within_a_second_and_another_one_answers(bench):
    pods = await bench.start(2)
    pods[0].engine.die()
    for number in range(4):
        document = {**BODY, "messages": [{"role": "user", "n": number}]}
        check_whole(await (await bench.ask(document)).answer(), document)


@in_fleet
async def test_F7_clients_headers_of_the_hop_do_not_pass_a_front(bench):
    [pod] = await bench.start()
    forged = {"X_Understudy_Journal": "3,1,1", "X_Understudy_Continuation_Id": "two"}
    client = await bench.ask(BODY, **forged)
    check_whole(await client.answer(), BODY)
    assert pod.engine.requests[0].journal is None


@in_fleet
async def test_stream_goes_on_at_another_incarnation_at_the_same_address(bench):
    [first] = await bench.start(hold_after_groups=3)
    client = await bench.stream()
    first.kill()
    await bench.pod(port=first.hop.port)
    check_whole(await client.answer(), BODY)
    assert sum(bench.fleet.losses.values()) == 1


@in_fleet
async def test_client_that_leaves_during_a_move_leaves_nothing_behind(bench):
    pods = await bench.start(2, hold_after_groups=3)
    client = await bench.stream()
    bench.of().hop.leave(30_000)
    for pod in pods:
        pod.engine.hold_after_groups = 1
    await auntil(lambda: bench.fleet.moves["leaving"] == 1, "the move")
    client.close()
    await auntil(lambda: not bench.fleet.requests, "the front to notice")
    await auntil(lambda: not any(pod.exchange.requests for pod in pods), "the pods, too")


@in_fleet
async def test_models_and_too_large_bodies_are_answered_through_a_front(bench):
    pod = await bench.pod(says={"body_bytes_max": 1000})
    pod.engine.routes["/v1/models"] = _list_models
    await bench.front()
    answer = await (await bench.ask(None, "/v1/models")).answer()
    assert (answer.status, answer.body) == (200, b'{"data": []}')
    assert answer.headers["x-understudy-pod"].startswith("pod-0")
    large = await (await bench.ask({**BODY, "user": "x" * 1000})).answer()
    assert large.status == 413
    check_whole(await (await bench.ask(BODY)).answer(), BODY)


async def _list_models(_: StubRequest, reply: StubReply) -> None:
    reply.head(length=12)
    reply.write(b'{"data": []}')


@in_fleet
async def test_turns_of_a_chat_reach_the_pod_that_has_its_prefix_by_any_front(bench):
    """Goal: the turns of a chat share a cache; chats share the pods."""
    await bench.start(4)
    ports = [bench.port]
    await bench.front()
    ports.append(bench.port)
    seen = [pod for front in bench.fronts for pod in front.fleet.pods.values()]
    used = set()

    def is_idle(pod: Pod) -> bool:
        models = pod.report.models.values()
        return not pod.sent.total() and not any(each.in_flight for each in models)

    for number in range(12):
        said = [{"role": "system", "content": "Be brief."}] * (number % 2)
        reached = set()
        for turn, bench.port in enumerate(itertools.islice(itertools.cycle(ports), 4)):
            said.append({"role": "user", "content": f"question {turn} of chat {number}"})
            answer = await (await bench.ask({**BODY, "messages": list(said)})).answer()
            reached.add(answer.headers["x-understudy-pod"])
            said.append({"role": "assistant", "content": answer.text()})
            await auntil(lambda: all(map(is_idle, seen)), "both fronts to hear of its end")
        assert len(reached) == 1, f"the turns of chat {number} reached {reached}"
        used |= reached
    assert len(used) > 1


WATCHED = b"HTTP/1.1 200 OK\r\n\r\n"
REPORT = PodReport("liar", 1, {}, 0)


@pytest.mark.parametrize(
    "said",
    [
        WATCHED + b"no JSON\n",
        WATCHED + b'{"pod": "' + b"x" * (64 << 10) + b'"}\n',
        WATCHED + b'{"pod": "liar", "incarnation": 0, "models": {}, "body_bytes_max": 0}\n',
        WATCHED + msgspec.json.encode(replace(REPORT, version=99)) + b"\n",
        b"HTTP/1.1 404 Not Found\r\n\r\n",
        b"x" * (128 << 10),
        WATCHED + b'{"more": ' + b"[" * (60 << 10) + b"\n",
        WATCHED + b'{"pod": "\xff"}\n',
        WATCHED[:20],
        *(
            WATCHED + msgspec.json.encode(REPORT).replace(b":%d" % n, b":1%d" % 10**30) + b"\n"
            for n in (0, 1)
        ),
        *(
            WATCHED + msgspec.json.encode(replace(REPORT, **said)) + b"\n"
            for said in (
                {"pod": "liar\x1b[2J"},
                {"pod": "rail\u202e"},
                {"models": {"m\n": PodModel()}},
                {"models": {"m": PodModel(engine="\x9b2J")}},
                {"models": {"m": PodModel(tier="awake\r")}},
                {"leaving_ms": 1e300},
                {"leaving_ms": -1.0},
            )
        ),
        b"\x1b[2J",
    ],
    ids=[
        *("garbage", "too-large", "no-incarnation", "other-version", "no-fleet", "no-http"),
        *("nested", "not-utf8", "cut", "large-limit", "large-incarnation"),
        *("name", "direction", "model", "engine", "tier", "leaving-late", "left", "escape"),
    ],
)
@in_fleet
async def test_pod_whose_reports_cannot_be_read_harms_nobody(bench, said):
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(struct.pack(">QI", 0, OPENED))
        for _ in range(2):  # it asks for channels, and in the first one for reports
            await reader.readuntil(b"\r\n\r\n")
        for at in range(0, len(said), FRAME_BYTES_MAX):
            part = said[at : at + FRAME_BYTES_MAX]
            writer.write(struct.pack(">QI", 1, len(part)) + part)
        with contextlib.suppress(OSError):
            await reader.read()  # until the front has closed it
        writer.transport.abort()

    await name_liar(bench, lie)
    check_whole(await (await bench.ask(BODY)).answer(), BODY)


@in_fleet
async def test_answer_of_what_is_no_hop_is_quoted(bench):
    async def lie(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 404 Not Found\r\n\r\n")
        with contextlib.suppress(OSError):
            await reader.read()
        writer.transport.abort()

    assert "404 Not Found" in await name_liar(bench, lie)


async def name_liar(bench: FleetBench, lie: Any) -> str:
    """What a front says of it beside a pod."""
    liar = await asyncio.start_server(lie, "127.0.0.1", 0)
    [pod] = await bench.start()
    port = liar.sockets[0].getsockname()[1]
    bench.server.links.names._names = [("127.0.0.1", pod.hop.port), ("127.0.0.1", port)]
    address = f"127.0.0.1:{port}"
    await auntil(lambda: address in bench.server.links.problems, "the problem")
    assert bench.fleet.pods[address].report is None
    assert any(each.startswith(f"{address}: ") for each in bench.server.document()["problems"])
    liar.close()
    assert bench.server.links.problems[address].isprintable()
    return bench.server.links.problems[address]


async def test_names_are_limited_and_what_cannot_be_looked_up_changes_nothing(tmp_path):
    file = tmp_path / "pods"
    file.write_text("".join(f"127.0.0.{1 + each % 250}:{9000 + each}\n" for each in range(300)))
    names = PodNames(f"@{file}")
    found = await names.look_up()
    assert found is not None
    assert len(found) == PODS_MAX
    assert "300 addresses" in (names.problem or "")
    for unreadable in (b"127.0.0.1:9000, not a name\n", b"\xff:9000\n"):
        file.write_bytes(unreadable)
        assert await names.look_up() is None
    file.unlink()
    assert await names.look_up() is None
    assert names.problem


async def test_name_that_cannot_be_looked_up_takes_no_other_pod_along(monkeypatch):
    """Goal: a front that starts while a pod's name is gone has the others, and one that runs keeps
    the pod. Method: a resolver that knows a name no more, and one no name of which can exist."""
    gone, loop = set[str](), asyncio.get_running_loop()

    async def resolve(host: str, port: int, **_: Any) -> list[Any]:
        if host in gone:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        if len(host) > 63:
            raise UnicodeError("label too long")
        return [(0, 0, 0, "", ({"a": "127.0.0.1", "b": "127.0.0.2"}[host], port))]

    monkeypatch.setattr(loop, "getaddrinfo", resolve)
    a, b, text = ("127.0.0.1", 1), ("127.0.0.2", 2), f"{'x' * 64}:3,a:1,b:2"
    names = PodNames(text)
    assert await names.look_up() == {a, b}
    gone.add("a")
    assert await names.look_up() == {a, b}
    assert "cannot look up a:" in (names.problem or "")
    assert await PodNames(text).look_up() == {b}
    gone.clear()
    assert await PodNames("a:1,b:2").look_up() == {a, b}


@in_fleet
async def test_pod_says_who_serves_at_once_and_its_load_later(bench, monkeypatch):
    """Method: only what is said at once is said at all."""
    monkeypatch.setattr(hop_module, "LOAD_S", 60.0)
    monkeypatch.setattr(hop_module, "REPORT_S", 60.0)
    pod = await bench.pod()
    bench.port = pod.hop.port
    watch = await bench.ask(None, WATCH_PATH)
    await watch.head()
    for _ in range(3):
        await (await bench.ask(BODY)).answer()
    pod.engine.token = 2
    await pod.grant()
    reports = [json.loads(await watch.reader.readline())["models"]["stub"] for _ in range(3)]
    assert [each["token"] for each in reports] == [1, 2, 2]
    assert [bool(each["engine"]) for each in reports] == [True, False, True]


@in_fleet
async def test_front_that_stood_still_takes_no_pod_for_silent(bench):
    [pod] = await bench.start()
    watching = set(pod.hop._watching)
    known = bench.fleet.pods[pod.address]
    time.sleep(1.5)  # noqa: ASYNC251 - longer than a pod may be silent
    stood_ms = known.heard_ms
    await auntil(lambda: known.heard_ms > stood_ms + 1500, "reports after that")
    assert (bench.ready(), pod.hop._watching) == (1, watching)


@in_fleet
async def test_pod_counts_a_resume_as_under_way_until_it_has_a_new_token(bench):
    """Method: the second pod's engine stops behind the journal of four tokens, then later."""
    [first] = await bench.start(hold_after_groups=4)
    client = await bench.stream()
    heir = await bench.pod(hold_after_groups=4)
    bench.name(first, heir)
    (request,) = bench.fleet.requests.values()
    await auntil(lambda: (bench.ready(), len(request.tokens)) == (2, 4), "a journal, and an heir")
    first.kill()
    await auntil(lambda: by_state(heir.core)["relaying"] == 1, "its first token")
    await auntil(lambda: not next(iter(heir.core.requests.values())).unplayed_tokens, "the journal")
    assert heir.core.resuming == 1
    heir.engine.hold_after_groups, released = 5, heir.engine.released
    heir.engine.released = asyncio.Event()
    released.set()
    await auntil(lambda: len(request.tokens) == 5, "a new token")
    assert heir.core.resuming == 0
    heir.engine.released.set()
    check_whole(await client.answer(), BODY)


@in_fleet
async def test_replay_of_a_pod_that_stops_is_read_to_its_end(bench):
    """Method: such a pod closes behind its answer, all of which comes before its turn to be
    compared."""
    [first] = await bench.start(hold_after_groups=4)
    client = await bench.stream()
    heir = await bench.pod()
    bench.name(first, heir)
    await auntil(lambda: bench.ready() == 2, "the heir")
    heir.exchange._is_stopping = True
    first.kill()
    check_whole(await client.answer(), BODY)
    assert len(heir.engine.requests) == 1


# ------------------------------------------------------------------ leaving


def of_pod(bench: FleetBench, pod: BenchPod) -> int:
    return sum(each.engine == pod.address for each in bench.fleet.attempts.values())


@in_fleet
async def test_streams_of_a_pod_that_leaves_go_on_elsewhere_four_at_a_time(bench):
    [leaving] = await bench.start(hold_after_groups=4)
    documents = [{**BODY, "seed": each} for each in range(12)]
    clients = [await bench.ask(each) for each in documents]
    await auntil(lambda: by_state(bench.fleet)["streaming"] == 12, "the streams")
    others = [await bench.pod(hold_after_groups=2) for _ in range(2)]
    bench.name(leaving, *others)
    await auntil(lambda: bench.ready() == 3, "the other pods")
    leaving.hop.leave(30_000)
    # Held before they have played what clients have.
    await auntil(lambda: [of_pod(bench, each) for each in others] == [4, 4], "four each")
    said_ms = bench.fleet.pods[leaving.address].heard_ms
    await auntil(lambda: bench.fleet.pods[leaving.address].heard_ms > said_ms, "its next report")
    assert [of_pod(bench, each) for each in (leaving, *others)] == [4, 4, 4]
    for pod in others:
        pod.engine.hold_after_groups = None
        pod.engine.released.set()
    for client, document in zip(clients, documents, strict=True):
        check_whole(await client.answer(), document)
    assert bench.fleet.moves["leaving"] == 12
    assert not bench.fleet.losses
    await auntil(lambda: not leaving.exchange.requests, "the pod to be empty")


@in_fleet
async def test_long_stream_stays_at_a_pod_that_leaves_until_its_heir_has_computed_it(
    bench, monkeypatch
):
    monkeypatch.setattr(fleet_module, "AHEAD_TOKENS", 4)
    [leaving] = await bench.start(hold_after_groups=4)
    client = await bench.stream()
    heir = await bench.pod(hold_after_groups=4)
    bench.name(leaving, heir)
    await auntil(lambda: bench.ready() == 2, "the heir")
    leaving.hop.leave(30_000)
    await auntil(lambda: heir.engine.requests, "the journal to be there")
    (request,) = bench.fleet.requests.values()
    leaving.engine.hold_after_groups, released = 6, leaving.engine.released
    leaving.engine.released = asyncio.Event()
    released.set()
    await auntil(lambda: len(request.tokens) == 6, "the stream to go on")
    assert (of_pod(bench, leaving), bench.fleet.moves["leaving"]) == (1, 0)
    heir.engine.released.set()
    check_whole(await client.answer(), BODY)
    assert [len(each.journal.tokens) for each in heir.engine.requests] == [4, 6]


@in_fleet
async def test_heir_that_computes_for_too_long_gets_the_stream_and_is_not_charged(
    bench, monkeypatch
):
    monkeypatch.setattr(fleet_module, "AHEAD_TOKENS", 2)
    for module in (fleet_module, upstream_module):
        monkeypatch.setattr(module, "AHEAD_MS", 50.0)
    [leaving] = await bench.start(hold_after_groups=4)
    client = await bench.stream()
    heir = await bench.pod(hold_after_groups=0)
    bench.name(leaving, heir)
    await auntil(lambda: bench.ready() == 2, "the heir")
    (request,) = bench.fleet.requests.values()
    leaving.hop.leave(30_000)
    await auntil(lambda: bench.fleet.moves["leaving"] == 1, "the move")
    await auntil(lambda: len(heir.exchange.requests) == 1, "the end of what was computed ahead")
    assert request.deaths == 0
    heir.engine.released.set()
    check_whole(await client.answer(), BODY)
    assert [len(each.journal.tokens) for each in heir.engine.requests] == [4, 4]


@pytest.mark.parametrize("is_broken", [False, True])
def test_engine_that_may_have_died_of_a_journal_is_charged(is_broken):
    fleet = Fleet(GatewayRules())
    fleet.handle(RequestCame(1, CHAT, 9, is_inference=True, is_stream=True), 0.0)
    request, pod = fleet.requests[1], Pod("127.0.0.1:1", 0.0)
    fleet._sent[1] = Sent(pod, 1, 1, "", ahead=Ahead(pod, until_ms=99.0, tokens=64, times=1))
    fleet.handle(Prefilled(1, is_broken=is_broken), 1.0)
    assert request.deaths == is_broken


@in_fleet
async def test_pod_that_leaves_drops_what_could_not_move_and_takes_nothing_new(bench):
    routes = {"/v1/files": _begin_and_wait}
    [leaving] = await bench.start(hold_after_groups=4, routes=routes)
    kept, lost = await bench.ask(BODY), await bench.ask(BODY, "/v1/files")
    await auntil(lambda: by_state(bench.fleet)["streaming"] == 1, "the stream")
    await lost.head()
    leaving.hop.leave(400)
    await auntil(lambda: not leaving.exchange.requests, "the end")
    assert not (await lost.chunks())[1]
    late = await bench.ask({**BODY, "seed": 1})
    await auntil(lambda: by_state(bench.fleet)["waiting"] == 1, "the late one")
    other = await bench.pod()
    bench.name(leaving, other)
    check_whole(await kept.answer(), BODY)
    check_whole(await late.answer(), {**BODY, "seed": 1})
    assert len(leaving.engine.requests) == 2


# ------------------------------------------------------------------ what a front says of itself


@in_fleet
async def test_status_probes_and_metrics_follow_the_pods(bench):
    await bench.start(2, hold_after_groups=3)
    client = await bench.stream()
    first = bench.of()
    first.kill()
    await auntil(lambda: bench.fleet.moves["gone"] == 1, "the move")
    bench.let_go()
    client.close()
    path = gateway_socket(bench.server.settings.directory)
    document = (await ask(path, CONTROL, StatusMsg())).message.document
    assert mismatches(document, FrontStatus) == []
    states = {each["name"]: each["state"] for each in document["pods"]}
    (other,) = states.keys() - {first.name}
    assert states == {first.name: "gone", other: "ready"}
    assert (document["losses"]["gone"], document["moves"]["gone"]) == (1, 1)
    assert document["problems"]
    url = f"http://127.0.0.1:{bench.server.http.port}"
    assert [(await get(f"{url}/{each}", 5)).status for each in ("live", "ready")] == [200] * 2
    page = (await get(f"{url}/metrics", 5)).body.decode()
    lines = 'pods{state="gone"} 1.0', 'pod_losses_total{cause="gone"} 1.0'
    for line in (*lines, "replays_differed_total 0.0"):
        assert f"understudy_gateway_{line}" in page
    text = render(document)
    assert "1 of 2 pods ready, 1 gone" in text
    view = front_view("/d", document)
    assert view["state"] == "degraded"
    assert front_lines(view, None)[0].startswith("front  degraded   1 of 2 pods ready")
    stopping = front_view("/d", {**document, "stopping": True})
    assert front_lines(stopping, None)[0].startswith("front  stopping ")
    kinds = [each.type for each in bench.server.log.kept_since(0)]
    assert "gateway.pod" in kinds


@in_fleet
async def test_front_is_ready_once_it_has_heard_a_pod_and_says_why_it_refuses(bench):
    await bench.front()
    assert not bench.server.ready().ok
    pod = await bench.pod()
    bench.name(pod)
    await auntil(lambda: bench.server.ready().ok, "the pod")
    pod.kill()
    await auntil(lambda: bench.server.fleet.waits_for, "the loss")
    assert bench.server.ready().ok
    answer = await (await bench.ask(None, "/health")).answer()
    assert answer.status == 503
    assert b"1 gone" in answer.body


# ------------------------------------------------------------------ certificates


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    directory = str(tmp_path_factory.mktemp("tls") / "fleet")
    done = CliRunner().invoke(main, ["certificates", directory])
    assert done.exit_code == 0, done.output
    return directory


@in_fleet
async def test_streams_of_a_lost_pod_take_the_connection_that_is_open(bench, certificates):
    """Method: none can be made any more when the pod dies; with the fleet's certificates."""
    for _ in range(2):
        await bench.pod(tls=f"{certificates}/pod", hold_after_groups=4)
    await bench.front(tls=f"{certificates}/front")
    links = bench.server.links
    clients = [await bench.ask({**BODY, "n": each}) for each in range(9)]
    await auntil(lambda: by_state(bench.fleet)["streaming"] == 9, "the streams")
    links._open = AsyncMock(side_effect=OSError)
    dead, other = sorted(bench.pods, key=lambda pod: -of_pod(bench, pod))
    most = of_pod(bench, dead)
    bench.let_go()
    dead.kill()
    other.engine.released.set()
    for number, client in enumerate(clients):
        check_whole(await client.answer(), {**BODY, "n": number})
    assert bench.fleet.moves["gone"] == most


@in_fleet
async def test_gateway_that_is_replaced_hands_its_streams_to_its_successor(bench):
    [old] = await bench.start(hold_after_groups=4)
    client = await bench.stream()
    said = old.hop.status()
    assert (said.fronts, said.requests) == (1, 1)
    old.hop.stop()
    new = await bench.pod(port=old.hop.port)
    for each in (client, await bench.ask(BODY)):
        check_whole(await each.answer(), BODY)
    assert not old.hop.clients | old.hop.in_channels
    assert len(new.engine.requests) == 2


@in_fleet
async def test_channel_within_a_channel_is_closed(bench):
    [pod] = await bench.start()
    protocol = Mock()
    bench.server.links._channels[pod.address].open(protocol)
    protocol.connection_made.call_args.args[0].write(pods_module.CHANNELS)
    await auntil(lambda: protocol.connection_lost.called, "its end")
    check_whole(await (await bench.ask(BODY)).answer(), BODY)
    assert len(pod.hop.channels) == 1


class Held(asyncio.Protocol):
    """A channel of a front that writes `said`, and reads when it is told to."""

    def __init__(self, said: bytes) -> None:
        self.said, self.read, self.is_lost = said, bytearray(), False

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.pause_reading()
        transport.write(self.said)

    def data_received(self, data: bytes) -> None:
        self.read += data

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True


def hold(bench: FleetBench, pod: BenchPod, said: bytes) -> Held:
    """Its channel beside those of a front's requests to this pod."""
    held = Held(said)
    bench.server.links._channels[pod.address].open(held)
    return held


@in_fleet
async def test_half_of_a_request_from_a_front_is_waited_for_no_longer_than_a_clients(
    bench, monkeypatch
):
    """Method: half a head and half a body in channels, and a connection on which nothing comes."""
    monkeypatch.setattr(exchange_module, "SWEEP_S", 0.05)
    for name in ("HEAD_S", "BODY_GRACE_S"):
        monkeypatch.setattr(client_module, name, 0.2)
    [pod] = await bench.start()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: pod\r\ncontent-length: 9\r\n"
    halves = [hold(bench, pod, each) for each in (head, head + b"\r\n123")]
    silent = await asyncio.open_connection("127.0.0.1", pod.hop.port)
    for each in halves:
        each.transport.resume_reading()
    assert await silent[0].read() == b""
    await auntil(lambda: all(each.is_lost for each in halves), "their ends")
    assert [b" 408 " in each.read for each in halves] == [True, True]
    assert bench.ready() == 1
    silent[1].transport.abort()


MODELS = b"GET /v1/models HTTP/1.1\r\nhost: pod\r\n\r\n"
ANSWER = b"x" * (WINDOW_BYTES + 30_000)


@in_fleet
async def test_front_is_let_in_beside_old_connections_and_many_requests(bench, monkeypatch):
    """Method: 65 connections that bring no more requests; requests as many as the process may have
    descriptors, on channels."""
    [pod] = await bench.start(routes={"/v1/models": _wait_for_ever})
    old = []
    for _ in range(65):
        old.append(await asyncio.open_connection("127.0.0.1", pod.hop.port))
        old[-1][1].write(pods_module.CHANNELS)
        await old[-1][0].readexactly(12)
    for _ in range(3):
        hold(bench, pod, MODELS)
    await auntil(lambda: len(pod.engine.requests) == 3, "the requests")
    monkeypatch.setattr(client_module, "connections_max", lambda: 2)
    await bench.front()
    check_whole(await (await bench.ask(BODY)).answer(), BODY)
    for _, writer in old:
        writer.transport.abort()


async def _answer_at_length(_: StubRequest, reply: StubReply) -> None:
    reply.head(length=len(ANSWER))
    reply.write(ANSWER)


@in_fleet
async def test_front_that_takes_nothing_of_its_answer_is_cut_off(bench, monkeypatch):
    monkeypatch.setattr(exchange_module, "SWEEP_S", 0.05)
    for name in ("IDLE_S", "STALLED_S"):
        monkeypatch.setattr(client_module, name, 0.2)
    [pod] = await bench.start(routes={"/v1/models": _answer_at_length})
    held = hold(bench, pod, MODELS)
    await auntil(lambda: len(pod.hop.in_channels) == 2, "its request")
    await auntil(lambda: len(pod.hop.in_channels) == 1, "its end")
    held.transport.resume_reading()
    await auntil(lambda: held.is_lost, "the end at the front")
    check_whole(await (await bench.ask(BODY)).answer(), BODY)


@in_fleet
async def test_pod_that_stops_waits_until_fronts_have_its_answers(bench):
    """Method: one that has the window and some more unread when the request has ended there."""
    [pod] = await bench.start(routes={"/v1/models": _answer_at_length})
    held = hold(bench, pod, MODELS)
    await auntil(lambda: pod.engine.requests and not pod.exchange.requests, "the end")
    stop = asyncio.create_task(pod.exchange.stop(20_000))
    stop.add_done_callback(lambda _: pod.kill())
    assert not (await asyncio.wait([stop], timeout=0.1))[0]
    held.transport.resume_reading()
    await stop
    await auntil(lambda: held.is_lost, "the pod's end")
    assert held.read.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize("who", ["pod", None])
@in_fleet
async def test_F7_peer_without_a_fronts_certificate_hears_nothing(bench, who, certificates):
    pod = await bench.pod(tls=f"{certificates}/pod")
    tls: dict[str, Any] = {}
    if who is not None:
        context = fleet_security(f"{certificates}/{who}").client_context()
        context.check_hostname = False
        tls = {"ssl": context, "server_hostname": "understudy-pod"}
    said = b""
    with contextlib.suppress(OSError, ssl.SSLError):
        address = ("127.0.0.1", pod.hop.port)
        reader, writer = await asyncio.open_connection(*address, **tls)
        writer.write(f"GET {WATCH_PATH} HTTP/1.1\r\nhost: pod\r\n\r\n".encode())
        said = await reader.read(1024)
        writer.transport.abort()
    assert b"incarnation" not in said
    await auntil(lambda: pod.hop.problem, "the pod to say why")


@in_fleet
async def test_front_without_certificates_says_why_it_hears_nothing(bench, certificates):
    await bench.front()
    pod = await bench.pod(tls=f"{certificates}/pod")
    bench.name(pod)
    await auntil(lambda: pod.address in bench.server.links.problems, "the problem")
    assert not bench.server.ready().ok
    bench.server.links.names._names = [("192.0.2.1", 8443)]
    await auntil(
        lambda: "--fleet-tls" in bench.server.links.problems.get("192.0.2.1:8443", ""),
        "plain text to be refused",
    )


def test_request_goes_where_it_runs_at_once_before_where_it_waits():
    """Method: any key, and none; the pod whose slots are taken has room, and the lesser load."""

    def place(number: int, slots: int, load: int) -> Place:
        model = PodModel("e", tier="awake", in_flight=load, room=200, slots=slots)
        pod = Pod(f"127.0.0.1:{number}", 0.0)
        pod.hear(PodReport(f"pod-{number}", number, {"m": model}, 1 << 20), 0.0)
        return Place(pod, model, 0)

    full, free = place(1, 8, 8), place(2, 16, 10)
    keys = [b"", *(bytes([each]) for each in range(20))]
    assert {it.pod for key in keys if (it := choose([full, free], key))} == {free.pod}
    both = [Place(each.pod, each.model, 20) for each in (full, free)]  # as if they said nothing
    found = {it.pod for key in keys if (it := choose(both, key))}
    assert found == {full.pod, free.pod}


@in_fleet
async def test_pod_reports_how_many_requests_its_engine_runs_at_once(bench):
    [pod] = await bench.start(says={"slots": 8})
    known = bench.fleet.pods[pod.address]
    assert known.any_model.slots == 8


def test_stream_of_a_model_that_slept_has_the_id_of_the_engine_that_answered(tmp_path):
    """And goes on where the model has not been awake yet. Method: a pod's report that was made
    before any engine had the model has no id."""
    fleet = Fleet(configured(str(tmp_path)).rules)

    def sent(*events: Any) -> SendRequest:
        effects = [it for each in events for it in fleet.handle(each, next(times))]
        (found,) = [it for it in effects if isinstance(it, SendRequest)]
        return found

    def pod(number: int) -> tuple[PodNamed, PodHeard]:
        address, cold = f"127.0.0.1:{number}", PodModel(tier="cold", room=9)
        report = PodReport(f"pod-{number}", number, {"m": cold}, 1 << 20)
        return PodNamed(address, True), PodHeard(address, report)

    times = itertools.count()
    came = RequestCame(1, CHAT, 100, is_inference=True, is_stream=True, model="m")
    first = sent(*pod(1), came)
    where = first.engine, first.token
    head = HeadCame(first.attempt, 200, *where, Continuation.EXACT, True, 3, "one")
    fleet.handle(head, next(times))
    assert (fleet.requests[1].state, fleet.requests[1].continuation_id) == ("streaming", "one")
    again = sent(*pod(2), PodBroke(first.engine, is_refused=True))
    assert (again.token, again.journal is None) == (2, False)
    assert fleet.requests[1].continuation_id == "one"


def test_pod_whose_reports_are_late_is_not_silent_as_long_as_tokens_come(tmp_path):
    """Method: a stream's tokens for three seconds, and then none, with one report before."""
    fleet, address = Fleet(configured(str(tmp_path)).rules), "127.0.0.1:1"
    awake = PodModel("e", 3, "era", "one", Continuation.EXACT, "awake", room=9)
    fleet.handle(PodNamed(address, True), 0.0)
    fleet.handle(PodHeard(address, PodReport("pod-1", 1, {"m": awake}, 1 << 20)), 0.0)
    came = RequestCame(1, CHAT, 100, is_inference=True, is_stream=True, model="m")
    (sent,) = [it for it in fleet.handle(came, 0.0) if isinstance(it, SendRequest)]
    head = HeadCame(sent.attempt, 200, address, 1, Continuation.EXACT, True, 3, "one")
    fleet.handle(head, 0.0)
    stream, found = fleet.attempts[sent.attempt], set()
    for now_ms in range(0, 4_000, 20):
        if now_ms < 3_000 and not now_ms % 100:
            stream.group(b"data: 1\n\n", [5], [1], now_ms)
        fleet.handle(Tick(), now_ms)
        found.add((now_ms < 3_400, str(fleet.state(fleet.pods[address]))))
    assert found == {(True, "ready"), (False, "silent")}
