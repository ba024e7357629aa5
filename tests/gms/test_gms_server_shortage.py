"""A device's server without a descriptor left, and clients without.

Method: a real server whose RLIMIT_NOFILE is lowered below every free number, over connections that
exist; then it is raised again. Who asked gets an error with a code and the limit to raise, nobody
else notices, nothing is lost, and with room everything goes on by itself.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest

from gms import messages as msg
from gms.client import Reader
from plumbing.errors import RemoteError, UnderstudyError
from plumbing.wire.blocking import BlockingClient
from tests.gms.bench import GmsProcess
from tests.helpers import descriptors_below, open_fds, room_for, until


def status(client: BlockingClient) -> dict[str, Any]:
    """Over a connection that exists."""
    reply = client.request(msg.StatusMsg()).message
    assert isinstance(reply, msg.StatusReplyMsg)
    return reply.document


def is_whole(gms: GmsProcess, reader: Reader) -> bool:
    """The reader's epoch is served to a newcomer, and nothing is wrong."""
    with gms.reader(engine="engine-8", incarnation="i-8") as newcomer:
        assert newcomer.epoch == reader.epoch
        assert newcomer.read("t") == reader.read("t")
    return gms.status()["problem"] is None


def test_attaching_reader_is_told_what_is_short_and_others_are_served(gms: GmsProcess):
    """No copy of a slab can be made for it: its connection ends with the limit, no other does."""
    with gms.load() as reader, gms.client() as watching, gms.client() as late:
        for client in (watching, late):
            status(client)
        with descriptors_below(3, gms.pid):
            with pytest.raises(RemoteError, match="limit of 3 open files; raise") as caught:
                late.request(msg.AttachMsg("e", "i", "ro"))
            assert caught.value.code == "gms.server_exhausted"
            until(lambda: len(status(watching)["sessions"]) == 1, "its session to end")
        until(lambda: is_whole(gms, reader), "the server to be whole")


def test_attach_without_descriptors_leaks_nothing(gms: GmsProcess):
    """Whichever descriptor is the last that it gets: an error, and with enough it succeeds."""
    with gms.load() as reader:
        before = set(open_fds())
        for count in itertools.count():
            with contextlib.suppress(UnderstudyError, OSError), room_for(count):
                gms.reader().close()
                break
            assert set(open_fds()) <= before
        assert count > 3
        until(lambda: is_whole(gms, reader), "the server to be whole")
