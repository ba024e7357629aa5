"""Survivors that are mad: a server that recovers is offered anything but what was committed.

A real epoch, its server killed and started again, and one good survivor who holds the epoch's file
and keeps quiet meanwhile. Whatever the mad ones offer, the server lives, publishes none of it, and
loses no descriptor; then the good survivor speaks, and the same bytes are committed again.
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
from msgspec import structs

from gms import messages as msg
from gms.client import Keeper, Reader
from plumbing.errors import UnderstudyError
from plumbing.wire.fds import OwnedFd, close_all
from tests.fuzz.streams import EXAMPLES, anything
from tests.gms.bench import IDENTITY, MIB, GmsProcess, hand_back_of
from tests.helpers import open_fds, until

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
        writer.plan(SLABS * MIB, MIB, slab_bytes=MIB)
        for index in range(SLABS):
            writer.place(f"t{index}", MIB, (MIB,), "uint8")
            writer.write(f"t{index}", bytes([index + 1]) * MIB)
        self.reader: Reader = writer.commit(IDENTITY)
        self.gms.kill()
        self.gms.start()
        until(lambda: self.gms.status()["state"] == "recovering", "the server to recover")
        until(lambda: self.gms.status()["unowned"][0]["holders"], "its first look at holders")
        self.fds = len(open_fds(self.gms.pid))

    def offer(self, kinds: list[str], changes: dict[str, Any], in_first: int) -> None:
        """Come back as a survivor with descriptors of `kinds`, the first in a frame alone."""
        reader = self.reader
        good = [OwnedFd(os.dup(fd)) for fd in reader.slab_fds()]
        fds = [MAD[k]() if k in MAD else good[i % SLABS].duplicate() for i, k in enumerate(kinds)]
        close_all(good)
        message = hand_back_of(reader, engine="mad", incarnation="m-1", **changes)
        message = structs.replace(message, more=1 if in_first else 0)
        with self.gms.client() as client, contextlib.suppress(UnderstudyError):
            if in_first:
                client.notify(message, fds[:in_first])
                client.request(msg.MoreMsg(), fds[in_first:])
            else:
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


@pytest.mark.parametrize("place", range(SLABS))
@pytest.mark.parametrize("kind", MAD)
def test_offer_with_one_descriptor_that_is_no_slab_is_refused(
    kind: str, place: int, recovering: Recovering
):
    """Every kind of descriptor that is not the committed memory, in every place."""
    kinds = ["good"] * SLABS
    kinds[place] = kind
    recovering.offer(kinds, {}, in_first=0)
    recovering.check()


WRONG = st.fixed_dictionaries(
    {},
    optional={
        "identity": st.just({"v": 2}) | st.dictionaries(st.text(max_size=4), anything, min_size=1),
        "manifest": st.binary(max_size=64),
        "layout_hash": st.text(min_size=1, max_size=64),
        "region": st.text(min_size=1, max_size=32),
        "slab_sizes": st.lists(st.integers(0, 2**40), max_size=5).map(tuple),
    },
).filter(bool)


def test_no_mad_offer_is_taken(recovering: Recovering):
    """Goal: an offer with anything wrong costs its sender only. Method: right and wrong fields,
    descriptors of any kind and number, in one frame or several."""

    @settings(max_examples=EXAMPLES // 20 or 60, deadline=None)
    @given(
        kinds=st.lists(st.sampled_from([*MAD, "good", "good", "good"]), max_size=6),
        changes=WRONG,
        in_first=st.integers(0, 3),
    )
    def run(kinds: list[str], changes: dict[str, Any], in_first: int) -> None:
        recovering.offer(kinds, dict(changes), in_first)
        recovering.check()

    run()
