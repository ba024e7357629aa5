"""`lockserver certificates`: what it writes lets engines in, and nobody else."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from lockserver.cli import main
from plumbing.errors import UnreachableError
from plumbing.wire.tcp import Security, connect_tcp
from plumbing.wire.tcp_address import TcpAddress
from tests.plumbing.wire.echo import CATALOGUE
from tests.plumbing.wire.tcp_rig import Client, answers, serving


def certificates(place: Path, *hosts: str) -> Result:
    flags = [f"--host={host}" for host in hosts]
    return CliRunner().invoke(main, ["certificates", str(place), *flags])


def pair(place: Path) -> Security:
    return Security(str(place / "tls.crt"), str(place / "tls.key"), str(place / "ca.crt"))


def test_both_pairs_connect_and_an_engine_cannot_pose_as_the_server(tmp_path: Path):
    """Goal: the command is enough for mutual TLS. Method: its files, a server that engines reach by
    one of its names, by a name that it does not have, and a server with the engines' pair."""
    done = certificates(tmp_path / "lock", "localhost", "127.0.0.1", "::1")
    assert done.exit_code == 0, done.output
    ours, theirs = pair(tmp_path / "lock/lockserver"), pair(tmp_path / "lock/engine")
    assert certificates(tmp_path / "named", "elsewhere.example").exit_code == 0

    async def main() -> None:
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

    asyncio.run(main())


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


@pytest.mark.parametrize("host", ["", "a,DNS:b", "10.0.0.256", "a\nb", "[::1]"])
def test_what_is_no_host_is_refused_and_nothing_is_written(tmp_path: Path, host: str):
    done = certificates(tmp_path / "lock", host)
    assert (done.exit_code, "wire.bad_address" in done.stderr) == (2, True)
    assert not (tmp_path / "lock").exists()


def test_machine_without_openssl_is_told_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = certificates(tmp_path / "lock")
    assert (done.exit_code, "lock.no_openssl" in done.stderr) == (2, True)


def test_directory_is_required_but_not_to_print_the_settings():
    """Goal: the settings of every command can be printed. Method: both, without a directory."""
    assert CliRunner().invoke(main, ["certificates", "--print-config", "--json"]).exit_code == 0
    done = CliRunner().invoke(main, ["certificates"])
    assert (done.exit_code, "lock.no_directory" in done.stderr) == (2, True)
