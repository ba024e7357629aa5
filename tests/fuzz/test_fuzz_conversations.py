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
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gms import messages as msg
from gms import names
from gms.manifest import TensorRecord, encode, layout_hash
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.frames import encode_frame
from plumbing.wire.messages import Message
from tests.fuzz.streams import EXAMPLES
from tests.gms.bench import DEVICE, IDENTITY, GmsProcess
from tests.helpers import open_fds, until

EMPTY = encode([])
ONE = encode([TensorRecord("t", 0, 16, (4,), "float32")])
IDENTITIES = st.sampled_from([None, IDENTITY, {"model": "other"}])
EPOCHS = st.sampled_from(["0" * 32, "f" * 32, "x"])


def commit(identity: dict[str, Any], manifest: bytes, sizes: list[int]) -> msg.CommitMsg:
    return msg.CommitMsg(identity, manifest, layout_hash(sizes, manifest))


MESSAGES: st.SearchStrategy[Message] = st.one_of(
    st.builds(
        msg.AttachMsg,
        st.just("mad"),
        st.sampled_from(["m-1", "m-2"]),
        st.sampled_from(["rw", "ro", "rw_or_ro", "rw"]),
        IDENTITIES,
        wait_ms=st.sampled_from([0, 5, 60_000]),
        replace=st.booleans(),
    ),
    st.builds(msg.AllocateMsg, st.sampled_from([1, 4096, 1 << 30, 1 << 62])),
    st.builds(msg.ProgressMsg, st.integers(0, 9), st.integers(0, 9)),
    st.builds(
        commit,
        st.sampled_from([IDENTITY, {}]),
        st.sampled_from([EMPTY, ONE, b"", b"\x91"]),
        st.sampled_from([[], [4096], [1]]),
    ),
    st.builds(
        msg.HandBackMsg,
        st.just("mad"),
        st.just("m-1"),
        EPOCHS,
        st.sampled_from([(), (4096,), (1,) * 300]),
        epoch=st.builds(msg.HeldEpoch, st.booleans(), st.just(IDENTITY), st.just("0" * 64)),
        manifest=st.sampled_from([EMPTY, b"x"]),
        more=st.integers(0, 2),
    ),
    st.builds(msg.MoreMsg, st.sampled_from([b"", EMPTY])),
    st.builds(msg.CondemnMsg, st.sampled_from(["canary", "device_error", "x"]), st.just("why")),
    st.builds(msg.DigestMsg, st.sampled_from([None, "0" * 64])),
    st.builds(msg.DropMsg, st.none() | EPOCHS, st.booleans()),
    st.sampled_from([msg.VerifyMsg(), msg.StatusMsg(), msg.InspectMsg()]),
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
    path = names.socket_path(gms.directory, DEVICE)
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
        gms.load(mode="rw", replace=True).close()
        until(lambda: gms.status()["sessions"] == [], "every session to end")
        until(lambda: not gms.status()["unowned"], "what they left to be free")
        assert len(names.epochs_on_disk(gms.directory, DEVICE)) == 1
        before.append(len(open_fds(gms.pid)))

    run()
    until(lambda: len(open_fds(gms.pid)) <= min(before), "no descriptor to be lost")
    assert os.path.exists(path)
