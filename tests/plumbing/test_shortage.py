"""Whose fault it is when a system call fails."""

from __future__ import annotations

import errno

import pytest

from engine.backends.process import fault_report
from plumbing.errors import RemoteError, UnderstudyError, UsageError, is_disk_fault
from plumbing.wire.messages import fault_of


def raised(number: int, error: UnderstudyError) -> UnderstudyError:
    """`error`, caused by the kernel's `number`."""
    try:
        raise error from OSError(number, "so it is")
    except UnderstudyError as found:
        return found


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_disk_is_seen_behind_an_error_and_by_the_peer_who_hears_of_it(number: int):
    error = raised(number, UsageError("x.unreadable", "cannot read it"))
    assert is_disk_fault(error)
    report = fault_report(error, "e")
    assert (report.is_machine, report.permanent) == (True, False)
    sent = fault_of(error)
    heard = RemoteError(sent.code, sent.message, **sent.details)
    assert is_disk_fault(heard)
    assert fault_report(heard, "e").is_machine


def test_other_errors_are_no_disks():
    assert not is_disk_fault(None)
    assert not is_disk_fault(raised(errno.ENOENT, UnderstudyError("x.missing", "it is gone")))
    memory = UnderstudyError("gms.device_full", "no memory", disk=False)
    assert not is_disk_fault(raised(errno.ENOSPC, memory))
    assert fault_report(UsageError("x.bad", "no"), "e").permanent
    assert fault_report(RemoteError("gms.identity_mismatch", "no"), "e").permanent
    own = OSError(errno.ENOENT, "gone")
    own.__cause__ = own
    assert not is_disk_fault(own)
