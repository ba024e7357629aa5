"""Reading files that an operator hands in, and refusing a secret that others can read."""

from __future__ import annotations

import os
import stat

from plumbing.errors import UsageError
from plumbing.wire.fds import OwnedFd

# A key is a few hundred bytes, a bundle of certificates a few hundred kilobytes.
FILE_BYTES_MAX = 1024 * 1024


def read(path: str, what: str, *, is_secret: bool) -> bytes:
    """The contents of `path`, which is `what` to the operator.

    A secret must belong to this user, and to it alone, or to root: then its group may read it. That
    is the one way in which Kubernetes can hand a Secret to a process that is not root (`fsGroup`
    makes the files root's, mode 0440). PostgreSQL has the same rule for its keys. Links are
    followed, as Kubernetes makes them; what is checked is the open file.

    Raises:
        UsageError: `wire.file`, it cannot be read; `wire.secret_readable`.
    """
    try:
        # Non-blocking: a path that names a pipe must not hang whoever reads it.
        with OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            found = os.fstat(fd.fileno())
            if is_secret:
                _check_secret(path, what, found)
            if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
                raise UsageError(
                    "wire.file",
                    f"{what}, {path}, is not a file of at most {FILE_BYTES_MAX} bytes",
                    path=path,
                )
            return os.read(fd.fileno(), FILE_BYTES_MAX)
    except OSError as error:
        raise UsageError(
            "wire.file", f"cannot read {what}, {path}: {error.strerror}", path=path
        ) from error


def _check_secret(path: str, what: str, found: os.stat_result) -> None:
    is_roots = found.st_uid == 0
    if found.st_uid not in (0, os.geteuid()):
        why, cure = f"it belongs to uid {found.st_uid}", f"chown it to uid {os.geteuid()}"
    elif found.st_mode & (0o037 if is_roots else 0o077):
        why = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
        cure = "chmod 600 it (a Kubernetes Secret: defaultMode: 0400 on its volume)"
    else:
        return
    raise UsageError(
        "wire.secret_readable",
        f"{what}, {path}, may be known to others ({why}); make a new one and {cure}",
        path=path,
    )
