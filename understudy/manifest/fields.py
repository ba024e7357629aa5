"""Typed access to a manifest's mappings that keeps track of the fields nobody has read.

A field that is read is honoured; every other one is reported to the user. A value of the wrong type
is refused with its path. Knows no field by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plumbing.errors import UsageError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of a container or volume (DNS-1123)
NUMBER_MAX = 2**31 - 1  # every number we read is an int32 in Kubernetes' API
NOT_IN_ARGV = re.compile("[\x00\ud800-\udfff]")  # cannot be passed to a process


QUOTES = "are quotes missing?"  # YAML reads `1` and `yes` as other types


class Reading:
    """One manifest being read: all its mappings, and which of their fields were read."""

    def __init__(self) -> None:
        self._all: list[Fields] = []

    def fields(self, value: Any, path: str, label: str = "") -> Fields:
        """A mapping found at `path`; its unread fields are reported under `label`."""
        found = Fields(self, value, path, label)
        self._all.append(found)
        return found

    def unread(self) -> tuple[str, ...]:
        """The fields that have not been read, each once."""
        return tuple(sorted({name for fields in self._all for name in fields.unread()}))


class Fields:
    """A mapping whose fields are read one by one, with their types."""

    def __init__(self, reading: Reading, value: Any, path: str, label: str) -> None:
        if not isinstance(value, dict):
            raise broken(path, "must be a mapping")
        self.path = path
        self._reading = reading
        self._value: Mapping[str, Any] = value
        self._label = label
        self._unread = set(value)

    def unread(self) -> list[str]:
        return [f"{self._label}.{name}" if self._label else name for name in self._unread]

    def has(self, name: str) -> bool:
        return self._value.get(name) is not None

    def take(self, name: str) -> Any:
        self._unread.discard(name)
        return self._value.get(name)

    def string(self, name: str, default: str = "") -> str:
        value = self.take(name)
        if value is None:
            return default
        if not _is_string(value):
            raise broken(f"{self.path}.{name}", f"must be a string; {QUOTES}")
        return str(value)

    def required(self, name: str) -> str:
        value = self.string(name)
        if not value:
            raise broken(f"{self.path}.{name}", "is required")
        return value

    def name(self) -> str:
        """Its own name, by Kubernetes' rules: it becomes part of paths."""
        value = self.required("name")
        if not NAME.fullmatch(value):
            raise broken(f"{self.path}.name", "must consist of a-z, 0-9 and -")
        return value

    def number(self, name: str, default: int, least: int = 0, most: int = NUMBER_MAX) -> int:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise broken(f"{self.path}.{name}", f"must be an integer from {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        return self.take(name) is True

    def strings(self, name: str) -> tuple[str, ...]:
        values = self.take(name) or []
        if not isinstance(values, list) or not all(map(_is_string, values)):
            raise broken(f"{self.path}.{name}", "must be a list of strings")
        return tuple(values)

    def mapping(self, name: str) -> dict[str, str]:
        """A mapping of strings to strings."""
        values = self.take(name) or {}
        if not isinstance(values, dict) or not all(
            _is_string(each) for pair in values.items() for each in pair
        ):
            raise broken(f"{self.path}.{name}", f"must be a mapping of strings; {QUOTES}")
        return dict(values)

    def fields(self, name: str, label: str | None = None) -> Fields | None:
        """A nested mapping; its unread fields are reported as `name.field`, or under `label`."""
        value = self.take(name)
        if value is None:
            return None
        return self._reading.fields(value, f"{self.path}.{name}", name if label is None else label)

    def list(self, name: str, label: str | None = None) -> list[Fields]:
        """The mappings of a nested list."""
        values = self.take(name) or []
        if not isinstance(values, list):
            raise broken(f"{self.path}.{name}", "must be a list")
        label = name if label is None else label
        return [
            self._reading.fields(value, f"{self.path}.{name}[{number}]", label)
            for number, value in enumerate(values)
        ]


def _is_string(value: Any) -> bool:
    return isinstance(value, str) and NOT_IN_ARGV.search(value) is None


def broken(path: str, what: str) -> UsageError:
    """The error for a manifest that is not valid."""
    return UsageError("manifest.broken", f"invalid manifest: {path} {what}", path=path)
