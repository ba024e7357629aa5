"""Goal: no number of clients takes the port or the process, and who may not ask gets nothing.

Method: real sockets, a real limit of descriptors, real certificates.
"""

import logging
import ssl
from pathlib import Path

import pytest

from gateway.server import client as listener
from tests.gateway.server.harness import CHAT, scene
from tests.gateway.server.test_answers import STREAM
from tests.helpers import auntil, room_for
from tests.plumbing.wire.certificates import Authority


@scene()
async def test_a_new_client_takes_the_place_of_the_one_that_was_idle_longest(bench, monkeypatch):
    """Goal: at the limit idle connections make room, busy ones do not."""
    monkeypatch.setattr(listener, "connections_max", lambda: 3)
    engine = await bench.active(hold_after_groups=1)
    busy, oldest, idle = [await bench.client() for _ in range(3)]
    busy.ask(CHAT, STREAM)
    await busy.head()
    await auntil(lambda: bench.load.connections == 3, "all of them to be accepted")
    newest = await bench.client()
    assert await oldest.rest() == b""
    newest.ask("/v1/models")
    assert (await newest.answer()).status == 200
    idle.ask("/v1/models")
    assert (await idle.answer()).status == 200
    engine.released.set()
    await busy.chunks()


@scene()
async def test_with_every_place_busy_new_clients_wait_in_the_backlog(bench, monkeypatch):
    monkeypatch.setattr(listener, "connections_max", lambda: 1)
    engine = await bench.active(hold_after_groups=1)
    busy = await bench.asking(CHAT, STREAM)
    await busy.head()
    waiting = await bench.asking("/v1/models")
    await auntil(lambda: bench.exchange.problem, "the limit to be shown")
    assert "the limit" in bench.exchange.problem
    engine.released.set()
    await busy.chunks()
    busy.close()
    assert (await waiting.answer()).status == 200


@scene()
async def test_accepting_without_descriptors_waits_and_retries(bench):
    await bench.active()
    held = await bench.asking("/v1/models")
    await held.answer()
    # The client's own socket takes the last descriptor, so none is left to accept it.
    with room_for(1):
        late = await bench.asking("/v1/models")
        await auntil(lambda: bench.exchange.problem, "the shortage to be shown")
        assert "open files" in bench.exchange.problem
        assert bench.exchange.accounts.limits["descriptors"]
    assert (await late.answer()).status == 200


def file_of_keys(directory):
    (directory / "keys").write_text("first\n\n  second  \n")
    return str(directory / "keys")


@scene(api_keys=file_of_keys, sweep_s=0.01)
async def test_api_keys(bench):
    """Goal: who has no key gets a 401 in OpenAI's form before the body is read, keys can be
    changed while it runs, and a bad file changes nothing."""
    import openai  # two seconds, which every collection of tests would take

    engine, keys = await bench.active(), Path(bench.directory, "keys")
    url = f"http://127.0.0.1:{bench.port}/v1"

    async def ask(key):
        async with openai.AsyncOpenAI(base_url=url, api_key=key, max_retries=0) as client:
            await client.chat.completions.create(model="stub", messages=[])

    for key in ("first", "second"):
        await ask(key)
    assert "authorization" not in engine.requests[-1].headers
    for key in ("third", "firs", "firstsecond"):
        with pytest.raises(openai.AuthenticationError):
            await ask(key)
    client = await bench.client()
    client.send(b"POST / HTTP/1.1\r\nContent-Length: 10\r\nAuthorization: Basic x\r\n\r\n")
    answer = await client.answer()
    assert (answer.status, answer.error()["code"]) == (401, "invalid_api_key")

    keys.write_text("third\n")
    await ask("third")
    with pytest.raises(openai.AuthenticationError):
        await ask("first")
    keys.write_text("\n")
    assert bench.exchange.problem
    await ask("third")
    keys.write_text("fourth\n")
    assert bench.exchange.problem is None
    await ask("fourth")


@pytest.fixture
def authority(tmp_path):
    """It has issued the certificate of `test_tls`."""
    found = Authority(tmp_path)
    found.issue("first", file="pod")
    return found


@scene(
    tls_cert=lambda path: f"{path}/pod.pem", tls_key=lambda path: f"{path}/pod.key", sweep_s=0.01
)
async def test_tls(bench, authority):
    """Goal: a stream over TLS, plain HTTP gets nothing, and a renewed certificate is used."""
    await bench.active()

    async def ask():
        client = await bench.client(ssl=ssl.create_default_context(cafile=authority.path))
        client.ask(CHAT, STREAM)
        answer = await client.answer()
        assert answer.is_whole
        assert answer.body.endswith(b"data: [DONE]\n\n")
        return dict(each[0] for each in client.writer.get_extra_info("peercert")["subject"])

    assert await ask() == {"commonName": "first"}
    plain = await bench.asking("/v1/models")
    assert b"200" not in await plain.rest()
    authority.issue("renewed", file="pod")
    assert bench.exchange.problem is None
    assert await ask() == {"commonName": "renewed"}


@scene(access_log=True)
async def test_the_access_log_has_no_users_text(bench, caplog):
    """Goal: one line for each request, without bodies, queries or keys."""
    caplog.set_level(logging.INFO, logger="gateway.access")

    await bench.active()
    await bench.once(CHAT + "?secret=1", {"prompt": "secret"}, Authorization="Bearer secret")
    await bench.once("/understudy/secret")
    # On a busy machine the loop's debug mode warns of a step that took long.
    records = [each for each in caplog.records if each.name == "gateway.access"]
    answered, refused = [record.getMessage() for record in records]
    assert f'"POST {CHAT}" 200' in answered
    assert "engine engine-0, id " in answered
    assert refused.startswith("refused with 404")
    assert "secret" not in caplog.text
