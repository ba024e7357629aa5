"""What one session, connection or process can make grow in a server: each has a limit with a name,
and who hits it is told its number. One test per thing that grows.

The wire's own limits (frames, queued bytes, connections, silence) are in
`tests/plumbing/wire`; here is what a memory server adds, and what it does when it runs out of
descriptors itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gms import messages as msg
from gms.core.weights import EPOCH_BYTES_MAX, EPOCHS_MAX
from gms.manifest import (
    IDENTITY_CHARS_MAX,
    MANIFEST_BYTES_MAX,
    SLABS_MAX,
    TensorRecord,
    encode,
)
from gms.messages import CATALOGUE, EpochAttachedMsg
from plumbing.errors import ProtocolError
from tests.gms.bench import IDENTITY, GmsProcess
from tests.gms.core.driver import Bench
from tests.helpers import until

EPOCH = "e" * 32


@pytest.fixture
def host(directory: str) -> Iterator[GmsProcess]:
    """Quotas are the server's, whatever its memory."""
    server = GmsProcess(directory).start()
    yield server
    server.stop()


# ---------------------------------------------------------------------- a session, in the machine


def test_slabs_of_an_epoch_are_limited():
    """One more slab than the limit: refused with the number; the epoch is as it was."""
    bench = Bench(capacity_bytes=SLABS_MAX * 8192)
    bench.attach(1)
    for _ in range(SLABS_MAX):
        assert isinstance(bench.allocate(1, 4096), msg.AllocatedMsg)
    with pytest.raises(ProtocolError, match=r"gms\.too_many_slabs") as caught:
        bench.allocate(1, 4096)
    assert str(SLABS_MAX) in caught.value.message
    staging = bench.device.staging
    assert len(staging.slab_sizes) == SLABS_MAX


def test_epochs_that_are_still_read_are_limited():
    """Drop again and again while a reader keeps every old epoch: the next writer waits, with the
    number; it is granted when one of the readers leaves."""
    bench = Bench()
    for session in range(1, EPOCHS_MAX + 1):
        bench.reload(session, 4096)
    assert len(bench.device.regions) == EPOCHS_MAX
    bench.drop()
    answer = bench.attach(99)
    assert isinstance(answer, msg.WaitingMsg)
    assert answer.reason == "epochs"
    assert f"{EPOCHS_MAX} epochs" in answer.message
    bench.close(3)
    assert isinstance(bench.last(99), msg.WritingMsg)


# ---------------------------------------------------------------------- sizes of what is said


def test_identity_is_limited(host: GmsProcess):
    """Too large by one shard, in attach and in commit: the limit is in the error."""
    large = {"shards": {f"s{n}": "0" * 1000 for n in range(IDENTITY_CHARS_MAX // 1000)}}
    error = host.refusal(msg.AttachMsg("e", "i", "ro", identity=large))
    assert error.code == "gms.identity_too_large"
    assert error.details["limit"] == IDENTITY_CHARS_MAX
    attach = msg.AttachMsg("e", "i", "rw_or_ro", wait_ms=20_000)
    commit = msg.CommitMsg(large, encode([]))
    assert host.refusal(attach, commit).code == "gms.identity_too_large"
    host.load().close()


def records(count: int, name_chars: int) -> list[TensorRecord]:
    return [TensorRecord(f"{n:0{name_chars}}", 0, 0, (0,), "uint8") for n in range(count)]


def test_manifest_is_limited_so_that_readers_can_be_sent_it(host: GmsProcess):
    """The largest manifest that is taken, with the largest identity and every slab, still fits
    the answer that readers get; one that would not is refused at commit with the limit."""
    answer = EpochAttachedMsg(
        epoch=EPOCH,
        identity={"x": "\N{SNOWMAN}" * (IDENTITY_CHARS_MAX // 6 - 10)},
        slab_sizes=(2**62,) * SLABS_MAX,
        manifest=bytes(MANIFEST_BYTES_MAX),
    )
    assert len(CATALOGUE.encode(answer)) < CATALOGUE.frame_bytes_max
    manifest = encode(records(40_000, 400))
    assert MANIFEST_BYTES_MAX < len(manifest) < CATALOGUE.frame_bytes_max
    attach = msg.AttachMsg("e", "i", "rw_or_ro", identity=IDENTITY, wait_ms=20_000)
    error = host.refusal(attach, msg.CommitMsg(IDENTITY, manifest))
    assert error.code == "gms.manifest_too_large"
    assert error.details["limit"] == MANIFEST_BYTES_MAX
    until(lambda: host.status()["state"] == "empty", "the refused load to be given up")
    host.load().close()


def test_survivor_cannot_claim_more_than_any_device_has(host: GmsProcess):
    """Sizes whose sum no status could carry: refused; what is claimed within reason is shown."""
    held = msg.HeldEpoch(True, {})
    huge = msg.HandBackMsg("e", "i", EPOCH, (2**62,) * 8, epoch=held)
    error = host.refusal(huge)
    assert error.code == "gms.bad_epoch"
    assert error.details["limit"] == EPOCH_BYTES_MAX
    clients = []
    for index in range(20):
        clients.append(host.client())
        claim = msg.HandBackMsg("e", "i", f"{index:032x}", (EPOCH_BYTES_MAX,), epoch=held)
        assert isinstance(clients[-1].request(claim).message, msg.KeptMsg)
    assert host.status()["superseded_bytes"] == 20 * EPOCH_BYTES_MAX
    for client in clients:
        client.close()
    until(lambda: host.status()["superseded_bytes"] == 0, "the survivors to be gone")
    host.load().close()


# ---------------------------------------------------------------------- floods


def test_identity_below_one_huge_key_is_checked_in_no_time(host: GmsProcess):
    """A key of 200 KiB with thousands below it: paths in errors are cut before they multiply."""
    key = "k" * 200_000
    identity = {key: {str(n): n for n in range(20_000)}, "x": b"no plain data"}
    error = host.refusal(msg.AttachMsg("e", "i", "ro", identity=identity))
    assert error.code == "gms.bad_identity"
    assert len(error.message) < 500
