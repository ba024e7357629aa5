"""Offload and restage with real servers: what is freed, what comes back, what dies meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gms import messages as msg
from gms.client import Keeper, Offloaded, Reader, release, weights
from gms.host_copy import CopyKeeper, make_copy
from gms.server.server import host_copy
from gms.status import status_of
from plumbing.errors import RemoteError, UnderstudyError
from tests.gms.bench import IDENTITY, MIB, GmsProcess, condemn, digested, inodes, kept
from tests.gms.kinds import host_only
from tests.helpers import until

SIZE = 3 * MIB


class Copies(CopyKeeper):
    """The keeper of the copies, in this process; counts those that it has had made."""

    def __init__(self, gms: GmsProcess) -> None:
        self.made: list[str] = []
        super().__init__(gms.directory, gms.device)

    def _make(self) -> Any:
        self.made.append(make_copy(self._directory, self._device))
        return SimpleNamespace(poll=lambda: 0)

    def settle(self) -> str:
        """Look until there is a digested copy; returns its epoch. The copy's server shows a digest
        before its thread has written it to the journal, which is what the device's server reads."""

        def digested() -> str | None:
            self.look()
            copy = status_of(self._directory, self._host, 5)
            if self._copy is not None and copy["digest"] == "pending":
                self._copy.client.notify(msg.DigestMsg(self._copy.digest()))  # likewise
            written = host_copy(self._directory, self._device)
            if written is None or written.digest is None or written.epoch != copy["epoch"]:
                return None
            return written.epoch

        return str(until(digested, "a digested copy"))


@pytest.fixture
def copies(gms: GmsProcess, host: GmsProcess) -> Iterator[Copies]:
    keeper = Copies(gms)
    yield keeper
    keeper.close()


def patterned(gms: GmsProcess, seed: int = 1, **more: Any) -> Reader:
    """Commit two tensors in slabs of their own, whose bytes depend on `seed`."""
    writer = gms.writer(**more)
    writer.plan(SIZE, slab_bytes=2 * MIB)
    for number, name in enumerate(("a", "b")):
        nbytes = (2 - number) * MIB
        writer.place(name, nbytes, (nbytes,), "uint8")
        writer.write(name, bytes([seed + number]) * nbytes)
    reader = writer.commit(more.get("identity", IDENTITY))
    # At once: a keeper computes it on a thread that a busy machine may starve.
    reader.client.notify(msg.DigestMsg(reader.digest()))
    reader.is_author = False
    return reader


def released(gms: GmsProcess, copies: Copies, reader: Reader) -> Offloaded:
    """Unmapped; the service has not been told yet."""
    keeper = Keeper(reader)
    keeper.start()
    digested(gms)
    copies.settle()
    return release(reader, keeper)


def away(gms: GmsProcess, copies: Copies, reader: Reader) -> Offloaded:
    """Released, its device freed: what a resting engine does."""
    gone = released(gms, copies, reader)
    assert gone.free() == reader.size_bytes
    return gone


def test_offloaded_weights_come_back_to_the_same_addresses_with_the_same_bytes(
    gms: GmsProcess, copies: Copies
):
    """Copy, release, free, restage: nothing is left on the device meanwhile; then the addresses,
    bytes, layout and digest are those of before, and it can be done again."""
    with patterned(gms) as reader:
        digest, address = reader.digest(), reader.address("b")
        for round_ in (1, 2):
            gone = away(gms, copies, reader)
            status = gms.status()
            assert (status["state"], status["unowned"], status["sessions"]) == ("offloaded", [], [])
            assert (status["committed_bytes"], status["releasing_bytes"]) == (0, 0)
            gone.restage(20)
            assert (reader.digest(), reader.address("b")) == (digest, address)
            assert reader.read("a")[:1] + reader.read("b")[-1:] == b"\1\2"
            status = gms.status()
            assert (status["state"], status["restages_total"]) == ("committed", round_)
            assert (status["digest"], status["offloaded"]) == (digest, None)
        assert len(copies.made) == 1, "an epoch cannot change, so one copy is enough"


@host_only
def test_second_engine_maps_what_the_first_has_restaged(gms: GmsProcess, copies: Copies):
    """The device is freed when the last engine lets go; the first to come back writes, the other
    one maps the very same memory."""
    with patterned(gms) as first, gms.reader(engine="engine-1", incarnation="i-1") as second:
        keeper = Keeper(first)
        keeper.start()
        digested(gms)
        copies.settle()
        one = release(first, keeper)
        with pytest.raises(RemoteError, match="still mapped by engine-1") as caught:
            one.free()
        assert caught.value.code == "gms.epoch_mapped"
        standby = Keeper(second)
        standby.start()
        two = release(second, standby)
        assert two.free() == second.size_bytes
        two.restage(20)
        one.restage(20)
        assert first.epoch == second.epoch
        assert inodes(first) == inodes(second)
        assert first.digest() == second.digest()
        assert gms.status()["restages_total"] == 1


