"""The directory that the processes of a pod share, and the names of sockets inside it.

Whoever may write there may become the lock server, so it must be ours alone: that is checked, not
mended, because a directory with the wrong mode may already hold somebody's socket.
"""

from __future__ import annotations

import os
import stat

from plumbing.errors import UsageError

SUN_PATH_MAX = 107  # unix(7): sun_path has 108 bytes, one of them the final NUL

# The longest name that every pod needs. A device with a longer name is caught by `socket_path`.
LONGEST_COMMON_NAME = "gms_HOST-0_weights.sock"


def runtime_dir(value: str) -> str:
    """Check the shared directory, or make it (0700, the last component only); its absolute path.

    Raises:
        UsageError: not a directory, somebody else's, open to others, or too long for sockets.
    """
    path = os.path.abspath(value)
    socket_path(path, LONGEST_COMMON_NAME)
    try:
        os.mkdir(path, 0o700)
    except FileExistsError:
        pass
    except FileNotFoundError as error:
        parent = os.path.dirname(path)
        raise UsageError(
            "service.no_such_directory",
            f"cannot make {path}: {parent} does not exist; make it, or name another with --dir",
            path=path,
        ) from error
    except OSError as error:
        raise UsageError(
            "service.directory_refused",
            f"cannot make {path}: {error.strerror}; name another directory with --dir",
            path=path,
        ) from error
    _check_is_ours(path)
    return path


def socket_path(directory: str, name: str) -> str:
    """`directory/name`, if the kernel can bind it.

    Raises:
        UsageError: it is longer than 107 bytes.
    """
    path = os.path.join(directory, name)
    length = len(os.fsencode(path))
    if length > SUN_PATH_MAX:
        raise UsageError(
            "service.path_too_long",
            f"the socket path {path} has {length} bytes and the kernel takes {SUN_PATH_MAX}; "
            "use a shorter --dir",
            path=path,
            length_bytes=length,
        )
    return path


def _check_is_ours(path: str) -> None:
    status = os.lstat(path)  # a symbolic link could be pointed elsewhere after this check
    if not stat.S_ISDIR(status.st_mode):
        raise UsageError(
            "service.not_a_directory",
            f"{path} is not a directory; remove it, or name another with --dir",
            path=path,
        )
    if status.st_uid != os.geteuid():
        raise UsageError(
            "service.foreign_directory",
            f"{path} belongs to uid {status.st_uid}, this process is uid {os.geteuid()}; "
            "run every part as one user, or name another directory with --dir",
            path=path,
            owner_uid=status.st_uid,
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise UsageError(
            "service.open_directory",
            f"{path} has mode {mode:04o} and must be 0700; run `chmod 700 {path}`",
            path=path,
            mode=f"{mode:04o}",
        )
