"""What engines import from the lock server."""

from lockserver import messages, witness
from lockserver.client.client import HEARTBEAT_MS, LockCallbacks, LockClient

__all__ = ["HEARTBEAT_MS", "LockCallbacks", "LockClient", "messages", "witness"]
