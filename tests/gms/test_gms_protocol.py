"""The wire side of a device's server: frames of an attachment, sizes, bad input, two servers."""

from __future__ import annotations

import contextlib
import os
import socket
from typing import Any

import pytest

from gms import messages as msg
from gms.client import Reader
from gms.manifest import SLABS_MAX
from gms.vmm.host import HostMemory
from plumbing.errors import ProtocolError
from plumbing.pod.paths import gms_socket
from plumbing.wire.blocking import BlockingClient, Reply
from plumbing.wire.fds import OwnedFd
from plumbing.wire.messages import Message
from tests.gms.bench import DEVICE, IDENTITY, MIB, GmsProcess
from tests.gms.faulty import FaultyGms
from tests.helpers import open_fds, until

PAGE = 4096


def commit_pages(gms: GmsProcess, count: int) -> Reader:
    """An epoch of `count` allocations of a page, with a tensor in each."""
    writer = gms.writer()
    writer.plan(count * PAGE, slab_bytes=PAGE)
    for index in range(count):
        writer.place(f"t{index}", PAGE, (PAGE,), "uint8")
    return writer.commit(IDENTITY)


@pytest.mark.parametrize("count", [1, SLABS_MAX])
def test_row_9_attaching_is_one_request_and_one_frame_of_allocations(
    directory: str, monkeypatch: pytest.MonkeyPatch, count: int
):
    """Every frame that a reader sends and receives, whatever the number of allocations."""
    gms = GmsProcess(directory).start()
    request, receive = BlockingClient.request, BlockingClient.receive
    asked: list[str] = []
    fds: list[int] = []

    def counted(reply: Reply) -> Reply:
        fds.append(len(reply.fds))
        return reply

    def requested(client: BlockingClient, message: Message, *more: Any, **options: Any) -> Reply:
        asked.append(message.TYPE)
        return counted(request(client, message, *more, **options))

    try:
        with commit_pages(gms, count) as committed:
            assert len(committed.slab_sizes) == count
            with monkeypatch.context() as patch:
                patch.setattr(BlockingClient, "request", requested)
                patch.setattr(BlockingClient, "receive", lambda *args: counted(receive(*args)))
                seen = gms.reader()
            assert len(seen.tensors) == count
            assert bytes(seen.view(f"t{count - 1}")) == bytes(PAGE)
            seen.close()
        assert asked == ["attach"]
        assert fds == [count]
    finally:
        gms.stop()


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
            writer.plan(nbytes, slab_bytes=nbytes)
            writer.place(f"t{index}", nbytes, (nbytes,), "uint8")
        with writer.commit(IDENTITY) as committed:
            assert all(size % server_granularity == 0 for size in committed.slab_sizes)
            assert all(size < 2 * MIB for size in committed.slab_sizes)
            for memory in (HostMemory(), CoarseMemory()):
                with gms.reader(memory=memory) as reader:
                    assert reader.slab_sizes == committed.slab_sizes
                    assert mapped_bytes(reader.address("t0")) == list(reader.slab_sizes)
                    assert reader.layout == committed.layout
    finally:
        gms.stop()


def attach(mode: str = "rw_or_ro") -> msg.AttachMsg:
    return msg.AttachMsg("e", "i", mode, identity=IDENTITY, wait_ms=20_000)


def test_bad_requests_cost_their_sender_only(gms: GmsProcess):
    """Every wrong word gets its code; the server serves on and has lost no descriptor."""
    with gms.load():
        until(lambda: len(gms.status()["sessions"]) == 1, "the writer to be a reader")
        fds = len(open_fds(gms.pid))
        for code, *messages in (
            ("wire.bad_field", msg.AttachMsg("e", "i", "write")),
            ("wire.bad_field", msg.AttachMsg("e" * 200, "i", "ro")),
            ("wire.bad_field", msg.AttachMsg("e", "i", "ro", wait_ms=-1)),
            ("gms.bad_identity", msg.AttachMsg("e", "i", "ro", {"x": b"1"})),
            ("gms.not_attached", msg.AllocateMsg(4096)),
            ("gms.unexpected_message", attach("ro"), attach("ro")),
            ("gms.unexpected_message", attach("ro"), msg.AllocateMsg(1)),
            ("gms.unexpected_message", msg.CommittedMsg("x")),
        ):
            assert gms.refusal(*messages).code == code
        status = gms.status()
        assert len(status["sessions"]) == 1
        assert status["protocol_errors_total"] == 5  # the wire's own refusals are not ours
        until(lambda: len(open_fds(gms.pid)) <= fds, "the descriptors to be as before")
        gms.reader().close()


def test_allocation_without_the_flock_is_refused(gms: GmsProcess):
    """A writer that does not hold the epoch's file gets no memory: nothing would say it is used."""
    assert gms.refusal(attach(), msg.AllocateMsg(4096)).code == "gms.not_held"
    until(lambda: gms.status()["state"] == "empty", "the staging epoch to be lost")


@pytest.mark.parametrize(
    ("epoch", "slabs"), [("0" * 32, 2), ("../x", 1)], ids=["too few slabs", "a path"]
)
def test_client_refuses_a_server_that_answers_wrongly(directory: str, epoch: str, slabs: int):
    """An answer lacks descriptors, or the epoch's id is a path: the server's fault; the client
    opens nothing and leaks nothing."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(gms_socket(directory, DEVICE))
    listener.listen()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            sock, _ = listener.accept()
            client = BlockingClient.from_socket(sock, msg.CATALOGUE)
            request = client.receive()
            fd = OwnedFd(os.memfd_create("slab"))
            answer = msg.EpochAttachedMsg(epoch, {}, (PAGE,) * slabs, b"")
            client.notify(answer, [fd], request_id=request.request_id)
            client.notify(msg.WaitingMsg("r", "m"), request_id=request.request_id)
        os._exit(0)
    listener.close()
    before = open_fds()
    with pytest.raises(ProtocolError, match=r"gms\.unexpected_answer"):
        GmsProcess(directory).reader()
    assert open_fds() == before
    os.waitpid(pid, 0)
