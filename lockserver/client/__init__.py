"""What engines import of the lock."""

from lockserver import messages, witness
from lockserver.client.client import HEARTBEAT_MS, LockClient

__all__ = ["HEARTBEAT_MS", "LockClient", "messages", "witness"]
