"""Names that all of the lock shares: engines, incarnations, witnesses and their states.

Pure values, so that the core and every backend process can import them before anything else.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from enum import StrEnum

from plumbing.errors import UsageError

PREFIX = "witness_"
SERVING_PREFIX = "serving_"
SEALED_BYTES = 1  # an unsealed witness is empty; any length says "this incarnation has ended"

ENGINE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")  # part of file names and of metrics
INCARNATION = re.compile(r"(?P<engine>[A-Za-z0-9][A-Za-z0-9_.-]{0,62})-(?P<random>[0-9a-f]{16})")


class WitnessState(StrEnum):
    """What one look at a witness shows."""

    FREE = "free"  # no process holds it: every process that joined is dead
    HELD = "held"
    UNPROVEN = "unproven"  # missing, replaced or unreadable: proves nothing
    UNSEEN = "unseen"  # it could not be looked at, for lack of descriptors or memory: look again


@dataclass(frozen=True, slots=True)
class WitnessFile:
    """A witness as the server records it: its name in the directory, its device and inode."""

    name: str
    dev: int
    ino: int


class ServingFile(WitnessFile):
    """A serving file, likewise."""


def new_incarnation(engine: str) -> str:
    """The id of a new launch of `engine`: the engine's id and 64 random bits."""
    if not ENGINE_ID.fullmatch(engine):
        raise UsageError(
            "engine.bad_id",
            f"{engine!r} is not a valid engine id: use at most 63 letters, digits, '.', '_' or '-',"
            " starting with a letter or digit",
            engine=engine,
        )
    return f"{engine}-{os.urandom(8).hex()}"


def name_of(incarnation: str) -> str:
    """The file name of an incarnation's witness: `witness_<engine>_<16 hex digits>`."""
    return PREFIX + _stem(incarnation)


def serving_name_of(incarnation: str) -> str:
    """The file name of an incarnation's serving file: `serving_<engine>_<16 hex digits>`."""
    return SERVING_PREFIX + _stem(incarnation)


def _stem(incarnation: str) -> str:
    match = INCARNATION.fullmatch(incarnation)
    assert match is not None, f"{incarnation!r} is not ENGINE_ID-<16 hex digits>"
    return f"{match['engine']}_{match['random']}"
