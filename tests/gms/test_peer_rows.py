"""What the peer to beat lacks, row by row (the numbers are those of the facts sheet's section on
it), each as a test that fails on the peer's behaviour: real servers, real clients, SIGKILL.

Rows 4 and 5, driver errors and slow driver calls, are in `test_peer_rows_driver.py`; row 7, tensors
left unbound, is in `tests/engine/reference/test_checkpoint.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engine.backends.reference.checkpoint import identity, open_checkpoint
from gms import names
from gms.client import Reader
from gms.server import journal
from gms.vmm.host import HostMemory
from plumbing.errors import RemoteError
from tests.engine.reference.support import copy_of
from tests.gms.bench import DEVICE, IDENTITY, MIB, ClientProcess, GmsProcess
from tests.gms.counting_proxy import counting_proxy
from tests.gms.faulty import FaultyGms
from tests.helpers import until

Start = Callable[..., ClientProcess]
PAGE = 4096


def journalled(gms: GmsProcess) -> str | None:
    record = journal.peek(names.journal_path(gms.directory, gms.device))
    return record.epoch if record else None


# ---------------------------------------------------------------------- row 1


@pytest.mark.parametrize("mode", ["rw_or_ro", "rw"])
def test_row_1_queued_client_that_dies_is_dropped_at_once_and_never_granted(
    gms: GmsProcess, client: Start, mode: str
):
    """SIGKILL a client that queues for RW: it leaves the queue while the writer still writes, and
    when that one leaves, the memory is nobody's: the next who asks has it at once."""
    writer = gms.writer()
    waiter = client(mode, engine="engine-1")
    waiter.expect("waiting")
    assert [w["engine"] for w in gms.status()["waiting"]] == ["engine-1"]
    waiter.kill()
    until(lambda: not gms.status()["waiting"], "the dead client to leave the queue")
    assert gms.status()["state"] == "staging", "the writer did not notice"
    writer.close()
    until(lambda: gms.status()["state"] == "empty", "the writer's memory to be free")
    assert gms.status()["sessions"] == []
    gms.load(wait_s=20).close()


def test_row_1_queued_client_that_dies_never_wipes_what_is_committed_meanwhile(
    gms: GmsProcess, client: Start
):
    """The same where it queues to replace: the weights that are committed after its death stay."""
    writer = gms.writer()
    waiter = client("rw+replace", engine="engine-1")
    waiter.expect("waiting")
    waiter.kill()
    until(lambda: not gms.status()["waiting"], "the dead client to leave the queue")
    writer.place("t", 4, (4,), "uint8")
    with writer.commit(IDENTITY) as committed, gms.reader() as reader:
        assert reader.epoch == committed.epoch
        assert gms.status()["epoch"] == committed.epoch
        assert gms.status()["staging_bytes"] == 0


# ---------------------------------------------------------------------- row 2


def test_row_2_rw_connect_frees_nothing_that_is_committed(gms: GmsProcess, client: Start):
    """Plain RW on committed weights is refused; RW to replace leaves them, and readers attach,
    until the moment of the new commit. A writer that dies before it has changed nothing."""
    old = gms.load()
    with pytest.raises(RemoteError, match=r"gms\.already_committed"):
        gms.open("rw")
    doomed = client("rw+replace", engine="engine-1")
    doomed.expect("writer")
    doomed.do("place 4")
    newcomer = client("ro", engine="engine-2")
    newcomer.expect("reader")
    assert newcomer.do("read")["first"] == 7
    assert gms.status()["epoch"] == journalled(gms) == old.epoch
    doomed.kill()
    until(lambda: gms.status()["staging_bytes"] == 0, "the dead writer's memory to be given up")
    assert gms.status()["epoch"] == journalled(gms) == old.epoch
    writer = gms.writer(mode="rw", replace=True, engine="engine-3")
    writer.place("t", 8, (8,), "uint8")
    with gms.reader(engine="engine-4") as late:
        assert late.epoch == old.epoch, "until the commit, what is committed is the old epoch"
        with writer.commit(IDENTITY) as new:
            assert gms.status()["epoch"] == journalled(gms) == new.epoch
            assert late.read("t") == b"\7" * 64
            assert newcomer.do("read")["first"] == 7
    old.close()


def test_row_2_where_two_copies_do_not_fit_a_mapped_epoch_stays(gms: GmsProcess):
    """The stated case: the new copy does not fit beside the old. While a process maps the old one,
    the writer fails with the reader's name, and the old epoch stays as it was."""
    with gms.load(40 * MIB, engine="engine-7") as old:
        writer = gms.writer(mode="rw", replace=True, engine="engine-1")
        with pytest.raises(RemoteError, match="engine-7"):
            writer.place("t", 40 * MIB, (40 * MIB,), "uint8")
        writer.close()
        until(lambda: gms.status()["staging_bytes"] == 0, "the writer to be gone")
        assert gms.status()["epoch"] == journalled(gms) == old.epoch
        assert old.read("t")[-1] == 7


def test_row_2_where_two_copies_do_not_fit_an_unmapped_epoch_makes_room(gms: GmsProcess):
    """The same without a process mapping it, and with replace: it is freed when the slab needs its
    room, not when the writer connects."""
    old = gms.load(40 * MIB)
    old.close()
    until(lambda: gms.status()["sessions"] == [], "the reader to leave")
    writer = gms.writer(mode="rw", replace=True, engine="engine-1")
    assert gms.status()["epoch"] == old.epoch, "connecting freed nothing"
    writer.place("t", 40 * MIB, (40 * MIB,), "uint8")
    assert journalled(gms) is None
    with writer.commit(IDENTITY) as new:
        assert gms.status()["epoch"] == journalled(gms) == new.epoch


