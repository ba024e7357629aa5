"""`understudy doctor --fix`: the fixes that cannot make anything worse.

There are two: removing sockets without a listener, and making our own directory private. Each is
checked again at the moment of the change. Everything else is reported and left to the operator.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from plumbing.errors import UnderstudyError
from plumbing.wire.server import PathGuard
from understudy.doctor.facts import PodFacts
from understudy.doctor.probe_directory import look_at_socket


def fix(facts: PodFacts) -> list[str]:
    """Apply the safe fixes; a sentence for each change."""
    done = [_close(facts)]
    done += [_remove(facts, each.name) for each in facts.sockets if not each.is_answered]
    return [sentence for sentence in done if sentence]


def _close(facts: PodFacts) -> str | None:
    """Make the directory private, unless it holds files of other users: those need a look."""
    found = facts.directory
    if found.kind != "directory" or found.owner_uid != found.our_uid or not found.mode & 0o077:
        return None
    fd = os.open(found.path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        names = os.listdir(fd)
        owners = {os.stat(name, dir_fd=fd, follow_symlinks=False).st_uid for name in names}
        if owners - {found.our_uid}:
            return None
        os.fchmod(fd, 0o700)
    finally:
        os.close(fd)
    return f"{found.path}: mode changed from {found.mode:04o} to 0700"


def _remove(facts: PodFacts, name: str) -> str | None:
    """Remove the socket `name`, holding its server's guard so that none can be starting."""
    path = Path(facts.directory.path, name)
    try:
        guard = PathGuard(str(path.with_suffix(".lock")), f"a server of {name}")
    except (UnderstudyError, OSError):
        return None  # a server is starting, or the file is not ours
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
        if not is_socket or look_at_socket(str(path)).is_answered:
            return None
        path.unlink()
    except FileNotFoundError:
        return None
    finally:
        guard.close()
    return f"{path} was removed: no process listened on it"
