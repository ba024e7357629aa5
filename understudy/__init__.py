"""The whole, for people: the `understudy` command and what is behind it."""

from plumbing import __version__

__all__ = ["__version__"]
