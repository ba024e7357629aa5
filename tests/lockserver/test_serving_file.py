"""The serving file: who may join it, what a look at it shows, and that its length is the seal."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import pytest

from lockserver import serving
from lockserver.client import LockCallbacks, LockClient
from lockserver.core.names import ServingFile, WitnessState, new_incarnation
from lockserver.messages import GrantedMsg
from lockserver.serving import ServingSeat
from plumbing.errors import UnderstudyError
from tests.helpers import open_fds, room_for

if TYPE_CHECKING:
    from plumbing.wire.connection import Connection


@pytest.fixture
def made(tmp_path) -> tuple[str, ServingFile]:
    return serving.create(str(tmp_path), new_incarnation("engine-0"))


@contextlib.contextmanager
def seat_at(path: str, file: ServingFile) -> Iterator[ServingSeat]:
    seat = ServingSeat(path, file)
    try:
        yield seat
    finally:
        seat.close()


def test_file_is_held_while_joined_and_sealed_when_it_is_found_free(made):
    """Goal: seal, fence and re-grant in one. Method: join, try, leave, try; join again for the
    token that is over, and for the next one."""
    path, file = made
    assert serving.find(os.path.dirname(path), file.name.replace("serving_engine-0_", "engine-0-"))
    with seat_at(path, file) as seat:
        seat.join(3)
        assert serving.probe(path, file, 3) is WitnessState.HELD
        assert os.stat(path).st_size == 0
        seat.leave()
        assert serving.probe(path, file, 3) is WitnessState.FREE
        assert os.stat(path).st_size == 3
        with pytest.raises(UnderstudyError, match="token 3 is over") as over:
            seat.join(3)
        assert over.value.code == "serving.over"
        assert serving.probe(path, file, 2) is WitnessState.FREE
        assert os.stat(path).st_size == 3  # never taken back
        seat.join(4)
        assert serving.probe(path, file, 4) is WitnessState.HELD
    assert serving.probe(path, file, 4) is WitnessState.FREE


def test_only_the_file_that_was_made_is_joined_and_tried(made):
    """Goal: another file proves nothing, either way. Method: remove it; put a fifo in its
    place, and another file; put it back."""
    path, file = made
    with seat_at(path, file) as seat:
        os.rename(path, f"{path}.old")
        with pytest.raises(UnderstudyError, match="removed or replaced"):
            seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.UNPROVEN
        os.mkfifo(path)
        with pytest.raises(UnderstudyError, match="removed or replaced"):
            seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.UNPROVEN
        os.unlink(path)
        os.close(os.open(path, os.O_CREAT | os.O_EXCL))
        with pytest.raises(UnderstudyError, match="removed or replaced"):
            seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.UNPROVEN
        os.replace(f"{path}.old", path)
        seat.join(1)


def test_seat_is_below_what_is_opened_later_and_no_helper_inherits_it(made):
    """Goal: it is let go of after the device, and not kept by a helper. Method: numbers; a helper
    started while joined outlives the seat."""
    path, file = made
    with seat_at(path, file) as seat:
        device = os.open(os.devnull, os.O_RDONLY)
        seat.join(1)
        mine = [fd for fd, target in open_fds().items() if target == path]
        assert len(mine) == 1
        assert mine[0] < device
        os.close(device)
        # A process lets go of what exec closes just before its program begins: wait until it runs.
        running = "print(flush=True); input()"
        with subprocess.Popen(
            [sys.executable, "-c", running],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        ) as helper:
            assert helper.stdout is not None
            assert helper.stdout.readline() == b"\n"
            seat.leave()
            found = serving.probe(path, file, 1)
            helper.communicate(b"\n")
    assert found is WitnessState.FREE


def test_leaving_needs_no_descriptor_and_joining_without_one_fails_and_holds_nothing(made):
    """Goal: a shortage never keeps the file held. Method: leave, and join, with none left."""
    path, file = made
    with seat_at(path, file) as seat:
        seat.join(1)
        with room_for(0):
            seat.leave()
            with pytest.raises(OSError, match="Too many open files"):
                seat.join(1)
        assert serving.probe(path, file, 1) is WitnessState.FREE


def test_look_without_a_descriptor_shows_nothing(made):
    """Goal: a shortage of the server frees nothing. Method: look without a descriptor; then in
    the same directory at what cannot be tried."""
    path, file = made
    with room_for(0):
        assert serving.probe(path, file, 1) is WitnessState.UNSEEN
    assert os.stat(path).st_size == 0


def test_scan_names_what_is_held_and_seals_the_rest(tmp_path):
    """Goal: after a lost state. Method: one held, one free, one sealed higher, one foreign."""
    made = [serving.create(str(tmp_path), new_incarnation("engine-0")) for _ in range(3)]
    os.truncate(made[2][0], 7)
    os.mkdir(tmp_path / "serving_foreign")
    with seat_at(*made[0]) as seat:
        seat.join(2)
        held = {made[0][1].name, "serving_foreign"}
        assert serving.scan(str(tmp_path)) == (held, 7)
        assert serving.scan(str(tmp_path), seal_at=9) == (held, 7)
    assert [os.stat(path).st_size for path, _ in made] == [0, 9, 9]


def test_client_reports_no_grant_up_to_the_token_that_was_handed_over():
    """Goal: an engine never wakes for a term that is over. Method: its own grants from before and
    after, and another engine's."""
    heard: list[tuple[str, int]] = []
    callbacks = LockCallbacks(on_granted=lambda lock, who, token: heard.append((who, token)))
    own, other = new_incarnation("engine-0"), new_incarnation("engine-1")
    client = LockClient("nowhere", callbacks, engine="engine-0")
    client.set_want(own, "witness", ["active"], over={"active": 3})
    for who, token in ((own, 3), (other, 4), (own, 5)):
        grant = GrantedMsg("active", who.rpartition("-")[0], who, token)
        client.received(cast("Connection", None), grant, 0, [])
    assert heard == [(other, 4), (own, 5)]


def test_scan_seals_no_file_that_is_to_be_kept(tmp_path):
    """Goal: another model's holder, which may rest, wakes again under its token."""
    kept, other = (serving.create(str(tmp_path), new_incarnation("e")) for _ in range(2))
    assert serving.scan(str(tmp_path), seal_at=9, keep={kept[1].name}) == (set(), 0)
    assert (os.stat(kept[0]).st_size, os.stat(other[0]).st_size) == (0, 9)
