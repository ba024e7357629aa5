"""What a keeper and a session survive: no descriptors, a service that dies, hangs or talks at once,
a driver that fails. Method: real servers where they can be had to do it, else a scripted one."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import pytest

from gms import epoch_file, names
from gms import messages as msg
from gms.client import Reader
from plumbing.errors import UnderstudyError, UnreachableError
from plumbing.pod.paths import gms_socket
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import close_all
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import Message
from tests.gms.bench import IDENTITY, GmsProcess, is_committed_with, kept
from tests.gms.kinds import cuda_only, host_only, stand_in_only
from tests.gms.test_gms_recovery import crash_in_commit
from tests.helpers import open_fds, until


@stand_in_only
@cuda_only
def test_commit_in_doubt_outlives_a_driver_call_that_fails_once(
    gms: GmsProcess, monkeypatch: pytest.MonkeyPatch
):
    """The next server cannot take the memory at its first try: the writer reports its retry."""
    said: list[str] = []
    writer = gms.writer(on_wait=said.append)
    writer.place("t", 64, (64,), "uint8")
    crash_in_commit(gms, writer, after_journal=True)
    monkeypatch.setenv("STANDIN_FAIL", "cuMemImportFromShareableHandle:1:999")
    with writer.commit(IDENTITY):
        assert is_committed_with(gms, 1)
    assert "CUDA_ERROR_UNKNOWN" in str(said)


# ---------------------------------------------------------------------- what was reported


@pytest.mark.parametrize("server", ["stopped", "dead"])
def test_report_lost_with_the_server_is_repeated(gms: GmsProcess, server: str):
    """The server is stopped, so that it has not read the report when it is killed; or dead."""
    with gms.load() as reader, kept(reader) as keeper:
        if server == "stopped":
            os.kill(gms.pid, signal.SIGSTOP)
        else:
            gms.kill()
            until(lambda: keeper.state == "rejoining", "the death to be seen")
        keeper.report_canary_failure("other tokens")
        assert keeper.wait_until_reported(0) == (server == "stopped")
        gms.kill()
        gms.start()
        assert keeper.wait_until_reported(30)
        with gms.reader(engine="engine-1", incarnation="i-1") as other:
            other.client.notify(msg.CondemnMsg("other tokens, too"))
            until(lambda: gms.status()["condemnations_total"] == 1, "the epoch to be condemned")


# ---------------------------------------------------------------------- a service by script


@pytest.fixture
def listener(gms: GmsProcess) -> Iterator[socket.socket]:
    """Takes the server's place when `take_place` is called."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(30)
        yield sock


def take_place(gms: GmsProcess, listener: socket.socket) -> None:
    path = gms_socket(gms.directory, gms.device)
    gms.kill()
    os.unlink(path)
    listener.bind(path)
    listener.listen()


def next_peer(listener: socket.socket) -> tuple[socket.socket, BlockingClient, int]:
    """Whoever comes: its socket, a client over it, and the number of its `hand_back`."""
    sock, _ = listener.accept()
    peer = BlockingClient.from_socket(sock, msg.CATALOGUE)
    reply = peer.receive()
    close_all(reply.fds)
    assert isinstance(reply.message, msg.HandBackMsg)
    return sock, peer, reply.request_id


def frame(message: Message, request_id: int) -> bytes:
    payload = msg.CATALOGUE.encode(message, request_id)
    return encode_frame(payload, 0, msg.CATALOGUE.frame_bytes_max)


@host_only
def test_closing_a_keeper_ends_its_wait_for_an_answer(gms: GmsProcess, listener: socket.socket):
    """A service that never answers `hand_back`: the thread ends, and leaves no session."""
    with gms.load() as reader:
        take_place(gms, listener)
        before = set(open_fds())
        with kept(reader) as keeper:
            _, peer, _ = next_peer(listener)
            with peer:
                keeper.close()
                assert not keeper._thread.is_alive()
                with pytest.raises(UnreachableError, match=r"wire\.closed"):
                    peer.receive()
        assert set(open_fds()) <= before


@host_only
def test_closed_reader_does_not_become_a_session_again(gms: GmsProcess, listener: socket.socket):
    """It is closed while its `rejoin` is under way, which is answered afterwards."""
    reader = gms.load()
    take_place(gms, listener)
    raised: list[UnderstudyError] = []

    def rejoin() -> None:
        try:
            reader.rejoin(30)
        except UnderstudyError as error:
            raised.append(error)

    thread = threading.Thread(target=rejoin)
    thread.start()
    sock, peer, number = next_peer(listener)
    with peer:
        reader.close()
        sock.sendall(frame(msg.KeptMsg(reader.epoch), number))
        with pytest.raises(UnreachableError, match=r"wire\.closed"):
            peer.receive()
    thread.join()
    assert [error.code for error in raised] == ["wire.closed"]


# ---------------------------------------------------------------------- a driver that fails


def is_held(gms: GmsProcess, reader: Reader) -> bool:
    return epoch_file.is_held(
        names.region_path(gms.directory, gms.device, names.WEIGHTS, reader.epoch)
    )


def flocks(gms: GmsProcess, reader: Reader) -> list[int]:
    name = names.region_file(gms.device, names.WEIGHTS, reader.epoch)
    return [fd for fd, link in open_fds().items() if link.endswith(name)]


@stand_in_only
@cuda_only
@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuMemAddressFree"])
@pytest.mark.parametrize("how", ["close", "leave"])
def test_session_ends_although_the_driver_fails(
    gms: GmsProcess, monkeypatch: pytest.MonkeyPatch, call: str, how: str
):
    """The connection is closed in any case; the flock only if the memory was let go."""
    reader = gms.load()
    reservation = reader.attachment.range
    address = reservation.address
    monkeypatch.setenv("STANDIN_FAIL", f"{call}:1:999")
    with contextlib.suppress(UnderstudyError):
        reader.close() if how == "close" else reader.leave().close()
    until(lambda: not gms.status()["sessions"], "the session to end")
    assert is_held(gms, reader) == (call != "cuMemAddressFree")
    with contextlib.suppress(UnderstudyError):  # addresses where something is mapped stay ours
        reader.close()
    assert is_held(gms, reader) == (call != "cuMemAddressFree"), "closing again changes nothing"
    for fd in flocks(gms, reader):
        os.close(fd)
    if call == "cuMemUnmap":
        reader.attachment.memory.driver.call("MemUnmap", address, reader.size_bytes)
