"""`understudy doctor --fix`: the mends that cannot make anything worse.

Owns two: removing sockets that nobody listens on, and closing our own directory to others. Each is
checked again at the moment of doing it. Everything else is told and left to people.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from plumbing.errors import UnderstudyError
from plumbing.wire.server import PathGuard
from understudy.doctor.facts import Facts
from understudy.doctor.probe_directory import look_at_socket


def fix(facts: Facts) -> list[str]:
    """Do what is safe; a sentence for each thing that was done."""
    done = [_close(facts)]
    done += [_remove(facts, each.name) for each in facts.sockets if not each.is_answered]
    return [sentence for sentence in done if sentence]


def _close(facts: Facts) -> str | None:
    """Take the rights of others away, if nobody else can have used them.

    What somebody else has put into the directory stays suspicious, and is for people to look at.
    """
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
    return f"{found.path} had mode {found.mode:04o} and has 0700 now"


def _remove(facts: Facts, name: str) -> str | None:
    """Remove the socket `name` under its server's own guard, so that none can be starting there."""
    path = Path(facts.directory.path, name)
    try:
        guard = PathGuard(str(path.with_suffix(".lock")), f"a server of {name}")
    except (UnderstudyError, OSError):
        return None  # it is just being taken over, or is not ours to touch
    try:
        is_socket = stat.S_ISSOCK(path.lstat().st_mode)
        if not is_socket or look_at_socket(str(path)).is_answered:
            return None
        path.unlink()
    except FileNotFoundError:
        return None
    finally:
        guard.close()
    return f"{path} was removed: nobody listened on it"
