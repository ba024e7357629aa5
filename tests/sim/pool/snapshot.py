"""A world as text, so that an exhaustive search knows where it has been.

Times count from now. Counters that only ever grow (tokens, generations, doors, requests,
incarnations) are replaced by their rank. What the law remembers is no part of the world.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from enum import Enum
from typing import Any

import msgspec

from pool.core.view import ModelRules, PoolRules
from tests.sim.pool.timeline import Line, Timeline
from tests.sim.pool.world import Shape, World

SKIPPED = {"rng", "law", "story", "made", "world", "steps", "spins", "numbers", "tokens", "eras"}
SKIPPED |= {
    "last_ms",
    "since_ms",
    "stage_since_ms",
    "came_ms",
    "due_ms",
    "spent_ms",
    "costs",
    "tries",
    "changes",
}
SKIPPED |= {"out", "reason", "wait", "file"}
COUNTERS = {
    "number",
    "token",
    "start",
    "id",
    "door",
    "door_number",
    "asked",
    "answered",
    "question",
}
LONG_AGO_MS = -400_000.0
COUNTER = re.compile(r"<(\w+):(\d+)>|(\w+\.\w)#(\d+)")


def fingerprint(world: World, left: tuple[int, ...]) -> bytes:
    """Equal for worlds in which the same can follow."""
    text = Walker(world).text(left)
    return hashlib.blake2b(text.encode(), digest_size=12).digest()


class Walker:
    def __init__(self, world: World) -> None:
        self.world, self.now_ms = world, world.timeline.now_ms
        self.met: dict[int, int] = {}

    def text(self, left: tuple[int, ...]) -> str:
        world = self.world
        parts = [
            self.walk(part)
            for part in (world.engines, world.memory, world.locks, world.gateways, world.devices)
        ]
        parts += [self.walk(world.pool), self.walk(world.law.goals), self.heap()]
        return ranked(f"{left} {parts}")

    def heap(self) -> str:
        """Those of one connection in order, all others in any."""
        free: list[str] = []
        lines: dict[int, list[str]] = {}
        for _, _, what, args in sorted(self.world.timeline.heap, key=lambda entry: entry[1]):
            if what.__func__ is Timeline._arrive:  # type: ignore[attr-defined]
                line, inner, inner_args = args
                if line.is_open:
                    said = self.method(inner) + self.walk(inner_args)
                    lines.setdefault(self.met[id(line)], []).append(said)
            else:
                free.append(self.method(what) + self.walk(args))
        return f"{sorted(free)} {sorted(lines.items())}"

    def method(self, what: Any) -> str:
        return f"{self.walk(what.__self__)}.{what.__name__}"

    def walk(self, value: Any, field: str = "") -> str:
        match value:
            case None | bool() | str():
                return value.value if isinstance(value, Enum) else str(value)
            case Enum():
                return value.name
            case int():
                return f"<{field}:{value}>" if field in COUNTERS else str(value)
            case float():
                if field.endswith("_ms") or not field:
                    return str(max(LONG_AGO_MS, round(value - self.now_ms)))
                return str(value)
            case dict():
                items = [
                    f"{self.walk(key)}={self.walk(each, field)}" for key, each in value.items()
                ]
                return "{" + ",".join(sorted(items)) + "}"
            case set() | frozenset():
                return "{" + ",".join(sorted(self.walk(each, field) for each in value)) + "}"
            case tuple() | list():
                return "[" + ",".join(self.walk(each, field) for each in value) + "]"
            case World() | Shape() | ModelRules() | PoolRules() | Timeline():
                return ""
        return self.thing(value)

    def thing(self, value: Any) -> str:
        if callable(value) and hasattr(value, "__self__"):
            return self.method(value)
        if callable(value):
            return str(value.__name__)
        if isinstance(value, msgspec.Struct):
            fields: Iterable[str] = value.__struct_fields__
        else:
            if id(value) in self.met:
                return f"@{self.met[id(value)]}"
            self.met[id(value)] = len(self.met)
            if isinstance(value, Line):
                fields = ("is_open",)
            else:
                fields = getattr(value, "__dataclass_fields__", None) or vars(value)
        said = [
            f"{name}={self.walk(getattr(value, name), name)}"
            for name in fields
            if name not in SKIPPED
        ]
        return f"{type(value).__name__}({','.join(said)})"


def ranked(text: str) -> str:
    """Each counter's values in their order, from 0."""
    found: dict[str, set[int]] = {}
    for kind, value, engine, number in COUNTER.findall(text):
        found.setdefault(kind or engine, set()).add(int(value or number))
    ranks = {
        kind: {value: rank for rank, value in enumerate(sorted(values))}
        for kind, values in found.items()
    }

    def rank(match: re.Match[str]) -> str:
        kind, value, engine, number = match.groups()
        return f"{kind or engine}~{ranks[kind or engine][int(value or number)]}"

    return COUNTER.sub(rank, text)
