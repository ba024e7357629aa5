"""A committed epoch survives real deaths, one after the other: servers, readers, bad clients.

Drawn from a seed that a failure prints (GMS_KILLS_SEED replays it; GMS_KILLS sets how many). A
server or a reader always holds the memory. When all of them are gone, so is the memory, as it
should be; that is another test.
"""

from __future__ import annotations

import os
import random
import shutil
import socket
import tempfile
from collections.abc import Iterator

import pytest

from plumbing.pod.paths import gms_socket
from plumbing.wire.frames import encode_frame
from tests.gms.bench import DEVICE, MIB, ClientProcess, GmsProcess
from tests.helpers import until

KILLS = int(os.environ.get("GMS_KILLS", "24"))
SEED = int(os.environ.get("GMS_KILLS_SEED", "0")) or random.randrange(1, 1 << 32)
READERS = 2


class Pod:
    """A server, two long-lived readers, and what was committed."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.numbers = iter(range(1, 1 << 30))
        self.gms = GmsProcess(directory, device_bytes=64 * MIB).start()
        with self.gms.load(3 * MIB) as first:
            self.epoch, self.digest = first.epoch, first.digest()
            self.inodes = {os.fstat(fd).st_ino for fd in first.slab_fds()}
            self.readers = [self.start_reader() for _ in range(READERS)]

    def start_reader(self) -> ClientProcess:
        reader = ClientProcess(self.directory, "ro", f"engine-{next(self.numbers)}")
        reader.expect("reader")
        assert reader.do("keep")["is"] == "keeping"
        return reader

    def kill_server(self, rng: random.Random) -> None:
        """Sometimes also its successor, before that has its memory back."""
        self.gms.kill()
        if rng.random() < 0.3:
            self.gms.start()
            self.gms.kill()
        self.gms.start()

    def kill_reader(self, rng: random.Random) -> None:
        self.readers.pop(rng.randrange(READERS)).kill()
        self.readers.append(self.start_reader())

    def kill_reader_and_server(self, rng: random.Random) -> None:
        """One survivor is left to hand everything back."""
        self.gms.kill()
        self.readers.pop(rng.randrange(READERS)).kill()
        self.gms.start()
        self.readers.append(self.start_reader())

    def send_garbage(self, rng: random.Random) -> None:
        """Bytes, and frames with surplus descriptors."""
        junk = rng.randbytes(rng.randrange(1, 400))
        if rng.random() < 0.5:
            junk = encode_frame(junk, 0, 1 << 20)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.connect(gms_socket(self.directory, DEVICE))
            sock.sendall(junk)

    def check(self) -> None:
        """A new client sees the same epoch in the same memory with the same bytes."""
        until(lambda: len(self.gms.status()["sessions"]) >= READERS, "the readers to be back")
        status = self.gms.status()
        assert (status["state"], status["epoch"]) == ("committed", self.epoch)
        with self.gms.reader(engine="engine-0", incarnation="newcomer") as newcomer:
            assert newcomer.epoch == self.epoch
            assert newcomer.digest() == self.digest
            assert {os.fstat(fd).st_ino for fd in newcomer.slab_fds()} == self.inodes

    def stop(self) -> None:
        for reader in self.readers:
            reader.kill()
        self.gms.stop()


@pytest.fixture
def pod() -> Iterator[Pod]:
    directory = tempfile.mkdtemp(prefix="gms-")
    running = Pod(directory)
    yield running
    running.stop()
    shutil.rmtree(directory)


def test_no_death_loses_or_alters_a_committed_epoch(pod: Pod):
    """Goal: no death loses or alters a committed epoch. Method: kill as the seed chooses,
    repeatedly; after each death a new client finds every byte."""
    rng = random.Random(SEED)
    print(f"GMS_KILLS_SEED={SEED}")
    deaths = [pod.kill_server, pod.kill_reader, pod.kill_reader_and_server]
    for _ in range(KILLS):
        rng.choice([*deaths, pod.kill_server, pod.send_garbage])(rng)
        pod.check()
