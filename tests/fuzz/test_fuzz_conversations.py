"""Conversations that no client of ours would hold, with a real server: well-formed messages of
every kind in any order, over two connections at once, without waiting for answers.

What is fuzzed is what is around the machine, whose order of things `tests/sim` tests:
frames, the driver's thread, descriptors, timers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms import messages as msg
from gms import names
from gms.client import Keeper, Reader
from gms.manifest import TensorRecord, encode
from plumbing.errors import UnderstudyError
from plumbing.pod.paths import gms_socket
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import Message
from tests.fuzz.streams import EXAMPLES, anything
from tests.gms.bench import DEVICE, IDENTITY, MIB, GmsProcess, hand_back_of
from tests.helpers import open_fds, until

EMPTY = encode([])
ONE = encode([TensorRecord("t", 0, 16, (4,), "float32")])
IDENTITIES = st.sampled_from([None, IDENTITY, {"model": "other"}])
EPOCHS = st.sampled_from(["0" * 32, "f" * 32, "x"])


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        msg.AttachMsg,
        st.just("mad"),
        st.sampled_from(["m-1", "m-2"]),
        st.sampled_from(["ro", "rw_or_ro"]),
        IDENTITIES,
        wait_ms=st.sampled_from([0, 5, 60_000]),
    ),
    st.builds(msg.AllocateMsg, st.sampled_from([1, 4096, 1 << 30, 1 << 62])),
    st.builds(msg.ProgressMsg, st.integers(0, 9), st.integers(0, 9)),
    st.builds(
        msg.CommitMsg,
        st.sampled_from([IDENTITY, {}]),
        st.sampled_from([EMPTY, ONE, b"", b"\x91"]),
    ),
    st.builds(
        msg.HandBackMsg,
        st.just("mad"),
        st.just("m-1"),
        EPOCHS,
        st.sampled_from([(), (4096,), (1,) * 300]),
        epoch=st.builds(msg.HeldEpoch, st.booleans(), st.just(IDENTITY)),
        manifest=st.sampled_from([EMPTY, b"x"]),
    ),
    st.just(msg.CondemnMsg("why")),
    st.builds(msg.DigestMsg, st.just("0" * 64)),
    st.builds(msg.DropMsg, st.none() | EPOCHS, st.booleans()),
    st.just(msg.StatusMsg()),
)
CONVERSATIONS = st.lists(st.tuples(st.booleans(), MESSAGES), min_size=1, max_size=12)


def drain(sock: socket.socket) -> None:
    """Read what there is, until the server closes or has no more to say for now."""
    sock.settimeout(0.01)
    with contextlib.suppress(TimeoutError, ConnectionResetError):
        while True:
            data, fds, _, _ = socket.recv_fds(sock, 65536, 253)
            close_all(OwnedFd(fd) for fd in fds)
            if not data:
                return


@pytest.fixture(scope="module")
def gms() -> Iterator[GmsProcess]:
    directory = tempfile.mkdtemp(prefix="gms-")
    server = GmsProcess(directory).start()
    yield server
    server.stop()
    shutil.rmtree(directory)


@pytest.mark.slow
def test_no_conversation_ends_a_server(gms: GmsProcess):
    """Goal: no order of good messages on connections that come and go ends the server, leaks a
    descriptor or an epoch's file, or keeps the next client from its weights."""
    path = gms_socket(gms.directory, DEVICE)
    before: list[int] = []

    @settings(max_examples=EXAMPLES // 20 or 100, deadline=None)
    @given(CONVERSATIONS)
    def run(said: list[tuple[bool, Message]]) -> None:
        with socket.socket(socket.AF_UNIX) as one, socket.socket(socket.AF_UNIX) as two:
            for sock in (one, two):
                sock.connect(path)
            for index, (is_first, message) in enumerate(said):
                payload = msg.CATALOGUE.encode(message, index + 1)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    (one if is_first else two).sendall(encode_frame(payload, 0))
            for sock in (one, two):
                drain(sock)
        status = gms.status()
        assert status["pid"] == gms.pid
        gms.reload().close()
        until(lambda: gms.status()["sessions"] == [], "every session to end")
        until(lambda: not gms.status()["unowned"], "what they left to be free")
        assert len(names.regions_on_disk(gms.directory, DEVICE, names.WEIGHTS)) == 1
        before.append(len(open_fds(gms.pid)))

    run()
    until(lambda: len(open_fds(gms.pid)) <= min(before), "no descriptor to be lost")
    assert os.path.exists(path)


SLABS = 3


def memfd(size_bytes: int, *, writable: bool) -> OwnedFd:
    fd = OwnedFd(os.memfd_create("mad"))
    os.ftruncate(fd.fileno(), size_bytes)
    if writable:
        return fd
    with fd:
        return OwnedFd(os.open(f"/proc/self/fd/{fd.fileno()}", os.O_RDONLY | os.O_CLOEXEC))


def one_end_of_a_pipe() -> OwnedFd:
    reading, writing = os.pipe()
    os.close(writing)
    return OwnedFd(reading)


MAD: dict[str, Callable[[], OwnedFd]] = {
    "pipe": one_end_of_a_pipe,
    "null": lambda: OwnedFd(os.open(os.devnull, os.O_RDWR)),
    "directory": lambda: OwnedFd(os.open("/", os.O_RDONLY)),
    "socket": lambda: OwnedFd(socket.socket(socket.AF_UNIX).detach()),
    "writable": lambda: memfd(MIB, writable=True),
    "not sealed": lambda: memfd(MIB, writable=False),
    "too short": lambda: memfd(4096, writable=False),
    "too long": lambda: memfd(2 * MIB, writable=False),
}


class Recovering:
    """A server that waits for its epoch, and the survivor that has it."""

    def __init__(self, directory: str) -> None:
        self.gms = GmsProcess(directory).start()
        writer = self.gms.writer()
        writer.plan(SLABS * MIB, slab_bytes=MIB)
        for index in range(SLABS):
            writer.place(f"t{index}", MIB, (MIB,), "uint8")
            writer.write(f"t{index}", bytes([index + 1]) * MIB)
        self.reader: Reader = writer.commit(IDENTITY)
        self.gms.kill()
        self.gms.start()
        until(lambda: self.gms.status()["state"] == "recovering", "the server to recover")
        until(lambda: self.gms.status()["unowned"][0]["holders"], "its first look at holders")
        self.fds = len(open_fds(self.gms.pid))

    def offer(self, kinds: list[str], changes: dict[str, Any]) -> None:
        """Come back as a survivor with descriptors of `kinds`."""
        reader = self.reader
        good = [OwnedFd(os.dup(fd)) for fd in reader.slab_fds()]
        fds = [MAD[k]() if k in MAD else good[i % SLABS].duplicate() for i, k in enumerate(kinds)]
        close_all(good)
        message = hand_back_of(reader, engine="mad", incarnation="m-1", **changes)
        with self.gms.client() as client, contextlib.suppress(UnderstudyError):
            client.request(message, fds)
            raise AssertionError(f"{kinds} with {sorted(changes)} was taken")

    def check(self) -> None:
        status = self.gms.status()
        assert (status["pid"], status["state"]) == (self.gms.pid, "recovering")

    def close(self) -> None:
        until(lambda: len(open_fds(self.gms.pid)) <= self.fds, "the server's descriptors")
        keeper = Keeper(self.reader)
        keeper.start()
        until(lambda: self.gms.status()["state"] == "committed", "the good survivor's offer")
        with self.gms.reader() as newcomer:
            assert [newcomer.read(f"t{index}")[-1] for index in range(SLABS)] == [1, 2, 3]
        keeper.close()
        self.reader.close()
        self.gms.stop()


@pytest.fixture(scope="module")
def recovering() -> Iterator[Recovering]:
    directory = tempfile.mkdtemp(prefix="gms-")
    made = Recovering(directory)
    yield made
    made.close()
    shutil.rmtree(directory)


WRONG = st.fixed_dictionaries(
    {},
    optional={
        "identity": st.just({"v": 2}) | st.dictionaries(st.text(max_size=4), anything, min_size=1),
        "manifest": st.binary(max_size=64),
        "region": st.text(min_size=1, max_size=32),
        "slab_sizes": st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    },
).filter(bool)


KINDS = st.lists(st.sampled_from([*MAD, "good", "good", "good"]), max_size=6)


@settings(max_examples=EXAMPLES // 20 or 60, deadline=None)
@given(kinds=KINDS, changes=WRONG)
def test_no_mad_offer_is_taken(recovering: Recovering, kinds: list[str], changes: dict[str, Any]):
    """Goal: an offer with anything wrong costs its sender only. Method: right and wrong fields,
    descriptors of any kind and number."""
    recovering.offer(kinds, dict(changes))
    recovering.check()
