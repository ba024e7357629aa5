"""What the kernel answers when descriptors, processes, threads or memory run out.

Such a shortage is the environment's fault and may end at any moment: it is reported, with what to
raise, and tried again. It never counts as an answer to a question.
"""

from __future__ import annotations

import errno
import os
import resource

_SHORTAGES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})


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
