"""The `understudy` command: run a pod, drill it, look at it."""

from plumbing import __version__

__all__ = ["__version__"]
