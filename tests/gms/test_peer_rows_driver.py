"""Rows 4 and 5 of what the peer to beat lacks: driver errors cost one session, and slow driver
calls delay nobody who does not need them. The server's memory fails or blocks as it is told."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from gms.client import Reader, Writer
from plumbing.errors import RemoteError, UnderstudyError
from tests.gms.bench import IDENTITY, GmsProcess
from tests.gms.faulty import FaultyGms
from tests.helpers import open_fds, until

KINDS = ["driver", "oserror", "memory", "runtime"]


@pytest.fixture
def faulty(directory: str) -> Iterator[FaultyGms]:
    server = FaultyGms(directory).start()
    yield server
    server.stop()


def replacing(gms: GmsProcess) -> Writer:
    """A writer, beside whatever is still read of what was dropped."""
    gms.drop()
    return gms.writer(engine="engine-1")


def write_one(writer: Writer) -> Reader:
    for index in range(3):
        writer.plan(8192, slab_bytes=4096)
        writer.place(f"t{index}", 4096, (4096,), "uint8")
    return writer.commit(IDENTITY)


# ---------------------------------------------------------------------- row 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("call", "nth"), [("create", 1), ("create", 3), ("export", 2), ("seal", 1), ("seal", 3)]
)
def test_row_4_driver_error_costs_the_writer_only(
    faulty: FaultyGms, call: str, nth: int, kind: str
):
    """Fail the n-th driver call of a writer, in every way that a driver fails: that session ends
    with an error, what others read stays, and the next writer succeeds."""
    with faulty.load() as old:
        pid, fds = faulty.pid, len(open_fds(faulty.pid))
        faulty.memory.fail(call, nth, kind)
        with replacing(faulty) as writer, pytest.raises(UnderstudyError) as caught:
            write_one(writer)
        assert caught.value.code.startswith("gms.")
        assert old.read("t") == b"\7" * 64
        until(lambda: faulty.status()["staging_bytes"] == 0, "the failed load to be given up")
        until(lambda: len(open_fds(pid)) <= fds, "the descriptors to be as before")
        write_one(replacing(faulty)).close()
        assert faulty.status()["commits_total"] == 2


@pytest.mark.parametrize("kind", KINDS)
def test_row_4_driver_error_costs_the_reader_only(faulty: FaultyGms, kind: str):
    """Fail the export for one reader: it gets an error, the one beside it and the next do not."""
    with write_one(faulty.writer()) as old, faulty.reader() as beside:
        faulty.memory.fail("export", 2, kind)
        with pytest.raises(UnderstudyError):
            faulty.reader()
        with faulty.reader() as reader:
            assert reader.epoch == beside.epoch == old.epoch
        until(lambda: len(faulty.status()["sessions"]) == 2, "the failed reader to be gone")


@pytest.mark.parametrize("kind", KINDS)
def test_row_4_failing_release_loses_nothing_else(faulty: FaultyGms, kind: str):
    """Memory that the driver does not take back: the server continues to grant."""
    writer = replacing(faulty)
    writer.place("t", 4096, (4096,), "uint8")
    faulty.memory.fail("release", 1, kind)
    writer.close()
    with faulty.load() as reader:
        assert faulty.status()["epoch"] == reader.epoch


# ---------------------------------------------------------------------- row 5


def in_thread(*work: object) -> threading.Thread:
    thread = threading.Thread(target=lambda: [each() for each in work if callable(each)])
    thread.start()
    return thread


@pytest.mark.parametrize("call", ["create", "seal"])
def test_row_5_driver_call_that_blocks_delays_no_reader(faulty: FaultyGms, call: str):
    """A writer's driver call blocks for as long as the test likes: meanwhile status answers, and a
    newcomer is told what it waits for. Then the call goes on, and the writer succeeds."""
    with faulty.load() as old:
        writer = replacing(faulty)
        done: list[Reader] = []
        faulty.memory.block(call)
        thread = in_thread(lambda: done.append(write_one(writer)))
        faulty.memory.wait_until_blocked()
        assert old.read("t") == b"\7" * 64
        engines = [s["engine"] for s in faulty.status()["sessions"]]
        assert sorted(engines) == ["engine-0", "engine-1"]
        with pytest.raises(RemoteError, match=r"gms\.wait_timeout"):
            faulty.reader(engine="engine-2", wait_ms=0)
        assert not done, "the driver call is still blocked"
        faulty.memory.may_go_on.set()
        thread.join(20)
        assert faulty.status()["epoch"] == done[0].epoch
        done[0].close()


def test_row_5_blocked_release_delays_no_client(faulty: FaultyGms):
    """The memory of an engine that left is being freed, for as long as the test likes: meanwhile
    status answers, a reader attaches and a client that wants to write is told what it waits for;
    it is granted when the memory is free."""
    old = faulty.load()
    with faulty.reload(engine="engine-1") as new:
        faulty.memory.block("release")
        old.close()
        faulty.memory.wait_until_blocked()
        assert faulty.status()["epoch"] == new.epoch
        faulty.reader(engine="engine-2").close()
        faulty.drop()
        reasons: list[str] = []
        granted: list[Writer] = []

        def replace() -> None:
            granted.append(faulty.writer(on_wait=reasons.append, engine="engine-3"))

        thread = in_thread(replace)
        until(lambda: reasons, "the reason of the wait")
        assert "not free yet" in reasons[0]
        assert not granted
        faulty.memory.may_go_on.set()
        thread.join(20)
        assert granted
        granted[0].close()
