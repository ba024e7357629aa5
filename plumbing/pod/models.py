"""The names that a model has in a pod: its own, its locks', and its places on devices.

A pod without models has the lock `active`, and one place on each device, which has the device's
name. With models each has its own: `active:chat`, `HOST-0.chat`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from plumbing.errors import UsageError

ACTIVE = "active"
LOCK_CHARS_MAX = 32  # of a lock's name, on the wire and on file
NAME_CHARS_MAX = LOCK_CHARS_MAX - len(ACTIVE) - 1
MODELS_MAX = 100  # a lock of each fits into one slot of the lock server's file

# No underscore: it ends a place in the names of files, `gms_HOST-0.chat_weights.sock`.
NAME_PATTERN = rf"[A-Za-z0-9][A-Za-z0-9.-]{{0,{NAME_CHARS_MAX - 1}}}"
_NAME = re.compile(NAME_PATTERN)


def model_name(text: str) -> str:
    """`text`, if a model can have that name.

    Raises:
        UsageError: `model.bad_name`.
    """
    if not _NAME.fullmatch(text):
        raise UsageError(
            "model.bad_name",
            f"{text[: 2 * NAME_CHARS_MAX]!r} is not a valid model name: use at most"
            f" {NAME_CHARS_MAX} letters, digits, '.' or '-', starting with a letter or digit; a"
            " longer name that clients use can be an alias",
            model=text[: 2 * NAME_CHARS_MAX],
        )
    return text


def model_names(texts: Sequence[str]) -> tuple[str, ...]:
    """Several of them, in order.

    Raises:
        UsageError: `model.bad_name`, `model.duplicate`, `model.too_many`.
    """
    names = tuple(map(model_name, texts))
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError("model.duplicate", f"the model {twice} is named twice", model=twice)
    if len(names) > MODELS_MAX:
        raise UsageError(
            "model.too_many", f"{len(names)} models are named, and the limit is {MODELS_MAX}"
        )
    return names


def lock_of(model: str) -> str:
    """The lock of a model, whose holder serves it; "": of a pod without models."""
    return f"{ACTIVE}:{model}" if model else ACTIVE


def model_of(lock: str) -> str:
    """`chat` of `active:chat`, "" of `active`."""
    return lock.partition(":")[2]


def place_of(device: str, model: str) -> str:
    """Where a model's memory on a device is served, by name; "": of a pod without models."""
    return f"{device}.{model}" if model else device


def device_of(place: str) -> str:
    """`HOST-0` of `HOST-0.chat` and of `HOST-0`; no device's name has a dot."""
    return place.partition(".")[0]


def model_at(place: str) -> str:
    """`chat` of `HOST-0.chat`, "" of `HOST-0`."""
    return place.partition(".")[2]
