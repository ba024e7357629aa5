"""Writers and readers against a real server: grants, deaths, commits, a writer that hangs.

Rows are those of the facts sheet on the peer to beat: each such test fails on its behaviour. Rows 4
and 5 are in `test_peer_rows_driver.py`, 9 and 10 in `test_gms_protocol.py`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engine.backends.reference.checkpoint import identity, open_checkpoint
from plumbing.errors import RemoteError, UnderstudyError
from tests.engine.reference.support import copy_of
from tests.gms.bench import IDENTITY, ClientProcess, GmsProcess, journalled
from tests.helpers import until

Start = Callable[..., ClientProcess]


def test_session_ends_with_its_process_even_if_a_child_keeps_the_socket(
    gms: GmsProcess, client: Start
):
    """A forked child keeps connection and memory: the session ends, the memory is not reused."""
    writer = client(engine="engine-0")
    writer.expect("writer")
    writer.do("place 8")
    child = writer.do("fork")["pid"]
    writer.kill()
    try:
        status = until(
            lambda: (s := gms.status())["unowned"] and s["unowned"][0]["holders"] and s,
            "the child to be named as the holder",
        )
        assert status["sessions"] == []
        assert status["unowned"][0]["holders"] == [child]
        waiter = client(engine="engine-1")
        assert "not free yet" in waiter.expect("waiting")["reason"]
    finally:
        os.kill(child, signal.SIGKILL)
    waiter.expect("writer")


def test_tied_and_strided_tensors_are_published_as_they_lie(gms: GmsProcess):
    """A transposed tensor keeps its strides and a tied one its bytes: one place, two names."""
    with gms.writer() as writer:
        writer.place("scales", 24, (2, 3), "float32", (1, 2))
        writer.alias("tied", "scales")
        writer.write("scales", bytes(range(24)))
        assert writer.address("tied") == writer.address("scales")
        with pytest.raises(AssertionError, match="placed before"):
            writer.alias("tied", "scales")
        with writer.commit(IDENTITY), gms.reader() as reader:
            assert reader.tensors["scales"].strides == (1, 2)
            assert reader.tensors["tied"].offset == reader.tensors["scales"].offset
            assert reader.read("tied") == bytes(range(24))


# ---------------------------------------------------------------------- rows of the facts sheet


def test_row_2_lost_writer_loses_its_staging_epoch_only(gms: GmsProcess, client: Start):
    """Who may write reads what is committed. Once that is dropped a writer that dies has changed
    nothing for those who still read it, and neither has the next one's commit."""
    old = gms.load()
    with gms.open(engine="engine-1") as late:
        assert gms.status()["epoch"] == journalled(gms) == late.epoch == old.epoch
        gms.drop()
        doomed = client("rw_or_ro", engine="engine-2")
        doomed.expect("writer")
        doomed.do("place 4")
        assert late.read("t") == b"\7" * 64
        doomed.kill()
        until(lambda: gms.status()["staging_bytes"] == 0, "the dead writer's memory to be given up")
        with gms.load(128, engine="engine-3") as new:
            assert gms.status()["epoch"] == journalled(gms) == new.epoch
            assert late.read("t") == old.read("t") == b"\7" * 64
    old.close()


def test_row_3_commit_leaves_no_gap_for_a_queued_writer(gms: GmsProcess, client: Start):
    """Commit with a writer in the queue: the committer reads on in the same session, on the same
    socket, and the other one reads the same epoch. Nobody writes."""
    writer = gms.writer()
    either = client("rw_or_ro", engine="engine-1")
    either.expect("waiting")
    writer.place("t", 4, (4,), "uint8")
    writer.write("t", b"\7" * 4)
    socket_before, address = writer.client.fileno(), writer.place("u", 4, (4,), "uint8")
    since = gms.status()["sessions"][0]
    with writer.commit(IDENTITY) as reader:
        assert reader.client.fileno() == socket_before
        assert reader.address("u") == address
        assert either.expect("reader")["epoch"] == reader.epoch
        assert either.do("read")["first"] == 7
        status = gms.status()
        assert status["commits_total"] == 1
        assert status["staging_bytes"] == status["superseded_bytes"] == 0
        found = {s["engine"]: s["pid"] for s in status["sessions"]}
        assert set(found) == {"engine-0", "engine-1"}
        assert found["engine-0"] == since["pid"]


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


# ---------------------------------------------------------------------- a writer that hangs

STALL_S = 2.0  # on a busy machine, too, longer than 4 MiB take


@pytest.fixture
def hasty(directory: str, device: str) -> Iterator[GmsProcess]:
    """A server that soon gives a writer up."""
    server = GmsProcess(directory, device=device, stall_s=STALL_S).start()
    yield server
    server.stop()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_writer_that_hangs_is_dropped_and_named_until_it_is_gone(
    hasty: GmsProcess, client: Start, end: signal.Signals
):
    """SIGSTOP a writer that has memory: its session ends at the deadline, but it may still touch
    what it maps, so the next writer waits and is told for whom. Killed, or awake and hearing that
    it was dropped, it lets go: RW is granted at once, with no second copy in between."""
    hung = client(engine="engine-0")
    hung.expect("writer")
    hung.do("place 4")
    os.kill(hung.pid, signal.SIGSTOP)  # before anything slow: it must report in time until now
    waiter = client(engine="engine-1")
    try:
        until(lambda: not hasty.status()["sessions"], "the writer to be given up")
        unowned = until(
            lambda: (found := hasty.status()["unowned"])[0]["holders"] and found, "its name"
        )
        assert unowned[0]["phase"] == "releasing"
        assert hung.pid in unowned[0]["holders"]
        (waiting,) = until(lambda: hasty.status()["waiting"], "the next writer to wait")
        assert waiting["engine"] == "engine-1"
    finally:
        os.kill(hung.pid, end)
    if end is signal.SIGCONT:
        hung.do("close")
    waiter.expect("writer")


def test_remap_onto_another_layout_is_an_error(gms: GmsProcess):
    """While it was unmapped, another layout of the same identity was committed: stale, fatal."""
    gms.load().close()
    with gms.reader() as reader:
        reader.leave().close()
        gms.reload(128).close()
        with pytest.raises(UnderstudyError, match=r"gms\.stale_layout"):
            reader.remap(20, reader)
