"""The physical memory of a pod's weights: real memfds in real processes."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from understudy.drill.machine import roots_of
from understudy.host import physical_bytes
from understudy.status.gather import Pids

MIB = 1 << 20


@contextmanager
def slab(size_bytes: int, name: str = "understudy-0123abcd-0") -> Iterator[int]:
    """A memfd that is called like one of the memory service's, every byte of it there."""
    fd = os.memfd_create(name)
    try:
        os.write(fd, bytes(size_bytes))
        yield fd
    finally:
        os.close(fd)


@pytest.fixture
def held() -> int:
    """What earlier tests of this process have left for the garbage collector."""
    return physical_bytes([os.getpid()])


def test_slab_counts_once_however_many_hold_it(held: int):
    """Goal: shared is not doubled. Method: one slab here and in a child, another only here, and a
    memfd of somebody else and one of a KV pool."""
    with (
        slab(MIB) as one,
        slab(2 * MIB, "understudy-0123abcd-1"),
        slab(MIB, "other"),
        slab(MIB, "understudy_kv-0123abcd-1"),
    ):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1, pass_fds=[one])
        with child:
            assert physical_bytes([os.getpid(), child.pid]) == held + 3 * MIB
            assert physical_bytes([child.pid]) == MIB
            child.communicate(b"\n")


def test_slab_that_is_only_mapped_counts(held: int):
    """Goal: memory lives on without a descriptor. Method: map it, close it, unmap it."""
    with slab(MIB) as fd:
        mapping = mmap.mmap(fd, MIB)
        assert physical_bytes([os.getpid()]) == held + MIB
    assert physical_bytes([os.getpid()]) == held + MIB
    mapping.close()
    assert physical_bytes([os.getpid()]) == held


def test_roots_are_the_supervisors_that_are_here():
    """Goal: engines and memory servers, restarted ones too. Method: this process as a server."""
    pids = Pids(lockserver=4, gms={"HOST-0": os.getpid()}, engines={"engine-0": 17})
    assert roots_of(pids) == [17, os.getppid()]
