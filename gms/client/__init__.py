"""What engines import of the memory service. No numpy, no asyncio, no click."""

from gms.client.client import (
    Allocation,
    Keeper,
    Reader,
    TensorRecord,
    Writer,
    memory_for,
    messages,
    open_session,
)

__all__ = [
    "Allocation",
    "Keeper",
    "Reader",
    "TensorRecord",
    "Writer",
    "memory_for",
    "messages",
    "open_session",
]
