"""What engines and gateways import from the lock server.

Every process of a backend runs `witness` before anything else, and those that serve use `serving`.
The clients, which need asyncio, are modules of their own.
"""

from lockserver import messages as messages
from lockserver import serving as serving
from lockserver import witness as witness
