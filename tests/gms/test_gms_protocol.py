"""The wire side of a device's server: frames of an attachment, bad input, two servers."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from gms import epoch_file, names
from gms import messages as msg
from gms.manifest import TensorRecord, WeightsManifest, encode, layout_hash
from plumbing.errors import ProtocolError, RemoteError
from plumbing.wire.blocking import BlockingClient
from plumbing.wire.fds import OwnedFd, close_all
from plumbing.wire.messages import Message
from tests.gms.bench import DEVICE, IDENTITY, MIB, GmsProcess
from tests.gms.kinds import host_only
from tests.helpers import open_fds, until

PAGE = 4096


def attach(mode: str = "rw_or_ro") -> msg.AttachMsg:
    return msg.AttachMsg("e", "i", mode, identity=IDENTITY, wait_ms=20_000)


def commit_slabs(gms: GmsProcess, client: BlockingClient, count: int) -> OwnedFd:
    """Commit an epoch of `count` slabs, as small as can be, with plain messages; its flock."""
    writing = client.request(attach()).message
    assert isinstance(writing, msg.WritingMsg)
    step = writing.granularity_bytes
    held = epoch_file.join(os.path.join(gms.directory, writing.epoch_file))
    for slab in range(count):
        reply = client.request(msg.AllocateMsg(1))
        assert isinstance(reply.message, msg.AllocatedMsg)
        assert (reply.message.slab, reply.message.size_bytes) == (slab, step)
        close_all(reply.fds)
    records = [TensorRecord(f"t{n}", n * step, step, (step,), "uint8") for n in range(count)]
    manifest = encode(records)
    hashed = layout_hash([step] * count, manifest)
    reply = client.request(msg.CommitMsg(IDENTITY, manifest, hashed))
    assert isinstance(reply.message, msg.CommittedMsg)
    return held


@pytest.fixture
def roomy(directory: str, device: str) -> Iterator[GmsProcess]:
    """A server with room for many slabs of any granularity."""
    server = GmsProcess(directory, device_bytes=2048 * MIB, device=device).start()
    yield server
    server.stop()


@pytest.mark.parametrize(("count", "frames"), [(1, 1), (250, 1), (251, 2), (600, 3)])
def test_attach_is_one_request_and_one_frame_per_250_slabs(
    roomy: GmsProcess, count: int, frames: int
):
    """Count the answers to one attach: 250 slabs come in one frame, more in as many as needed."""
    gms = roomy
    with gms.client() as writer, commit_slabs(gms, writer, count):
        with gms.client() as client:
            replies = [client.request(attach("ro"))]
            first = replies[0].message
            assert isinstance(first, msg.EpochAttachedMsg)
            assert len(first.slab_sizes) == len(WeightsManifest(first.manifest)) == count
            while sum(len(reply.fds) for reply in replies) < count:
                replies.append(client.receive())
            assert len(replies) == frames
            assert [reply.request_id for reply in replies] == [1] * frames
            close_all(fd for reply in replies for fd in reply.fds)
        with gms.reader() as reader:
            assert len(reader.slab_fds()) == count
            assert reader.read(f"t{count - 1}") == bytes(reader.slab_sizes[0])


@host_only  # the stand-in needs a descriptor of its own for each handle
def test_client_makes_room_for_the_descriptors_that_it_is_sent(roomy: GmsProcess):
    """A process that may open 400 attaches 600 slabs: the limit is raised, and nothing is lost."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with roomy.client() as writer, commit_slabs(roomy, writer, 600):
        resource.setrlimit(resource.RLIMIT_NOFILE, (400, hard))
        try:
            with roomy.reader() as reader:
                assert len(reader.slab_fds()) == 600
                assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] == hard
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def fault_of(gms: GmsProcess, *messages: Message) -> str:
    """The code of the error that the last of `messages` gets."""
    with gms.client() as client:
        for message in messages:
            try:
                close_all(client.request(message).fds)
            except RemoteError as error:
                return error.code
    raise AssertionError("no error came")


def test_bad_requests_cost_their_sender_only(gms: GmsProcess):
    """Every wrong word gets its code; the server serves on and has lost no descriptor."""
    with gms.load():
        until(lambda: len(gms.status()["sessions"]) == 1, "the writer to be a reader")
        fds = len(open_fds(gms.pid))
        assert fault_of(gms, msg.AttachMsg("e", "i", "write")) == "gms.bad_mode"
        assert fault_of(gms, msg.AttachMsg("e" * 200, "i", "ro")) == "wire.bad_field"
        assert fault_of(gms, msg.AttachMsg("e", "i", "ro", wait_ms=-1)) == "wire.bad_field"
        assert fault_of(gms, msg.AttachMsg("e", "i", "ro", {"x": b"1"})) == "gms.bad_identity"
        assert fault_of(gms, msg.AllocateMsg(4096)) == "gms.not_attached"
        assert fault_of(gms, attach("ro"), attach("ro")) == "gms.unexpected_message"
        assert fault_of(gms, attach("ro"), msg.AllocateMsg(1)) == "gms.unexpected_message"
        assert fault_of(gms, msg.CommittedMsg("x")) == "gms.unexpected_message"
        status = gms.status()
        assert len(status["sessions"]) == 1
        assert status["protocol_errors_total"] == 6  # the wire's own refusals are not ours
        until(lambda: len(open_fds(gms.pid)) <= fds, "the descriptors to be as before")
        gms.reader().close()


