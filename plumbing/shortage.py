"""What the kernel answers when descriptors, processes, threads, memory or disks fail us.

That is the machine's fault and may end at any moment: it is reported, with what to raise or free,
and tried again. It never counts as an answer to a question, nor against the program that met it.
"""

from __future__ import annotations

import errno
import os
import resource

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})

_DISK = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO})
DISK = "disk"  # in an error's details: whether a disk has caused it, which a peer cannot see
CAUSES_MAX = 8  # that are looked at: an error may even be its own cause


def is_disk_fault(error: BaseException | None) -> bool:
    """Whether a disk that is full, read-only or broken has caused `error`."""
    for _ in range(CAUSES_MAX):
        if error is None:
            break
        details = getattr(error, "details", {})  # of an `UnderstudyError`
        if DISK in details:
            return bool(details[DISK])
        if isinstance(error, OSError) and error.errno in _DISK:
            return True
        error = error.__cause__
    return False


def is_shortage(error: OSError) -> bool:
    """Whether `error` only means that descriptors or memory have run out: ask again later."""
    return error.errno in _SHORTAGES


def explain(number: int | None, who: str = "this process") -> str:
    """What the kernel's `number` means for `who`, and for a shortage how to fix it. EAGAIN is that
    of fork(2): nothing here would block."""
    match number:
        case errno.EMFILE:
            limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            return (
                f"{who} is at its limit of {limit} open files; raise the limit (ulimit -n, or the"
                " container's nofile limit)"
            )
        case errno.ENFILE:
            return "this machine is at its limit of open files; raise it (sysctl fs.file-max)"
        case errno.EAGAIN:
            return (
                "no process or thread can be created; raise the limit (ulimit -u, or pids.max of"
                " the control group) or stop some"
            )
        case errno.ENOMEM:
            return "no memory is left; raise the container's memory limit or stop something"
        case None:
            return "unknown error"
        case _:
            return os.strerror(number)