@host_only
def test_lost_copy_costs_a_load(
    gms: GmsProcess, host: GmsProcess, copies: Copies, monkeypatch: pytest.MonkeyPatch
):
    """Everybody who had the copy is gone: the next engine writes, and then there is a new copy."""
    monkeypatch.setattr(weights, "COPY_BACK_S", 0.1)
    with patterned(gms) as reader:
        away(gms, copies, reader).close()
    copies.close()
    host.kill()
    host.start()
    assert gms.status()["state"] == "offloaded"
    with patterned(gms, seed=5) as again, kept(again):
        assert gms.status()["state"] == "committed"
        digested(gms)
        copies.settle()
        assert len(copies.made) == 2


@host_only
@pytest.mark.parametrize("asks_again", [True, False])
def test_device_server_that_dies_while_weights_leave_takes_their_copy(
    gms: GmsProcess, copies: Copies, asks_again: bool
):
    """SIGKILL when the only reader has unmapped them and has not said so: the copy of the lost
    bytes stands for them, whether the engine asks for their memory again or wants them back."""
    with patterned(gms) as reader:
        digest = reader.digest()
        gone = released(gms, copies, reader)
        gms.kill()
        gms.start()
        if asks_again:
            until(lambda: gms.status()["state"] == "offloaded", "the kernel to say that it is lost")
            assert gone.free() == reader.size_bytes
            gms.kill()
            gms.start()  # it is on disk
        gone.restage(20)
        assert reader.digest() == gms.status()["digest"] == digest
        assert gms.status()["restages_total"] == 1


@host_only
def test_service_that_dies_before_it_commits_what_comes_back_costs_another_copy(
    gms: GmsProcess, copies: Copies, monkeypatch: pytest.MonkeyPatch
):
    """Goal: an engine that wakes lives through a death of the memory service at any moment. Method:
    SIGKILL in place of the commit; the engine cannot tell whether the service received it."""
    requested = weights.Writer._request_commit

    def killed(writer: weights.Writer, commit: msg.CommitMsg) -> bool:
        monkeypatch.setattr(weights.Writer, "_request_commit", requested)
        gms.kill()
        gms.start()
        return False

    with patterned(gms) as reader:
        digest, address = reader.digest(), reader.address("b")
        gone = away(gms, copies, reader)
        monkeypatch.setattr(weights.Writer, "_request_commit", killed)
        gone.restage(20)
        assert (reader.digest(), reader.address("b")) == (digest, address)
        assert gms.status()["restages_total"] == 1


@host_only
def test_copy_of_other_bytes_is_replaced_and_never_stands_for_the_weights(
    gms: GmsProcess, host: GmsProcess, copies: Copies
):
    """The weights are condemned, and loaded with other bytes: not offloaded before the copy is of
    these; the keeper notices, and has one made."""
    with patterned(gms) as reader:
        stale = copies.settle()
        condemn(gms, reader)
    until(lambda: gms.status()["state"] == "empty", "its memory to be free")
    with patterned(gms, seed=9) as again, kept(again):
        digest = digested(gms)
    until(lambda: not gms.status()["sessions"], "the reader's end to be seen")
    with gms.client() as asker, pytest.raises(RemoteError, match="other bytes"):
        asker.request(msg.OffloadMsg())
    until(lambda: copies.settle() != stale, "another copy")
    until(lambda: host.status()["digest"] == digest, "its digest")


@host_only
def test_without_a_copy_nothing_is_released(gms: GmsProcess):
    """No server of copies, or none made yet: the engine keeps its weights and its keeper."""
    with patterned(gms) as reader, kept(reader) as keeper:
        with pytest.raises(UnderstudyError, match="no server of copies") as caught:
            release(reader, keeper)
        assert caught.value.code == "gms.no_copy"
        assert reader.read("a")[:1] == b"\1"
        assert keeper.state == "attached"


@host_only
def test_copy_that_only_its_server_has_does_not_stand_for_the_weights(
    gms: GmsProcess, copies: Copies
):
    """A server may die at any moment: somebody besides it must hold the copy."""
    with patterned(gms) as reader, kept(reader):
        digested(gms)
        copies.settle()
    copies.close()
    until(lambda: not gms.status()["sessions"], "the reader's end to be seen")
    with gms.client() as asker, pytest.raises(RemoteError, match="only its server has it"):
        asker.request(msg.OffloadMsg())


def test_keeper_lets_a_dropped_copy_go(gms: GmsProcess, host: GmsProcess, copies: Copies):
    """Goal: a model that ends gives its host memory back. Method: drop the weights, then their
    copy, which only the keeper reads."""
    with patterned(gms):
        copies.settle()
    for server in (gms, host):
        until(lambda server=server: len(server.status()["sessions"]) == (server is host), "readers")
        with server.client() as client:
            client.request(msg.DropMsg(even_if_mapped=server is host))

    def is_free() -> bool:
        copies.look()
        status = host.status()
        kinds = ("committed_bytes", "superseded_bytes", "releasing_bytes")
        return not any(status[kind] for kind in kinds)

    until(is_free, "the memory of the copy")
    assert len(copies.made) == 1
