"""What engines import of the memory service. No numpy, no asyncio, no click."""

from gms import messages
from gms.client.client import memory_for, open_session
from gms.client.keeper import Keeper
from gms.client.reader import Reader
from gms.client.writer import Writer
from gms.core.manifest import TensorRecord
from gms.vmm.interface import Allocation

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
