"""What engines and gateways import from the lock server."""

from lockserver import messages, witness
from lockserver.client.borrower import Borrower, BorrowerCallbacks
from lockserver.client.client import LockCallbacks, LockClient
from lockserver.client.reconnect import HEARTBEAT_MS

__all__ = [
    "HEARTBEAT_MS",
    "Borrower",
    "BorrowerCallbacks",
    "LockCallbacks",
    "LockClient",
    "messages",
    "witness",
]