# ---------------------------------------------------------------------- row 3


def test_row_3_commit_leaves_no_gap_for_a_queued_writer(gms: GmsProcess, client: Start):
    """Commit with two writers in the queue: the committer reads on in the same session, on the
    same socket; who asked for RW or RO reads the same epoch, who asked for RW is told that there
    is something now. Nobody writes."""
    writer = gms.writer()
    either = client("rw_or_ro", engine="engine-1")
    either.expect("waiting")
    strict = client("rw", engine="engine-2")
    strict.expect("waiting")
    writer.place("t", 4, (4,), "uint8")
    writer.write("t", b"\7" * 4)
    socket_before, address = writer.fileno(), writer.place("u", 4, (4,), "uint8")
    since = gms.status()["sessions"][0]
    with writer.commit(IDENTITY) as reader:
        assert reader.fileno() == socket_before
        assert reader.address("u") == address
        assert either.expect("reader")["epoch"] == reader.epoch
        assert strict.expect("refused")["code"] == "gms.already_committed"
        assert either.do("read")["first"] == 7
        status = gms.status()
        assert status["commits_total"] == 1
        assert status["staging_bytes"] == status["superseded_bytes"] == 0
        found = {s["engine"]: s["pid"] for s in status["sessions"]}
        assert set(found) == {"engine-0", "engine-1"}
        assert found["engine-0"] == since["pid"]


# ---------------------------------------------------------------------- row 6


def test_row_6_another_fine_tune_of_the_same_shapes_is_refused(gms: GmsProcess, tmp_path: Path):
    """Two checkpoints with equal headers and one byte of one tensor different: the layouts are
    equal, the identities are not, and the error names the field."""
    base = copy_of("tied-f32", tmp_path / "base")
    tuned = copy_of("tied-f32", tmp_path / "tuned")
    shard = Path(tuned) / "model.safetensors"
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    mine, other = ({**identity(str(path)), "model": "same"} for path in (base, tuned))
    shapes = [[(t.name, t.shape) for t in open_checkpoint(str(p)).tensors] for p in (base, tuned)]
    assert shapes[0] == shapes[1]
    with gms.load(identity=mine):
        with pytest.raises(RemoteError, match=r"gms\.identity_mismatch") as caught:
            gms.reader(identity=other)
        assert caught.value.details["field"] == "shards.model.safetensors.sample"
        assert "shards.model.safetensors.sample is" in caught.value.message
        gms.reader(identity=mine).close()


# ---------------------------------------------------------------------- row 9


def commit_pages(gms: GmsProcess, count: int) -> Reader:
    """An epoch of `count` allocations of a page, with a tensor in each."""
    writer = gms.writer()
    writer.plan(count * PAGE, PAGE, slab_bytes=PAGE)
    for index in range(count):
        writer.place(f"t{index}", PAGE, (PAGE,), "uint8")
    return writer.commit(IDENTITY)


@pytest.mark.parametrize(("count", "frames"), [(1, 1), (250, 1), (251, 2), (1000, 4)])
def test_row_9_attaching_is_one_request_and_a_frame_per_250_allocations(
    directory: str, count: int, frames: int
):
    """A proxy counts every frame between a client and the server: one request whatever the number
    of allocations, ceil(n / 250) frames of descriptors in answer, and not one per tensor."""
    gms = FaultyGms(directory).start()
    try:
        with commit_pages(gms, count) as committed:
            assert len(committed.slab_sizes) == count
            with counting_proxy(directory, DEVICE) as proxy:
                seen = GmsProcess(proxy.directory).reader()
                assert len(seen.tensors) == count
                assert bytes(seen.view(f"t{count - 1}")) == bytes(PAGE)
                seen.close()
            assert dict(proxy.asked) == {"attach": 1}
            assert sum(proxy.answered.values()) == frames
            assert proxy.answered["attached"] == 1
            assert sum(proxy.fds) == count
            assert max(proxy.fds) <= 250
    finally:
        gms.stop()


# ---------------------------------------------------------------------- row 10


class CoarseMemory(HostMemory):
    """A client whose own driver would have chosen larger pieces."""

    granularity_bytes = 2 * MIB


def mapped_bytes(address: int) -> list[int]:
    """The sizes of the mappings of this process from `address` on that lie side by side."""
    sizes = []
    with open("/proc/self/maps", encoding="ascii") as maps:
        for line in maps:
            first, last = (int(word, 16) for word in line.split()[0].split("-"))
            if first == address and "memfd:" in line:
                sizes.append(last - first)
                address = last
    return sizes


@pytest.mark.parametrize("server_granularity", [PAGE, 64 * 1024])
def test_row_10_sizes_are_the_servers_whatever_the_importers_granularity(
    directory: str, server_granularity: int
):
    """The writer asks for a number of bytes, the server says what it made, importers map that and
    nothing else: writer and importers with other granularities than the server's agree with it."""
    gms = FaultyGms(directory, granularity_bytes=server_granularity).start()
    try:
        writer = gms.writer(memory=CoarseMemory())
        for index, nbytes in enumerate((100, 70_000)):
            writer.plan(nbytes, nbytes, slab_bytes=nbytes)
            writer.place(f"t{index}", nbytes, (nbytes,), "uint8")
        with writer.commit(IDENTITY) as committed:
            assert all(size % server_granularity == 0 for size in committed.slab_sizes)
            assert all(size < 2 * MIB for size in committed.slab_sizes)
            for memory in (HostMemory(), CoarseMemory()):
                with gms.reader(memory=memory) as reader:
                    assert reader.slab_sizes == committed.slab_sizes
                    assert mapped_bytes(reader.address("t0")) == list(reader.slab_sizes)
                    assert reader.layout_hash == committed.layout_hash
    finally:
        gms.stop()
