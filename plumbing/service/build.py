"""What runs here: the version, and the commit where the build knows it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable

from plumbing import __version__

COMMIT_ENV = "UNDERSTUDY_COMMIT"  # set by an image's build; a wheel does not know its commit


def build_info() -> dict[str, str]:
    """`version`, `commit` ("unknown" where nobody said) and `python`, for people and metrics."""
    return {
        "version": __version__,
        "commit": os.environ.get(COMMIT_ENV) or "unknown",
        "python": platform.python_version(),
    }


def installed(packages: Iterable[str]) -> dict[str, str]:
    """The versions of those of `packages` that are installed; nothing is imported for it."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
