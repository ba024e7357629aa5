"""Small files that are never seen half-written."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

from plumbing.errors import UnderstudyError


def write_atomic(
    path: str,
    content: bytes | str | dict[str, Any],
    mode: int = 0o600,
    *,
    survives_power_cut: bool = True,
) -> None:
    """Replace `path` in one step: readers see the old content or the new, also after a power cut.

    A dict is written as JSON. The new file is written beside the old one, so it needs room for
    both. Without `survives_power_cut` nothing waits for the disk, which is enough for files that
    mean nothing after a reboot.

    Raises:
        OSError: no room, no permission; the old content is untouched and no file is left behind.
    """
    if isinstance(content, dict):
        content = json.dumps(content, ensure_ascii=False, indent=1) + "\n"
    payload = content.encode() if isinstance(content, str) else content
    directory, name = os.path.split(os.path.abspath(path))
    temporary = os.path.join(directory, f".{name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb", opener=lambda p, flags: os.open(p, flags, mode)) as stream:
            stream.write(payload)
            if survives_power_cut:
                stream.flush()
                os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    if survives_power_cut:
        sync_directory(directory)


def read_json(path: str) -> dict[str, Any] | None:
    """The JSON object in `path`; None if there is no such file.

    Raises:
        UnderstudyError: `service.broken_file`, the content is not a JSON object.
        OSError: it cannot be read.
    """
    try:
        with open(path, "rb") as stream:
            raw = stream.read()
    except FileNotFoundError:
        return None
    try:
        document = json.loads(raw)
    except ValueError as error:  # also UnicodeDecodeError
        raise _broken(path, str(error)) from error
    if not isinstance(document, dict):
        raise _broken(path, "it is not a JSON object")
    return document


def _broken(path: str, reason: str) -> UnderstudyError:
    return UnderstudyError("service.broken_file", f"{path} is not valid: {reason}", path=path)


def sync_directory(directory: str) -> None:
    """Make the names in `directory` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
