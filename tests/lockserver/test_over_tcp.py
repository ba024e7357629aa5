"""The lock over TCP: engines, flags and certificates of a real server."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner, Result

from lockserver import messages
from lockserver.cli import main
from plumbing.errors import UnreachableError
from plumbing.wire.tcp import Security, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import auntil, free_port
from tests.lockserver.engines import Engine
from tests.lockserver.processes import run_command_of
from tests.plumbing.wire.certificates import Authority, shared, tls_flags
from tests.plumbing.wire.echo import CATALOGUE
from tests.plumbing.wire.tcp_rig import Client, answers, serving

LEASE_MS, MARGIN_MS, SILENT_MS = 2000, 500, 1000  # how late a busy machine may be


@pytest.fixture
def authority(tmp_path):
    return Authority(tmp_path)


@pytest.fixture
def address():
    return f"tcp://127.0.0.1:{free_port()}"


@pytest.fixture
def server(start_server, address, authority):
    """A lock server that engines reach with certificates."""
    times = {"lease": LEASE_MS, "lease-margin": MARGIN_MS, "silent": SILENT_MS}
    flags = [f"--{name}-ms={value}" for name, value in times.items()]
    return start_server("--listen", address, *tls_flags(authority.issue("lockserver")), *flags)


@pytest.fixture
def remote(server, pod_dir, address, authority):
    """`remote(name)`: an engine that reaches the server over TCP; no timer ends this process."""
    ender = SimpleNamespace(arm=lambda at_ms: None, disarm=lambda: None)
    how = {"address": address, "security": authority.issue("engine"), "ender": ender}
    return lambda name="engine-0": Engine(pod_dir, name, **how)


@pytest.mark.slow
async def test_engine_over_tcp_holds_while_it_is_heard_and_its_lease_is_shown(server, remote):
    """Goal: a grant outlasts a cut connection, and is replaced once the lease has expired. Method:
    cut, and reconnect; then leave without a word, while another one waits."""
    async with remote() as holder, remote("engine-1") as other:
        assert await holder.hold() == 1
        await other.stand_by()
        connects = holder.connects
        holder.client.conn.close("cut")
        await auntil(lambda: holder.connects > connects, "it to be back")
        await auntil(lambda: server.lock()["state"] == "held", "its lock to be held")
        assert holder.client.lease["lease_ms"] == LEASE_MS
        first = server.status()["supervisors"][0]
        assert 0 < first["lease_left_ms"] <= LEASE_MS + MARGIN_MS
        assert first["peer"]
        _, page = await asyncio.to_thread(server.get, "/metrics")
        left = next(k for k in page.splitlines() if "lock_lease_remaining_seconds{" in k)
        assert 0 < float(left.rpartition(" ")[2]) <= (LEASE_MS + MARGIN_MS) / 1000
        await holder.disconnect()
        assert await other.granted() == 2


async def test_over_tcp_only_the_messages_of_engines_are_answered(server, address, authority):
    """Goal: only the Unix socket accepts requests that change or show the lock."""
    client, security = Client(), authority.issue("engine")
    conn = await connect_tcp(TcpAddress.parse(address), messages.CATALOGUE, client, security)
    conn.send(messages.StatusMsg(), 1)
    await auntil(lambda: client.reasons, "the end")
    assert [each.code for each in client.received_messages] == ["lock.unexpected_message"]


@pytest.mark.slow
async def test_engines_on_this_host_and_on_others_share_one_lock(server, pod_dir, remote):
    """Goal: one machine for both. Method: an engine with a witness holds the lock; one over TCP
    waits, is sent the holder, and is granted the lock when the witness is free; then the other way
    round."""
    async with remote() as far, Engine(pod_dir, "engine-1") as local:
        assert await local.hold() == 1
        await far.stand_by()
        local.reap()
        local.relent()
        assert await far.granted() == 2
        await local.stand_by()
        await auntil(lambda: server.lock()["waiters"], "the engine to wait")
        far.relent()
        assert await local.granted() == 3


NO_FILES = [f"--tls-{each}=/no/such/file" for each in ("cert", "key", "ca")]


@pytest.mark.parametrize(
    ("code", "flags"),
    [
        ("wire.incomplete_security", ("--listen", "tcp://0.0.0.0:9402")),
        ("wire.incomplete_security", ("--listen", "tcp://127.0.0.1:9402")),
        ("wire.incomplete_security", ("--listen", "tcp://localhost:9402")),
        ("wire.bad_address", ("--listen", "0.0.0.0:9402")),
        ("wire.incomplete_security", ("--listen", "tcp://0.0.0.0:9402", "--tls-cert", "x")),
        (
            "lock.service_over_tcp",
            ("--listen", "tcp://127.0.0.1:9402", "--service", "active=127.0.0.1:8000"),
        ),
        ("wire.file", ("--listen", "tcp://127.0.0.1:0", *NO_FILES)),
        ("config.bad_value", ("--lease-ms", "5")),
    ],
)
def test_serve_refuses_conflicting_flags_with_one_clear_error(pod_dir, code, flags):
    """Goal: a lock is never left open to the network by mistake. Method: each flag or pair of flags
    that is refused."""
    ran = run_command_of(pod_dir, "serve", "--http-port=0", *flags)
    assert ran.returncode == 2, ran.stderr
    assert code in ran.stderr
    assert "Traceback" not in ran.stderr


def test_serve_over_tcp_status_shows_address_and_security(start_server, pod_dir):
    """Goal: operators can read what to configure on members. Method: the document and the text."""
    address = f"tcp://127.0.0.1:{free_port()}"
    server = start_server("--listen", address, *tls_flags(shared()), "--lease-ms", "7000")
    tcp = server.status()["tcp"]
    assert (tcp["address"], tcp["secured"], tcp["lease_ms"]) == (address, True, 7000)
    text = run_command_of(pod_dir, "status").stdout
    assert f"{address}  0 connections" in text


def certificates(place: Path, *hosts: str) -> Result:
    flags = [f"--host={host}" for host in hosts]
    return CliRunner().invoke(main, ["certificates", str(place), *flags])


def pair(place: Path) -> Security:
    return Security(str(place / "tls.crt"), str(place / "tls.key"), str(place / "ca.crt"))


async def test_both_pairs_connect_and_an_engine_cannot_pose_as_the_server(tmp_path: Path):
    """Goal: the command is enough for mutual TLS. Method: its files, a server that engines reach by
    one of its names, by a name that it does not have, and a server with the engines' pair."""
    done = certificates(tmp_path / "lock", "localhost", "127.0.0.1", "::1")
    assert done.exit_code == 0, done.output
    ours, theirs = pair(tmp_path / "lock/lockserver"), pair(tmp_path / "lock/engine")
    assert certificates(tmp_path / "named", "elsewhere.example").exit_code == 0
    async with serving(ours) as (_, address):
        assert await answers(address, theirs)
        assert await answers(TcpAddress("localhost", address.port), theirs)
        stranger = pair(tmp_path / "named/engine")
        with pytest.raises(UnreachableError):
            await connect_tcp(address, CATALOGUE, Client(), stranger)
        with pytest.raises(UnreachableError):
            await connect_tcp(address, CATALOGUE, Client(), ours)  # a server is no engine
    for posing, engine in (
        (theirs, theirs),
        (pair(tmp_path / "named/lockserver"), pair(tmp_path / "named/engine")),
    ):
        async with serving(posing) as (_, address):
            with pytest.raises(UnreachableError):
                await connect_tcp(address, CATALOGUE, Client(), engine)


