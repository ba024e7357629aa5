"""What engines and gateways import from the lock server.

Every process of a backend runs `witness` before anything else, and those that serve use `serving`.
So the clients, which need asyncio, are loaded when they are first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lockserver import messages, serving, witness

if TYPE_CHECKING:
    from lockserver.client.borrower import Borrower, BorrowerCallbacks, Stage
    from lockserver.client.client import LockCallbacks, LockClient
    from lockserver.client.reconnect import HEARTBEAT_MS

__all__ = [
    "HEARTBEAT_MS",
    "Borrower",
    "BorrowerCallbacks",
    "LockCallbacks",
    "LockClient",
    "Stage",
    "messages",
    "serving",
    "witness",
]

_MODULES = {
    "Borrower": "borrower",
    "BorrowerCallbacks": "borrower",
    "HEARTBEAT_MS": "reconnect",
    "LockCallbacks": "client",
    "LockClient": "client",
    "Stage": "borrower",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
