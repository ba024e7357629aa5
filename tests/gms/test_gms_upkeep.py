"""Condemn, drop, digest, verify: what happens to committed weights besides being read."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from gms import names
from gms import upkeep as operate
from gms.messages import DigestMsg
from plumbing.errors import WaitTimeoutError
from plumbing.pod.paths import gms_journal
from tests.gms.bench import (
    OTHER,
    GmsProcess,
    command,
    condemn,
    digested,
    inodes,
    journalled,
    kept,
)
from tests.gms.kinds import host_only
from tests.helpers import until


def test_writer_digests_what_it_committed_and_a_command_verifies_it(gms: GmsProcess):
    """Commit, keep, verify: the command reads the memory; the digest outlives the server."""
    with gms.load() as reader, kept(reader):
        digest = digested(gms)
        assert digest == reader.digest()
        gms.kill()
        gms.start()
        until(lambda: gms.status()["state"] == "committed", "the epoch to be back")
        code, document = command(gms, "verify")
        assert (code, document["result"]) == (0, "intact")
        found = document["devices"][0]
        assert (found["expected"], found["found"]) == (digest, digest)
        until(lambda: len(gms.status()["sessions"]) == 1, "the command to have left")


def test_verify_finds_bytes_that_are_not_what_was_written(gms: GmsProcess):
    """The writer's digest is another than that of the bytes: exit code 1, and it is an event."""
    with gms.load() as reader:
        reader.client.notify(DigestMsg("0" * 64))
        assert digested(gms) == "0" * 64
    code, document = command(gms, "verify")
    assert (code, document["result"]) == (1, "altered")


@pytest.fixture
def four(gms: GmsProcess) -> Iterator[list[GmsProcess]]:
    """HOST-0 and three more devices beside it."""
    more = [GmsProcess(gms.directory, device=f"HOST-{n}").start() for n in (1, 2, 3)]
    yield [gms, *more]
    for server in more:
        server.stop()


@host_only  # what becomes of several devices is all the same to it
def test_verify_reports_a_result_for_every_device(four: list[GmsProcess]):
    """Intact, empty, recovering and down: four results; each answer of a worse one is graver."""
    intact, _, recovering, down = four
    with intact.load() as reader, kept(reader), recovering.load(), down.load():
        digested(intact)
        recovering.kill()
        recovering.start()
        code, document = command(intact, "verify")
        results = {d["device_uuid"]: d["result"] for d in document["devices"]}
        assert results == {
            "HOST-0": "intact", "HOST-1": "empty", "HOST-2": "recovering", "HOST-3": "pending",
        }  # fmt: skip
        assert (code, document["result"]) == (4, "recovering")
        down.kill()
        code, document = command(intact, "verify")
        assert (code, document["result"]) == (3, "unreachable")
        assert document["devices"][0]["result"] == "intact"
        assert document["devices"][3]["error"]["message"].startswith("HOST-3: ")
        said = operate.render(document).splitlines()
        assert [line.split()[1].rstrip(":") for line in said] == sorted(results)
        code, sentence = command(recovering, "drop", "--yes", "--device", "HOST-2")
        assert (code, "HOST-2: " in sentence, "handed back" in sentence) == (4, True, True)


def test_stopped_server_is_neither_waited_for_nor_obeyed_later(
    gms: GmsProcess, monkeypatch: pytest.MonkeyPatch
):
    """SIGSTOP: verify reports unreachable, drop fails and is not carried out after SIGCONT."""
    monkeypatch.setattr(operate, "ANSWER_TIMEOUT_S", 0.2)
    with gms.load() as reader:
        os.kill(gms.pid, signal.SIGSTOP)
        assert operate.verify(gms.directory, None)["result"] == "unreachable"
        with pytest.raises(WaitTimeoutError, match=gms.device):
            operate.drop(gms.directory, None, epoch=None, even_if_mapped=True)
        os.kill(gms.pid, signal.SIGCONT)
        assert gms.status()["epoch"] == gms.status()["epoch"] == reader.epoch


def test_drop_names_the_readers_and_frees_an_unmapped_epoch(gms: GmsProcess):
    """Mapped: refused, unless that is meant. Not mapped: gone, and the next loads anew."""
    with gms.load() as reader:
        code, said = command(gms, "drop", "--yes")
        assert (code, "engine-0" in said) == (1, True)
        code, document = command(gms, "drop", "--yes", "--even-if-mapped", "--epoch", reader.epoch)
        assert code == 0
        assert document["devices"][0]["readers"][0].startswith("engine-0")
        status = gms.status()
        assert (status["state"], status["superseded_bytes"]) == ("empty", reader.size_bytes)
        assert reader.read("t") == b"\7" * 64
    gms.load(identity=OTHER).close()
    assert command(gms, "drop", "--yes", "--epoch", reader.epoch)[0] == 1, "that one is history"
    assert command(gms, "drop", "--yes")[0] == 0
    until(lambda: gms.status()["committed_bytes"] == 0, "the memory to be freed")


def test_after_a_condemnation_the_next_writer_loads_anew(gms: GmsProcess):
    """Another epoch, in other memory, for the next engine."""
    with gms.load() as reader:
        condemn(gms, reader)
        with gms.load(engine="engine-1", incarnation="i-1") as fresh:
            assert fresh.epoch != reader.epoch
            assert not set(inodes(fresh)) & set(inodes(reader))


@pytest.mark.parametrize("journal", ["as it was", "torn", "never written"])
def test_condemned_epoch_does_not_come_back_with_a_restart(gms: GmsProcess, journal: str):
    """Its survivors are kept as readers of history, whatever became of the journal."""
    path = gms_journal(gms.directory, gms.device)
    with gms.load() as reader:
        if journal == "never written":  # its place is taken while it is condemned
            os.rename(path, path + ".saved")
            os.mkdir(path)
        condemn(gms, reader)
        mark = names.region_path(gms.directory, gms.device, names.WEIGHTS, reader.epoch)
        until(lambda: os.stat(mark).st_size, "its file to be marked")
        gms.kill()
        if journal == "never written":
            os.rmdir(path)
            os.rename(path + ".saved", path)
        elif journal == "torn":
            with open(path, "r+b") as stream:
                stream.write(b"torn")
        gms.start()
        reader.rejoin(10)
        status = gms.status()
        assert (status["state"], status["superseded_bytes"]) == ("empty", reader.size_bytes)
        until(lambda: journalled(gms) is None, "the journal to say so, too")