def test_keys_are_private_and_none_is_overwritten(tmp_path: Path):
    """Goal: a second call destroys no authority. Method: the modes; call it again."""
    place = tmp_path / "lock"
    done = certificates(place)
    assert sorted(done.stdout.split()) == sorted(str(p) for p in place.rglob("*") if p.is_file())
    keys = [place / "ca.key", place / "lockserver/tls.key", place / "engine/tls.key"]
    assert {stat.S_IMODE(os.stat(key).st_mode) for key in keys} == {0o600}
    before = [key.read_bytes() for key in keys]
    again = certificates(place)
    assert (again.exit_code, "lock.certificates_exist" in again.stderr) == (2, True)
    assert [key.read_bytes() for key in keys] == before


@pytest.mark.parametrize("host", ["", "a,DNS:b", "a,b", "a\nb", "[::1]"])
def test_what_is_no_host_is_refused_and_nothing_is_written(tmp_path: Path, host: str):
    done = certificates(tmp_path / "lock", host)
    assert (done.exit_code, "wire.bad_address" in done.stderr) == (2, True)
    assert not (tmp_path / "lock").exists()


def test_machine_without_openssl_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = certificates(tmp_path / "lock")
    assert (done.exit_code, "lock.no_openssl" in done.stderr) == (2, True)
