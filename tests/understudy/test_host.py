"""The memory of a pod's weights as processes hold it: real memfds in real processes."""

from __future__ import annotations

import mmap
import os

from understudy.host import slabs_of

MIB = 1 << 20


def sizes() -> list[int]:
    return [each.size_bytes for each in slabs_of(os.getpid()).values()]


def test_slab_that_is_open_or_only_mapped_counts_and_no_other_memory():
    """Goal: memory lives on without a descriptor. Method: a slab, a memfd of somebody else and one
    of a KV pool; map the slab, close it, unmap it."""
    held, names = sizes(), ("understudy-0123abcd-0", "other", "understudy_kv-0123abcd-1")
    fd, *others = (os.memfd_create(name) for name in names)
    for each in (fd, *others):
        os.write(each, bytes(MIB))
    assert sizes() == [*held, MIB]
    mapping = mmap.mmap(fd, MIB)
    assert sizes() == [*held, MIB]
    for each in (fd, *others):
        os.close(each)
    assert sizes() == [*held, MIB]
    mapping.close()
    assert sizes() == held
