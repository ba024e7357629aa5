"""Run a command as if on an older kernel: the system calls it lacks fail as they would there.

`python -m tests.lockserver.old_kernel LACKS COMMAND …`, where LACKS is `SO_PEERPIDFD` (before Linux
6.5) or `pidfds` (before 5.3: `pidfd_open` too). It uses a seccomp filter, which the command cannot
remove.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys

SO_PEERPIDFD = 77
PIDFD_OPEN = 434  # the same number everywhere
GETSOCKOPT = {"x86_64": 55, "aarch64": 209}
LACKS = ("SO_PEERPIDFD", "pidfds")

_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 38, 22, 2
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06  # linux/filter.h: 32-bit words, a constant
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _THIRD_ARGUMENT = 0, 32  # offsets into struct seccomp_data


def why_not() -> str | None:
    return None if platform.machine() in GETSOCKOPT else f"no filter for {platform.machine()}"


def program(lacks: str) -> list[tuple[int, int, int, int]]:
    """The filter, as (code, jump if true, jump if false, operand)."""
    old_pidfd_open = _ERRNO | errno.ENOSYS if lacks == "pidfds" else _ALLOW
    return [
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_IF_EQUAL, 0, 1, PIDFD_OPEN),
        (_RETURN, 0, 0, old_pidfd_open),
        (_JUMP_IF_EQUAL, 0, 3, GETSOCKOPT[platform.machine()]),
        (_LOAD, 0, 0, _THIRD_ARGUMENT),
        (_JUMP_IF_EQUAL, 0, 1, SO_PEERPIDFD),
        (_RETURN, 0, 0, _ERRNO | errno.ENOPROTOOPT),
        (_RETURN, 0, 0, _ALLOW),
    ]


def install(lacks: str) -> None:
    """For this process, whatever it executes, and its children."""
    code = b"".join(struct.pack("HBBI", *line) for line in program(lacks))
    held = ctypes.create_string_buffer(code, len(code))
    description = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(held))
    libc = ctypes.CDLL(None, use_errno=True)
    for call in (
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, description, 0, 0),
    ):
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), "no seccomp filter can be installed")


if __name__ == "__main__":
    install(sys.argv[1])
    os.execvp(sys.argv[2], sys.argv[2:])
