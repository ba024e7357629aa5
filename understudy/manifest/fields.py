"""Reading a manifest's mappings so that nothing in it is overlooked.

Owns the refusal of what is not what it should be, with its place, and the list of what nobody asked
for: whoever reads a field thereby honours it, and every other one is named to people. Knows no
field by name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from plumbing.errors import UsageError

NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")  # of a container or a volume: DNS-1123
NUMBER_MAX = 2**31 - 1  # every number that we read is an int32 of Kubernetes' API
UNSAYABLE = re.compile("[\x00\ud800-\udfff]")  # no process can be told these


class Reading:
    """One manifest being read: all its mappings, and what was asked of them."""

    def __init__(self) -> None:
        self._all: list[Fields] = []

    def fields(self, value: Any, path: str, label: str = "") -> Fields:
        """A mapping found at `path`; its unread fields are named under `label`."""
        found = Fields(self, value, path, label)
        self._all.append(found)
        return found

    def unread(self) -> tuple[str, ...]:
        """The fields that nobody has asked for, each once."""
        return tuple(sorted({name for fields in self._all for name in fields.unread()}))


class Fields:
    """A mapping whose fields are taken one by one, with their types."""

    def __init__(self, reading: Reading, value: Any, path: str, label: str) -> None:
        if not isinstance(value, dict):
            raise broken(path, "is to be a mapping")
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

    def text(self, name: str, default: str = "") -> str:
        value = self.take(name)
        if value is None:
            return default
        if not _is_text(value):
            raise broken(f"{self.path}.{name}", "is to be a text; are quotes missing?")
        return str(value)

    def required(self, name: str) -> str:
        value = self.text(name)
        if not value:
            raise broken(f"{self.path}.{name}", "is missing")
        return value

    def name(self) -> str:
        """Its own name, which becomes a part of paths here: Kubernetes takes no other, either."""
        value = self.required("name")
        if not NAME.fullmatch(value):
            raise broken(f"{self.path}.name", "is to have nothing but a-z, 0-9 and - in it")
        return value

    def number(self, name: str, default: int, least: int = 0, most: int = NUMBER_MAX) -> int:
        value = self.take(name)
        if value is None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise broken(f"{self.path}.{name}", f"is to be a whole number from {least} to {most}")
        return value

    def flag(self, name: str) -> bool:
        return self.take(name) is True

    def texts(self, name: str) -> tuple[str, ...]:
        values = self.take(name) or []
        if not isinstance(values, list) or not all(map(_is_text, values)):
            raise broken(f"{self.path}.{name}", "is to be a list of texts")
        return tuple(values)

    def mapping(self, name: str) -> dict[str, str]:
        """A mapping of texts to texts."""
        values = self.take(name) or {}
        if not isinstance(values, dict) or not all(
            _is_text(each) for pair in values.items() for each in pair
        ):
            raise broken(f"{self.path}.{name}", "is to be a mapping of texts; are quotes missing?")
        return dict(values)

    def fields(self, name: str, label: str | None = None) -> Fields | None:
        """A mapping inside; its unread fields are named `name.field`, unless `label` says else."""
        value = self.take(name)
        if value is None:
            return None
        return self._reading.fields(value, f"{self.path}.{name}", name if label is None else label)

    def list(self, name: str, label: str | None = None) -> list[Fields]:
        """The mappings of a list inside."""
        values = self.take(name) or []
        if not isinstance(values, list):
            raise broken(f"{self.path}.{name}", "is to be a list")
        label = name if label is None else label
        return [
            self._reading.fields(value, f"{self.path}.{name}[{number}]", label)
            for number, value in enumerate(values)
        ]


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and UNSAYABLE.search(value) is None


def broken(path: str, what: str) -> UsageError:
    """The error for a manifest that cannot be understood."""
    return UsageError(
        "manifest.broken", f"in the manifest, {path} {what}; mend it there", path=path
    )
