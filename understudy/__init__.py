"""Understudy: what the packages share, and the whole for people."""

__version__ = "0.1.0"