def test_allocation_without_the_flock_is_refused(gms: GmsProcess):
    """A writer that does not hold the epoch's file gets no memory: nothing would say it is used."""
    assert fault_of(gms, attach(), msg.AllocateMsg(4096)) == "gms.epoch_not_held"
    until(lambda: gms.status()["state"] == "empty", "the staging epoch to be lost")


def test_impossible_manifest_is_refused(gms: GmsProcess):
    """A tensor outside the epoch: the commit is refused, as the peer's fault; staging is lost."""
    with gms.writer() as writer:
        writer.place("t", 16, (16,), "uint8")
        writer._records["t"] = TensorRecord("t", 1 << 40, 16, (16,), "uint8")
        with pytest.raises(RemoteError) as caught:
            writer.commit(IDENTITY)
    assert caught.value.code == "gms.bad_manifest"
    until(lambda: gms.status()["state"] == "empty", "the staging epoch to be lost")
    assert gms.status()["protocol_errors_total"] == 1


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\0" * 64])
def test_garbage_does_not_disturb_other_clients(gms: GmsProcess, garbage: bytes):
    """Bytes that are no frame: that connection ends, a session beside it reads on."""
    with gms.load() as reader:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(names.socket_path(gms.directory, gms.device))
            sock.settimeout(20)
            sock.sendall(garbage)
            while sock.recv(65536):
                pass
        assert gms.status()["state"] == "committed"
        assert reader.read("t") == b"\7" * 64


def test_epoch_file_name_from_a_server_is_not_followed_anywhere():
    """Only a plain name of that kind is opened; a path is refused."""
    good = names.epoch_file(DEVICE, "0" * 32)
    assert names.is_epoch_file(good)
    for bad in ("../x", "/etc/passwd", f"a/{good}", f"{good}\n", good.upper(), ""):
        assert not names.is_epoch_file(bad)


def test_second_server_on_one_path_names_the_first(gms: GmsProcess):
    """Start another server on the same device: one sentence with the pid, exit code 1."""
    flags = ["--dir", gms.directory, "--device", gms.device, "--memory", gms.kind]
    second = subprocess.run(
        [sys.executable, "-m", "gms.cli", "serve-device", *flags],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert second.returncode == 1
    said = [line for line in second.stderr.splitlines() if line.startswith("error: ")]
    assert len(said) == 1
    assert f"pid {gms.pid}" in said[0]
    assert "Traceback" not in second.stderr
    assert gms.status()["pid"] == gms.pid


def test_client_refuses_a_server_that_sends_too_few_slabs(directory: str):
    """A server whose answer lacks descriptors is at fault; the client leaks none of them."""
    path = names.socket_path(directory, DEVICE)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    pid = os.fork()
    if pid == 0:
        sock, _ = listener.accept()
        client = BlockingClient.from_socket(sock, msg.CATALOGUE)
        request = client.receive()
        fd = OwnedFd(os.memfd_create("slab"))
        answer = msg.EpochAttachedMsg("e", "f", {}, "h", (PAGE, PAGE), b"")
        client._send(answer, request.request_id, [fd], float("inf"))
        client._send(msg.WaitingMsg("r", "m"), request.request_id, [], float("inf"))
        os._exit(0)
    listener.close()
    before = open_fds()
    with pytest.raises(ProtocolError, match=r"gms\.unexpected_answer"):
        GmsProcess(directory).reader()
    assert open_fds() == before
    os.waitpid(pid, 0)


def test_big_identity_and_manifest_travel(gms: GmsProcess):
    """12,000 tensors and an identity of 200 shards: attached in one answer, unchanged."""
    identity = {"shards": {f"model-{n:05d}": {"sample": "0" * 64} for n in range(200)}}
    with gms.writer(identity=identity) as writer:
        writer.plan(12_000 * 256, 256)
        for n in range(12_000):
            writer.place(f"model.layers.{n}.mlp.experts.w13_weight", 16, (4,), "float32")
        with writer.commit(identity) as committed, gms.reader(identity=identity) as reader:
            assert reader.identity == identity
            assert reader.manifest == committed.manifest
            assert reader.layout_hash == committed.layout_hash
            assert reader.size_bytes <= 4 * MIB
