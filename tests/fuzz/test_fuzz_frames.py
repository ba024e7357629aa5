"""The decoder under arbitrary input: the framer and the catalogues, then a real server's socket.

`make fuzz` runs longer.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine import messages as engine_messages
from gms import messages as gms_messages
from lockserver import messages as lock_messages
from plumbing.errors import ProtocolError
from plumbing.pod.messages import StatusMsg, StatusReplyMsg
from plumbing.pod.paths import KV_SLAB_PREFIX, gms_socket
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import FrameDecoder
from plumbing.wire.limits import FRAME_BYTES_MAX
from plumbing.wire.messages import Catalogue, fault_of
from tests.fuzz.streams import EXAMPLES, frame, replayed, scripts
from tests.gms.bench import DEVICE, IDENTITY, GmsProcess
from tests.helpers import open_fds, until

CATALOGUES = {
    "gms": gms_messages.CATALOGUE,
    "lockserver": lock_messages.CATALOGUE,
    "engine": engine_messages.CONTROL,
    "channel": engine_messages.CHANNEL,
}
GMS = gms_messages.CATALOGUE

in_memory = settings(max_examples=EXAMPLES or 300, deadline=None)
on_a_server = settings(
    max_examples=EXAMPLES // 10 or 150,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


def some_fds(count: int) -> list[OwnedFd]:
    return [OwnedFd(os.memfd_create("fuzz")) for _ in range(count)]


def decode(script: bytes, catalogue: Catalogue, step: int) -> None:
    """Feed `script` in pieces of `step` bytes; only a ProtocolError may come, and no leak."""
    before = len(open_fds())
    decoder = FrameDecoder(catalogue.frame_bytes_max)
    fds = some_fds(script[0] if script else 0)
    stream = script[1:]
    try:
        for at in range(0, len(stream), step):
            frames = decoder.receive(stream[at : at + step], fds)
            fds = []
            for found in frames:
                close_all(found.fds)
                with contextlib.suppress(ProtocolError):
                    catalogue.decode(found.payload, len(found.fds))
    except ProtocolError as error:
        catalogue.encode(fault_of(error))  # it can be said to the peer
    finally:
        close_all(fds)
        decoder.close()
    assert len(open_fds()) == before


@pytest.mark.parametrize("script", replayed(GMS))
@pytest.mark.parametrize("name", CATALOGUES)
def test_known_script_is_decoded_or_refused(script: bytes, name: str):
    """Replay every script, whole and byte by byte."""
    for step in (1, 7, len(script)):
        decode(script, CATALOGUES[name], step)


@pytest.mark.parametrize("name", CATALOGUES)
def test_any_script_is_decoded_or_refused(name: str):
    """Goal: whatever arrives, in whatever pieces, raises nothing but ProtocolError and leaks no
    descriptor. Method: mutated frames of the catalogue itself."""

    @in_memory
    @given(script=scripts(CATALOGUES[name]), step=st.integers(1, 300))
    def run(script: bytes, step: int) -> None:
        decode(script, CATALOGUES[name], step)

    run()


# ---------------------------------------------------------------------- a real server


class Target:
    """One device's server with a committed epoch, a reader and a good client beside the bad."""

    def __init__(self, directory: str) -> None:
        self.gms = GmsProcess(directory).start()
        self.reader = self.gms.load()
        self.good = self.gms.client()
        self.path = gms_socket(directory, DEVICE)
        self.epoch = self.reader.epoch
        self.check()
        self.fds = self.held_fds()

    def send(self, script: bytes) -> None:
        """Send `script`, say nothing more, and read until the server closes."""
        fds = some_fds(script[0] if script else 0)
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(20)
            sock.connect(self.path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                socket.send_fds(sock, [script[1:]], [fd.fileno() for fd in fds])
                sock.shutdown(socket.SHUT_WR)
            close_all(fds)
            with contextlib.suppress(ConnectionResetError):
                while True:
                    data, sent, _, _ = socket.recv_fds(sock, 65536, 253)
                    close_all(OwnedFd(fd) for fd in sent)
                    if not data:
                        return

    def check(self) -> None:
        """The server lives, answers others, and what is committed is there."""
        answer = self.good.request(StatusMsg()).message
        assert isinstance(answer, StatusReplyMsg)
        status = answer.document
        assert status["pid"] == self.gms.pid
        assert status["epoch"] == self.epoch
        assert bytes(self.reader.view("t")) == b"\7" * 64

    def held_fds(self) -> int:
        """But for KV memory, which a valid claim makes: it outlives its connection."""
        return sum(KV_SLAB_PREFIX not in link for link in open_fds(self.gms.pid).values())

    def close(self) -> None:
        until(lambda: self.held_fds() <= self.fds, "the server's descriptors")
        self.gms.reader(identity=IDENTITY).close()
        self.good.close()
        self.reader.close()
        self.gms.stop()


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    directory = tempfile.mkdtemp(prefix="gms-")
    made = Target(directory)
    yield made
    made.close()
    shutil.rmtree(directory)


@pytest.mark.parametrize("script", replayed(GMS))
def test_server_survives_every_known_script(script: bytes, target: Target):
    """Send it to a real server: that lives and serves others."""
    target.send(script)
    target.check()


@pytest.mark.slow
@on_a_server
@given(script=scripts(GMS))
def test_server_survives_any_script(target: Target, script: bytes):
    """Goal: bad input costs its sender only. Method: mutated frames over the socket; after each
    the server answers others, its epoch as before; at the end it has lost no descriptor."""
    target.send(script)
    target.check()


def test_server_survives_frames_at_the_limits(target: Target):
    """The largest frame that is allowed, one byte more, and the largest quoted in an error."""
    for size in (FRAME_BYTES_MAX, GMS.frame_bytes_max - 64, GMS.frame_bytes_max + 1):
        target.send(b"\0" + frame(bytes(size)))
        target.send(b"\0" + frame(b"\x82\xa2id\x01\xa4type\xdb" + size.to_bytes(4, "big"), 0, size))
        target.check()
    large = GMS.frame_bytes_max - 64
    text = b"\xdb" + (large - 20).to_bytes(4, "big") + b"x" * (large - 20)
    target.send(b"\0" + frame(b"\x82\xa2id\x01\xa4type" + text))
    target.send(b"\0" + frame(b"\x83\xa2id\x01\xa4type\xa5hello" + text + b"\x01"))
    target.check()
